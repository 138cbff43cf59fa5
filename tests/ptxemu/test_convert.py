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
