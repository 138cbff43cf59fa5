"""Sums as a tensor core makes them, compared with the answers and results of an H100."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance import fragments, lane_matrices, matrices, precision, wgmma_sparse
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.ptx_program import Program, aimed_at, emulate
from ptxemu import Options
from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.mma import mma
from ptxemu.numerics.accumulation import Rule, Types, accumulate, rule
from tests.ptxemu.test_mma import D_AT
from tests.ptxemu.test_mma import Case as Tcgen05

RESULTS = Path(__file__).parents[2] / "results" / "conformance_h100.json"
ALIGNED = Options(accumulation="aligned", limit=None)
# answers of an H100 to `--questions`, without the spaces; precision.LEGEND explains the columns
ANSWERS = {
    "m16n8k8.row.col.f32.f16.f16.f32": "25 25 25 0/0 0/0 0/0 0 2 1 --...... -......-",
    "m16n8k16.row.col.f16.f16.f16.f16": "25 25 25 1/1 0/0 1/1 0 4 4 --.............."
    " -..............-",
    "m16n8k8.row.col.f32.tf32.tf32.f32": "25 25 25 0/0 0/0 0/0 0 2 1 --...... -......-",
    "m16n8k32.row.col.f32.e4m3.e4m3.f32": ">=32 24 >=32 0/0 0/0 1/1 0 8 7"
    " --++..++..++..++..++..++..++..++ -..............................-",
    "m16n8k32.row.col.f16.e4m3.e4m3.f16": ">=32 11 >=32 0/0 0/0 1/1 0 8 8"
    " --++..++..++..++..++..++..++..++ -..............................-",
    "f32.bf16.bf16": "25 25 25 0/0 0/0 0/0 0 4 3 --.............. -..............-",
    "f32.e5m2.e5m2": "13 13 13 0/0 0/0 0/0 0 0 0 --.............................."
    " -..............................-",
    "f16.e4m3.e4m3": "13 13 13 1/1 0/0 1/1 0 8 8 --.............................."
    " -..............................-",
}
ANY = {case.name: case for case in matrices.products() if case.sums and ".f64." not in case.name}


def run(program: Program) -> dict[str, np.ndarray]:
    aimed = aimed_at(program, "sm_90a")
    return emulate(aimed, ptxemu.load(aimed.text), ALIGNED)


@pytest.mark.parametrize("form", ANSWERS)
def test_what_a_gpu_was_asked(form: str) -> None:
    warp = form.startswith("m16")
    opcode = f"mma.sync.aligned.{form}" if warp else form
    types = fragments.types_of(opcode) if warp else form.split(".")
    k = fragments.depth(opcode) if warp else 256 // fragments.BITS[types[1]]
    narrow = types[0] == "f16"
    chosen, ask = list(precision.probes(k, narrow)), precision.mma if warp else precision.warpgroup
    found = precision.summary(k, narrow, chosen, ask(opcode, chosen, run))
    assert " ".join(found.values()) == ANSWERS[form]


@pytest.mark.parametrize("name", ANY)
def test_products_of_any_numbers_are_as_far_off_as_the_gpus(name: str) -> None:
    """Compare the largest error of 131,072 sums, to 12 digits."""
    case = ANY[name]
    (opcode,) = case.forms
    recorded = json.loads(RESULTS.read_text(encoding="utf-8"))["approximations"][opcode]
    operands = [buffer.data for buffer in case.program.buffers() if buffer.expected is None]
    d, a, b, _ = fragments.types_of(opcode)
    types = Types(d, a, b)
    how = rule("mma.sync", "sm_90a", types)
    sums = [
        accumulate(x.astype("f4"), y.T.astype("f4"), z.astype("f4"), types, how)
        for x, y, z in zip(*fragments.operands(opcode, operands), strict=True)
    ]
    codes = fragments.codes_of(np.stack(sums).astype(np.float64), d)
    found = fragments.scatter(codes, d, fragments.place_d).ravel()
    error = fragments.excess(opcode, operands, found).max()
    assert error == pytest.approx(recorded["gpu_error"], rel=1e-11)


def _one(a: list[float], b: list[float], c: float, types: Types, how: Rule) -> float:
    rows = (np.array([values], np.float32) for values in (a, b, [c]))
    with np.errstate(all="ignore"):
        return float(accumulate(*rows, types, how)[0, 0])


@pytest.mark.parametrize(
    ("a", "b", "c", "right"),
    [
        ([np.inf, 1.0], [1.0, 1.0], 0.0, np.inf),
        ([np.inf, 1.0], [1.0, -1.0], -np.inf, np.nan),
        ([np.inf, 1.0], [0.0, 1.0], 0.0, np.nan),
        ([2.0**127, 2.0**127], [1.0, 1.0], 0.0, np.inf),
        ([2.0**127, 2.0**-126], [1.5, 1.0], 2.0**126 - 2.0**102, 2.0**128 - 2.0**104),
        ([0.0, 0.0], [2.0**120, 0.0], 2.0**-149, 2.0**-149),  # zeros shift nothing
        ([1.5, 1.5], [1.5, 1.5], 2.0**-24, 4.5),
        ([-0.0, 0.0], [1.0, 1.0], -0.0, 0.0),
    ],
)
def test_ends_of_the_range(a: list[float], b: list[float], c: float, right: float) -> None:
    found = _one(a, b, c, Types("f32", "bf16", "bf16"), Rule(25))
    assert np.array_equal(found, right, equal_nan=True)
    assert not np.signbit(found)


def test_a_subnormal_operand_has_the_least_exponent_of_its_type() -> None:
    """2^-24 of f16 counts as exponent -14: C, which is 2^-36 of that, is shifted to 2^-25."""
    types, tiny = Types("f32", "f16", "f16"), 2.0**-24
    assert _one([tiny], [1.0], 2.0**-39, types, Rule(25)) == tiny + 2.0**-39
    assert _one([tiny], [1.0], 2.0**-40, types, Rule(25)) == tiny


def test_tcgen05_sums_as_is_claimed() -> None:
    """D in tensor memory is added like C."""
    case = Tcgen05(a_format="f16", b_format="f16", n=16)
    rng = np.random.default_rng(1)
    before = rng.normal(size=(128, 16)).astype(np.float32)
    case.group[0].tmem.cells[D_AT : D_AT + 16, :128] = before.T.view(np.uint32)
    types = Types("f32", "f16", "f16")
    how = rule("tcgen05.mma", "sm_100a", types)
    mma(case.group, D_AT, case.a, case.b, case.idesc, True, sums=how)
    a, b = (codes.view(np.float16).astype(np.float32) for codes in (case.a_codes, case.b_codes))
    right = accumulate(a, b, before, types, how)
    assert (case.d_bits() == right.view(np.uint32)).all()


UNKNOWN: dict[str, Case] = {
    "mma.sp": lane_matrices.sparse("m16n8k16.row.col.f32.f16.f16.f32", "mma.sp", (0b0100,)),
    "wgmma.mma_async.sp": wgmma_sparse.program(wgmma_sparse.Sparse("f32.f16.f16", 8)),
    "mma.sync.m8n8k4": lane_matrices.quads("m8n8k4.row.col.f32.f16.f16.f32"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_nobody_knows_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedPtx, match=f"aligned.*{name} sums") as caught:
        run(UNKNOWN[name].program)
    assert caught.value.line


# how ptxas 13.0 and 13.5 assemble mma.sync with FP8 operands
QMMA = {
    **dict.fromkeys("sm_90 sm_90a sm_100 sm_100a sm_100f sm_103a sm_110 sm_110a".split(), False),
    **dict.fromkeys("sm_120 sm_120a sm_121a".split(), True),
}


@pytest.mark.parametrize("target", QMMA)
@pytest.mark.parametrize("d", ["f32", "f16"])
def test_fp8_without_an_instruction_of_its_own_goes_through_f16(target: str, d: str) -> None:
    """Two sums of 16 products each, then C: bits below the last one of the first sum are lost."""
    for a, b in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")):
        assert rule("mma.sync", target, Types(d, a, b)).split is not QMMA[target]
    for other in ("f16", "bf16", "tf32"):
        assert not rule("mma.sync", target, Types(d, other, other)).split
    types = Types("f32", "e4m3", "e4m3")
    how = rule("mma.sync", target, types)
    # 2^18 of C hides 2^-8 if all are aligned at once; otherwise the sum of the products keeps it
    values = [2.0**-4, 0.0, 0.0, 0.0] * 8
    found = _one(values, [2.0**-4] * 32, 2.0**18, types, how)
    assert found == (2.0**18 if QMMA[target] else 2.0**18 + 2.0**-5)


def test_older_gpus_and_other_words_are_refused() -> None:
    with pytest.raises(UnsupportedPtx, match="sm_89"):
        rule("mma.sync", "sm_89", Types("f32", "e4m3", "e4m3"))
    with pytest.raises(UnsupportedPtx, match="sm_80"):
        rule("mma.sync", "sm_80", Types("f32", "f16", "f16"))
    with pytest.raises(ValueError, match="accumulation='exact'"):
        Options(accumulation="exact")
