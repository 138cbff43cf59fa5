"""mma.sync of sm_120a, sparse mma and m8n8k4 of f16: products element by element, with places from
the manual's formulas, written out here lane by lane; and refusals.
"""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from lab.silicon.conformance.exact_arithmetic import values_of
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from tests.ptxemu import kernels

M, N = 16, 8
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "e4m3": 8, "e5m2": 8}
BITS |= {"e3m2": 8, "e2m3": 8, "e2m1": 8, "packed": 4}
SMALL = {"e2m1": 4, "packed": 4, "e3m2": 6, "e2m3": 6}  # bits of a code in its container
SHIFT = {"e2m1": 2}


def run(instruction: str, fragments: list[np.ndarray], results: int) -> np.ndarray:
    """Return D, [register, lane]. fragments: [register, lane] words for %r0, %r1, ..."""
    words = np.ascontiguousarray(np.concatenate(fragments).astype(np.uint32))
    out = np.zeros((results, 32), np.uint32)
    loads = "".join(f"ld.global.b32 %r{k}, [%rd2+{128 * k}];\n" for k in range(len(words)))
    stores = "".join(f"st.global.b32 [%rd3+{128 * k}], %d{k};\n" for k in range(results))
    text = kernels.kernel(
        f""".reg .b32 %d<8>;
        ld.param.u64 %rd0, [a]; ld.param.u64 %rd1, [b]; mov.u32 %r63, %tid.x;
        mul.wide.u32 %rd4, %r63, 4; add.u64 %rd2, %rd0, %rd4; add.u64 %rd3, %rd1, %rd4;
        {loads}{instruction}\n{stores}""",
        ".param .u64 a, .param .u64 b",
    )
    kernels.launch(text.replace("sm_100a", "sm_120a"), words, out)
    return out


def named(first: int, count: int, letter: str = "r") -> str:
    return "{" + ", ".join(f"%{letter}{first + k}" for k in range(count)) + "}"


def numbers(type_: str, codes: np.ndarray) -> np.ndarray:
    if type_ in ("s4", "u4"):
        return codes.astype(float) - 16 * (codes >= 8) * (type_ == "s4")
    return values_of("e2m1" if type_ == "packed" else type_, codes)


def random_codes(rng: np.random.Generator, type_: str, shape: tuple[int, int]) -> np.ndarray:
    """Small numbers with exact sums."""
    if type_ in SMALL or type_ in ("s4", "u4"):
        return rng.integers(0, 1 << SMALL.get(type_, 4), shape)
    values = rng.integers(-4, 5, shape)
    if type_ in ("s8", "u8"):
        return (np.abs(values) if type_ == "u8" else values) & 0xFF
    if type_ in ("e4m3", "e5m2"):
        exponents = rng.integers(*((5, 10) if type_ == "e4m3" else (13, 18)), shape)
        return exponents << (3 if type_ == "e4m3" else 2) | rng.integers(0, 2, shape) << 7
    if type_ == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.int64)
    words = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return words >> 16 if type_ == "bf16" else words


