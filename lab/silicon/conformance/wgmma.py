"""wgmma.mma_async: a program per shape, with types, layouts, signs and sources of A in turn.

Every CTA is one warpgroup. It copies the image of A and B to shared memory, chains a few operations
along K on one accumulator, and stores its fragments. Numbers are small integers, so that every sum
is exact in whatever order. Layouts and fragments are written down after the manual's figures;
nothing of ptxemu is used here. PTX ISA: "Asynchronous warpgroup level matrix instructions".
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lab.silicon.conformance import fragments
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.kernel import case, output
from lab.silicon.conformance.ptx_program import Buffer
from lab.silicon.conformance.values import below, random_words

M = 64
GRID = 2  # warpgroups of a program
_WARPS = 4
_LINE_BYTES = 32  # of a row along K, of one operation
SPANS = {"none": 16, "32B": 32, "64B": 64, "128B": 128}  # bytes of a row of the swizzle's pattern
_CODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
_CORE = 8  # lines of a core matrix
_ALL_N, _INTEGER_N = range(8, 257, 8), (8, 24, *range(16, 257, 16))
# types of D, A and B that take turns, and N
_FORMS: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (("f32.f16.f16", "f16.f16.f16"), tuple(_ALL_N)),
    (("f32.bf16.bf16",), tuple(_ALL_N)),
    (("f32.tf32.tf32",), tuple(_ALL_N)),
    (
        tuple(f"{d}.{a}.{b}" for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for d in
              ("f32", "f16")),
        tuple(_ALL_N),
    ),
    (tuple(f"s32.{a}.{b}" for a in ("s8", "u8") for b in ("s8", "u8")), _INTEGER_N),
    (tuple(f"s32.{a}.{b}.satfinite" for a in ("s8", "u8") for b in ("s8", "u8")), _INTEGER_N),
    (("satfinite.s32.s8.u8",), (16,)),
    (("s32.b1.b1.and.popc",), _INTEGER_N),
)  # fmt: skip
# Products of attention in e4m3: sizes that take turns above, in the layouts that it has them in.
_E4M3_N, _E4M3_LAYOUTS = (
    (48, 64, 96, 128, 256),
    (("32B", "32B"), ("64B", "64B"), ("128B", "128B"), ("registers", "64B"), ("registers", "128B")),
)
_MOST = 3  # magnitude of the integers of floating-point types


@dataclass(frozen=True)
class Variant:
    """A wgmma instruction.

    types: text after the shape.
    a, b: swizzles of the operands, or "registers".
    signs: factors of A and B.
    accumulate: scale-d of the first operation."""

    types: str
    n: int
    a: str = "128B"
    b: str = "128B"
    a_mn: bool = False
    b_mn: bool = False
    signs: tuple[int, int] = (1, 1)
    accumulate: bool = True

    @property
    def _three(self) -> list[str]:
        return [part for part in self.types.split(".") if part != "satfinite"]

    @property
    def d_type(self) -> str:
        return self._three[0]

    @property
    def a_type(self) -> str:
        return self._three[1]

    @property
    def b_type(self) -> str:
        return self._three[2]

    @property
    def saturates(self) -> bool:
        return "satfinite" in self.types

    @property
    def bits(self) -> int:
        return 1 if self.a_type == "b1" else fragments.BITS[self.a_type]

    @property
    def k(self) -> int:
        return 8 * _LINE_BYTES // self.bits

    @property
    def a_k(self) -> int:
        """Number of stored elements in a row of A, for one operation."""
        return self.k

    @property
    def more(self) -> str:
        """Registers beside those of D and of A."""
        return ""

    def whole(self, a: np.ndarray) -> np.ndarray:
        """A of what is stored of it."""
        return a

    def metadata(self) -> np.ndarray | None:
        """uint32 (grid, steps, thread) of a sparse A."""
        return None

    def metadata_operands(self, step: int) -> str:
        return ""

    @property
    def steps(self) -> int:
        """Operations: as many as a row of the widest pattern has room for."""
        spans = [SPANS[where] for where in (self.a, self.b) if where in SPANS]
        return max(max(spans) // _LINE_BYTES, 2)

    @property
    def opcode(self) -> str:
        return f"wgmma.mma_async.sync.aligned.m{M}n{self.n}k{self.k}.{self.types}"

    @property
    def name(self) -> str:
        majors = "".join("km"[mn] for mn in (self.a_mn, self.b_mn))
        signs = "".join("+-"[sign < 0] for sign in self.signs)
        start = "D" if self.accumulate else "0"
        return f"wgmma n{self.n} {self.types} A {self.a} B {self.b} {majors} {signs} {start}"


# -- operands -----------------------------------------------------------------------------------


def matrices(v: Variant) -> list[np.ndarray]:
    """Return the stored A (grid, 64, K) and B (grid, n, K), and D before (grid, 64, n), as
    int64."""
    seed = v.name
    low, count = {"s8": (-128, 256), "u8": (0, 256), "b1": (0, 2)}, 2 * _MOST + 1
    out = []
    sizes = (("a", v.a_type, M, v.a_k), ("b", v.b_type, v.n, v.k))
    for label, type_, rows, depth in sizes:
        first, limit = low.get(type_, (-_MOST, count))
        k = depth * v.steps
        out.append(below(f"{seed} {label}", GRID * rows * k, limit).reshape(GRID, rows, k) + first)
    words = below(f"{seed} d", GRID * M * v.n, 128) - 64
    if v.d_type == "s32":  # every other one so near an end that sums go beyond it
        near = np.where(words < 0, -(2**31) + 64 + words, 2**31 - 1 - words)
        words = np.where(np.arange(words.size) % 2, near, words)
    return [*out, words.reshape(GRID, M, v.n)]


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Bytes along the last axis, of bit patterns."""
    if bits == 1:
        return np.packbits(codes.astype(np.uint8), axis=-1, bitorder="little")
    narrow = np.ascontiguousarray(codes.astype(f"u{bits // 8}"))
    return narrow.view(np.uint8).reshape(*codes.shape[:-1], -1)


