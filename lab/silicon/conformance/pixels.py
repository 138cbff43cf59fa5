"""cp.async.bulk.tensor and cp.reduce.async.bulk.tensor in im2col mode: images of 1 to 3 dimensions,
every element type and swizzle, random bounding boxes, traversal strides and offsets, zeros and NaN
out of bounds, multicast.
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
from lab.silicon.conformance.tensors import MEET, START, declared, wait
from lab.silicon.conformance.values import below, operands
from ptxemu.machine import tensor_map
from ptxemu.machine.im2col import PixelBox

BOXES = 8  # of a program
_TYPES = ("u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64", "tf32")
_NAN_TYPES = ("f16", "bf16", "f32", "f64", "tf32")
_SPANS = {"none": 128, "32B": 32, "64B": 64, "128B": 128}
_BOX_BYTES = 4096
_COPIES = "cp.async.bulk cp.reduce.async.bulk"
_REDUCTIONS = (
    *(("u32", "add"), ("f16", "add"), ("u64", "max"), ("bf16", "min"), ("u32", "xor")),
    ("u32", "max"),
)


@dataclass(frozen=True)
class Images:
    """A batch, C first and N last, and one box of it."""

    dtype: str
    swizzle: str
    dims: tuple[int, ...]
    box: tuple[int, int]  # channels, pixels
    pixels: PixelBox
    nan_fill: bool = False

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> int:
        return tensor_map.DTYPES[self.dtype][1] // 8

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return self.size * self.box[0] * self.box[1]

    @property
    def place(self) -> int:
        """Bytes of shared memory for a box, a multiple of the threads' words."""
        span = 0 if self.swizzle == "none" else _SPANS[self.swizzle]
        nbytes = max(self.size * self.box[0], span) * self.box[1]
        return -(-nbytes // (4 * THREADS)) * 4 * THREADS

    @property
    def words(self) -> int:
        """Words of the whole batch."""
        return self.size * int(np.prod(self.dims)) // 4

    def map(self, of: str) -> Map:
        return Map(
            "map", of, self.dtype, self.dims, self.box, self.swizzle, self.pixels, self.nan_fill
        )

    def positions(self, seed: str, count: int, *, write: bool) -> np.ndarray:
        """int32 [count, 5]: places in the bounding box; some channels and images are beyond."""
        unit = max(16 // self.size, 1)
        low = 0 if write else -unit
        out = np.zeros((count, 5), np.int32)
        out[:, 0] = (below(f"{seed} C", count, self.dims[0] - low) + low) // unit * unit
        for k, (first, end) in enumerate(self.pixels.span(self.dims[1:-1]), start=1):
            out[:, k] = below(f"{seed} {k}", count, end - first) + first
        out[:, self.rank - 1] = below(f"{seed} N", count, self.dims[-1] + 1)
        return out.reshape(-1)


def _images(seed: str, rank: int, dtype: str, swizzle: str, write: bool, **how: bool) -> Images:
    """Odd sizes; corners on either side of the images' borders, but inside to be written to."""
    size, inner = tensor_map.DTYPES[dtype][1] // 8, _SPANS[swizzle]
    draws = iter(below(f"{seed} shape", 32, 1 << 20).tolist())
    channels = inner // (1 + next(draws) % 2) // size
    pixels = 1 + next(draws) % (_BOX_BYTES // inner)
    sizes = [3 + next(draws) % 9 for _ in range(rank - 2)]
    lower = [next(draws) % 3 - (0 if write else 2) for _ in sizes]
    upper = [(0 if write else 3) - next(draws) % 3 - (n > 5) for n in sizes]
    box = PixelBox(tuple(lower), tuple(min(u, 0) if write else u for u in upper),
                   tuple(1 + next(draws) % 4 for _ in sizes))  # fmt: skip
    dims = (16 // size * (1 + next(draws) % 12), *sizes, 1 + next(draws) % 4)
    box = PixelBox(tuple(min(a, n + b - 1) for a, b, n in zip(box.lower, box.upper, sizes,
                                                               strict=True)),
                   box.upper, box.strides)  # fmt: skip
    return Images(dtype, swizzle, dims, (channels, pixels), box, **how)


def _named(k: int, images: Images, *, offsets: bool = True) -> str:
    """Coordinates into %r1 .., offsets into %h1 ..."""
    lines = [f"ld.global.b32 %r{1 + i}, [%x+{20 * k + 4 * i}];" for i in range(images.rank)]
    if offsets:
        count = images.rank - 2
        lines += [f"ld.global.b16 %h{1 + i}, [%o+{6 * k + 2 * i}];" for i in range(count)]
    return " ".join(lines)


def _place(images: Images) -> str:
    return f"[%map, {{{', '.join(f'%r{1 + i}' for i in range(images.rank))}}}]"


def _offsets(images: Images) -> str:
    return f"{{{', '.join(f'%h{1 + i}' for i in range(images.rank - 2))}}}"


def _drawn_offsets(name: str, count: int) -> Buffer:
    """uint16 [count, 3]."""
    return Buffer("o", below(f"{name} offsets", 3 * count, 4).astype(np.uint16))


def _load(name: str, images: Images, space: str) -> Case:
    """Boxes one after the other into the same place, each dumped as it lies there."""
    words, body = images.place // 4, [START]
    for k in range(BOXES):
        hint, policy = hinted(k)
        copy = f"cp.async.bulk.tensor.{images.rank}d.{space}.global.im2col"
        body += [
            fill(words, value=str(k)),
            f"fence.proxy.async.shared::cta; bar.sync 0; @!%p0 bra FOLLOW{k};",
            _named(k, images),
            f"cp.async.bulk.prefetch.tensor.{images.rank}d.L2.global.im2col{hint} {_place(images)},"
            f" {_offsets(images)}{policy};",
            f"mbarrier.arrive.expect_tx.shared.b64 %w9, [%r20], {images.bytes};",
            f"{copy}.mbarrier::complete_tx::bytes{hint} [%r21], {_place(images)}, [%r20],"
            f" {_offsets(images)}{policy};",
            f"FOLLOW{k}:",
            wait(k),
            dump(words, row=images.place * k),
            "bar.sync 0;",
        ]
    return case(
        name,
        _COPIES,
        body,
        [
            random_buffer("a", name, "u4", images.words),
            images.map("a"),
            Buffer("x", images.positions(name, BOXES, write=False)),
            _drawn_offsets(name, BOXES),
            output("d", "u4", BOXES * words),
        ],
        inputs=BOXES * images.box[0] * images.box[1],
        declared=declared(images.place),
        grid=(1,),
    )


def _store(name: str, images: Images, reduction: str = "") -> Case:
    """Boxes of random values into the batch, one after the other."""
    words, body = images.place // 4, [START]
    for k in range(BOXES):
        hint, policy = hinted(k)
        copy = f"cp{'.reduce' if reduction else ''}.async.bulk.tensor.{images.rank}d"
        ends = f"{'.' if reduction else ''}{reduction}.im2col_no_offs.bulk_group"
        body += [
            f"add.u64 %w6, %a, {images.place * k};",
            brought(words, "%w6"),
            f"fence.proxy.async.shared::cta; bar.sync 0; @!%p0 bra NEXT{k};",
            _named(k, images, offsets=False),
            f"{copy}.global.shared::cta{ends}{hint} {_place(images)}, [%r21]{policy};",
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
            f"NEXT{k}: bar.sync 0;",
        ]
    if reduction:
        batch, data = (
            _numbers(buffer, name, images.dtype, count, which)
            for which, (buffer, count) in enumerate((("d", images.words), ("a", BOXES * words)))
        )
    else:
        batch = random_buffer("d", name, "u4", images.words)
        data = random_buffer("a", name, "u4", BOXES * words)
    batch.expected = batch.data
    return case(
        name,
        _COPIES,
        body,
        [data, batch, images.map("d"), Buffer("x", images.positions(name, BOXES, write=True))],
        inputs=BOXES * images.box[0] * images.box[1],
        declared=declared(images.place),
        grid=(1,),
    )


def _numbers(name: str, seed: str, dtype: str, words: int, which: int) -> Buffer:
    """Values of an element type."""
    bits = tensor_map.DTYPES[dtype][1]
    found = operands((dtype, dtype), seed, -(-words * 32 // bits // 4) * 4)[which]
    return Buffer(name, found.astype(f"u{bits // 8}").view(np.uint32)[:words].copy())


def _multicast(name: str, images: Images) -> Case:
    """The second of two CTAs loads for both."""
    words = images.place // 4
    copy = f"cp.async.bulk.tensor.{images.rank}d.shared::cluster.global.im2col"
    body = [
        START,
        fill(words),
        f"fence.proxy.async; {MEET} @!%p0 bra FOLLOW;",
        f"mbarrier.arrive.expect_tx.shared.b64 %w9, [%r20], {images.bytes};",
        "setp.ne.u32 %p2, %rank, 1; @%p2 bra FOLLOW;",
        f"{_named(0, images)} mov.b16 %h9, 3;",
        f"{copy}.mbarrier::complete_tx::bytes.multicast::cluster [%r21], {_place(images)}, [%r20],"
        f" {_offsets(images)}, %h9;",
        "FOLLOW:",
        wait(0),
        dump(words),
        MEET,
    ]
    return case(
        name,
        _COPIES,
        body,
        [
            random_buffer("a", name, "u4", images.words),
            images.map("a"),
            Buffer("x", images.positions(name, 1, write=False)),
            _drawn_offsets(name, 1),
            output("d", "u4", 2 * words),
        ],
        inputs=2 * images.box[0] * images.box[1],
        declared=declared(images.place),
        grid=(2,),
        cluster=(2,),
    )


def cases() -> Iterator[Case]:
    for rank, (k, dtype) in itertools.product(range(3, 6), enumerate(_TYPES)):
        for j, swizzle in enumerate(_SPANS):
            name = f"{rank}d {dtype} {swizzle}"
            space = ("shared::cluster", "shared::cta")[(k + j) % 2]
            loaded = _images(f"load {name}", rank, dtype, swizzle, False)
            yield _load(f"im2col load {name}", loaded, space)
            if (k + j) % 3 == 0:
                stored = _images(f"store {name}", rank, dtype, swizzle, True)
                yield _store(f"im2col store {name}", stored)
    for k, dtype in enumerate(_NAN_TYPES):
        name = f"im2col load, NaN beside it, {dtype}"
        swizzle = tuple(_SPANS)[k % 4]
        yield _load(name, _images(name, 3 + k % 3, dtype, swizzle, False, nan_fill=True),
                    "shared::cluster")  # fmt: skip
    for k, (dtype, how) in enumerate(_REDUCTIONS):
        name, swizzle = f"im2col {how} {dtype}", tuple(_SPANS)[k % 4]
        yield _store(name, _images(name, 3 + k % 3, dtype, swizzle, True), how)
    for rank in range(3, 6):
        name = f"im2col multicast {rank}d"
        yield _multicast(name, _images(name, rank, "u16", "64B", False))
