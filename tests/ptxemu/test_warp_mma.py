"""mma.sync and movmatrix: products element by element, refusals, and undefined data.

The programs and inputs are those of `conformance.matrices`, which run on a GPU, too.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance import (
    bounds,
    coverage,
    everything,
    fragments,
    lane_matrices,
    matrices,
    unavailable,
)
from lab.silicon.conformance.campaign import Campaign
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.fragments import BITS, M, N, place_a, place_b, place_d
from ptxemu.check.taint import ALL, RULES, both_halves
from ptxemu.codegen.flow import flow_of
from ptxemu.errors import UnsupportedPtx
from ptxemu.ops import warp_mma
from ptxemu.syntax.tree import Instr, Reg, Vec
from tests.ptxemu.test_taint import found, launch, program

COUNT = 16  # matrices of a program
CASES = {case.name: case for case in matrices.products(COUNT)}


def opcode_of(case: Case) -> str:
    return next(iter(case.outputs["d"].forms))


def operands_of(case: Case) -> list[np.ndarray]:
    return [buffer.data for buffer in case.program.buffers() if buffer.expected is None]


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", ["f16", "tf32", "e4m3"])
@pytest.mark.parametrize(("place", "rows", "columns"), [(place_a, M, 2), (place_b, 2, N)])
def test_a_fragment_holds_every_element_once(
    place: fragments.Place, type_: str, rows: int, columns: int
) -> None:
    k = 256 // BITS[type_]
    shape = (rows, k) if place is place_a else (k, columns)
    places = list(fragments.elements(place, type_, shape[0] * shape[1]))
    assert {(row, column) for *_, row, column in places} == set(np.ndindex(*shape))
    assert len({entry[:3] for entry in places}) == len(places)


@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    case = CASES[name]
    d, opcode, operands = case.emulated()["d"], opcode_of(case), operands_of(case)
    if case.outputs["d"].approximate:
        error = fragments.excess(opcode, operands, d)
        assert error.max() <= 1
        assert (error >= 0).all()
    else:
        right = fragments.multiplied(opcode, operands).ravel()
        if right.dtype == np.uint64:  # as numbers: a zero of .rm is negative
            d, right = d.view(np.float64), right.view(np.float64)
        assert (d.view(right.dtype) == right).all()


@pytest.mark.parametrize("end", [0x7FFFFFFF, 0x80000000])
def test_sums_go_beyond_both_ends(end: int) -> None:
    """The inputs exceed the range, which .satfinite is for."""
    case = CASES["integers m16n8k32.row.col.satfinite.s32.s8.s8.s32"]
    clipped = case.emulated()["d"] == end
    free = fragments.multiplied(opcode_of(case).replace(".satfinite", ""), operands_of(case))
    assert (free.ravel()[clipped] >> 31 != end >> 31).sum() > 10


# Result of ptxemu's maps -> that of wrong maps: of A and B [line, along K], of D [half, column, g,
# i].
WRONG = {
    "rows g and g + 8": ("rows_of_a", lambda a: np.roll(a, len(a) // 2, axis=0)),
    "columns of A": ("rows_of_a", lambda a: np.roll(a, a.shape[1] // 2, axis=1)),
    "elements of a register": ("rows_of_a", lambda a: a[:, np.arange(a.shape[1]) ^ 1]),
    "lanes g of A": ("rows_of_a", lambda a: a[np.arange(len(a)) ^ 1]),
    "rows of B": ("columns_of_b", lambda b: np.roll(b, b.shape[1] // 2, axis=1)),
    "lanes g of B": ("columns_of_b", lambda b: b[np.arange(len(b)) ^ 4]),
    "halves of D": ("by_lane", lambda d: d[::-1]),
    "columns of D": ("by_lane", lambda d: d[:, ::-1]),
    "lanes of D": ("by_lane", lambda d: d.transpose(0, 1, 3, 2).reshape(d.shape)),
}
SHAPES = {
    f"{shape}.{bits}": case
    for case in CASES.values()
    if not case.outputs["d"].approximate
    for shape, bits in [
        (opcode_of(case).split(".")[3], BITS[fragments.types_of(opcode_of(case))[1]])
    ]
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_map_of_a_fragment_is_noticed(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fragments` follows the manual's figures and notices it on the inputs of `test_products`."""
    case = SHAPES[shape]
    right = fragments.multiplied(opcode_of(case), operands_of(case)).ravel()
    for name, (function, change) in WRONG.items():
        if name in ("rows g and g + 8", "halves of D") and shape.startswith("m8"):
            continue  # there is only one
        correct = getattr(warp_mma, function)
        wrong = lambda *given, f=correct, g=change: g(f(*given))  # noqa: E731
        with monkeypatch.context() as changed:
            changed.setattr(warp_mma, function, wrong)
            found = case.emulated()["d"].view(right.dtype)
        assert (found != right).any(), name


