"""Programs with tcgen05.mma in a given form: see `lab.bringup.programs`.

Two MMAs follow each other, as K steps of a kernel do: the second adds to D and begins a step
further into the swizzled rows. D is zeros before, and all of its lanes are written out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lab.bringup import tensor_core
from lab.silicon.conformance import elementwise
from lab.silicon.conformance.case import Case, Output
from lab.silicon.conformance.kernel import output
from lab.silicon.conformance.ptx_program import Buffer, Program
from lab.silicon.conformance.values import below
from ptxemu.machine.umma_desc import image_of, smem_desc
from ptxemu.numerics import swizzle as swizzles

_FORM = re.compile(
    r"mma (?P<kind>\w+) cta_group::(?P<group>\d) m(?P<m>\d+) n(?P<n>\d+) k(?P<k>\d+)"
    r" (?P<a>[\w ]+) x (?P<b>[\w ]+) -> (?P<d>\w+), A (?P<a_at>[^,]+), B (?P<b_at>[^,]+)"
    r"(?:, (?P<blocks>\d) (?P<scales>\w+) scales(?: ids (?P<a_id>\d) (?P<b_id>\d))?)?"
    r"(?:, D at column (?P<column>\d+) of 16)?"
)
_CODES = {  # of the field of an instruction descriptor
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "i8": {"u8": 0, "s8": 1},
    "mxf8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf4": {"packed e2m1": 1},
    "mxf4nvf4": {"packed e2m1": 1},
}
_D_CODES = {"f16": 0, "f32": 1, "s32": 2}
_LAYOUTS = {"none": 0, "128B": 2, "64B": 4, "32B": 6}
_ELEMENTS = {  # codes of small numbers; of other formats every byte is one
    "f16": np.array([0, 0x3C00, 0xBC00, 0x4000, 0xC000, 0x3800, 0xB800, 0x4200], "<u2"),
    "bf16": np.array([0, 0x3F80, 0xBF80, 0x4000, 0xC000, 0x3F00, 0xBF00, 0x4040], "<u2"),
    "tf32": np.array([0, 0x3F800000, 0xBF800000, 0x40000000, 0xC0000000, 0x3F000000], "<u4"),
    "e4m3": np.array([0, 0x38, 0xB8, 0x40, 0xC0, 0x30, 0xB0, 0x44], "u1"),
    "e5m2": np.array([0, 0x3C, 0xBC, 0x40, 0xC0, 0x38, 0xB8, 0x42], "u1"),
    # scale factors
    "ue8m0": np.array([125, 126, 127, 128, 129], "u1"),
    "ue4m3": np.array([0x30, 0x38, 0x40, 0x3C, 0x34], "u1"),
}
_ANY = np.arange(256, dtype="u1")
_BLOCK_NAMES = {
    ("mxf8f6f4", 1): "block32",
    ("mxf4", 2): "block32",
    ("mxf4nvf4", 2): "block32",
    ("mxf4nvf4", 4): "block16",
}
_A_COLUMN, _A_SCALES, _B_SCALES = 288, 320, 352  # in tensor memory, behind D
_A_WORDS = 16  # of a lane, where A is in tensor memory: two MMAs of 32 bytes
_LANES = 128
_STEP_BYTES = 32  # of a row along K, of one MMA
_COPY_BYTES = 512  # of scale factors: of 128 rows, 4 each


@dataclass(frozen=True)
class Operand:
    """An operand in shared memory.

    word: its descriptor without the address.
    step: bytes from the first MMA to the second.
    nbytes: bytes that may be read."""

    fmt: str
    word: int
    step: int
    nbytes: int


def _operand(at: str, rows: int, k: int, fmt: str) -> Operand | None:
    """at: as the form says it, `128B MN 1024/2048`; None for one in tensor memory."""
    if at == "TMEM":
        return None
    swizzle, major, steps = at.split()
    stride, leading = (int(x) for x in [*reversed(steps.split("/")), "0"][:2])
    word = _LAYOUTS[swizzle] << 61 | 1 << 46 | stride >> 4 << 32 | leading >> 4 << 16
    mn_major, span = major == "MN", swizzles.BY_NAME[swizzle].span
    step = k // 8 * stride if mn_major else _STEP_BYTES if span > _STEP_BYTES else 0
    end = image_of(smem_desc(word), (rows, k, fmt, mn_major)).end * 8 + step
    return Operand(fmt, word, step, -(-end // 1024) * 1024)


@dataclass(frozen=True)
class Product:
    """An MMA as its form says it."""

    form: str
    kind: str
    ctas: int
    n: int
    descriptor: int
    a: Operand | None
    a_fmt: str
    b: Operand
    blocks: int
    scales: str
    column: int

    @classmethod
    def of(cls, form: str) -> Product | None:
        """None for what is no MMA, or one with something that this file does not make."""
        match = _FORM.fullmatch(form)
        if match is None:
            return None
        said = match.groupdict()
        ctas, m, n, k = (int(said[name]) for name in ("group", "m", "n", "k"))
        codes = _CODES[said["kind"]]
        scaled = bool(said["scales"])
        word = codes[said["a"]] << 7 | codes[said["b"]] << 10 | n >> 3 << 17
        word |= (" MN" in said["a_at"]) << 15 | (" MN" in said["b_at"]) << 16
        if scaled:
            word |= int(said["b_id"] or 0) << 4 | (said["scales"] == "ue8m0") << 23
            word |= m >> 7 << 27 | int(said["a_id"] or 0) << 29
        else:
            word |= _D_CODES[said["d"]] << 4 | m >> 4 << 24
        return cls(
            form=form,
            kind=said["kind"],
            ctas=ctas,
            n=n,
            descriptor=word,
            a=_operand(said["a_at"], m // ctas, k, said["a"]),
            a_fmt=said["a"],
            b=_operand(said["b_at"], n // ctas, k, said["b"]),
            blocks=int(said["blocks"] or 0),
            scales=said["scales"] or "",
            column=int(said["column"] or 0),
        )

    @property
    def copies(self) -> tuple[int, int]:
        """Copies of scale factors of A and of B, 128 rows each."""
        return (1, -(-self.n // 128)) if self.scales else (0, 0)

    @property
    def parts(self) -> list[tuple[str, int]]:
        """List the contents of shared memory as (format, bytes)."""
        found = [(self.a.fmt, self.a.nbytes)] if self.a else []
        found.append((self.b.fmt, self.b.nbytes))
        return [*found, *((self.scales, count * _COPY_BYTES) for count in self.copies if count)]

    @property
    def opcode(self) -> str:
        name = f"tcgen05.mma.cta_group::{self.ctas}.kind::{self.kind}"
        if self.scales:
            name += f".block_scale.{_BLOCK_NAMES[self.kind, self.blocks]}"
        return f"{name}.collector::a::discard"

    def image(self) -> np.ndarray:
        """Shared memory of every CTA, uint8; both of a pair have the same scale factors of B."""
        images = []
        for rank in range(self.ctas):
            seeds = [f"{self.form} {rank} {k}" for k in range(len(self.parts))]
            if self.scales:
                seeds[-1] = f"{self.form} scales of B"
            pairs = zip(self.parts, seeds, strict=True)
            images += [_elements(fmt, nbytes, seed) for (fmt, nbytes), seed in pairs]
        return np.concatenate(images)


def _elements(fmt: str, nbytes: int, seed: str) -> np.ndarray:
    """Random ones of a few codes, uint8."""
    codes = _ELEMENTS.get(fmt, _ANY)
    chosen = below(seed, nbytes // codes.itemsize, len(codes))
    return codes[chosen].view(np.uint8)


def cases(wanted: Iterable[str]) -> Iterator[Case]:
    """Yield one case for each MMA among the forms."""
    for form in wanted:
        product = Product.of(form)
        if product is not None:
            yield _case(product)


def _case(what: Product) -> Case:
    image = what.image()
    params = [Buffer("x", image)]
    if what.a is None:
        count = what.ctas * _LANES * _A_WORDS * 4
        params.append(Buffer("a", _elements(what.a_fmt, count, f"{what.form} A")))
    params.append(output("d", "u4", what.ctas * _LANES * what.n))
    names = [f".param .u64 {each.name}" for each in params]
    per_cta = len(image) // what.ctas
    program = Program(
        what.form,
        elementwise.module(names, _body(what, per_cta), tensor_core.SHARED),
        grid=(what.ctas,),
        block=(tensor_core.THREADS,),
        cluster=(what.ctas,),
        smem=per_cta + tensor_core.RESERVED,
        params=params,
    )
    outputs = {"d": Output("d", (what.form,), params[-1].data.size)}
    return Case(what.form, program, outputs, recorded=False)


def _body(what: Product, nbytes: int) -> Iterator[str]:
    """nbytes: of shared memory that are filled."""
    ctas, columns = what.ctas, -(-(what.column + what.n) // 8) * 8
    yield from tensor_core.begin(ctas, nbytes, 512)
    yield from tensor_core.fill("x", nbytes)
    yield from tensor_core.zeros(columns)
    if what.a is None:
        yield from tensor_core.lanes_from("a", _A_COLUMN, _A_WORDS)
    yield from tensor_core.meet(ctas)
    yield "@!%leader bra WAIT;"
    yield from _issue(what)
    yield from tensor_core.commit(ctas)
    yield "WAIT:"
    yield from tensor_core.wait()
    yield from tensor_core.lanes_to("d", what.column, what.n)
    yield from tensor_core.end(ctas, 512)


def _issue(what: Product) -> Iterator[str]:
    places = np.cumsum([0, *(nbytes for _, nbytes in what.parts)]).tolist()
    yield "and.b32 %r0, %smem, 0x3ffff; shr.u32 %r0, %r0, 4; cvt.u64.u32 %w0, %r0;"
    if what.a is not None:
        yield f"add.u64 %w1, %w0, {places.pop(0) >> 4}; or.b64 %w1, %w1, {what.a.word:#x};"
        yield f"add.u64 %w3, %w1, {what.a.step >> 4};"
    yield f"add.u64 %w2, %w0, {places.pop(0) >> 4}; or.b64 %w2, %w2, {what.b.word:#x};"
    yield f"add.u64 %w4, %w2, {what.b.step >> 4};"
    yield f"add.u32 %r1, %tmem, {what.column}; add.u32 %r2, %tmem, {_A_COLUMN};"
    yield f"add.u32 %r3, %r2, {_A_WORDS // 2}; mov.u32 %r4, {what.descriptor:#x};"
    yield f"add.u32 %r5, %tmem, {_A_SCALES}; add.u32 %r6, %tmem, {_B_SCALES};"
    for first, count in zip((_A_SCALES, _B_SCALES), what.copies, strict=True):
        place = places.pop(0) if count else 0
        for k in range(count):
            yield f"add.u32 %r7, %tmem, {first + 4 * k};"
            yield f"add.u64 %w5, %w0, {place + _COPY_BYTES * k >> 4};"
            yield "or.b64 %w5, %w5, 0x400800010000;"
            yield f"tcgen05.cp.cta_group::{what.ctas}.32x128b.warpx4 [%r7], %w5;"
    scales = " [%r5], [%r6]," if what.scales else ""
    for k, added in enumerate(("%never", "%always")):
        a = f"%w{1 + 2 * k}" if what.a is not None else f"[%r{2 + k}]"
        yield f"{what.opcode} [%r1], {a}, %w{2 + 2 * k}, %r4,{scales} {added};"
