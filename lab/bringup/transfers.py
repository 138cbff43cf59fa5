"""Programs that move data in a given form: tensor memory, TMA, allocations, and what is left over.

See `lab.bringup.programs`; every word that is written is random and comes back as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from lab.bringup import tensor_core
from lab.silicon.conformance import elementwise, kernel
from lab.silicon.conformance.case import Case, Output
from lab.silicon.conformance.kernel import output, random_buffer
from lab.silicon.conformance.ptx_program import Buffer, Map, Program
from ptxemu.machine import tensor_map

_MOVE = re.compile(r"tcgen05\.(ld|st)\.sync\.aligned\.(\d+x\d+b(?:x2)?)\.x(\d+)\.b32")
_WORDS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # of a lane, by .x1
_ALLOCATION = re.compile(r"tcgen05\.alloc cta_group::(\d) of (\d+) columns")
_MAP = re.compile(r"tensor map (\d)d (\w+) (\w+) (loads|stores)")
_PAIR = re.compile(
    r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cluster\.global\.tile\.mbarrier::complete_tx::bytes"
    r"(\.multicast::cluster)?(\.L2::cache_hint)?\.cta_group::2"
)
_CLUSTER = re.compile(r"cluster of (\d+)")
_LOAD = re.compile(r"ld\.global(?:\.nc|\.L1::no_allocate)*(?:\.v([24]))?\.b(16|32)")
_MOVED = 128  # columns that a program of tcgen05.ld or .st has, the most that one reaches
_PADDED = "16u4_align16b"  # 16 elements in 8 bytes of global memory and 16 of shared memory


def cases(wanted: Iterable[str]) -> Iterator[Case]:
    """Cases of the forms that are known here."""
    makers = ((_MOVE, _move), (_ALLOCATION, _allocation), (_MAP, _map), (_PAIR, _pair),
              (_CLUSTER, _cluster), (_LOAD, _load))  # fmt: skip
    forms = list(wanted)
    for pattern, make in makers:
        for form in forms:
            if match := pattern.fullmatch(form):
                yield make(form, *match.groups())
    yield from (_other(form) for form in forms if form in _OTHERS)


def _case(
    form: str, body: Iterable[str], params: Sequence[Buffer | Map], ctas: int, smem: int
) -> Case:
    """A program of `tensor_core`, all of whose outputs speak for the form."""
    names = [
        f".param .align 64 .b8 {each.name}[128]" if isinstance(each, Map)
        else f".param .u64 {each.name}"
        for each in params
    ]  # fmt: skip
    program = Program(
        form,
        elementwise.module(names, body, tensor_core.SHARED),
        grid=(ctas,),
        block=(tensor_core.THREADS,),
        cluster=(ctas,),
        smem=smem + tensor_core.RESERVED,
        params=list(params),
    )
    outputs = {b.name: Output(b.name, (form,), b.data.size) for b in program.outputs()}
    return Case(form, program, outputs, recorded=False)


# -- tensor memory ----------------------------------------------------------------------------


def _move(form: str, way: str, shape: str, count: str) -> Case:
    """All columns are written by a plain form and, behind the form, read by one. A shape of 16
    lanes reaches half of those of a warp, once the lower ones, once the upper ones."""
    words = _WORDS[shape] * int(count)
    halves = (0, 16) if shape.startswith("16") else (0,)
    lanes = 128 * _MOVED
    each = len(halves) * words * tensor_core.THREADS
    loaded = output("y", "u4", each) if way == "ld" else random_buffer("y", form, "u4", each)
    params = [random_buffer("x", form, "u4", lanes), loaded, output("d", "u4", lanes)]
    return _case(form, _moving(form, way, shape, words, halves), params, 1, 0)


def _moving(form: str, way: str, shape: str, words: int, halves: Sequence[int]) -> Iterator[str]:
    names = [f"%r{100 + k}" for k in range(words)]
    vector, second = f"{{{', '.join(names)}}}", ", 16" if shape == "16x32bx2" else ""
    yield from tensor_core.begin(1, 0, 512)
    yield from tensor_core.lanes_from("x", 0, _MOVED)
    yield from tensor_core.meet(1)
    yield "ld.param.u64 %w3, [y];"
    yield f"mad.wide.u32 %w3, %thread, {4 * words * len(halves)}, %w3;"
    for number, half in enumerate(halves):
        places = [f"[%w3+{4 * (number * words + k)}]" for k in range(words)]
        yield f"add.u32 %r99, %quarter, {half << 16};"
        if way == "ld":
            yield f"{form} {vector}, [%r99]{second}; tcgen05.wait::ld.sync.aligned;"
            yield from (f"st.global.b32 {p}, {r};" for p, r in zip(places, names, strict=True))
        else:
            yield from (f"ld.global.b32 {r}, {p};" for p, r in zip(places, names, strict=True))
            yield f"{form} [%r99]{second}, {vector}; tcgen05.wait::st.sync.aligned;"
    yield from tensor_core.meet(1)
    yield from tensor_core.lanes_to("d", 0, _MOVED)
    yield from tensor_core.end(1, 512)


def _allocation(form: str, group: str, columns: str) -> Case:
    """Every column of it is written and read; so is where it begins."""
    ctas, count = int(group), int(columns)
    size = ctas * 128 * count
    params = [random_buffer("x", form, "u4", size), output("d", "u4", size)]
    params.append(output("where", "u4", ctas))

    def body() -> Iterator[str]:
        yield from tensor_core.begin(ctas, 0, count)
        yield from tensor_core.lanes_from("x", 0, count)
        yield from tensor_core.meet(ctas)
        yield from tensor_core.lanes_to("d", 0, count)
        yield "ld.param.u64 %w0, [where]; mad.wide.u32 %w0, %rank, 4, %w0;"
        yield "setp.eq.u32 %p2, %thread, 0; @%p2 st.global.b32 [%w0], %tmem;"
        yield from tensor_core.end(ctas, count)

    return _case(form, body(), params, ctas, 0)


# -- TMA --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tile:
    """A tensor, and a box of it that leaves it in the second dimension, as many bytes wide as the
    swizzle's pattern. Sizes are of elements, the contiguous dimension first."""

    rank: int
    dtype: str
    swizzle: str

    @property
    def elements(self) -> int:
        """Elements of a row of the box."""
        if self.dtype == _PADDED:
            return 128  # the only width that there is
        nbytes = 64 if self.swizzle == "none" else int(self.swizzle.removesuffix("B"))
        return 8 * nbytes // self._bits

    @property
    def _bits(self) -> int:
        return tensor_map.DTYPES[self.dtype][1]

    @property
    def dims(self) -> tuple[int, ...]:
        return (2 * self.elements, 12, 3, 2, 2)[: self.rank]

    @property
    def box(self) -> tuple[int, ...]:
        return (self.elements, 8, 2, 1, 2)[: self.rank]

    @property
    def at(self) -> tuple[int, ...]:
        return (self.elements, 6, 1, 1, 0)[: self.rank]

    @property
    def counted(self) -> int:
        """Bytes that an mbarrier hears of."""
        return prod(self.box) * self._bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the box in shared memory."""
        return self.counted * (2 if self.dtype == _PADDED else 1)

    def buffer(self, name: str, seed: str, written: bool) -> Buffer:
        """The tensor: random, or an output of zeros."""
        size = max(self._bits // 8, 1)
        count = prod(self.dims) * self._bits // 8 // size
        kind = f"u{size}"
        return output(name, kind, count) if written else random_buffer(name, seed, kind, count)

    def map(self, name: str, of: str) -> Map:
        return Map(name, of, self.dtype, self.dims, self.box, self.swizzle)


def _map(form: str, rank: str, dtype: str, swizzle: str, way: str) -> Case:
    """A box goes to shared memory and from there, as it lies, to an output; or the other way."""
    tile = _Tile(int(rank), dtype, swizzle)
    params: list[Buffer | Map]
    if way == "loads":
        outside = output("d", "u1", tile.nbytes)
        params = [tile.buffer("x", form, False), tile.map("m", "x"), outside]
        return _case(form, _loading(tile), params, 1, tile.nbytes)
    params = [random_buffer("x", form, "u1", tile.nbytes), tile.buffer("d", form, True)]
    return _case(form, _storing(tile), [*params, tile.map("m", "d")], 1, tile.nbytes)


def _loading(tile: _Tile) -> Iterator[str]:
    """Shared memory is zeros before, for padding is not written."""
    name = f"cp.async.bulk.tensor.{tile.rank}d.shared::cluster.global.tile"
    yield from tensor_core.prologue(tile.nbytes)
    yield from tensor_core.clear(tile.nbytes)
    yield "mov.b64 %w9, m; cvta.param.u64 %w9, %w9;"
    yield "fence.proxy.async.shared::cta; bar.sync 0; @!%leader bra WAIT;"
    yield f"mbarrier.arrive.expect_tx.shared.b64 _, [%barrier], {tile.counted};"
    yield f"{name}.mbarrier::complete_tx::bytes [%smem], [%w9, {_spelt(tile.at)}], [%barrier];"
    yield "WAIT:"
    yield from tensor_core.arrived()
    yield from tensor_core.drain("d", tile.nbytes)


def _storing(tile: _Tile) -> Iterator[str]:
    name = f"cp.async.bulk.tensor.{tile.rank}d.global.shared::cta.tile.bulk_group"
    yield from tensor_core.prologue(tile.nbytes)
    yield from tensor_core.fill("x", tile.nbytes)
    yield "mov.b64 %w9, m; cvta.param.u64 %w9, %w9;"
    yield "fence.proxy.async.shared::cta; bar.sync 0; @!%leader bra DONE;"
    yield f"{name} [%w9, {_spelt(tile.at)}], [%smem];"
    yield "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    yield "DONE:"


def _spelt(items: Iterable[object]) -> str:
    return f"{{{', '.join(map(str, items))}}}"


def _pair(form: str, rank: str, multicast: str | None, hint: str | None) -> Case:
    """Both CTAs load a box, and all bytes are counted by the mbarrier of the first one, whose
    address is that of the other with one bit less; with multicast each box goes to both."""
    tile, copies = _Tile(int(rank), "u16", "128B"), 2 if multicast else 1
    params = [
        tile.buffer("x", form, False),
        tile.map("m", "x"),
        output("d", "u1", 2 * copies * tile.nbytes),
    ]
    body = _loading_both(form, tile, copies, bool(hint))
    return _case(form, body, params, 2, copies * tile.nbytes)


def _loading_both(form: str, tile: _Tile, copies: int, hint: bool) -> Iterator[str]:
    at = _spelt(("%r21", *tile.at[1:]))
    more = ", %h0" * (copies > 1) + f", {kernel.EVICT_FIRST}" * hint
    yield from tensor_core.prologue(copies * tile.nbytes)
    yield "mov.b64 %w9, m; cvta.param.u64 %w9, %w9; mov.b16 %h0, 3;"
    yield f"mul.lo.u32 %r21, %rank, {tile.elements};"
    yield f"mul.lo.u32 %r22, %rank, {tile.nbytes * (copies > 1)}; add.u32 %r22, %smem, %r22;"
    yield f"fence.proxy.async.shared::cta; {tensor_core.BOTH}"
    counted = 2 * copies * tile.counted
    yield f"@%leader mbarrier.arrive.expect_tx.shared.b64 _, [%barrier], {counted};"
    yield "setp.ne.u32 %p2, %thread, 0; @%p2 bra WAIT;"
    yield "and.b32 %r25, %barrier, 0xfeffffff;"
    yield f"{form} [%r22], [%w9, {at}], [%r25]{more};"
    yield "WAIT: setp.ne.u32 %p4, %rank, 0; @%p4 bra MEET;"
    yield from tensor_core.arrived("parity.acquire.cluster.shared::cta")
    yield f"MEET: {tensor_core.BOTH}"
    yield from tensor_core.drain("d", copies * tile.nbytes)


# -- the rest ---------------------------------------------------------------------------------


def _cluster(form: str, size: str) -> Case:
    """Each CTA writes its number to shared memory of the next one, and says what it finds."""
    ctas = int(size)

    def body() -> Iterator[str]:
        yield from tensor_core.prologue(0)
        yield f"add.u32 %r1, %rank, 1; rem.u32 %r1, %r1, {ctas};"
        yield "add.u32 %r2, %barrier, 32; mapa.shared::cluster.u32 %r2, %r2, %r1;"
        yield "mad.lo.u32 %r3, %rank, 3, 5;"
        yield f"setp.eq.u32 %p2, %thread, 0; {tensor_core.BOTH}"
        yield f"@%p2 st.shared::cluster.b32 [%r2], %r3; {tensor_core.BOTH}"
        yield "ld.shared.b32 %r4, [%barrier+32]; ld.param.u64 %w0, [d];"
        yield "mad.wide.u32 %w0, %rank, 4, %w0; @%p2 st.global.b32 [%w0], %r4;"

    return _case(form, body(), [output("d", "u4", ctas)], ctas, 0)


def _load(form: str, several: str | None, bits: str) -> Case:
    """Each thread loads some elements and stores them."""
    count, nbytes = int(several or 1), int(bits) // 8
    letter = {"16": "h", "32": "r"}[bits]
    names = [f"%{letter}{k}" for k in range(count)]
    vector = _spelt(names) if several else names[0]
    size = count * tensor_core.THREADS

    def body() -> Iterator[str]:
        yield from tensor_core.prologue(0)
        yield f"ld.param.u64 %w0, [x]; mad.wide.u32 %w0, %thread, {count * nbytes}, %w0;"
        yield f"ld.param.u64 %w1, [d]; mad.wide.u32 %w1, %thread, {count * nbytes}, %w1;"
        yield f"{form} {vector}, [%w0];"
        yield from (f"st.global.b{bits} [%w1+{nbytes * k}], {r};" for k, r in enumerate(names))

    kind = f"u{nbytes}"
    return _case(
        form, body(), [random_buffer("x", form, kind, size), output("d", kind, size)], 1, 0
    )


# form -> statements that leave a word in %r1; %w1 is a cell of the output, [%barrier+32] one of
# shared memory, both 0 before
_OTHERS = {
    "mbarrier expects 0 bytes": (
        "@%leader mbarrier.arrive.expect_tx.shared.b64 _, [%barrier], 0;"
        " AGAIN: mbarrier.try_wait.parity.shared.b64 %p3, [%barrier], 0; @!%p3 bra AGAIN;"
        " mov.u32 %r1, 7;"
    ),
    "atom.global.acq_rel.add.u32": (
        "atom.global.acq_rel.add.u32 %r2, [%w1], %thread; mov.u32 %r1, 7;"
    ),
    "atom.global.release.add.u32": (
        "atom.global.release.add.u32 %r2, [%w1], %thread; mov.u32 %r1, 7;"
    ),
    "red.relaxed.gpu.global.max.u32": (
        "red.relaxed.gpu.global.max.u32 [%w1], %thread; mov.u32 %r1, 7;"
    ),
    "atom.shared.cta.add.u32": (
        "atom.shared.cta.add.u32 %r2, [%barrier+32], %thread; bar.sync 0;"
        " ld.shared.b32 %r1, [%barrier+32];"
    ),
}


def _other(form: str) -> Case:
    """A word for each thread, and the cell behind them."""

    def body() -> Iterator[str]:
        yield from tensor_core.prologue(0)
        yield "mov.u32 %r0, 0; @%leader st.shared.b32 [%barrier+32], %r0; ld.param.u64 %w0, [d];"
        yield f"bar.sync 0; add.u64 %w1, %w0, {4 * tensor_core.THREADS}; {_OTHERS[form]}"
        yield "mad.wide.u32 %w0, %thread, 4, %w0; st.global.b32 [%w0], %r1;"

    return _case(form, body(), [output("d", "u4", tensor_core.THREADS + 1)], 1, 0)