def test_movmatrix_transposes() -> None:
    case = matrices.transposed(COUNT)
    before = case.program.buffers()[0].data.view(np.uint16).reshape(-1, 8, 8)
    after = case.emulated()["d"].view(np.uint16).reshape(-1, 8, 8)
    assert (after == before.transpose(0, 2, 1)).all()


def test_operands_that_are_equal_in_all_lanes_and_a_result_in_their_place() -> None:
    """A is all ones, B all twos, C the lane, then zeros."""
    body = """
    mov.b32 %r10, 0x3f803f80; mov.b32 %r11, 0x40004000;
    cvt.rn.f32.u32 %f0, %r0; mov.f32 %f1, %f0; mov.f32 %f2, 0f00000000; mov.f32 %f3, 0f3F000000;
    mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32
        {%f0, %f1, %f2, %f3}, {%r10, %r10}, {%r11}, {%f0, %f1, %f2, %f3};
    mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32
        {%f4, %f5, %f6, %f7}, {%r10, %r10}, {%r11}, {%f2, %f2, %f2, %f2};
    add.f32 %f0, %f0, %f4; st.global.f32 [%rd1], %f0; st.global.f32 [%rd1+128], %f3;
    movmatrix.sync.aligned.m8n8.trans.b16 %r12, %r10; st.global.b32 [%rd1+256], %r12;"""
    _, out = launch(body)
    values = out.view(np.float32)[:64].reshape(2, 32)
    assert (values[0] == np.arange(32) + 16 + 32).all()
    assert (values[1] == 16.5).all()
    assert (out[64:96] == 0x3F803F80).all()


_GOOD = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
_COUNTS = (4, 4, 2, 4)  # registers of D, A, B and C
REFUSED = [
    (_GOOD, (4, 2, 2, 4)),
    (_GOOD, (4, 4, 1, 4)),
    (_GOOD, (2, 4, 2, 4)),
    (_GOOD, (4, 4, 2, 2)),
    (_GOOD.replace("k16", "k8"), _COUNTS),
    (_GOOD.replace("k16", "k32"), (4, 8, 4, 4)),
    (_GOOD.replace("k16", "k4"), (4, 1, 1, 4)),
    (_GOOD.replace("m16n8k16", "m8n8k4"), (4, 2, 2, 4)),
    (_GOOD.replace(".m16n8k16", ""), _COUNTS),
    (_GOOD.replace("k16", "k16.m16n8k8"), _COUNTS),
    (_GOOD.replace(".row.col", ".row"), _COUNTS),
    (_GOOD.replace(".row.col", ".col.row.row"), _COUNTS),
    (_GOOD.replace(".aligned", ""), _COUNTS),
    (_GOOD.replace(".row.", ".satfinite.row."), _COUNTS),
    (_GOOD.replace("16.f32", "16.f16"), (4, 4, 2, 2)),
    (_GOOD.replace("f32.f16.f16.f32", "f16.f16.f16.f32"), (2, 4, 2, 4)),
    (_GOOD.replace("f32.f16.f16.f32", "f16.bf16.bf16.f16"), (2, 4, 2, 2)),
    (_GOOD.replace("f16.f16", "f16.bf16"), _COUNTS),
    (_GOOD.replace("f16.f16", "e4m3.f16"), _COUNTS),
    (_GOOD.replace("f16.f16", "e2m1.e2m1"), _COUNTS),
    (_GOOD.replace("f16.f16", "tf32.tf32"), (4, 8, 4, 4)),
    (_GOOD.replace("aligned", "aligned.kind::f8f6f4"), _COUNTS),
    (_GOOD.replace("sync", "sp.sync"), _COUNTS),
    ("mma.sync.aligned.m16n8k16.row.col.s32.s4.s4.s32", (4, 2, 1, 4)),
    ("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.u32", (4, 2, 1, 4)),
    ("movmatrix.sync.aligned.m8n8.b16", (1, 1)),
    ("movmatrix.sync.aligned.m8n8.trans.b8", (1, 1)),
    ("movmatrix.sync.aligned.m16n8.trans.b16", (1, 1)),
]


