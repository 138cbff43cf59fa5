"""Block-scaled tcgen05.mma compared with a float64 product of decoded operands and scale
factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance import ptx_program
from lab.silicon.conformance.exact_arithmetic import FORMATS, values_of
from ptxemu.check.undefined import TensorCodes
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.mma import mma
from ptxemu.machine.scale_factors import Placement, Scales
from ptxemu.machine.tmem import POISON, Tmem
from ptxemu.machine.umma_desc import InstrDesc, instr_desc, smem_desc
from ptxemu.native.library import without
from tests.ptxemu.test_mma import A_AT, A_TMEM, B_AT, Cta, put_a_in_tmem
from tests.ptxemu.umma_operands import image_of, multiply, put_operand, random_codes

D_AT, SFA_AT, SFB_AT = 0, 300, 320  # in tensor memory
_CODES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
_K = {"mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
# kind, scale factors of a row, their format, their scale ids
VARIANTS = [
    ("mxf8f6f4", 1, "ue8m0", (0, 1, 2, 3)),
    ("mxf4", 2, "ue8m0", (0, 2)),
    ("mxf4nvf4", 2, "ue8m0", (0, 2)),
    ("mxf4nvf4", 4, "ue8m0", (0,)),
    ("mxf4nvf4", 4, "ue4m3", (0,)),
]
IDS = [(*v[:3], a, b) for v in VARIANTS for a, b in product(v[3], v[3])]
# CTAs, rows of A of each, N
SHAPES = [(1, 128, n) for n in (8, 24, 40, 64, 128, 192, 256)]
SHAPES += [(2, rows, n) for rows in (64, 128) for n in (16, 48, 80, 128, 208, 256)]
# M = 128 on a pair: N -> (row of B, lanes that hold its scale factors, column)
HALVES = {
    16: [(0, (0, 32), 0), (7, (7, 39), 0), (8, (64, 96), 0), (15, (71, 103), 0)],
    32: [(15, (15, 47), 0), (16, (64, 96), 0), (31, (79, 111), 0)],
    80: [(31, (31, 63), 0), (39, (7, 39), 1), (40, (64, 96), 0), (72, (64, 96), 1)],
    256: [
        (0, (0, 32), 0), (32, (0, 32), 1), (127, (31, 63), 3),
        (128, (64, 96), 0), (195, (67, 99), 2), (255, (95, 127), 3),
    ],
}  # fmt: skip


def codes_of(rng: np.random.Generator, fmt: str, shape: tuple[int, int]) -> np.ndarray:
    return random_codes(rng, fmt, shape) & np.uint8((1 << FORMATS[fmt].bits) - 1)


def factors_of(fmt: str, codes: np.ndarray) -> np.ndarray:
    """Decode scale factors to float64."""
    return values_of("e4m3", codes & 0x7F) if fmt == "ue4m3" else values_of(fmt, codes)


def put_factors(tmem: Tmem, column: int, codes: np.ndarray, first: int, parts: int = 1) -> None:
    """Put codes (rows, blocks) into the bytes from `first` on of their words, in every quarter of
    the lanes; with two parts, half of the rows in both quarters of half of the lanes."""
    words = np.full((len(codes), 4), 0x5A, np.uint8)
    words[:, first : first + codes.shape[1]] = codes
    for part, of_part in enumerate(np.split(words.view(np.uint32)[:, 0], parts)):
        lanes = tmem.cells[:, 64 * part :] if part else tmem.cells[:, : 128 // parts]
        for row, word in enumerate(of_part):
            lanes[column + row // 32, row % 32 :: 32] = word


@dataclass
class Case:
    """An MMA with random operands in shared memory and random scale factors in tensor memory."""

    kind: str = "mxf4nvf4"
    blocks: int = 4
    scale_format: str = "ue4m3"
    a_id: int = 0
    b_id: int = 0
    a_format: str = "e2m1"
    b_format: str = "e2m1"
    ctas: int = 1
    rows: int = 128
    n: int = 64
    mn_major: bool = False
    flags: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.n)
        self.m, k = self.rows * self.ctas, _K[self.kind]
        self.group = [Cta() for _ in range(self.ctas)]
        self.a_codes = codes_of(rng, self.a_format, (self.m, k))
        self.b_codes = codes_of(rng, self.b_format, (self.n, k))
        low, high = (0x28, 0x50) if self.scale_format == "ue4m3" else (121, 134)
        self.sfa = rng.integers(low, high, (self.m, self.blocks), dtype=np.uint8)
        self.sfb = rng.integers(low, high, (self.n, self.blocks), dtype=np.uint8)
        self.place()

    def place(self) -> None:
        operands = ((self.a_format, self.a_codes), (self.b_format, self.b_codes))
        a, b = (
            image_of(self.kind, *each)
            if not self.mn_major
            else image_of(self.kind, each[0], each[1].T).T
            for each in operands
        )
        parts = (np.split(whole, self.ctas) for whole in (a, b, self.sfa))
        for cta, a_part, b_part, sfa in zip(self.group, *parts, strict=True):
            a_word = put_operand(cta.smem, A_AT, a_part, "128B", self.mn_major)
            b_word = put_operand(cta.smem, B_AT, b_part, "32B", self.mn_major)
            put_factors(cta.tmem, SFA_AT, sfa, self.a_id)
            put_factors(cta.tmem, SFB_AT, self.sfb, self.b_id, 128 // self.rows)
        self.a, self.b = smem_desc(a_word), smem_desc(b_word)

    def idesc(self) -> InstrDesc:
        packed = self.kind != "mxf8f6f4"
        a, b = (1 if packed else _CODES[fmt] for fmt in (self.a_format, self.b_format))
        word = self.b_id << 4 | a << 7 | b << 10 | self.mn_major * (3 << 15) | self.n >> 3 << 17
        word |= (self.scale_format == "ue8m0") << 23 | self.m >> 7 << 27 | self.a_id << 29
        return instr_desc(self.kind, word | self.flags)

    def run(self, accumulate: bool = False, scales: Scales | None = None, **options) -> bool:
        """Return whether machine code does it."""
        addresses = SFA_AT | self.a_id << 30, SFB_AT | self.b_id << 30
        where = scales or Scales(*addresses, self.blocks)
        a = options.pop("a", self.a)
        instr = self.idesc()
        return multiply(self.group, D_AT, a, self.b, instr, accumulate, scales=where, **options)

    def operands(self) -> Iterator[np.ndarray]:
        """A and B times their scale factors, float64."""
        both = ((self.a_format, self.a_codes, self.sfa), (self.b_format, self.b_codes, self.sfb))
        for fmt, codes, factors in both:
            block = codes.shape[1] // self.blocks
            yield values_of(fmt, codes) * factors_of(self.scale_format, factors).repeat(block, 1)

    def d(self) -> np.ndarray:
        halves = 128 // self.rows  # parts of D's columns, one in the lanes below those of the other
        columns = slice(D_AT, D_AT + self.n // halves)
        parts = [cta.tmem.cells[columns].view(np.float32).T for cta in self.group]
        return np.concatenate([np.hstack(np.split(part, halves)) for part in parts])


def compare(case: Case, times: int = 1) -> None:
    """Check that D is `times` A B, up to the rounding of a float32 sum."""
    a, b = case.operands()
    assert (np.abs(case.d() - times * (a @ b.T)) <= 1e-6 * (np.abs(a) @ np.abs(b).T)).all()


def check(case: Case, sign: int = 1) -> None:
    """Check D = A B over poison, then D += A B."""
    case.run()
    compare(case, sign)
    case.run(accumulate=True)
    compare(case, 2 * sign)


@pytest.mark.parametrize(("kind", "blocks", "scale_format", "a_id", "b_id"), IDS)
@pytest.mark.parametrize("group", [(1, 128), (2, 128), (2, 64)])  # CTAs, rows of A of each
def test_scale_ids(kind, blocks, scale_format, a_id, b_id, group):
    check(Case(kind, blocks, scale_format, a_id, b_id, ctas=group[0], rows=group[1]))


@pytest.mark.parametrize(("ctas", "rows", "n"), SHAPES)
@pytest.mark.parametrize(("kind", "blocks", "scale_format"), [v[:3] for v in VARIANTS])
def test_shapes(kind, blocks, scale_format, ctas, rows, n):
    check(Case(kind, blocks, scale_format, ctas=ctas, rows=rows, n=n))


@pytest.mark.parametrize("group", [(1, 128), (2, 64)])  # CTAs, rows of A of each
@pytest.mark.parametrize("codes", ["all", "small"])
@pytest.mark.parametrize(("kind", "blocks", "scale_format"), [v[:3] for v in VARIANTS])
def test_machine_code_scales_to_the_same_bits(kind, blocks, scale_format, codes, group):
    """Codes include NaN and scale factors too large for float32, which Python does, or not."""
    fmt = "e4m3" if kind == "mxf8f6f4" else "e2m1"
    case = Case(kind, blocks, scale_format, 0, 0, fmt, fmt, ctas=group[0], rows=group[1])
    rng = np.random.default_rng(9)
    top = 256 if codes == "all" else 190
    case.sfa = rng.integers(0, top, case.sfa.shape, dtype=np.uint8)
    case.sfb = rng.integers(0, top, case.sfb.shape, dtype=np.uint8)
    if fmt == "e4m3" and codes == "all":
        case.a_codes = rng.integers(0, 256, case.a_codes.shape, dtype=np.uint8)
    case.place()
    assert case.run() == case.run(accumulate=True) == (codes == "small" or scale_format == "ue4m3")
    with without():
        assert not case.run()


@pytest.mark.parametrize(
    ("n", "row", "lanes", "column"), [(n, *x) for n in HALVES for x in HALVES[n]]
)
def test_where_half_of_the_lanes_has_half_of_the_rows_of_b(n, row, lanes, column):
    """Twice a scale factor gives twice a column of D, in the CTA that owns it."""
    case = Case("mxf8f6f4", 1, "ue8m0", 3, 1, "e4m3", "e4m3", ctas=2, rows=64, n=n)
    case.run()
    before = case.d()
    case.group[1].tmem.cells[SFB_AT + column, list(lanes)] += np.uint32(1 << 8)  # byte 1
    case.run()
    before[64:, row] *= 2
    np.testing.assert_array_equal(case.d(), before)


@pytest.mark.parametrize(
    ("row", "lane", "column"), [(0, 0, 0), (31, 31, 0), (32, 0, 1), (63, 31, 1)]
)
def test_where_the_rows_of_a_are(row, lane, column):
    """Rows of A are in the same place of all quarters, also if a CTA has 64 of them."""
    case = Case("mxf8f6f4", 1, "ue8m0", 3, 1, "e4m3", "e4m3", ctas=2, rows=64, n=32)
    case.run()
    before = case.d()
    for quarter in range(4):
        case.group[1].tmem.cells[SFA_AT + column, 32 * quarter + lane] += np.uint32(1 << 24)
    case.group[1].tmem.cells[SFA_AT + 2 : SFB_AT] = POISON
    case.run()
    before[64 + row] *= 2
    np.testing.assert_array_equal(case.d(), before)


@pytest.mark.parametrize(("a_format", "b_format"), [*product(_CODES, _CODES)])
def test_element_formats(a_format, b_format):
    check(Case("mxf8f6f4", 1, "ue8m0", 1, 2, a_format, b_format))


@pytest.mark.parametrize(("flags", "sign"), [(1 << 13, -1), (1 << 14, -1), (3 << 13, 1)])
@pytest.mark.parametrize("variant", [("mxf8f6f4", 1, "ue8m0"), ("mxf4nvf4", 4, "ue4m3")])
def test_negation(variant, flags, sign):
    check(Case(*variant, flags=flags), sign)


@pytest.mark.parametrize("formats", [("e4m3", "e5m2"), ("e2m1", "e3m2"), ("e2m3", "e2m1")])
@pytest.mark.parametrize("ctas", [1, 2])
def test_operands_may_be_mn_major(formats, ctas):
    """Elements of 4 and 6 bits are then packed along M and N."""
    a, b = formats
    case = Case("mxf8f6f4", 1, "ue8m0", a_format=a, b_format=b, n=128, mn_major=True, ctas=ctas)
    check(case)


@pytest.mark.parametrize("variant", [("mxf4", 2, "ue8m0"), ("mxf4nvf4", 4, "ue4m3")])
@pytest.mark.parametrize(("ctas", "rows"), [(1, 128), (2, 128), (2, 64)])
def test_a_from_tensor_memory(variant, ctas, rows):
    case = Case(*variant, ctas=ctas, rows=rows)
    put_a_in_tmem(case, image_of(case.kind, "e2m1", case.a_codes))
    case.run(a=A_TMEM)
    compare(case)


@pytest.mark.parametrize("a_format", _CODES)
@pytest.mark.parametrize(("ctas", "rows"), [(1, 128), (2, 64)])
def test_elements_of_a_in_bytes_of_tensor_memory(a_format, ctas, rows):
    case = Case("mxf8f6f4", 1, "ue8m0", 1, 2, a_format, "e5m2", ctas, rows)
    put_a_in_tmem(case, case.a_codes << np.uint8(2 if a_format == "e2m1" else 0))
    case.run(a=A_TMEM)
    compare(case)


@pytest.mark.parametrize(
    ("a_format", "where", "beside"),
    [("e2m1", "2 to 5", (0, 1, 6, 7)), ("e2m3", "0 to 5", (6, 7)), ("e3m2", "0 to 5", (6, 7))],
)
def test_bits_beside_elements_in_tensor_memory(a_format, where, beside):
    for bit in beside:
        case = Case("mxf8f6f4", 1, "ue8m0", a_format=a_format, b_format="e4m3")
        put_a_in_tmem(case, np.zeros((128, 32), np.uint8))
        case.group[0].tmem.cells[A_TMEM + 3, 77] = 1 << 8 + bit
        with pytest.raises(UnsupportedPtx, match=rf"A in {a_format} in TMEM .* bits {where} of"):
            case.run(a=A_TMEM)


def test_a_that_was_never_written_is_nan():
    case = Case("mxf8f6f4", 1, "ue8m0", a_format="e2m1", b_format="e4m3")
    case.b_codes |= 1  # not zero
    case.place()
    put_a_in_tmem(case, np.zeros((128, 32), np.uint8))
    case.group[0].tmem.cells[A_TMEM + 3, 77] = POISON
    case.run(a=A_TMEM)
    assert np.isnan(case.d()[77]).all()
    assert not np.delete(case.d(), 77, 0).any()


@pytest.mark.parametrize(("scale_format", "nan"), [("ue8m0", 0xFF), ("ue4m3", 0x7F)])
def test_a_scale_factor_that_is_no_number(scale_format, nan):
    case = Case(scale_format=scale_format)
    case.sfa[5, 3] = nan
    case.place()
    case.run()
    assert np.isnan(case.d()[5]).all()
    assert not np.isnan(np.delete(case.d(), 5, 0)).any()


def test_the_upper_bit_of_ue4m3_is_none():
    case = Case()
    case.sfb |= 0x80
    case.place()
    check(case)


@pytest.mark.parametrize(("of_a", "of_b"), [(254, 0), (0, 254), (253, 2)])
def test_scale_factors_make_up_for_one_another(of_a, of_b):
    """2^127 times 448 exceeds float32, but the product does not."""
    case = Case("mxf8f6f4", 1, "ue8m0", a_format="e4m3", b_format="e4m3")
    case.a_codes[:], case.b_codes[:] = 0x7E, 0x01  # 448 and 2^-9
    if of_b > of_a:
        case.a_codes, case.b_codes = np.full_like(case.a_codes, 1), np.full_like(case.b_codes, 0x7E)
    case.sfa[:], case.sfb[:] = of_a, of_b
    case.place()
    check(case)
    assert case.d()[0, 0] == 64 * 448 * 2.0 ** (of_a + of_b - 254 - 9)


def test_scale_factors_of_rows_that_there_are_not_do_not_matter():
    case = Case(n=40)
    cells = case.group[0].tmem.cells
    columns = cells[SFB_AT + 1].reshape(4, 32)
    columns[:, 8:] = np.arange(4)[:, None]
    cells[SFB_AT + 2 :] = POISON
    check(case)


REFUSED = [
    ("mxf4nvf4", {}, {"blocks": 1}, "kind::mxf4nvf4 with 1 scale factors per row"),
    ("mxf4", {"blocks": 2, "scale_format": "ue8m0"}, {"blocks": 4}, "mxf4 with 4 scale factors"),
    ("mxf8f6f4", {"blocks": 1, "scale_format": "ue8m0"}, {"blocks": 2}, "mxf8f6f4 with 2 scale"),
    ("mxf8f6f4", {"blocks": 1}, {}, r"per row in ue4m3, must be one of \('ue8m0',\)"),
    ("mxf4", {"blocks": 2}, {}, r"per row in ue4m3, must be one of \('ue8m0',\)"),
    ("mxf4nvf4", {"blocks": 2}, {}, r"per row in ue4m3, must be one of \('ue8m0',\)"),
    ("mxf4nvf4", {}, {"a": SFA_AT | 32 << 16}, "scale factors at TMEM lane 32, must be 0"),
    ("mxf4nvf4", {}, {"b": SFB_AT | 1 << 16}, "scale factors at TMEM lane 1, must be 0"),
    ("mxf4nvf4", {"n": 128}, {"b": 509}, "TMEM not allocated: column 0x200"),
]


@pytest.mark.parametrize(("kind", "changes", "scales", "message"), REFUSED)
def test_refusals(kind, changes, scales, message):
    case = Case(kind, **changes)
    with pytest.raises(HardwareRefusal, match=message):
        case.run(scales=Scales(SFA_AT, SFB_AT, case.blocks)._replace(**scales))


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        (VARIANTS[1], {"a_id": 1}, "scale id 1 of A, must be a multiple of 2"),
        (VARIANTS[2], {"b_id": 3}, "scale id 3 of B, must be a multiple of 2"),
        (VARIANTS[3], {"a_id": 2}, "scale id 2 of A, must be a multiple of 4"),
        (VARIANTS[4], {"m": 64}, "of M=0 N=64"),
        (VARIANTS[4], {"m": 256}, "of M=256 N=64"),
    ],
)
def test_scale_ids_and_rows_that_there_are_not(variant, changes, message):
    case = Case(*variant[:3])
    vars(case).update(changes)
    with pytest.raises(HardwareRefusal, match=message):
        case.run()


@pytest.mark.parametrize(
    ("group", "column", "lane", "message"),
    [
        ((1, 128), SFA_AT + 1, 64 + 9, "TMEM column 0x12c differ between the quarters"),
        ((2, 64), SFA_AT, 64, "differ between the quarters .* the same rows"),
        ((2, 64), SFB_AT, 40, "differ between the quarters .* the same rows"),
        ((2, 64), SFB_AT, 70, "differ between the quarters .* the same rows"),
        ((2, 64), A_TMEM + 2, 70, "A in TMEM column 0x1c0 differs between the lanes'"),
    ],
)
def test_what_is_several_times_in_tensor_memory_has_to_agree(group, column, lane, message):
    case = Case("mxf4", 2, "ue8m0", ctas=group[0], rows=group[1])
    put_a_in_tmem(case, image_of(case.kind, "e2m1", case.a_codes))
    case.run(a=A_TMEM)
    case.group[-1].tmem.cells[column, lane] ^= 1
    with pytest.raises(UnsupportedPtx, match=message):
        case.run(a=A_TMEM)


# unwritten lane, column -> undefined rows of B, and of A with 64 rows in a CTA
UNDEFINED = {
    (0, 0): ([0], [0]),
    (33, 0): ([1], [33]),
    (33, 1): ([33], [33]),
    (64, 0): ([40], [0]),
    (103, 1): ([79], [39]),
    (104, 1): ([], [40]),
}


@pytest.mark.parametrize(("lane", "column"), UNDEFINED)
def test_undefined_copies_of_rows(lane, column):
    """A single undefined copy is enough, among those that are read."""
    codes = TensorCodes()
    codes.suspects = -1
    codes.cells[...] = 0
    codes.cells[20 + column, lane] = 7
    of_b, of_a = (
        np.flatnonzero(found) if found is not None else []
        for found in (
            codes.scales(Placement(20, 80, 2)),
            codes.operand(20, instr_desc("mxf4", 0x08940480), 2),
        )
    )
    assert (list(of_b), list(of_a)) == UNDEFINED[lane, column]


def test_scale_factors_belong_to_their_kinds():
    case = Case()
    with pytest.raises(HardwareRefusal, match="kind::mxf4nvf4 without scale factors"):
        mma(case.group, D_AT, case.a, case.b, case.idesc(), False)
    dense = instr_desc("f16", 0x08100010)
    with pytest.raises(HardwareRefusal, match="kind::f16 with scale factors"):
        mma(case.group, D_AT, case.a, case.b, dense, False, scales=Scales(SFA_AT, SFB_AT, 1))


# -- programs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        ("mxf4nvf4.block_scale", UnsupportedPtx, "kind::mxf4nvf4 without a block size"),
        ("mxf4nvf4.scale_vec::4X", UnsupportedPtx, "without .block_scale"),
        ("mxf4nvf4.block_scale.block32", HardwareRefusal, "with 2 scale factors per row in ue4m3"),
        ("mxf4nvf4.block_scale.scale_vec::1X", HardwareRefusal, "with 1 scale factors per row"),
        ("mxf4.block_scale", HardwareRefusal, "kind::mxf4 with 2 scale factors per row in ue4m3"),
        ("mxf4.block_scale.block16", HardwareRefusal, "kind::mxf4 with 4 scale factors per row"),
    ],
)
def test_block_sizes_of_an_instruction(form, error, message):
    program = ptx_program.read(ptx_program.FOLDER / "block_scaled_mma.ptx")
    own = "mxf4nvf4.block_scale.scale_vec::4X"
    assert own in program.text
    module = ptxemu.load(program.text.replace(own, form))
    with pytest.raises(error, match=message):
        ptx_program.emulate(program, module, ptxemu.Options(limit=20))


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("m", [0, 256, 384])
def test_rows_are_refused_with_and_without_the_checker(m, check):
    program = ptx_program.read(ptx_program.FOLDER / "block_scaled_mma.ptx")
    assert "0x08080480" in program.text
    module = ptxemu.load(program.text.replace("0x08080480", f"{0x00080480 | m >> 7 << 27:#x}"))
    with pytest.raises(HardwareRefusal, match=f"kind::mxf4nvf4 cta_group::1 of M={m} N=32"):
        ptx_program.emulate(program, module, ptxemu.Options(limit=20, check=check))
