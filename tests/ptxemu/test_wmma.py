"""wmma: fragments are loaded, multiplied and stored in all shapes, types and layouts."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.errors import UnsupportedPtx
from ptxemu.numerics import formats
from tests.ptxemu.kernels import kernel, launch, pointers

SHAPES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16)}
SHAPES |= {"m16n16k8": (16, 16, 8), "m8n8k4": (8, 8, 4)}
# registers of A, B and D by type (PTX ISA, "Matrix Fragments for WMMA"), where A is not 8 in f16
COUNTS = {
    ("bf16", "m16n16k16"): (4, 4), ("bf16", "m32n8k16"): (8, 2), ("bf16", "m8n32k16"): (2, 8),
    ("s8", "m16n16k16"): (2, 2), ("s8", "m32n8k16"): (4, 1), ("s8", "m8n32k16"): (1, 4),
    ("tf32", "m16n16k8"): (4, 4), ("f64", "m8n8k4"): (1, 1),
}  # fmt: skip
CASES = [
    (kind, shape, d, c)
    for kind, d, c in [
        ("f16", "f32", "f32"), ("f16", "f16", "f16"), ("f16", "f32", "f16"), ("f16", "f16", "f32"),
        ("bf16", "f32", "f32"), ("s8", "s32", "s32"), ("u8", "s32", "s32"),
    ]
    for shape in ("m16n16k16", "m32n8k16", "m8n32k16")
]  # fmt: skip
CASES += [("tf32", "m16n16k8", "f32", "f32"), ("f64", "m8n8k4", "f64", "f64")]
NUMPY = {"f16": np.float16, "f32": np.float32, "tf32": np.float32, "f64": np.float64}
NUMPY |= {"s8": np.int8, "u8": np.uint8, "s32": np.int32, "bf16": np.uint16}


def registers(name: str, count: int, wide: bool) -> tuple[str, str]:
    """A declaration and a list."""
    kind = "f64" if wide else "b32"
    names = ", ".join(f"%{name}{k}" for k in range(count))
    return f".reg .{kind} %{name}<{count}>;\n", f"{{{names}}}"


def program(kind: str, shape: str, d: str, c: str, layouts: str) -> str:
    """D = A B + C of matrices whose rows (columns) are three elements apart."""
    a, b, before, after = layouts.split()
    signed = "s8" if kind == "u8" else kind
    counts = COUNTS.get((signed, shape), (8, 8))
    m, n, k = SHAPES[shape]
    size = {"f16": m * n // 64, "f64": 2}
    lists = {}
    text = "".join(f"ld.param.u64 %rd{j}, [p{j}];\n" for j in range(4))
    sizes = (*counts, size.get(c, m * n // 32), size.get(d, m * n // 32))
    for name, count in zip(("a", "b", "c", "d"), sizes, strict=True):
        declared, lists[name] = registers(name, count, kind == "f64")
        text += declared
    steps = ((k if a == "row" else m) + 3, (n if b == "row" else k) + 3)
    step = {"row": n + 3, "col": m + 3}
    text += (
        f"wmma.load.a.sync.aligned.{a}.{shape}.global.{kind} {lists['a']}, [%rd0], {steps[0]};\n"
    )
    text += f"wmma.load.b.sync.aligned.{b}.{shape}.{kind} {lists['b']}, [%rd1], {steps[1]};\n"
    what = f"wmma.load.c.sync.aligned.{before}.{shape}.global.{c}"
    text += f"{what} {lists['c']}, [%rd2], {step[before]};\n"
    types = f"{d}.{c}" if kind == "f16" else f"{d}.{kind}.{kind}.{c}"
    what = f"{a}.{b}.{shape}.{'rn.' if kind == 'f64' else ''}{types}"
    text += (
        f"wmma.mma.sync.aligned.{what} {lists['d']}, {lists['a']}, {lists['b']}, {lists['c']};\n"
    )
    what = f"wmma.store.d.sync.aligned.{after}.{shape}.global.{d}"
    text += f"{what} [%rd3], {lists['d']}, {step[after]};\n"
    return kernel(text, ", ".join(f".param .u64 p{j}" for j in range(4)))


def matrix(rng: np.random.Generator, kind: str, size: tuple[int, int]) -> np.ndarray:
    """Small integers and halves, exact in every type and sum."""
    if kind in ("s8", "u8", "s32"):
        info = np.iinfo(NUMPY[kind])
        return rng.integers(max(info.min, -999), min(info.max, 999) + 1, size)
    return rng.integers(-8, 9, size) / 2


def in_memory(values: np.ndarray, kind: str, layout: str) -> np.ndarray:
    """The matrix with three elements between its rows or columns."""
    rows = values if layout == "row" else values.T
    held = np.zeros((rows.shape[0], rows.shape[1] + 3), NUMPY[kind])
    bits = formats.f32_to_bf16(rows.astype(np.float32)) if kind == "bf16" else rows
    held[:, : rows.shape[1]] = bits
    return held


@pytest.mark.parametrize("layouts", ["row col row row", "col row col col", "row row row col"])
@pytest.mark.parametrize(("kind", "shape", "d", "c"), CASES)
def test_products(kind: str, shape: str, d: str, c: str, layouts: str) -> None:
    rng = np.random.default_rng(len(kind + shape + layouts))
    m, n, k = SHAPES[shape]
    left, right, before = (
        matrix(rng, t, size) for t, size in ((kind, (m, k)), (kind, (k, n)), (c, (m, n)))
    )
    a, b, e, f = layouts.split()
    arrays = [in_memory(*x) for x in ((left, kind, a), (right, kind, b), (before, c, e))]
    out = in_memory(np.zeros((m, n)), d, f)
    text = program(kind, shape, d, c, layouts)
    memory = [*arrays, out]
    report = launch(text, params=pointers(*memory), memory=memory, check=True)
    expected = in_memory(left @ right + before, d, f)
    assert (out == expected).all()
    assert report.findings == []


def test_registers_of_f16_and_f32_accumulators_hold_the_same_elements() -> None:
    """Kernels convert an accumulator element by element before they store it."""
    body = "ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; .reg .b32 %a<8>, %b<4>;\n"
    eight = ", ".join(f"%a{k}" for k in range(8))
    body += f"wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {{{eight}}}, [%rd0];\n"
    body += "".join(f"cvt.rn.f16x2.f32 %b{k}, %a{2 * k + 1}, %a{2 * k};\n" for k in range(4))
    body += "wmma.store.d.sync.aligned.row.m16n16k16.global.f16 [%rd1], {%b0, %b1, %b2, %b3};\n"
    values, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float16)
    memory = [values, out]
    text = kernel(body, ".param .u64 p0, .param .u64 p1")
    launch(text, params=pointers(*memory), memory=memory)
    assert (out == values).all()


@pytest.mark.parametrize(("kind", "how"), [("s4", ""), ("u4", ""), ("b1", "xor"), ("b1", "and")])
def test_elements_below_a_byte(kind: str, how: str) -> None:
    """Rows of A and columns of B lie 32 bits apart."""
    bits, k = (1, 128) if kind == "b1" else (4, 32)
    rng = np.random.default_rng(bits)
    low = -8 if kind == "s4" else 0
    left, right = (rng.integers(low, low + (1 << bits), (8, k)) for _ in range(2))
    before, out = rng.integers(-9, 9, (8, 8)).astype(np.int32), np.zeros((8, 8), np.int32)
    step, shape, op = k + 32 // bits, f"m8n8k{k}", f".{how}.popc" if how else ""
    body = "".join(f"ld.param.u64 %rd{j}, [p{j}];\n" for j in range(4))
    body += f"""wmma.load.a.sync.aligned.row.{shape}.{kind} {{%r0}}, [%rd0], {step};
        wmma.load.b.sync.aligned.col.{shape}.global.{kind} {{%r1}}, [%rd1], {step};
        wmma.load.c.sync.aligned.row.{shape}.s32 {{%r2, %r3}}, [%rd2];
        wmma.mma{op}.sync.aligned.row.col.{shape}.s32.{kind}.{kind}.s32 {{%r4, %r5}}, {{%r0}},
            {{%r1}}, {{%r2, %r3}};
        wmma.store.d.sync.aligned.row.{shape}.s32 [%rd3], {{%r4, %r5}};
        """
    memory = [packed(left, bits), packed(right, bits), before, out]
    text = kernel(body, ", ".join(f".param .u64 p{j}" for j in range(4)))
    report = launch(text, params=pointers(*memory), memory=memory, check=True)
    wide = left[:, None], right[None]
    product = (wide[0] ^ wide[1]) if how == "xor" else wide[0] * wide[1]
    assert (out == product.sum(-1) + before).all()
    assert report.findings == []
    other = text.replace("a.sync.aligned.row", "a.sync.aligned.col")
    with pytest.raises(UnsupportedPtx, match="wmma"):
        launch(other, params=pointers(*memory), memory=memory)


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of integers, the lowest bits first, with four bytes between them."""
    shown = (values[..., None] >> np.arange(bits)) & 1
    rows = np.packbits(shown.reshape(len(values), -1).astype(np.uint8), axis=1, bitorder="little")
    return np.pad(rows, ((0, 0), (0, 4)))


