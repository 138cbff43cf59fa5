"""cvt of two narrow codes to bf16x2, with and without scales, which Triton emits for sm_120."""

from __future__ import annotations

import numpy as np
import pytest

from lab.silicon.conformance.exact_arithmetic import FORMATS, values_of
from tests.ptxemu.kernels import kernel, launch, pointers

NARROW = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")
LANES = 32


def bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_two_codes_become_bf16(name: str, relu: bool, scaled: bool) -> None:
    bits = FORMATS[name].bits
    rng = np.random.default_rng(bits)
    codes = rng.permutation(2 * LANES).reshape(LANES, 2) * 4 % (1 << bits) | rng.integers(0, 4)
    scales = rng.integers(120, 135, (LANES, 2))
    shift = 4 if bits == 4 else 8
    packed = (codes[:, 0] | codes[:, 1] << shift).astype(np.uint32)
    factors = (scales[:, 0] | scales[:, 1] << 8).astype(np.uint32)
    opcode = f"cvt.rn{'.relu' * relu}{'.scaled::n2::ue8m0' * scaled}.bf16x2.{name}x2"
    body = "mov.u32 %r0, %tid.x;\n" + "".join(
        f"ld.param.u64 %rd{k}, [p{k}]; mad.wide.u32 %rd{k}, %r0, 4, %rd{k};\n" for k in range(3)
    )
    body += "ld.global.b32 %r1, [%rd0]; ld.global.b32 %r2, [%rd1];\n"
    body += f"cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2; {opcode} %r3, %h1{', %h2' * scaled};\n"
    body += "st.global.b32 [%rd2], %r3;"
    out = np.zeros((LANES, 2), np.uint16)
    memory = [packed, factors, out]
    text = kernel(body, ".param .u64 p0, .param .u64 p1, .param .u64 p2")
    launch(text, params=pointers(*memory), memory=memory)
    expected = values_of(name, codes.astype(np.uint8)).astype(np.float64)
    expected *= 2.0 ** (scales - 127.0) if scaled else 1
    expected = np.where((expected < 0) & relu, 0, expected)
    assert (np.isnan(bf16(out)) == np.isnan(expected)).all()
    known = ~np.isnan(expected)
    assert (bf16(out)[known] == expected[known]).all()


@pytest.mark.parametrize("root", ["rcp.approx.ftz", "rsqrt.approx.ftz", "rsqrt.approx"])
def test_approximations_of_f64(root: str) -> None:
    special = [0.0, -0.0, np.inf, 4.0, 2.0**-1074, 1e308, 1.0, 3.0]
    values = np.concatenate([np.random.default_rng(0).uniform(0.1, 1e6, 24), special])
    body = f"""mov.u32 %r0, %tid.x; ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, 8, %rd0;
    ld.global.f64 %fd0, [%rd0]; {root}.f64 %fd1, %fd0; st.global.f64 [%rd0], %fd1;"""
    out = values.copy()
    launch(kernel(body, ".param .u64 p0"), params=pointers(out), memory=[out])
    rough = "ftz" in root
    assert not rough or (out.view(np.uint64) & 0xFFFFFFFF == 0).all()
    exact = 1 / (values[:24] if "rcp" in root else np.sqrt(values[:24]))
    assert (np.abs(out[:24] / exact - 1) < 2.0 ** (-19 if rough else -52)).all()
    zero, minus, infinite, four, tiny = out[24:29]
    assert (zero, infinite, tiny) == (np.inf, 0, np.inf if rough else 2.0**537)
    assert minus == (-np.inf)
    assert four == (0.25 if "rcp" in root else 0.5)