def packed(codes: np.ndarray, type_: str, lines: int) -> np.ndarray:
    """Return [register, lane] of A (16 lines, its rows) or B (8 lines, its columns) from [line,
    along K]."""
    each, halves = 32 // BITS[type_], lines // 8
    count = halves * codes.shape[1] // (4 * each)
    words = np.zeros((count, 32), np.uint32)
    for lane, register, k in product(range(32), range(count), range(each)):
        line = lane // 4 + 8 * (register % halves)
        along = each * (lane % 4) + k + 4 * each * (register // halves)
        code = int(codes[line, along]) << SHIFT.get(type_, 0)
        words[register, lane] |= np.uint32(code << BITS[type_] * k)
    return words


def matrix_of(d: np.ndarray, type_: str) -> np.ndarray:
    """Return [row, column] from D's registers."""
    out = np.zeros((M, N))
    for lane, element in product(range(32), range(4)):
        row, column = lane // 4 + 8 * (element // 2), 2 * (lane % 4) + element % 2
        if type_ == "f16":
            out[row, column] = d.view(np.float16).reshape(2, 32, 2)[element // 2, lane, element % 2]
        else:
            out[row, column] = d.view({"f32": np.float32, "s32": np.int32}[type_])[element, lane]
    return out


def zeros(type_: str) -> np.ndarray:
    return np.zeros((2 if type_ == "f16" else 4, 32), np.uint32)


# -- kind::f8f6f4 and block scales --------------------------------------------------------------


@pytest.mark.parametrize("d_type", ["f32", "f16"])
@pytest.mark.parametrize(
    ("a_type", "b_type"),
    [("e2m1", "e3m2"), ("e3m2", "e2m3"), ("e2m3", "e2m1"), ("e4m3", "e2m1"), ("e3m2", "e5m2")],
)
def test_narrow_types_have_a_byte_each(a_type: str, b_type: str, d_type: str) -> None:
    rng = np.random.default_rng(1)
    a, b = random_codes(rng, a_type, (M, 32)), random_codes(rng, b_type, (N, 32))
    count = 2 if d_type == "f16" else 4
    text = (
        f"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.{d_type}.{a_type}.{b_type}.{d_type}"
        f" {named(0, count, 'd')}, {named(0, 4)}, {named(4, 2)}, {named(6, count)};"
    )
    d = run(text, [packed(a, a_type, M), packed(b, b_type, N), zeros(d_type)], count)
    exact = numbers(a_type, a) @ numbers(b_type, b).T
    if d_type == "f16":
        with np.errstate(over="ignore"):
            exact = exact.astype(np.float16).astype(float)
    assert (matrix_of(d, d_type) == exact).all()


def test_bits_beside_a_narrow_element_are_refused() -> None:
    text = (
        "mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.e2m1.e2m1.f32"
        f" {named(0, 4, 'd')}, {named(0, 4)}, {named(4, 2)}, {named(6, 4)};"
    )
    a = np.full((4, 32), 0x01010101)
    with pytest.raises(UnsupportedPtx, match="outside") as caught:
        run(text, [a, np.zeros((2, 32)), zeros("f32")], 4)
    assert caught.value.line


SCALED = [
    # kind, factors of a row, their type, type of the elements, columns of A
    ("mxf8f6f4", 1, "ue8m0", "e3m2", 32),
    ("mxf8f6f4", 1, "ue8m0", "e4m3", 32),
    ("mxf4", 2, "ue8m0", "packed", 64),
    ("mxf4nvf4", 2, "ue8m0", "packed", 64),
    ("mxf4nvf4", 4, "ue4m3", "packed", 64),
]
IDS = [(0, 0, 0, 0), (0, 1, 0, 3), (2, 1, 0, 1), (0, 0, 2, 2), (3, 1, 1, 3)]


def scale_values(type_: str, codes: np.ndarray) -> np.ndarray:
    return np.exp2(codes.astype(float) - 127) if type_ == "ue8m0" else values_of("e4m3", codes)


# A byte id is a multiple of the number of factors.
PLACED = [(c, ids) for c in SCALED for ids in IDS if not any(byte % c[1] for byte in ids[::2])]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("case", "ids"), PLACED, ids=lambda value: "-".join(map(str, value)))
def test_scale_factors_come_from_the_lanes_and_bytes_that_are_named(
    case: tuple[str, int, str, str, int], ids: tuple[int, ...], constant: bool
) -> None:
    kind, factors, factor_type, type_, k = case
    rng = np.random.default_rng(2)
    a, b = random_codes(rng, type_, (M, k)), random_codes(rng, type_, (N, k))
    lowest = 124 if factor_type == "ue8m0" else 0x30
    words = rng.integers(lowest, lowest + 8, (2, 32, 4)).astype(np.uint8)  # [A or B, lane, byte]
    byte_a, thread_a, byte_b, thread_b = ids
    scale_a, scale_b = np.zeros((M, k)), np.zeros((N, k))
    for line, part in product(range(M), range(factors)):
        lane = 4 * (line % 8) + 2 * thread_a + line // 8
        value = scale_values(factor_type, words[0, lane, byte_a + part])
        scale_a[line, part * k // factors : (part + 1) * k // factors] = value
    for line, part in product(range(N), range(factors)):
        value = scale_values(factor_type, words[1, 4 * line + thread_b, byte_b + part])
        scale_b[line, part * k // factors : (part + 1) * k // factors] = value
    name = "e2m1" if type_ == "packed" else type_
    vector = "" if kind == "mxf8f6f4" else f".scale_vec::{factors}X"
    chosen = [str(x) for x in ids] if constant else ["%h0", "%h1", "%h2", "%h3"]
    moves = "".join(f"mov.b16 %h{n}, {x};\n" for n, x in enumerate(ids))
    left, right = ("%r10", "%r11") if constant else ("{%r10}", "{%r11}")  # both are written
    text = (
        f"{moves} mma.sync.aligned.kind::{kind}.block_scale{vector}.m16n8k{k}.row.col"
        f".f32.{name}.{name}.f32.{factor_type} {named(0, 4, 'd')}, {named(0, 4)}, {named(4, 2)},"
        f" {named(6, 4)}, {left},"
        f" {{{chosen[0]}, {chosen[1]}}}, {right}, {{{chosen[2]}, {chosen[3]}}};"
    )
    fragments = [packed(a, type_, M), packed(b, type_, N), zeros("f32"), words.view("u4")[..., 0]]
    exact = (numbers(type_, a) * scale_a) @ (numbers(type_, b) * scale_b).T
    d = matrix_of(run(text, fragments, 4), "f32")
    assert (d == exact.astype(np.float32)).all()


# -- sparse --------------------------------------------------------------------------------------

SPARSE = [
    ("f16", "f32", 16),
    ("f16", "f16", 32),
    ("bf16", "f32", 16),
    ("bf16", "f32", 32),
    ("tf32", "f32", 8),
    ("tf32", "f32", 16),
    ("s8", "s32", 32),
    ("u8", "s32", 64),
    ("s4", "s32", 64),
    ("u4", "s32", 128),
    ("e4m3", "f32", 64),
    ("e5m2", "f16", 64),
    ("e2m3", "f32", 64),
]


def sparse_matrix(
    rng: np.random.Generator, type_: str, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes of A with zeros, codes of kept elements, and metadata bits of each row [row,
    bit]."""
    unit = 2 if BITS[type_] == 4 else 1
    dense, kept = np.zeros((M, k), np.int64), np.zeros((M, k // 2), np.int64)
    bits: list[list[int]] = [[] for _ in range(M)]
    pairs = list(combinations(range(4), 2))
    values = random_codes(rng, type_, (M, k // 2))
    for row in range(M):
        done = 0
        while done < k // 2:
            if type_ == "tf32":
                which = int(rng.integers(2))
                taken, code = [2 * done + which], (0b0100, 0b1110)[which]
            else:
                first, second = pairs[rng.integers(6)]
                start = 2 * done
                taken = [start + unit * x + y for x in (first, second) for y in range(unit)]
                code = first | second << 2
            for column in taken:
                dense[row, column] = kept[row, done] = values[row, done]
                done += 1
            bits[row] += [code >> n & 1 for n in range(4)]
    return dense, kept, np.array(bits)


def metadata_words(bits: np.ndarray, wide: bool, selector: int) -> np.ndarray:
    """Return words [lane] by the figures "metadata layout"; other lanes hold invalid metadata."""
    words = np.full(32, 0xFFFFFFFF, np.uint64)
    length = bits.shape[1]
    for g in range(8):
        for lane in range(4):
            low, high = bits[g], bits[g + 8]
            if length == 16 and lane == selector:
                found = [*low, *high]
            elif length == 32 and lane // 2 == selector:
                part = slice(16 * (lane % 2), 16 * (lane % 2) + 16)
                found = [*low[part], *high[part]] if wide else list((low, high)[lane % 2])
            elif length == 64:
                found = list((low, high)[lane % 2][32 * (lane // 2) : 32 * (lane // 2) + 32])
            else:
                continue
            words[4 * g + lane] = sum(int(x) << n for n, x in enumerate(found))
    return words.astype(np.uint32)[None]


ORDERED = "sp::ordered_metadata"
# Instructions with a kind have ordered metadata only.
SORTED = [
    (case, sort) for case in SPARSE for sort in ("sp", ORDERED) if (case[0], sort) != ("e2m3", "sp")
]


@pytest.mark.parametrize(
    ("case", "sort"), SORTED, ids=[f"{'-'.join(map(str, c))}-{s}" for c, s in SORTED]
)
def test_sparse_products(case: tuple[str, str, int], sort: str) -> None:
    type_, d_type, k = case
    kind = ".kind::f8f6f4" if type_ == "e2m3" else ""
    rng = np.random.default_rng(3)
    dense, kept, bits = sparse_matrix(rng, type_, k)
    b = random_codes(rng, type_, (N, k))
    count, a_count = 2 if d_type == "f16" else 4, M * k // 2 * BITS[type_] // 1024
    b_count = k * N * BITS[type_] // 1024
    for selector in range(64 // bits.shape[1]):
        first = a_count + b_count
        text = (
            f"mma.{sort}.sync.aligned{kind}.m16n8k{k}.row.col.{d_type}.{type_}.{type_}.{d_type}"
            f" {named(0, count, 'd')}, {named(0, a_count)}, {named(a_count, b_count)},"
            f" {named(first, count)}, %r{first + count}, {selector};"
        )
        words = metadata_words(bits, BITS[type_] >= 16, selector)
        parts = [packed(kept, type_, M), packed(b, type_, N), zeros(d_type), words]
        exact = numbers(type_, dense) @ numbers(type_, b).T
        assert (matrix_of(run(text, parts, count), d_type) == exact).all()


@pytest.mark.parametrize(("word", "sort", "wrong"), [
    (0x44444444, "sp", False),
    (0x11111111, "sp", False),  # falling indices, which only ordered metadata exclude
    (0x11111111, "sp::ordered_metadata", True),
    (0x44444445, "sp", True),
])  # fmt: skip
def test_metadata_without_a_meaning_are_refused(word: int, sort: str, wrong: bool) -> None:
    text = (
        f"mma.{sort}.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {named(0, 4, 'd')},"
        f" {named(0, 2)}, {named(2, 2)}, {named(4, 4)}, %r8, 0;"
    )
    zeros_only = [np.zeros((8, 32)), np.full((1, 32), word)]
    assert not run(text, zeros_only, 4).any(), "a group of zeros needs no metadata"
    parts = [np.full((1, 32), 0x3C003C00), np.zeros((7, 32)), np.full((1, 32), word)]
    if not wrong:
        assert not run(text, parts, 4).any()
        return
    with pytest.raises(HardwareRefusal, match="metadata") as caught:
        run(text, parts, 4)
    assert caught.value.line


def test_sparse_and_scaled() -> None:
    """The instruction has both A's metadata and the factors, which are 2 for A and 4 for B
    everywhere."""
    rng = np.random.default_rng(4)
    dense, kept, bits = sparse_matrix(rng, "packed", 128)
    b = random_codes(rng, "packed", (N, 128))
    text = (
        "mma.sp::ordered_metadata.sync.aligned.kind::mxf4.block_scale.m16n8k128.row.col"
        f".f32.e2m1.e2m1.f32.ue8m0 {named(0, 4, 'd')}, {named(0, 4)}, {named(4, 4)},"
        f" {named(8, 4)}, %r12, 0, %r13, {{0, 0}}, %r14, {{0, 0}};"
    )
    scales = [np.full((1, 32), 0x80808080), np.full((1, 32), 0x81818181)]
    parts = [packed(kept, "packed", M), packed(b, "packed", N), zeros("f32")]
    parts += [metadata_words(bits, False, 0), *scales]
    exact = 8 * numbers("packed", dense) @ numbers("packed", b).T
    assert (matrix_of(run(text, parts, 4), "f32") == exact).all()


# -- m8n8k4 of f16 -------------------------------------------------------------------------------


def quad_lane(q: int, half: int, lane: int) -> int:
    return 4 * q + 16 * half + lane


@pytest.mark.parametrize(("d_type", "c_type"), [("f16", "f16"), ("f32", "f16"), ("f32", "f32")])
@pytest.mark.parametrize(("a_order", "b_order"), [*product(("row", "col"), repeat=2)])
def test_four_products_of_quads(a_order: str, b_order: str, d_type: str, c_type: str) -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(-4, 5, (4, *shape)) for shape in ((8, 4), (4, 8), (8, 8)))
    a_words, b_words = np.zeros((2, 32, 2), np.float16), np.zeros((2, 32, 2), np.float16)
    c16, c32 = np.zeros((4, 32, 2), np.float16), np.zeros((8, 32), np.float32)
    where32 = {}
    for q, half, lane, n in product(range(4), range(2), range(4), range(4)):
        t = quad_lane(q, half, lane)
        a_at = (lane + 4 * half, n) if a_order == "row" else (n + 4 * half, lane)
        b_at = (lane, n + 4 * half) if b_order == "row" else (n, lane + 4 * half)
        a_words[n // 2, t, n % 2], b_words[n // 2, t, n % 2] = a[q][a_at], b[q][b_at]
    for q, half, lane, n in product(range(4), range(2), range(4), range(8)):
        t = quad_lane(q, half, lane)
        c16[n // 2, t, n % 2] = c[q, lane + 4 * half, n]
        row, column = (lane & 1) + (n & 2) + 4 * half, (n & 4) + (lane & 2) + (n & 1)
        c32[n, t], where32[n, t] = c[q, row, column], (q, row, column)
    counts = {"f16": 4, "f32": 8}
    c_words = (c16 if c_type == "f16" else c32).view(np.uint32).reshape(-1, 32)
    text = (
        f"mma.sync.aligned.m8n8k4.{a_order}.{b_order}.{d_type}.f16.f16.{c_type}"
        f" {named(0, counts[d_type], 'd')}, {named(0, 2)}, {named(2, 2)},"
        f" {named(4, counts[c_type])};"
    )
    parts = [x.view(np.uint32).reshape(2, 32) for x in (a_words, b_words)]
    d = run(text, [*parts, c_words], counts[d_type])
    exact = a @ b + c
    for q, half, lane, n in product(range(4), range(2), range(4), range(8)):
        t = quad_lane(q, half, lane)
        if d_type == "f16":
            value, at = (
                d.view(np.float16).reshape(4, 32, 2)[n // 2, t, n % 2],
                (q, lane + 4 * half, n),
            )
        else:
            value, at = d.view(np.float32)[n, t], where32[n, t]
        assert value == exact[at]


REFUSED = [
    f"mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f32 {named(0, 4)}, {named(0, 2)}, {named(2, 2)},"
    f" {named(4, 8)};",
    "mma.sync.aligned.kind::mxf4nvf4.block_scale.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0"
    f" {named(0, 4)}, {named(0, 4)}, {named(4, 2)}, {named(6, 4)}, %r0, {{0, 0}}, %r1, {{0, 0}};",
    "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32"
    f".ue8m0 {named(0, 4)}, {named(0, 4)}, {named(4, 2)}, {named(6, 4)}, %r0, {{0, 0}}, %r1,"
    " {0, 0};",
    "mma.sync.aligned.kind::mxf4.block_scale.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"
    f" {named(0, 4)}, {named(0, 4)}, {named(4, 2)}, {named(6, 4)}, %r0, {{0, 0}}, %r1, {{0, 0}};",
    "mma.sync.aligned.m16n8k32.row.col.f32.e2m1.e2m1.f32"
    f" {named(0, 4)}, {named(0, 4)}, {named(4, 2)}, {named(6, 4)};",
    f"mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {named(0, 4)}, {named(0, 4)},"
    f" {named(4, 4)}, {named(8, 4)}, %r12, 2;",
    f"mma.sp.sync.aligned.kind::f8f6f4.m16n8k64.row.col.f32.e3m2.e2m1.f32 {named(0, 4)},"
    f" {named(0, 4)}, {named(4, 4)}, {named(8, 4)}, %r12, 0;",
]


@pytest.mark.parametrize("text", REFUSED)
def test_forms_that_there_are_not_are_refused_by_name(text: str) -> None:
    with pytest.raises(UnsupportedPtx, match="unsupported form of mma") as caught:
        run(text, [np.zeros((16, 32))], 4)
    assert text.split()[0] in str(caught.value)
    assert caught.value.line


@pytest.mark.parametrize("ids", [(1, 0, 0, 0), (0, 2, 0, 0), (0, 0, 0, 4), (4, 0, 0, 0)])
def test_ids_out_of_range_are_refused(ids: tuple[int, ...]) -> None:
    text = (
        "mma.sync.aligned.kind::mxf4.block_scale.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0"
        f" {named(0, 4, 'd')}, {named(0, 4)}, {named(4, 2)}, {named(6, 4)}, %r0,"
        f" {{{ids[0]}, {ids[1]}}}, %r1, {{{ids[2]}, {ids[3]}}};"
    )
    with pytest.raises(HardwareRefusal, match="ids"):
        run(text, [np.zeros((12, 32))], 4)
