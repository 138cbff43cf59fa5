"""cp.async.bulk.tensor and cp.reduce.async.bulk.tensor in tile mode: 1 to 5 dimensions, every
element type and swizzle, boxes over every border, multicast; tensormap.replace.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lab.silicon.conformance.case import Case
from lab.silicon.conformance.copies import brought, dump, fill
from lab.silicon.conformance.kernel import THREADS, case, hinted, output, random_buffer
from lab.silicon.conformance.ptx_program import Buffer, Map
from lab.silicon.conformance.values import below, operands
from ptxemu.machine import tensor_map

BOXES = 8  # of a program
_TYPES = ("u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64", "tf32")
_SWIZZLES = ("none", "32B", "64B", "128B")
_INNER = {"none": 128, "32B": 32, "64B": 64, "128B": 128}  # bytes of a box's first dimension
_BOX_BYTES = 4096
_COPIES = "cp.async.bulk cp.reduce.async.bulk fence.proxy"


@dataclass(frozen=True)
class Shape:
    """A tensor and its box, dimension 0 contiguous."""

    dtype: str
    swizzle: str
    dims: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def size(self) -> int:
        return tensor_map.DTYPES[self.dtype][1] // 8

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return self.size * int(np.prod(self.box))

    @property
    def footprint(self) -> int:
        """Bytes of a box in shared memory, where a row takes a row of the swizzle pattern at
        least."""
        span = 0 if self.swizzle == "none" else _INNER[self.swizzle]
        return max(self.size * self.box[0], span) * int(np.prod(self.box[1:]))

    @property
    def words(self) -> int:
        """Words of the whole tensor."""
        return self.size * int(np.prod(self.dims)) // 4

    def map(self, name: str, of: str) -> Map:
        return Map(name, of, self.dtype, self.dims, self.box, self.swizzle)


def _shape(seed: str, rank: int, dtype: str, swizzle: str) -> Shape:
    """Odd sizes: the rows of the tensor end on 16 bytes, nothing else is round."""
    size = tensor_map.DTYPES[dtype][1] // 8
    draws = below(seed, 2 * rank, 1 << 20)
    inner = _INNER[swizzle] // (1 if draws[0] % 2 else 2) // size
    box, left = [inner], _BOX_BYTES // (inner * size)
    for k in range(1, rank):
        box.append(1 + int(draws[k] % max(min(left, 8 if rank > 2 else 32), 1)))
        left //= box[-1]
    unit = 16 // size or 1
    dims = [unit * int(inner // unit + 1 + draws[rank] % (2 * inner // unit + 1))]
    dims += [int(box[k] + draws[rank + k] % (2 * box[k] + 3)) for k in range(1, rank)]
    return Shape(dtype, swizzle, tuple(dims), tuple(box))


def _positions(seed: str, shape: Shape, write: bool, boxes: int = BOXES) -> np.ndarray:
    """int32 [boxes, 5]: boxes inside, over each border and outside; none below 0 to write."""
    unit = max(16 // shape.size, 1)
    out = np.zeros((boxes, 5), np.int32)
    for k, (extent, box) in enumerate(zip(shape.dims, shape.box, strict=True)):
        low = 0 if write else -box
        draws = below(f"{seed} {k}", boxes, extent - low + 1) + low
        out[:, k] = draws if k else draws // unit * unit
    return out.reshape(-1)


def _coordinates(k: int, rank: int) -> str:
    """Into %r1 .. %r5."""
    return " ".join(f"ld.global.b32 %r{1 + i}, [%x+{20 * k + 4 * i}];" for i in range(rank))


def _operand(rank: int, name: str = "map") -> str:
    return f"[%{name}, {{{', '.join(f'%r{1 + i}' for i in range(rank))}}}]"


START = """setp.eq.u32 %p0, %thread, 0; mov.u32 %r20, bar; mov.u32 %r21, slots;
@%p0 mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"""
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"


def declared(nbytes: int) -> str:
    return f".shared .align 1024 .b8 slots[{nbytes}]; .shared .align 8 .b64 bar;"


def wait(k: int) -> str:
    return f"WAIT{k}: mbarrier.try_wait.parity.shared.b64 %p1, [%r20], {k & 1}; @!%p1 bra WAIT{k};"


def _words(nbytes: int) -> int:
    """Words of shared memory that holds a box: a multiple of the threads."""
    return -(-nbytes // (4 * THREADS)) * THREADS


def _brought_box(k: int, shape: Shape, copy: str, before: str = "") -> list[str]:
    """Box k into shared memory, dumped as it lies there."""
    words = _words(shape.footprint)
    return [
        fill(words, value=str(k)),
        f"fence.proxy.async.shared::cta; bar.sync 0; @!%p0 bra FOLLOW{k};",
        _coordinates(k, len(shape.dims)),
        before,
        f"mbarrier.arrive.expect_tx.shared.b64 %w9, [%r20], {shape.bytes};",
        copy,
        f"FOLLOW{k}:",
        wait(k),
        dump(words, row=4 * words * k),
        "bar.sync 0;",
    ]


def _load(name: str, shape: Shape, space: str) -> Case:
    """Boxes one after the other into the same place, each dumped as it lies there."""
    rank, words = len(shape.dims), _words(shape.footprint)
    body = [START]
    for k in range(BOXES):
        hint, policy = hinted(k)
        tile = (".tile", "")[k // 2 % 2]
        prefetch = f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global{tile}{hint}"
        ends = f"global{tile}.mbarrier::complete_tx::bytes{hint}"
        copy = f"cp.async.bulk.tensor.{rank}d.{space}.{ends}"
        body += _brought_box(
            k,
            shape,
            f"{copy} [%r21], {_operand(rank)}, [%r20]{policy};",
            f"{prefetch} {_operand(rank)}{policy};",
        )
    return case(
        name,
        _COPIES,
        body,
        [
            random_buffer("a", name, "u4", shape.words),
            shape.map("map", "a"),
            Buffer("x", _positions(name, shape, False)),
            output("d", "u4", BOXES * words),
        ],
        inputs=BOXES * shape.bytes // shape.size,
        declared=declared(4 * words),
        grid=(1,),
    )


def _element(dtype: str) -> str:
    return {"tf32": "f32", "u8": "u8"}.get(dtype, dtype)


def _data(name: str, seed: str, dtype: str, words: int, which: int) -> Buffer:
    """Values of an element type; the first or the second of two operands."""
    kind = _element(dtype)
    bits = tensor_map.DTYPES[dtype][1]
    found = operands((kind, kind), seed, -(-words * 32 // bits // 4) * 4)[which]
    narrow = found.astype(f"u{bits // 8}")
    return Buffer(name, narrow.view(np.uint32)[:words].copy())


def _store(name: str, shape: Shape, reduction: str = "") -> Case:
    """Boxes of random values into the tensor, one after the other."""
    rank, words = len(shape.dims), _words(shape.footprint)
    elements = shape.bytes // shape.size
    boxes = max(BOXES, -(-1000 // elements)) if reduction else BOXES
    waits = ("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;")
    body = [START]
    for k in range(boxes):
        hint, policy = hinted(k)
        tile = (".tile", "")[k // 2 % 2]
        copy = f"cp{'.reduce' if reduction else ''}.async.bulk.tensor.{rank}d"
        ends = f"{'.' if reduction else ''}{reduction}{tile}.bulk_group"
        body += [
            f"add.u64 %w6, %a, {4 * words * k};",
            brought(words, "%w6"),
            f"fence.proxy.async.shared::cta; bar.sync 0; @!%p0 bra NEXT{k};",
            _coordinates(k, rank),
            f"{copy}.global.shared::cta{ends}{hint} {_operand(rank)}, [%r21]{policy};",
            f"cp.async.bulk.commit_group; {waits[0]} {waits[1]}",
            f"NEXT{k}: bar.sync 0;",
        ]
    if reduction:
        tensor = _data("d", name, shape.dtype, shape.words, 1)
        data = _data("a", name, shape.dtype, boxes * words, 0)
    else:
        tensor = random_buffer("d", name, "u4", shape.words)
        data = random_buffer("a", name, "u4", boxes * words)
    tensor.expected = tensor.data
    return case(
        name,
        _COPIES,
        body,
        [data, tensor, shape.map("map", "d"), Buffer("x", _positions(name, shape, True, boxes))],
        inputs=boxes * elements,
        declared=declared(4 * words),
        grid=(1,),
    )


def _multicast(size: int, shape: Shape) -> Case:
    """Every CTA sends boxes to random sets of CTAs, each box to a place of its own."""
    name, rank = f"multicast {len(shape.dims)}d to {size}", len(shape.dims)
    place = -(-shape.footprint // 1024) * 1024
    words, boxes = size * BOXES * place // 4, size * BOXES
    masks = 1 + below(f"{name} masks", 2 * boxes, (1 << size) - 1)
    arrivals = masks.reshape(2, boxes)
    expected = np.stack([(arrivals >> r & 1).sum(1) for r in range(size)], axis=1) * shape.bytes
    body = [
        START,
        fill(words),
        f"fence.proxy.async; {MEET} @!%p0 bra FOLLOW;",
        "mul.wide.u32 %w7, %cta, 4; add.u64 %w7, %w7, %e; ld.global.b32 %r9, [%w7];",
        "mbarrier.arrive.expect_tx.shared.b64 %w9, [%r20], %r9;",
        f"mad.lo.u32 %r10, %cta, {BOXES}, 0; mul.wide.u32 %w8, %r10, 20; add.u64 %x, %x, %w8;",
        "mul.wide.u32 %w8, %r10, 2; add.u64 %w8, %w8, %m;",
        f"mul.lo.u32 %r11, %rank, {BOXES * place};",
        "add.u32 %r21, %r21, %r11;",
    ]
    for k in range(BOXES):
        hint, policy = hinted(k)
        body += [
            f"{_coordinates(k, rank)} ld.global.b16 %h1, [%w8+{2 * k}];",
            f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            f".multicast::cluster{hint} [%r21], {_operand(rank)}, [%r20], %h1{policy};",
            f"add.u32 %r21, %r21, {place};",
        ]
    body += ["FOLLOW:", wait(0), dump(words), MEET]
    positions = np.concatenate([_positions(f"{name} {k}", shape, False) for k in range(2 * size)])
    return case(
        name,
        _COPIES,
        body,
        [
            random_buffer("a", name, "u4", shape.words),
            shape.map("map", "a"),
            Buffer("x", positions),
            Buffer("m", masks.astype(np.uint16)),
            Buffer("e", expected.astype(np.uint32).reshape(-1)),
            output("d", "u4", 2 * size * words),
        ],
        inputs=2 * boxes * shape.bytes // shape.size,
        declared=declared(16),
        grid=(2 * size,),
        cluster=(size,),
        smem=4 * words,
    )


def _edited(space: str, scope: str) -> Case:
    """A tensor map that is changed on the GPU, in shared or in global memory, and then used."""
    name = f"tensor map edited in {space} memory, {scope}"
    shape = Shape("u32", "64B", (40, 24, 6), (16, 4, 2))
    wider = Shape("u32", "64B", (44, 20, 9), (16, 4, 2))
    words = _words(shape.footprint)
    copied = "fence.proxy.tensormap::generic.release"
    where, state = ("[%r22]", "shared::cta") if space == "shared" else ("[%t]", "global")
    replace = "tensormap.replace.tile"
    edits = [f"{replace}.global_address.{state}.b1024.b64 {where}, %b;"]
    for k, extent in enumerate(wider.dims):
        edits.append(
            f"mov.u32 %r9, {extent}; {replace}.global_dim.{state}.b1024.b32 {where}, {k}, %r9;"
        )
    for k, stride in enumerate(wider.map("m", "b").strides()):
        edits.append(f"mov.u64 %w9, {stride};")
        edits.append(f"{replace}.global_stride.{state}.b1024.b64 {where}, {k}, %w9;")
    publish = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release"
    body = [
        START,
        "mov.u32 %r22, edited; setp.lt.u32 %p2, %thread, 32; mul.wide.u32 %w5, %thread, 4;",
        "add.u64 %w6, %map, %w5; add.u64 %w7, %t, %w5; mad.lo.u32 %r8, %thread, 4, %r22;",
        "@!%p2 bra READY; ld.b32 %r7, [%w6]; st.shared.b32 [%r8], %r7; st.global.b32 [%w7], %r7;",
        "bar.warp.sync 0xffffffff; @!%p0 bra EDITED;",
        *edits,
        "EDITED: bar.warp.sync 0xffffffff;",
        f"{publish}.{scope}.sync.aligned [%t], [%r22], 128;" if space == "shared" else "",
        f"{copied}.{scope}; fence.proxy.tensormap::generic.acquire.{scope} [%t], 128;",
        "READY: bar.sync 0;",
    ]
    for k in range(BOXES):
        copy = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        body += _brought_box(k, shape, f"{copy} [%r21], {_operand(3, 't')}, [%r20];")
    return case(
        name,
        "tensormap fence.proxy cp.async.bulk",
        body,
        [
            random_buffer("a", name, "u4", shape.words),
            random_buffer("b", name, "u4", wider.words),
            Buffer("t", np.zeros(32, np.uint32)),
            shape.map("map", "a"),
            Buffer("x", _positions(name, wider, False)),
            output("d", "u4", BOXES * words),
        ],
        inputs=BOXES * shape.bytes // shape.size,
        declared=f"{declared(4 * words)} .shared .align 128 .b8 edited[128];",
        grid=(1,),
    )


_REDUCTIONS = {
    "u32": "add min max inc dec and or xor",
    "u64": "add min max and or xor",
    "f16": "add min max",
    "bf16": "add min max",
    "f32": "add",
}


def cases() -> Iterator[Case]:
    for rank in range(1, 6):
        for k, dtype in enumerate(_TYPES):
            for j, swizzle in enumerate(_SWIZZLES):
                name = f"{rank}d {dtype} {swizzle}"
                shape = _shape(name, rank, dtype, swizzle)
                space = ("shared::cluster", "shared::cta")[(k + j) % 2]
                yield _load(f"tensor load {name}", shape, space)
                yield _store(f"tensor store {name}", shape)
    for number, (dtype, names) in enumerate(_REDUCTIONS.items()):
        for k, (how, rank) in enumerate(itertools.product(names.split(), range(1, 6))):
            swizzle = _SWIZZLES[(number + k) % 4]
            shape = _shape(f"{how} {dtype} {rank}", rank, dtype, swizzle)
            yield _store(f"tensor reduce {how} {rank}d {dtype} {swizzle}", shape, how)
    for scope in ("cta", "cluster", "gpu", "sys"):
        yield _edited("shared", scope)
        yield _edited("global", scope)
    for size, rank in ((2, 1), (2, 3), (4, 2)):
        yield _multicast(
            size, _shape(f"multicast {size}", rank, "u16", "128B" if rank > 1 else "none")
        )