def test_a_product_saturates() -> None:
    text = program("u8", "m16n16k16", "s32", "s32", "row col row row")
    text = text.replace("m16n16k16.s32.u8.u8.s32", "m16n16k16.satfinite.s32.u8.u8.s32")
    memory = [np.full((16, 19), 255, np.uint8)] * 2
    memory += [np.full((16, 19), (1 << 31) - 5, np.int32), np.zeros((16, 19), np.int32)]
    launch(text, params=pointers(*memory), memory=memory)
    assert (memory[3][:, :16] == (1 << 31) - 1).all()


def test_shared_memory_and_a_fragment_that_is_scaled() -> None:
    """Every register of A is doubled."""
    text = program("f16", "m16n16k16", "f32", "f32", "row col row row")
    doubled = "".join(f"add.f16x2 %a{k}, %a{k}, %a{k};\n" for k in range(8))
    text = text.replace("wmma.mma.", doubled + "wmma.mma.", 1)
    move = "mov.u32 %r0, %tid.x; mad.wide.u32 %rd5, %r0, 4, %rd0; mov.u32 %r1, tile;\n"
    move += "mad.lo.u32 %r1, %r0, 4, %r1;\n" + "".join(
        f"ld.global.b32 %r2, [%rd5+{at}]; st.shared.b32 [%r1+{at}], %r2;\n"
        for at in range(0, 640, 128)
    )
    text = text.replace("wmma.load.a", move + "bar.sync 0; wmma.load.a", 1)
    text = text.replace("global.f16 {%a0", "shared.f16 {%a0").replace("[%rd0], 19", "[tile], 19")
    text = text.replace(".visible", ".shared .align 32 .b8 tile[640];\n.visible")
    rng = np.random.default_rng(0)
    left, right = (matrix(rng, "f16", (16, 16)) for _ in range(2))
    memory = [np.zeros(320, np.float16), in_memory(right, "f16", "col")]
    memory[0][:304] = in_memory(left, "f16", "row").reshape(-1)
    memory += [np.zeros((16, 19), np.float32), np.zeros((16, 19), np.float32)]
    launch(text, params=pointers(*memory), memory=memory, check=True)
    assert (memory[3][:, :16] == 2 * left @ right).all()


@pytest.mark.parametrize(("old", "new"), [
    ("m16n16k16.f32.f32", "m16n16k8.f32.f32"),
    ("m16n16k16.f32.f32", "m16n16k16.f64.f32"),
    ("{%a0, ", "{"),
])  # fmt: skip
def test_what_the_manual_has_not_is_refused(old: str, new: str) -> None:
    text = program("f16", "m16n16k16", "f32", "f32", "row col row row").replace(old, new)
    memory = [np.zeros((16, 19), np.float32)] * 4
    with pytest.raises(UnsupportedPtx, match="wmma"):
        launch(text, params=pointers(*memory), memory=memory)