def laid_out(lines: np.ndarray, swizzle: str) -> np.ndarray:
    """A matrix, uint8 (lines, bytes), as it lies in shared memory: panels as wide as the pattern,
    in each row of which chunks of 16 bytes are permuted by the number of the row."""
    span, (count, width) = SPANS[swizzle], lines.shape
    padded = np.zeros((count, -(-width // span) * span), np.uint8)
    padded[:, :width] = lines
    chunks = padded.reshape(count, -1, span // 16, 16).transpose(1, 0, 2, 3)
    out = np.empty_like(chunks)
    for row in range(count):
        turn = {"none": 0, "32B": row // 4 % 2, "64B": row // 2 % 4, "128B": row % 8}[swizzle]
        for chunk in range(span // 16):
            out[:, row, chunk ^ turn] = chunks[:, row, chunk]
    return out.reshape(-1)


def descriptor(lines: int, swizzle: str, mn_major: bool) -> int:
    """Descriptor of a matrix at 0."""
    span = SPANS[swizzle]
    panel, group = lines * span, _CORE * span
    leading, stride = panel, group
    if swizzle == "none" and mn_major:
        leading, stride = group, panel
    return leading >> 4 << 16 | stride >> 4 << 32 | _CODES[swizzle] << 62


def _advances(v: Variant, where: str, mn: bool, rows: int, k: int) -> list[int]:
    """The byte offset of every operation's part: within a row of the pattern, then panels on."""
    span, nbytes = SPANS[where], k * v.bits // 8
    if mn:
        return [step * k * span for step in range(v.steps)]
    return [step * nbytes // span * rows * span + step * nbytes % span for step in range(v.steps)]


def _image(v: Variant, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, int]:
    """(the bytes of A and B of every warpgroup, uint8 (grid, bytes); where B begins)."""
    parts: list[np.ndarray] = []
    start = 0
    for values, type_, where, mn in ((a, v.a_type, v.a, v.a_mn), (b, v.b_type, v.b, v.b_mn)):
        if where == "registers":
            continue
        start = sum(part.shape[1] for part in parts)
        codes = _codes(values, type_)
        lines = packed(codes.transpose(0, 2, 1) if mn else codes, v.bits)
        laid = np.stack([laid_out(one, where) for one in lines])
        parts.append(np.pad(laid, ((0, 0), (0, -laid.shape[1] % 1024))))
    return np.concatenate(parts, axis=1), start


def _codes(values: np.ndarray, type_: str) -> np.ndarray:
    if type_ == "b1":
        return values.astype(np.uint32)
    return fragments.codes_of(values.astype(np.float64), type_)


# -- fragments ----------------------------------------------------------------------------------


def a_fragments(v: Variant, a: np.ndarray) -> np.ndarray:
    """uint32 (grid, steps, register, thread): a warp has 16 rows, of which a lane has lane / 4 and
    that plus 8; a register holds 32 bits of a row."""
    words = packed(_codes(a, v.a_type), v.bits).view(np.uint32)  # (grid, 64, 8 words of each step)
    thread, register = np.arange(32 * _WARPS), np.arange(4)[:, None]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2)
    word = thread % 4 + register // 2 * 4
    return words.reshape(GRID, M, v.steps, 8).transpose(0, 2, 1, 3)[:, :, row, word]


def d_fragments(v: Variant, d: np.ndarray) -> np.ndarray:
    """uint32 (grid, register, thread) of D (grid, 64, n)."""
    codes = fragments.codes_of(d.astype(np.float64), "f16") if v.d_type == "f16" else None
    if codes is None:
        codes = d.astype(np.float32).view(np.uint32) if v.d_type == "f32" else d.astype(np.uint32)
    thread, element = np.arange(32 * _WARPS), np.arange(v.n // 2)[:, None]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (element // 2 % 2)
    out = codes[:, row, element // 4 * 8 + thread % 4 * 2 + element % 2]
    return out[:, 0::2] | out[:, 1::2] << np.uint32(16) if v.d_type == "f16" else out


def expected(v: Variant) -> np.ndarray:
    """The fragments of D, uint32 (grid, register, thread)."""
    a, b, d = matrices(v)
    a = v.whole(a)
    if not v.accumulate:
        d = np.zeros_like(d)
    for step in range(v.steps):
        part = slice(step * v.k, (step + 1) * v.k)
        d = d + v.signs[0] * v.signs[1] * (a[..., part] @ b[..., part].transpose(0, 2, 1))
        if v.saturates:
            d = d.clip(-(2**31), 2**31 - 1)
    return d_fragments(v, d)


# -- programs -----------------------------------------------------------------------------------


def program(v: Variant) -> Case:
    """The program of a variant."""
    a, b, d = matrices(v)
    (image, b_start), metadata = _image(v, a, b), v.metadata()
    count = v.n // 4 if v.d_type == "f16" else v.n // 2
    names = [f"%d{k}" for k in range(count)]
    thread_byte = f"mad.lo.u32 %r0, %cta, {count * 128}, %thread; mul.wide.u32 %w60, %r0, 4;"
    body = [
        *_copied(image.shape[1]),
        f"{thread_byte} add.u64 %w61, %w60, %d; add.u64 %w62, %w60, %out;",
        *(f"ld.global.b32 {name}, [%w61+{512 * k}];" for k, name in enumerate(names)),
        *(_loaded("a", 4 * v.steps) if v.a == "registers" else ()),
        *(_loaded("e", v.steps) if metadata is not None else ()),
        f"setp.{'ne' if v.accumulate else 'eq'}.u32 %p1, %cta, 4096; wgmma.fence.sync.aligned;",
        *_operations(v, names, b_start),
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        *(f"st.global.b32 [%w62+{512 * k}], {name};" for k, name in enumerate(names)),
    ]
    params = [Buffer("image", image.reshape(-1)), Buffer("d", d_fragments(v, d).reshape(-1))]
    if v.a == "registers":
        params.append(Buffer("a", a_fragments(v, a).reshape(-1)))
    if metadata is not None:
        params.append(Buffer("e", metadata.reshape(-1)))
    made = case(
        v.name,
        "wgmma",
        body,
        [*params, output("out", "u4", GRID * count * 128)],
        inputs=GRID * M * v.n,
        grid=(GRID,),
        declared=f".shared .align 1024 .b8 s[{image.shape[1]}];\n"
        f".reg .b32 %d<{count}>, %a<{4 * v.steps}>{v.more};",
    )
    text = made.program.text.replace(".target sm_100a", ".target sm_90a")
    return dataclasses.replace(made, program=dataclasses.replace(made.program, text=text))


def _copied(nbytes: int) -> Iterator[str]:
    """The CTA's image goes to shared memory, and the async proxy sees it."""
    yield f"mul.wide.u32 %w0, %cta, {nbytes}; add.u64 %w0, %w0, %image;"
    yield "mov.u32 %r1, s; shl.b32 %r2, %thread, 4; cvt.u64.u32 %w1, %r2;"
    yield "add.u64 %w0, %w0, %w1; add.u32 %r1, %r1, %r2;"
    yield f"copy: setp.ge.u32 %p0, %r2, {nbytes}; @%p0 bra copied;"
    yield "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%w0];"
    yield "st.shared.v4.b32 [%r1], {%r4, %r5, %r6, %r7};"
    yield "add.u64 %w0, %w0, 2048; add.u32 %r1, %r1, 2048; add.u32 %r2, %r2, 2048; bra copy;"
    yield "copied: fence.proxy.async.shared::cta; bar.sync 0;"


def _loaded(name: str, count: int) -> Iterator[str]:
    """Registers of a buffer, by which they are called."""
    yield f"mad.lo.u32 %r0, %cta, {count * 128}, %thread; mul.wide.u32 %w63, %r0, 4;"
    yield f"add.u64 %w63, %w63, %{name};"
    for k in range(count):
        yield f"ld.global.b32 %{name}{k}, [%w63+{512 * k}];"


def _operations(v: Variant, names: list[str], b_start: int) -> Iterator[str]:
    """The chain, whose descriptors are made of the address of the image."""
    a_lines = v.a_k * v.steps if v.a_mn else M
    b_lines = v.k * v.steps if v.b_mn else v.n
    yield "mov.u32 %r8, s; shr.u32 %r8, %r8, 4; cvt.u64.u32 %w10, %r8;"
    immediates = ""
    if v.d_type != "s32":
        immediates = f", {v.signs[0]}, {v.signs[1]}"
    if v.a_type in ("f16", "bf16"):
        transposes = [v.b_mn] if v.a == "registers" else [v.a_mn, v.b_mn]
        immediates += "".join(f", {int(each)}" for each in transposes)
    of_b = descriptor(b_lines, v.b, v.b_mn)
    for step in range(v.steps):
        start = b_start + _advances(v, v.b, v.b_mn, v.n, v.k)[step]
        yield f"add.u64 %w12, %w10, {of_b + (start >> 4):#x};"
        first = "%w11"
        if v.a == "registers":
            first = f"{{{', '.join(f'%a{4 * step + k}' for k in range(4))}}}"
        else:
            start = _advances(v, v.a, v.a_mn, M, v.a_k)[step]
            word = descriptor(a_lines, v.a, v.a_mn) + (start >> 4)
            yield f"add.u64 %w11, %w10, {word:#x};"
        scale = "1" if step else "%p1"
        sources = f"{first}, %w12{v.metadata_operands(step)}, {scale}{immediates}"
        yield f"{v.opcode} {{{', '.join(names)}}}, {sources};"


# -- all ------------------------------------------------------------------------------------------


def variants() -> Iterator[Variant]:
    """Each shape of each row of types once, what else there is takes turns; those of attention."""
    for types, sizes in _FORMS:
        for number, n in enumerate(sizes):
            yield _variant(types[number % len(types)], n, number)
    for n, (a, b) in itertools.product(_E4M3_N, _E4M3_LAYOUTS):
        yield Variant("f32.e4m3.e4m3", n, a, b)


def _variant(types: str, n: int, number: int) -> Variant:
    turn = random_words(f"wgmma {types} {n}", 8).tolist()
    wide = "16" in types.split(".")[1]
    b_mn = wide and turn[0] % 2 == 1
    a_mn = wide and turn[1] % 2 == 1
    fitting = [name for name, span in SPANS.items() if not b_mn or 2 * n % span == 0]
    a = (*SPANS, "registers")[number % 5]
    signed = not types.startswith(("s32", "satfinite"))
    signs = (1 - 2 * (turn[2] % 2), 1 - 2 * (turn[3] % 2)) if signed else (1, 1)
    return Variant(
        types,
        n,
        a,
        fitting[turn[4] % len(fitting)],
        a_mn and a != "registers",
        b_mn,
        signs,
        accumulate=turn[5] % 4 != 0,
    )


# -- products of any numbers ----------------------------------------------------------------------

_SUMS = ("f32.f16.f16", "f16.f16.f16", "f32.bf16.bf16", "f32.tf32.tf32",
         *(f"{d}.{a}.{a}" for a in ("e4m3", "e5m2") for d in ("f32", "f16")))  # fmt: skip


def _any(seed: str, type_: str, count: int) -> np.ndarray:
    """Bit patterns of numbers of all bits within a few powers of two, whatever place they take."""
    words = random_words(seed, count)
    fraction = 1 + (words >> np.uint64(12)).astype(np.float64) * 2.0**-52
    power = below(f"{seed} power", count, 9) - 4
    sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
    return fragments.codes_of(sign * fraction * np.exp2(power), type_)


def _of_any_numbers(v: Variant) -> Case:
    """The variant's program; its bits say how a tensor core sums."""
    made, name = program(v), f"any {v.name}"
    image, d = (b.data for b in made.program.buffers() if b.name in ("image", "d"))
    count = d.nbytes * 8 // fragments.BITS[v.d_type]
    contents = {
        "image": packed(_any(name, v.a_type, image.nbytes * 8 // v.bits), v.bits),
        "d": packed(_any(f"{name} d", v.d_type, count), fragments.BITS[v.d_type]),
    }
    params = [
        dataclasses.replace(param, data=contents[param.name].view(param.data.dtype))
        if isinstance(param, Buffer) and param.name in contents
        else param
        for param in made.program.params
    ]
    changed = dataclasses.replace(made.program, params=params)
    return dataclasses.replace(made, name=name, program=changed, recorded=False, sums=True)


def sums() -> Iterator[Case]:
    """A program of each kind of numbers."""
    for types in _SUMS:
        yield _of_any_numbers(Variant(types, 64))


def cases() -> Iterator[Case]:
    yield from map(program, variants())