def instruction(opcode: str, counts: tuple[int, ...]) -> Instr:
    """An instruction with fragments in registers d0, d1, ..., a0, ..., b0, ..., c0, ..."""
    named = zip("dabc", counts, strict=False)
    operands = [Vec(tuple(Reg(f"{x}{k}") for k in range(count))) for x, count in named]
    return Instr(opcode, tuple(operands), None, 1, opcode)


@pytest.mark.parametrize(("opcode", "counts"), REFUSED)
def test_what_is_no_form_is_refused_by_name(opcode: str, counts: tuple[int, ...]) -> None:
    registers = [f"%r{10 + k}" for k in range(sum(counts))]
    lists, first = [], 0
    for count in counts:
        lists.append("{" + ", ".join(registers[first : first + count]) + "}")
        first += count
    text = f"{opcode} {', '.join(lists)};"
    with pytest.raises(UnsupportedPtx, match=opcode.split(".")[0]) as caught:
        launch(text)
    assert caught.value.line == program(text).splitlines().index(text) + 1
    assert opcode in caught.value.text


# -- conformance ----------------------------------------------------------------------------------


def test_the_programs_hold_every_form_of_the_registry() -> None:
    programs = (*CASES.values(), matrices.transposed(4), *lane_matrices.cases())
    forms = [form for case in programs for form in case.forms]
    refused = [text.split()[0] for text in unavailable.instructions()]
    missing = coverage.missing(forms, refused)
    assert len(forms) > 100
    assert not [
        item
        for item, reason in missing.items()
        if item[0].startswith(("mma.", "movmatrix")) and not reason
    ]


def test_a_sum_beyond_its_bound_is_a_difference() -> None:
    case = CASES["any m16n8k16.row.col.f32.bf16.bf16.f32"]
    opcode, right, tally = opcode_of(case), case.emulated(), Campaign()
    (bound,) = bounds.bounds_of(opcode)
    tally.judge(case, right, right)
    assert tally.forms[opcode].right
    magnitude = fragments.operands(opcode, operands_of(case))
    a, b, c = (np.abs(x) for x in magnitude)
    allowed = bound.value * (a @ b + c)[0, 0, 0]
    for step, expected in ((0.5, True), (2.0, False)):
        wrong, judged = {"d": right["d"].copy()}, Campaign()
        wrong["d"].view(np.float32)[0] += np.float32(step * allowed)
        judged.judge(case, wrong, right)
        assert judged.forms[opcode].right is expected


def test_a_wrong_bit_of_an_exact_sum_is_a_difference_though_the_form_has_a_bound() -> None:
    exact, near = (CASES[f"{x} m16n8k8.row.col.f32.f16.f16.f32"] for x in ("exact", "any"))
    judged, right = Campaign(), exact.emulated()
    wrong = {"d": right["d"].copy()}
    wrong["d"][5] ^= 1
    judged.judge(near, near.emulated(), near.emulated())
    judged.judge(exact, wrong, right)
    assert not judged.forms[opcode_of(exact)].right


def test_a_campaign_of_some_programs_can_be_written_down() -> None:
    judged, near = Campaign(), CASES["any m16n8k8.row.col.f32.f16.f16.f32"]
    judged.judge(near, near.emulated(), near.emulated())
    document = everything.document(judged, {})
    (row,) = document["approximations"].values()
    assert row["bound"].endswith("of the sum of magnitudes")
    assert row["same"] == row["inputs"] == COUNT
    assert not document["different"]


# -- undefined data -------------------------------------------------------------------------------


def places(opcode: str, letter: str, type_: str) -> list[tuple[int, int, int, int]]:
    """(lane, register, row, column) of a fragment's elements."""
    m, k = fragments.rows(opcode), fragments.depth(opcode)
    place, count = {
        "a": (place_a, m * k),
        "b": (place_b, k * N),
        "c": (place_d, m * N),
        "d": (place_d, m * N),
    }[letter]
    return [
        (lane, register, row, column)
        for lane, register, _, row, column in fragments.elements(place, type_, count)
    ]


def reached(opcode: str, letter: str, lane: int, register: int) -> dict[str, int]:
    """Masks of D's registers if one lane of a register of A, B or C is undefined."""
    types = dict(zip("dabc", fragments.types_of(opcode), strict=True))
    start = [at[2:] for at in places(opcode, letter, types[letter]) if at[:2] == (lane, register)]
    masks: dict[str, int] = {}
    for to_lane, to_register, row, column in places(opcode, "d", types["d"]):
        hit = {
            "a": any(row == r for r, _ in start),
            "b": any(column == c for _, c in start),
            "c": (row, column) in start,
        }[letter]
        name = f"d{to_register}"
        masks[name] = masks.get(name, 0) | hit << to_lane
    return masks


