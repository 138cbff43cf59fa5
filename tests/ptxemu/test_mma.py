"""tcgen05.mma compared with a float64 product, over kinds, layouts, tile shapes and CTA pairs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.exact_arithmetic import values_of
from ptxemu.check import footprints
from ptxemu.check.undefined import TensorCodes
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.mma import Mma, mma
from ptxemu.machine.quick_mma import plan
from ptxemu.machine.tmem import POISON, Tmem
from ptxemu.machine.umma_desc import instr_desc, require_shape, smem_desc, stationary_desc
from ptxemu.native.library import library
from tests.ptxemu import kernels
from tests.ptxemu.umma_operands import SWIZZLES, multiply, put_operand, random_codes

_FORMAT_CODES = {
    "f16": 0, "bf16": 1, "tf32": 2, "u8": 0, "s8": 1, "e4m3": 0, "e5m2": 1, "e2m1": 5,
}  # fmt: skip
_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
_D_CODES = {"f16": 0, "f32": 1, "s32": 2}
A_AT, B_AT, D_AT = 0x400, 0x10480, 64  # B starts inside the swizzle pattern
A_TMEM = 448  # the column of A in tensor memory


@dataclass
class Cta:
    smem: np.ndarray = field(default_factory=lambda: np.zeros(160 * 1024, np.uint8))
    tmem: Tmem = field(default_factory=Tmem)

    def __post_init__(self) -> None:
        self.tmem.try_alloc(512)
        self.smem_at = self.smem.ctypes.data


@dataclass
class Case:
    """An MMA with random operands in shared memory."""

    kind: str = "f16"
    a_format: str = "bf16"
    b_format: str = "bf16"
    d_format: str = "f32"
    m: int = 128
    n: int = 64
    ctas: int = 1
    a_swizzle: str = "128B"
    b_swizzle: str = "128B"
    a_mn: bool = False
    b_mn: bool = False
    flags: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.m + self.n)
        k = _K[self.kind]
        self.group = [Cta() for _ in range(self.ctas)]
        self.a_codes = random_codes(rng, self.a_format, (self.m, k))
        self.b_codes = random_codes(rng, self.b_format, (self.n, k))
        a_parts = np.split(self.a_codes, self.ctas)
        b_parts = np.split(self.b_codes, self.ctas)
        for cta, a, b in zip(self.group, a_parts, b_parts, strict=True):
            self.a = smem_desc(put_operand(cta.smem, A_AT, a, self.a_swizzle, self.a_mn))
            self.b = smem_desc(put_operand(cta.smem, B_AT, b, self.b_swizzle, self.b_mn))
        word = _D_CODES[self.d_format] << 4 | self.a_mn << 15 | self.b_mn << 16 | self.flags
        word |= _FORMAT_CODES[self.a_format] << 7 | _FORMAT_CODES[self.b_format] << 10
        self.idesc = instr_desc(self.kind, word | self.n >> 3 << 17 | self.m >> 4 << 24)

    def run(self, accumulate: bool = False, a: int | None = None, **options: object) -> bool:
        """Return whether machine code does it."""
        operand = self.a if a is None else a
        return multiply(self.group, D_AT, operand, self.b, self.idesc, accumulate, **options)

    def expected(self) -> np.ndarray:
        a, b = values_of(self.a_format, self.a_codes), values_of(self.b_format, self.b_codes)
        return a @ b.T

    def d_bits(self) -> np.ndarray:
        """D as stored in tensor memory, uint32 (m, n)."""
        parts = []
        for cta in self.group:
            cells = cta.tmem.cells[D_AT:]
            rows = np.arange(self.m // self.ctas)
            lanes = rows if len(rows) == 128 else rows // 16 * 32 + rows % 16
            if self.ctas == 2 and self.m == 128:
                half = self.n // 2
                parts.append(np.concatenate([cells[:half, :64], cells[:half, 64:]]).T)
            else:
                parts.append(cells[: self.n, lanes].T)
        return np.concatenate(parts)

    def d(self) -> np.ndarray:
        bits = np.ascontiguousarray(self.d_bits())
        if self.d_format == "f16":
            return (bits & 0xFFFF).astype(np.uint16).view(np.float16)
        return bits.view(np.float32 if self.d_format == "f32" else np.int32)


def check(case: Case) -> None:
    """D = A B over poison, then D += A B."""
    case.run(accumulate=False)
    np.testing.assert_allclose(case.d(), case.expected(), rtol=1e-5, atol=1e-5)
    case.run(accumulate=True)
    np.testing.assert_allclose(case.d(), 2 * case.expected(), rtol=1e-5, atol=1e-5)


TILE_SHAPES = [
    (m, n, ctas)
    for m, ctas in ((64, 1), (128, 1), (128, 2), (256, 2))
    for n in (8, 16, 64, 128, 256)
    if n % (8 * ctas) == 0
]


@pytest.mark.parametrize(("m", "n", "ctas"), TILE_SHAPES)
def test_tile_shapes(m, n, ctas):
    check(Case(m=m, n=n, ctas=ctas))


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_operand_layouts(fmt, a_mn, b_mn, ctas, swizzle):
    other = SWIZZLES[SWIZZLES.index(swizzle) - 1]
    layouts = {"a_swizzle": swizzle, "b_swizzle": other, "a_mn": a_mn, "b_mn": b_mn}
    check(Case(a_format=fmt, b_format=fmt, m=128 * ctas, ctas=ctas, **layouts))


@pytest.mark.parametrize("mn", [False, True])
@pytest.mark.parametrize("ctas", [1, 2])
def test_tf32(mn, ctas):
    swizzle = "128B_ATOM_32B" if mn else "128B"
    layouts = {"a_swizzle": swizzle, "b_swizzle": swizzle, "a_mn": mn, "b_mn": mn}
    check(Case(kind="tf32", a_format="tf32", b_format="tf32", ctas=ctas, **layouts))


@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("mn", [False, True])
def test_fp8(a, b, mn):
    check(Case(kind="f8f6f4", a_format=a, b_format=b, a_mn=mn, b_mn=mn))


@pytest.mark.parametrize(("a", "b"), [("s8", "s8"), ("u8", "s8"), ("u8", "u8")])
@pytest.mark.parametrize(("m", "ctas"), [(64, 1), (256, 2)])
def test_integers_are_exact(a, b, m, ctas):
    case = Case(kind="i8", a_format=a, b_format=b, d_format="s32", m=m, ctas=ctas)
    case.run()
    np.testing.assert_array_equal(case.d(), case.expected().astype(np.int64))


@pytest.mark.parametrize("saturate", [False, True])
def test_integer_overflow_wraps_or_saturates(saturate):
    case = Case(kind="i8", a_format="u8", b_format="u8", d_format="s32", flags=saturate << 3)
    case.group[0].tmem.cells[:] = 2**31 - 1
    case.run(accumulate=True)
    total = case.expected().astype(np.int64) + 2**31 - 1
    expected = np.minimum(total, 2**31 - 1) if saturate else (total + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(case.d(), expected)


@pytest.mark.parametrize(("m", "ctas"), [(64, 1), (128, 1), (128, 2), (256, 2)])
def test_f16_accumulator_rounds_once_per_instruction(m, ctas):
    case = Case(a_format="f16", b_format="f16", d_format="f16", m=m, ctas=ctas)
    case.run()
    once = case.expected().astype(np.float32).astype(np.float16)
    np.testing.assert_allclose(case.d(), once, rtol=1e-3, atol=1e-3)
    case.run(accumulate=True)
    np.testing.assert_allclose(case.d(), 2 * once.astype(np.float64), rtol=2e-3, atol=2e-3)
    assert (case.d_bits() >> 16 == 0xFFFF).all()


@pytest.mark.parametrize(("ctas", "m"), [(1, 128), (2, 256), (2, 128)])
@pytest.mark.parametrize(
    ("kind", "fmt"), [("f16", "bf16"), ("f16", "f16"), ("f8f6f4", "e4m3"), ("tf32", "tf32")]
)
def test_a_from_tensor_memory(ctas, m, kind, fmt):
    case = Case(kind=kind, a_format=fmt, b_format=fmt, m=m, ctas=ctas)
    put_a_in_tmem(case, case.a_codes)
    case.run(a=A_TMEM)
    np.testing.assert_allclose(case.d(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(library() is None, reason="llvmlite is not installed")
@pytest.mark.parametrize(
    ("case", "done"),
    [
        ({}, True),
        ({"m": 256, "ctas": 2, "n": 256, "b_mn": True}, True),
        ({"m": 64, "a_format": "f16", "b_format": "f16"}, True),
        ({"kind": "f8f6f4", "a_format": "e4m3", "b_format": "e5m2"}, True),
        ({"flags": 1 << 13}, False),
        ({"a_format": "f16", "b_format": "f16", "d_format": "f16"}, False),
        ({"kind": "tf32", "a_format": "tf32", "b_format": "tf32"}, False),
    ],
)
def test_what_machine_code_multiplies(case, done):
    found = Case(**case)
    assert found.run() == found.run(accumulate=True) == done
    if found.kind == "f16":
        assert not found.run(accumulate=True, scale_input_d=1)


def test_machine_code_leaves_errors_to_python():
    """An operand beyond shared memory, a lane that D has not, columns that nobody allocated."""
    case = Case()
    beyond = replace(case.a, start=160 * 1024 - 512)
    plans = [plan(_asked(case, a=beyond), 1), plan(_asked(case, d=1 << 16), 1)]
    assert not plans[0].run(case.group)
    for what in (plans[1], plan(_asked(case), 1)):
        case.group[0].tmem = Tmem()
        with pytest.raises(HardwareRefusal):
            what.run(case.group)


def _asked(case: Case, d: int = D_AT, a: object = None) -> Mma:
    operands = d, a or case.a, case.b, case.idesc, False
    return Mma(*operands, disable_lanes=(), scale_input_d=0, scales=None, shift=False)


def put_a_in_tmem(case: Case, codes: np.ndarray) -> None:
    """Put the rows of A into tensor memory (64 rows of a CTA twice), and nothing into shared
    memory."""
    packed = np.ascontiguousarray(codes).view(np.uint32)  # (m, columns)
    for cta, rows in zip(case.group, np.split(packed, case.ctas), strict=True):
        columns = slice(A_TMEM, A_TMEM + rows.shape[1])
        cta.tmem.cells[columns] = np.tile(rows, (128 // len(rows), 1)).T
        cta.smem[A_AT:B_AT] = 0xFF


# lane -> lane whose row of A it holds after an MMA with .ashift
MOVED = {0: 1, 1: 2, 30: 31, 31: 31, 32: 33, 62: 63, 63: 63, 94: 95, 95: 95, 96: 97, 126: 127}


@pytest.mark.parametrize(("ctas", "m"), [(1, 128), (2, 128), (2, 256)])
@pytest.mark.parametrize("fmt", ["bf16", "tf32"])
def test_rows_of_a_move_when_they_have_been_read(ctas, m, fmt):
    case = Case(kind="tf32" if fmt == "tf32" else "f16", a_format=fmt, b_format=fmt, m=m, ctas=ctas)
    put_a_in_tmem(case, case.a_codes)
    for cta in case.group:
        cta.tmem.cells[456] = np.arange(128)
    before = [cta.tmem.cells[448:457].copy() for cta in case.group]
    case.run(a=A_TMEM, shift=True)
    np.testing.assert_allclose(case.d(), case.expected(), rtol=1e-5, atol=1e-5)
    for cta, cells in zip(case.group, before, strict=True):
        for lane, source in {**MOVED, 127: 127}.items():
            np.testing.assert_array_equal(cta.tmem.cells[448:456, lane], cells[:8, source])
        np.testing.assert_array_equal(cta.tmem.cells[456], cells[8])


def test_rows_of_64_do_not_move():
    case = Case(m=64)
    put_a_in_tmem(case, case.a_codes)
    with pytest.raises(HardwareRefusal, match=r"\.ashift of M=64, must be 128 or 256"):
        case.run(a=A_TMEM, shift=True)


@pytest.mark.parametrize("lane", [0, 16])
@pytest.mark.parametrize(("kind", "fmt"), [("f16", "bf16"), ("tf32", "tf32"), ("f8f6f4", "e4m3"),
                                           ("i8", "s8")])  # fmt: skip
def test_64_rows_of_a_lie_where_those_of_d_do(kind, fmt, lane):
    """16 rows in each quarter of the lanes; other lanes are not read."""
    case = Case(kind=kind, a_format=fmt, b_format=fmt, m=64, d_format="s32" if kind == "i8" else
                "f32")  # fmt: skip
    (cta,), columns = case.group, case.a_codes.view(np.uint32).shape[1]
    cta.smem[A_AT:B_AT] = 0xFF
    for row, words in enumerate(np.ascontiguousarray(case.a_codes).view(np.uint32)):
        cta.tmem.cells[A_TMEM : A_TMEM + columns, row // 16 * 32 + row % 16 + lane] = words
    mma(case.group, lane << 16 | D_AT, lane << 16 | A_TMEM, case.b, case.idesc, False)
    found = cta.tmem.cells[D_AT : D_AT + case.n].reshape(case.n, 4, 32)
    d = found[:, :, lane : lane + 16].reshape(case.n, 64).T
    values = d.view(np.int32 if kind == "i8" else np.float32)
    np.testing.assert_allclose(values, case.expected(), rtol=1e-5, atol=1e-5)
    assert (found[:, :, 16 - lane : 32 - lane] == POISON).all()


@pytest.mark.parametrize(("a", "d", "message"), [
    (16, 0, "A of M=64 at TMEM lane 16, D at lane 0"),
    (0, 16, "A of M=64 at TMEM lane 0, D at lane 16"),
    (32, 0, "A of M=64 at TMEM lane 32"),
])  # fmt: skip
def test_64_rows_of_a_in_other_lanes(a, d, message):
    case = Case(m=64)
    case.group[0].tmem.cells[:] = 0
    with pytest.raises(HardwareRefusal, match=message):
        mma(case.group, d << 16 | D_AT, a << 16 | A_TMEM, case.b, case.idesc, False)


@pytest.mark.parametrize(
    ("undefined", "behind"), [(33, [32]), (32, []), (16, [15]), (31, [30, 31])]
)
def test_undefined_rows_of_a_move_along(undefined, behind):
    codes, instr = TensorCodes(), Case().idesc
    codes.cells[:] = 0
    codes.cells[4, undefined] = 7
    codes.suspects = 1 << 4 * 8 + undefined // 16
    codes.shift(0, instr, 1)
    rows = codes.operand(0, instr, 1)
    assert ([] if rows is None else np.flatnonzero(rows).tolist()) == behind
    in_half_a_quarter = codes.read(("16x64b", 1, False, 0), 4, 0)
    assert (in_half_a_quarter is not None) == (15 in behind)


def test_undefined_rows_of_a_quarter_move_along():
    codes = TensorCodes()
    codes.cells[:] = 0
    codes.cells[4, [40, 96]] = 7
    codes.suspects = 1 << 4 * 8 + 40 // 16 | 1 << 4 * 8 + 96 // 16
    codes.shift_quarter(32 << 16 | 2)
    assert np.flatnonzero(codes.cells[4]).tolist() == [39, 96]


@pytest.mark.parametrize(("lane", "undefined"), [(0, [1, 17]), (16, [15, 16])])
def test_only_the_lanes_of_64_rows_are_looked_at(lane, undefined):
    codes = TensorCodes()
    codes.cells[:] = 0
    codes.cells[3, [1, 31, 33, 48]] = 7
    codes.suspects = -1
    rows = codes.operand(lane << 16, Case(m=64).idesc, 1)
    assert np.flatnonzero(rows).tolist() == undefined
    touched = footprints.tensor_operand_cells(lane << 16, Case(m=64).idesc, 1)
    assert touched.index().tolist() == list(range(lane // 16, 64, 2))


@pytest.mark.parametrize(("flags", "sign"), [(1 << 13, -1), (1 << 14, -1), (3 << 13, 1)])
def test_negation(flags, sign):
    case = Case(flags=flags)
    case.run()
    np.testing.assert_allclose(case.d(), sign * case.expected(), rtol=1e-5, atol=1e-5)


def test_k_advance_inside_the_swizzle_pattern_adds_32_bytes():
    """Four k-steps of one 128-byte row: the descriptor's start moves, and the XOR is applied
    after."""
    case = Case()
    rng = np.random.default_rng(0)
    a_codes, b_codes = (random_codes(rng, "bf16", (rows, 64)) for rows in (128, 64))
    a_word = put_operand(case.group[0].smem, A_AT, a_codes, "128B", False)
    b_word = put_operand(case.group[0].smem, B_AT, b_codes, "128B", False)
    for step in range(4):
        a, b = smem_desc(a_word + 2 * step), smem_desc(b_word + 2 * step)
        mma(case.group, D_AT, a, b, case.idesc, step > 0)
    case.a_codes, case.b_codes = a_codes, b_codes
    np.testing.assert_allclose(case.d(), case.expected(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("m", [64, 128])
def test_only_the_cells_of_d_change(m):
    case = Case(m=m, n=16)
    case.run()
    cells = case.group[0].tmem.cells.copy()
    lanes = [lane for lane in range(128) if m == 128 or lane % 32 < 16]
    assert (cells[D_AT : D_AT + 16, lanes] != POISON).all()
    cells[D_AT : D_AT + 16, lanes] = POISON
    assert (cells == POISON).all()


@pytest.mark.parametrize("ctas", [1, 2])
def test_disabled_lanes_keep_their_value(ctas):
    case = Case(m=128 * ctas, ctas=ctas)
    words = [0x0000000F, 0, 1 << 31, 0, 0, 0xFFFFFFFF, 0, 0][: 4 * ctas]
    case.run(disable_lanes=words)
    disabled = [word >> bit & 1 == 1 for word in words for bit in range(32)]
    bits = case.d_bits()
    assert (bits[disabled] == POISON).all()
    enabled = np.logical_not(disabled)
    np.testing.assert_allclose(case.d()[enabled], case.expected()[enabled], rtol=1e-5, atol=1e-5)


def test_scale_input_d():
    case = Case()
    case.run()
    case.run(accumulate=True, scale_input_d=3)
    np.testing.assert_allclose(case.d(), 1.125 * case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "options", "error"),
    [
        ({"m": 64, "ctas": 2}, {}, HardwareRefusal),
        ({}, {"scale_input_d": 16}, HardwareRefusal),
        ({"kind": "f8f6f4", "a_format": "e4m3", "b_format": "e4m3"}, {"scale_input_d": 1},
         HardwareRefusal),
        ({}, {"disable_lanes": [0] * 8}, HardwareRefusal),
        ({}, {"a": 16 << 16}, HardwareRefusal),
        ({"a_mn": True}, {"a": 0}, HardwareRefusal),
        ({"m": 64}, {"a": 8 << 16}, HardwareRefusal),
    ],
)  # fmt: skip
def test_refusals(changes, options, error):
    case = Case(**changes)
    with pytest.raises(error):
        case.run(**options)


# tcgen05.mma.ws: D of M = 32, 64 and 128 in all lanes, A in shared memory or read from the lanes of
# each part of N, compared with a product in float64; a kernel with it, and its refusals.

KINDS = [("f16", "bf16", "f32"), ("tf32", "tf32", "f32"), ("f8f6f4", "e4m3", "f16"),
         ("i8", "s8", "s32")]  # fmt: skip
SHAPES = [(32, 64), (32, 256), (64, 64), (64, 128), (128, 128)]


def made(kind: str, fmt: str, d_format: str, m: int, n: int) -> Case:
    case = Case(kind=kind, a_format=fmt, b_format=fmt, d_format=d_format, m=m, n=n)
    case.idesc = replace(case.idesc, stationary=True)
    require_shape(case.idesc, 1)
    return case


def read(case: Case) -> np.ndarray:
    """D [m, n]: row r of part p of N is in lane m p + r; its columns start at 0 again."""
    width = case.n * case.m // 128
    cells = case.group[0].tmem.cells
    bits = np.empty((case.m, case.n), np.uint32)
    for n in range(case.n):
        lanes = n // width * case.m + np.arange(case.m)
        bits[:, n] = cells[D_AT + n % width, lanes]
    assert (cells[D_AT + width] == POISON).all()
    if case.d_format == "f16":
        return (bits & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    return bits.view(np.int32 if case.d_format == "s32" else np.float32)


def close(found: np.ndarray, expected: np.ndarray, d_format: str) -> None:
    tolerance = 2e-3 if d_format == "f16" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "fmt", "d_format"), KINDS)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_a_in_shared_memory(kind, fmt, d_format, m, n):
    case = made(kind, fmt, d_format, m, n)
    case.run()
    close(read(case), case.expected(), d_format)


@pytest.mark.parametrize(("kind", "fmt", "d_format"), KINDS)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_each_part_of_n_reads_a_in_its_lanes(kind, fmt, d_format, m, n):
    """Parts that differ make one instruction several products."""
    case, parts = made(kind, fmt, d_format, m, n), 128 // m
    packed = np.ascontiguousarray(case.a_codes).view(np.uint32)
    columns = slice(A_TMEM, A_TMEM + packed.shape[1])
    copies = [np.roll(packed, part, axis=0) for part in range(parts)]
    case.group[0].tmem.cells[columns] = np.concatenate(copies).T
    case.run(a=A_TMEM)
    whole = values_of(fmt, case.a_codes) @ values_of(fmt, case.b_codes).T
    width = n // parts
    expected = [
        np.roll(whole[:, part * width : (part + 1) * width], part, axis=0) for part in range(parts)
    ]
    close(read(case), np.concatenate(expected, axis=1), d_format)


def test_it_accumulates():
    case = made("f16", "bf16", "f32", 32, 64)
    case.run()
    case.run(accumulate=True)
    close(read(case), 2 * case.expected(), "f32")


def test_undefined_rows_reach_their_lanes():
    """An undefined cell of any part of A affects its row."""
    codes, instr = TensorCodes(), stationary_desc("f16", 1 << 4 | 64 >> 3 << 17 | 64 >> 4 << 24)
    codes.cells[:] = 0
    codes.cells[3, [5, 70]] = 7
    codes.suspects = -1
    assert np.flatnonzero(codes.operand(0, instr, 1)).tolist() == [5, 6]


@pytest.mark.parametrize(("m", "n"), [(16, 64), (256, 64), (64, 32), (64, 192)])
def test_shapes_that_there_are_not(m, n):
    desc = stationary_desc("f16", 1 << 4 | n >> 3 << 17 | m >> 4 << 24)
    with pytest.raises(HardwareRefusal, match=rf"MMA \.ws of M={m} N={n}, must be M of"):
        require_shape(desc, 1)


def test_a_shift_of_the_descriptor_is_refused():
    with pytest.raises(UnsupportedPtx, match=r"\.ws maximum shift"):
        instr_desc("f16", 1 << 30 | 1 << 4 | 64 >> 3 << 17 | 64 >> 4 << 24)


# -- in a kernel ----------------------------------------------------------------------------------

MMA = "tcgen05.mma.ws.cta_group::1.kind::f16.collector::b1::fill [%r10], [%r13], %rd4, %r14, {0}"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r9+8], 0; @!%p2 bra W;"
IDESC = 1 << 4 | 64 >> 3 << 17 | 64 >> 4 << 24  # f16, D f32, N = 64, M = 64
B_DESC = 1 << 46 | 128 >> 4 << 32 | 1024 >> 4 << 16  # K-major, not swizzled


def launch(
    text: str = MMA.format("0, 0"), wait: str = WAIT, **how: object
) -> tuple[np.ndarray, ptxemu.LaunchReport]:
    """Return D, float32 [lane, 32]. A is 1 in column 0 of lane L, and L in column 1; B[n] = [n, 1,
    0, ...] with n counted in its part, plus 1000 in the second."""
    columns = ", ".join(f"%r{20 + k}" for k in range(32))
    stores = "".join(f"st.global.u32 [%rd2+{4 * k}], %r{20 + k};" for k in range(32))
    body = f"""ld.param.u64 %rd1, [d]; mov.u32 %r0, %tid.x; mov.u32 %r9, told;
        mad.wide.u32 %rd2, %r0, 128, %rd1; mov.u32 %r8, b;
        shr.u32 %r1, %r0, 5; setp.eq.u32 %p0, %r1, 0; setp.eq.u32 %p1, %r0, 0;
        @%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 64;
        @%p1 mbarrier.init.shared.b64 [%r9+8], 1;
        shl.b32 %r2, %r0, 4; add.u32 %r2, %r2, %r8; mov.b32 %r3, 0;
        st.shared.v4.b32 [%r2], {{%r3, %r3, %r3, %r3}}; bar.sync 0;
        and.b32 %r4, %r0, 31; cvt.rn.f32.u32 %f0, %r4; setp.ge.u32 %p3, %r0, 32;
        @%p3 add.f32 %f0, %f0, 0f447A0000;
        cvt.rn.f16.f32 %h0, %f0; mov.b16 %h1, 0x3C00; mov.b32 %r3, {{%h0, %h1}};
        setp.lt.u32 %p3, %r0, 64; @%p3 st.shared.b32 [%r2], %r3;
        cvt.rn.f32.u32 %f0, %r0; cvt.rn.f16.f32 %h0, %f0; mov.b32 %r20, {{%h1, %h0}};
        {"".join(f"mov.b32 %r{20 + k}, 0;" for k in range(1, 8))}
        fence.proxy.async; bar.sync 0;
        ld.shared.u32 %r10, [%r9]; shl.b32 %r11, %r1, 21; add.u32 %r11, %r11, %r10;
        add.u32 %r12, %r11, 32; add.u32 %r13, %r10, 32;
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12],
            {{{", ".join(f"%r{20 + k}" for k in range(8))}}};
        tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;
        tcgen05.fence::after_thread_sync; @!%p1 bra OTHERS;
        shr.u32 %r15, %r8, 4; cvt.u64.u32 %rd4, %r15; or.b64 %rd4, %rd4, {B_DESC};
        mov.b32 %r14, {IDESC}; mov.b64 %rd5, 3; setp.ne.u32 %p4, %r14, %r14;
        {text};
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9+8];
        OTHERS: {wait}
        tcgen05.fence::after_thread_sync;
        tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{columns}}}, [%r11];
        tcgen05.wait::ld.sync.aligned; {stores}
        tcgen05.fence::before_thread_sync; bar.sync 0;
        @%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;"""
    declared = ".shared .align 16 .b8 told[16];\n.shared .align 1024 .b8 b[2048];\n"
    out = np.zeros((128, 32), np.float32)
    program = kernels.kernel(body, ".param .u64 d", declared)
    return out, kernels.launch(program, out, **{"check": True, "block": (128,), **how})


@pytest.mark.parametrize("how", [{}, {"policy": "adversarial", "seed": 1}])
def test_two_products_of_one_instruction(how):
    out, report = launch(MMA.format("%p4"), **how)
    lane, column = np.arange(128)[:, None], np.arange(32)
    assert (out == column + 1000 * (lane // 64) + lane).all()
    assert not report.findings


def test_without_ws_64_rows_take_half_of_the_lanes():
    """This applies to A, which all lanes hold, and to D, which is undefined in the other lanes."""
    idesc = 1 << 4 | 32 >> 3 << 17 | 64 >> 4 << 24
    plain = "tcgen05.mma.cta_group::1.kind::f16 [%r10], [%r13], %rd4, %r14, 0"
    out, report = launch(f"mov.b32 %r14, {idesc}; {plain}")
    lanes = [lane for lane in range(128) if lane % 32 < 16]
    assert (out[lanes] == np.arange(32) + np.array(lanes)[:, None]).all()
    assert {finding.check for finding in report.findings} == {"uninitialised"}


def test_without_the_wait_d_races():
    _, report = launch(wait="")
    assert any(finding.check == "race" for finding in report.errors)


@pytest.mark.parametrize(("text", "message"), [
    (MMA.format("0, %rd5"), "zero-column mask 0x3"),
    (MMA.format("0").replace("::1.kind", "::2.kind"), "cta_group::2"),
    (MMA.format("0").replace("kind::f16", "kind::mxf4"), "mxf4"),
    (MMA.format("0").replace(".ws", ".ws.sp"), "sp"),
    (MMA.format("0").replace("b1", "a"), "collector::a"),
])  # fmt: skip
def test_forms_that_are_refused_by_name(text, message):
    with pytest.raises(UnsupportedPtx, match=message) as caught:
        launch(text)
    assert caught.value.line