_REPEATED = ("e5m2", "u8", "u4", "satfinite", ".rn", ".rz", ".rm", ".rp", "and.popc")


@pytest.mark.parametrize("form", [f for f in matrices.FORMS if not any(x in f for x in _REPEATED)])
def test_an_undefined_element_reaches_its_row_its_column_or_itself(form: str) -> None:
    opcode = f"mma.sync.aligned.{form}"
    d, a, b, _ = fragments.types_of(opcode)
    m, k = fragments.rows(opcode), fragments.depth(opcode)
    count = fragments.register_count
    counts = (count(d, m * N), count(a, m * k), count(b, k * N), count(d, m * N))
    instr = instruction(opcode, counts)
    wide = {f"{x}{n}" for x, most in zip("dabc", counts, strict=True) for n in range(most)}
    names = {f"d{x}" for x in range(counts[0])}
    flow = flow_of(0, instr, names, frozenset(wide if d == "f64" else ()))
    for letter, most in zip("abc", counts[1:], strict=True):
        for register, lane in product(range(most), (0, 6, 13, 31)):
            found_masks = RULES[flow.kind](flow, {f"{letter}{register}": 1 << lane}, ALL)
            expected = reached(opcode, letter, lane, register)
            if d == "f64":
                expected = {name: both_halves(mask) for name, mask in expected.items()}
            assert dict(zip(flow.targets, found_masks, strict=True)) == expected


def test_an_undefined_word_of_movmatrix_reaches_two_rows() -> None:
    instr = instruction("movmatrix.sync.aligned.m8n8.trans.b16", (1, 1))
    flow = flow_of(0, instr, {"d0"}, frozenset())
    for lane in range(32):
        column, rows = lane // 4, (lane % 4 * 2, lane % 4 * 2 + 1)
        (mask,) = RULES[flow.kind](flow, {"a0": 1 << lane}, ALL)
        assert mask == sum(1 << 4 * row + column // 2 for row in rows)


_ALL_BUT_LAST = "setp.lt.u32 %p0, %r0, 28; @%p0 st.shared.b32 [%r3], 0; ld.shared.b32 %r10, [%r3];"
_ALL_BUT_LAST += "mov.b32 %r11, 0; and.b32 %r4, %r0, 3; setp.eq.u32 %p1, %r4, 3;"
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r20, %r21, %r22, %r23}, "
_A_ROW = _MMA + "{%r10, %r11, %r11, %r11}, {%r11, %r11}, {%r11, %r11, %r11, %r11};"  # row 7
_B_COLUMN = _MMA + "{%r11, %r11, %r11, %r11}, {%r11, %r10}, {%r11, %r11, %r11, %r11};"  # 7
_MOVED = "movmatrix.sync.aligned.m8n8.trans.b16 %r20, %r10;"  # row 7 to column 7
# instruction; store; is it reported?
UNDEFINED = {
    "row of A": (_A_ROW, "st.global.b32 [%rd1], %r20;", True),
    "row of A that is dropped": (_A_ROW, "@%p0 st.global.b32 [%rd1], %r20;", False),
    "other rows of A": (_A_ROW, "st.global.b32 [%rd1], %r22;", False),
    "column of B": (_B_COLUMN, "@%p1 st.global.b32 [%rd1], %r21;", True),
    "column of B in the lower half": (_B_COLUMN, "@%p1 st.global.b32 [%rd1], %r23;", True),
    "column of B that is dropped": (_B_COLUMN, "@!%p1 st.global.b32 [%rd1], %r21;", False),
    "other columns of B": (_B_COLUMN, "st.global.b32 [%rd1], %r20;", False),
    "transposed": (_MOVED, "@%p1 st.global.b32 [%rd1], %r20;", True),
    "transposed and dropped": (_MOVED, "@!%p1 st.global.b32 [%rd1], %r20;", False),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_rows_and_columns_that_are_dropped_may_be_undefined(name: str) -> None:
    computed, stored, expected = UNDEFINED[name]
    report, _ = launch((_ALL_BUT_LAST + computed + stored).replace(";", ";\n"))
    assert bool(found(report)) is expected


@pytest.mark.parametrize("policy", ["round-robin", "random", "adversarial"])
def test_results_do_not_depend_on_the_schedule(policy: str) -> None:
    case = CASES["exact m16n8k16.row.col.f32.bf16.bf16.f32"]
    found_bits = case.emulated(ptxemu.Options(policy=policy, seed=3, limit=None))["d"]
    assert (found_bits == case.emulated()["d"]).all()
