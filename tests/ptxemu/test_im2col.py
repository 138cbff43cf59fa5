"""TMA in im2col mode: the bits of its tensor maps, the pixels of an operation as defined by the
manual, with every rank, corner, stride and offset; stores, reductions, refusals.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import aligned_copy
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine import tensor_map
from ptxemu.machine.im2col import PixelBox
from ptxemu.machine.tma_tile import load_tile
from tests.ptxemu import kernels
from tests.ptxemu.test_tma_tile import BASE, FlatMemory

# Words 2..15 as the DSL's host code encoded them (4.8.1): a batch of f16 images, 64 pixels of 32
# channels; sizes, strides (bytes), and, W first, lower corner, upper corner, traversal strides.
DSL_MAPS = [
    ("44323 8 a0 0 0 0 3f 13 2 0 0 1f000008 fffbfed4 3f",
     (64, 20, 3), (128, 2560), (-300,), (-5,), (2,)),
    ("44333 8 48 3f0 0 0 3f 8 d 2 0 1f0001c8 3fff80fd 3f",
     (64, 9, 14, 3), (128, 1152, 16128), (-3, -128), (-1, 63), (2, 8)),
    ("244343 8 48 3f0 17a0 0 3f 8 d 5 2 1f000e88 77ef43fe 3f",
     (64, 9, 14, 6, 3), (128, 1152, 16128, 96768), (-2, -1, -16), (15, -1, -3), (2, 3, 8)),
]  # fmt: skip


def packed(words: list[int]) -> bytes:
    return struct.pack("<16I", *words).ljust(128, b"\0")


@pytest.mark.parametrize(("words", "dims", "strides", "lower", "upper", "steps"), DSL_MAPS)
def test_maps_that_the_dsl_encoded(words, dims, strides, lower, upper, steps):
    raw = packed([0x1000, 0x5582, *(int(word, 16) for word in words.split())])
    address, pixels = 0x5582_0000_1000, PixelBox(lower, upper, steps)
    found = tensor_map.decode(raw)
    assert (found.address, found.dims, found.strides) == (address, dims, strides)
    assert (found.pixels, found.box) == (pixels, (32, 64))
    assert tensor_map.encode_im2col(address, dims, strides, (32, 64), pixels, "f16", "64B") == raw


@pytest.mark.parametrize(("word", "value"), [
    (2, 0x44313),  # two dimensions
    (2, 0x44B33),  # an interleaved layout
    (13, 1),  # a traversal stride of C
    (13, 1 << 9),  # of N
    (15, 1 << 10),
])  # fmt: skip
def test_bits_of_a_map_that_are_not_known(word, value):
    words = [0, 0, *(int(each, 16) for each in DSL_MAPS[1][0].split())]
    words[word] = value if word == 2 else words[word] | value
    with pytest.raises(UnsupportedPtx, match=f"word {word} "):
        tensor_map.decode(packed(words))


@pytest.mark.parametrize(("change", "message"), [
    ({"lower": (-129, 0)}, "from -128 to 127"),
    ({"upper": (0, 128)}, "from -128 to 127"),
    ({"lower": (4, 0), "upper": (-5, 0)}, "is empty"),
    ({"steps": (1, 9)}, "must be from 1 to 8"),
    ({"box": (8, 1025)}, "column of 1025 pixels, limit is 1024"),
    ({"box": (264, 8)}, "up to 256 channels"),
    ({"box": (4, 8)}, "multiple of 16 bytes"),
    ({"lower": (0,)}, "2 of each"),
    ({"dtype": "u16", "nan_fill": True}, "fills with NaN"),
])  # fmt: skip
def test_what_the_driver_rejects(change, message):
    given = {"box": (8, 8), "lower": (0, 0), "upper": (0, 0), "steps": (1, 1), "dtype": "f16"}
    given |= change
    pixels = PixelBox(given.pop("lower"), given.pop("upper"), given.pop("steps"))
    with pytest.raises(HardwareRefusal, match=message):
        tensor_map.encode_im2col(
            0, (64, 9, 14, 3), (128, 1152, 16128), pixels=pixels, swizzle="none", **given
        )


class Images(NamedTuple):
    """A batch and one operation on it. sizes: N, (D, (H,)) W, C; all other fields have W first."""

    sizes: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    start: tuple[int, ...]  # W, (H, (D,)) N
    offsets: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    pixels: int = 16
    channels: int = 8
    channel: int = 0
    swizzle: str = "none"
    dtype: str = "u16"
    nan_fill: bool = False

    @property
    def spatial(self) -> int:
        return len(self.sizes) - 2

    def map(self, batch: np.ndarray) -> bytes:
        box = PixelBox(self.lower, self.upper, self.steps or (1,) * self.spatial)
        return tensor_map.encode_im2col(
            batch.ctypes.data, self.sizes[::-1], batch.strides[-2::-1],
            (self.channels, self.pixels), box, self.dtype, self.swizzle, self.nan_fill,
        )  # fmt: skip

    def places(self) -> list[tuple[int, ...]]:
        """N, (D, (H,)) W of every pixel, in the order of nested loops."""
        size, steps = self.sizes[-2:0:-1], self.steps or (1,) * self.spatial
        at, found = list(self.start), []
        for _ in range(self.pixels):
            offsets = (*(self.offsets or (0,) * self.spatial), 0)
            found.append(tuple(a + o for a, o in zip(at, offsets, strict=True))[::-1])
            for k in range(self.spatial):
                at[k] += steps[k]
                if at[k] < size[k] + self.upper[k]:
                    break
                at[k] = self.lower[k]
            else:
                at[-1] += 1
        return found

    def inside(self) -> list[tuple[int, tuple[int, ...]]]:
        """(pixel, its place) for the pixels inside the batch."""
        return [
            (k, place)
            for k, place in enumerate(self.places())
            if all(0 <= a < size for a, size in zip(place, self.sizes[:-1], strict=True))
        ]

    def image(self, batch: np.ndarray, outside: int = 0) -> np.ndarray:
        """[pixel, channel] as loaded."""
        image = np.full((self.pixels, self.channels), outside, batch.dtype)
        last = min(self.channel + self.channels, self.sizes[-1])
        for k, place in self.inside():
            image[k, : last - self.channel] = batch[place][self.channel : last]
        return image

    @property
    def coordinates(self) -> tuple[int, ...]:
        return (self.channel, *self.start)


# Triton's tutorial on im2col, which runs on Hopper, with its names of the pixels
TRITON = [
    (Images((1, 4, 4, 8), (0, 0), (0, 0), (0, 0, 0)), range(1, 17)),
    (Images((1, 4, 4, 8), (-1, -1), (-1, -1), (-1, -1, 0)),
     [0, 0, 0, 0, 0, 1, 2, 3, 0, 5, 6, 7, 0, 9, 10, 11]),
    (Images((1, 4, 4, 8), (-1, -1), (-1, -1), (-1, -1, 0), (1, 1)), range(1, 17)),
    (Images((2, 4, 4, 8), (0, 0), (0, 0), (3, 1, 0)), range(8, 24)),
]  # fmt: skip
CASES = [
    Images((2, 5, 24), (-1,), (1,), (1, 0), (2,), channel=16),
    Images((3, 7, 16), (0,), (-2,), (4, 1), (2,), (3,), pixels=11, channels=16),
    Images((2, 5, 6, 64), (-2, 0), (0, -3), (5, 1, 0), (3, 2), (2, 1), channels=64, swizzle="128B"),
    Images((2, 3, 4, 5, 16), (-1, -1, 0), (-1, 0, -1), (2, 3, 1, 0), (1, 0, 1), pixels=70),
    Images((2, 3, 4, 5, 16), (1, 0, -3), (-1, 2, 2), (2, 0, -1, 0), (0, 1, 2), (2, 3, 2),
           channels=16, swizzle="32B"),
    Images((1, 9, 14, 8), (-1, -1), (-1, -1), (7, 4, 0), dtype="f16", nan_fill=True),
]  # fmt: skip
BYTES = 4096


def launch(
    body: str, case: Images, batch: np.ndarray, other: np.ndarray, **how: object
) -> ptxemu.LaunchReport:
    """Lane 0 of a warp executes `body`. %rd0: the map, %rd1: `other`, %r1: shared memory."""
    values = "".join(f"mov.b32 %r{10 + k}, {x};" for k, x in enumerate(case.coordinates))
    values += "".join(f"mov.b16 %h{k}, {x};" for k, x in enumerate(case.offsets))
    text = kernels.kernel(
        f"""mov.u64 %rd0, map; cvta.param.u64 %rd0, %rd0; ld.param.u64 %rd1, [b];
        mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r1;
        mul.wide.u32 %rd2, %r0, 4; add.u64 %rd1, %rd1, %rd2; setp.eq.u32 %p0, %r0, 0;
        {values}
        {body}""",
        ".param .align 64 .b8 map[128], .param .u64 b",
        kernels.DYNAMIC,
    )
    params = [case.map(batch), *kernels.pointers(other)]
    return kernels.launch(
        text, params=params, memory=[batch, other], smem_bytes=2 * BYTES, check=True, **how
    )


def operand(case: Images) -> str:
    registers = [f"%r{10 + k}" for k in range(len(case.sizes))]
    return f"[%rd0, {{{', '.join(registers)}}}]"


def load(case: Images, mode: str = ".im2col", offsets: int | None = None) -> str:
    """Load the box to shared memory, and copy it to `other`."""
    nbytes = case.pixels * case.channels * 2
    count = case.spatial if offsets is None else offsets
    info, tensor = ", ".join(f"%h{k}" for k in range(count)), f"tensor.{len(case.sizes)}d"
    copies = "".join(
        f"setp.lt.u32 %p2, %r0, {(nbytes - k) // 4}; @%p2 ld.shared.b32 %r3, [%r2+{k}];"
        f"@%p2 st.global.b32 [%rd1+{k}], %r3;"
        for k in range(0, nbytes, 128)
    )
    return f"""@%p0 mbarrier.init.shared.b64 [%r1+{BYTES}], 1;
        fence.mbarrier_init.release.cluster; bar.warp.sync -1;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+{BYTES}], {nbytes};
        @%p0 cp.async.bulk.prefetch.{tensor}.L2.global{mode} {operand(case)}, {{{info}}};
        @%p0 cp.async.bulk.{tensor}.shared::cta.global{mode}.mbarrier::complete_tx::bytes
            [%r1], {operand(case)}, [%r1+{BYTES}], {{{info}}};
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+{BYTES}], 0;
        @!%p1 bra W;
        {copies}"""


def store(case: Images, how: str = "") -> str:
    """Copy `other` to shared memory, and store it to the batch."""
    copies = "".join(
        f"ld.global.b32 %r3, [%rd1+{k}]; st.shared.b32 [%r2+{k}], %r3;"
        for k in range(0, case.pixels * case.channels * 2, 128)
    )
    name = f"cp{'.reduce' if how else ''}.async.bulk.tensor.{len(case.sizes)}d"
    return f"""{copies} fence.proxy.async; bar.warp.sync -1;
        @%p0 {name}.global.shared::cta{how}.im2col_no_offs.bulk_group {operand(case)}, [%r1];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""


def batch_of(case: Images) -> np.ndarray:
    count = int(np.prod(case.sizes))
    numbers = np.arange(1, count + 1) % 0x7000 if case.dtype == "f16" else np.arange(1, count + 1)
    return aligned_copy(numbers.astype(np.uint16)).reshape(case.sizes)


def in_shared_memory(case: Images, image: np.ndarray) -> np.ndarray:
    """Rows of 16-byte chunks, permuted by the swizzle: address bits above 128 bytes are XORed into
    those of the chunk."""
    mask = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[case.swizzle]
    chunks = image.reshape(-1).view(np.uint8).reshape(-1, 16)
    where = np.arange(len(chunks))
    return chunks[where ^ (where >> 3 & mask)].reshape(-1)


def loaded(case: Images, batch: np.ndarray, **how: object) -> np.ndarray:
    out = aligned_copy(np.zeros(-(-case.pixels * case.channels * 2 // 128) * 128, np.uint8))
    report = launch(load(case), case, batch, out, **how)
    assert not report.findings
    return out[: case.pixels * case.channels * 2]


@pytest.mark.parametrize(("case", "values"), TRITON)
def test_what_hopper_loads(case, values):
    batch = batch_of(case)
    batch[...] = np.arange(1, batch.size // 8 + 1).reshape(*case.sizes[:-1], 1)
    offsets = case.offsets or (0, 0)
    image = loaded(case._replace(offsets=offsets), batch).view(np.uint16).reshape(16, 8)
    assert image.tolist() == [[value] * 8 for value in values]


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("case", CASES)
def test_pixels_are_loaded(case, policy):
    case = case._replace(offsets=case.offsets or (0,) * case.spatial)
    batch = batch_of(case)
    image = case.image(batch, 0x7FF7 if case.nan_fill else 0)
    assert case.inside()
    assert (loaded(case, batch, policy=policy) == in_shared_memory(case, image)).all()


def drawn(seed: int) -> Images:
    """A random operation."""
    rng = np.random.default_rng(seed)
    spatial = int(rng.integers(1, 4))
    sizes = [int(rng.integers(1, 9)) for _ in range(spatial)]
    lower = [int(rng.integers(-4, min(size, 3))) for size in sizes]
    upper = [int(rng.integers(low - size + 1, 4)) for low, size in zip(lower, sizes, strict=True)]
    start = [
        int(rng.integers(low, size + high))
        for low, size, high in zip(lower, sizes, upper, strict=True)
    ]
    return Images(
        (int(rng.integers(1, 4)), *sizes[::-1], 24), tuple(lower), tuple(upper),
        (*start, int(rng.integers(0, 4))), tuple(map(int, rng.integers(0, 6, spatial))),
        tuple(map(int, rng.integers(1, 9, spatial))), pixels=int(rng.integers(1, 100)),
        channels=16, channel=int(rng.choice([0, 8, 16])), swizzle=str(rng.choice(["none", "32B"])),
    )  # fmt: skip


def test_random_operations():
    for seed in range(300):
        case = drawn(seed)
        batch = batch_of(case)
        tm = replace(tensor_map.decode(case.map(batch)), address=BASE)
        memory = FlatMemory(batch.reshape(-1).view(np.uint8))
        image = load_tile(tm, (*case.coordinates, *case.offsets), memory)
        assert (image.view(np.uint16) == case.image(batch).reshape(-1)).all(), case


STORED = Images((2, 5, 6, 16), (1, 0), (-1, -2), (3, 1, 0), steps=(1, 2), pixels=24, channels=8)


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("how", ["", ".add"])
@pytest.mark.parametrize("case", [STORED, STORED._replace(channel=8, dtype="f16", swizzle="32B",
                                                          channels=16)])  # fmt: skip
def test_pixels_are_stored(case, how, policy):
    if how and case.dtype == "u16":
        case = case._replace(dtype="bf16")
    batch = aligned_copy(np.zeros(2 * 5 * 6 * 16, np.uint16)).reshape(case.sizes)
    image = np.arange(0x3C00, 0x3C00 + case.pixels * case.channels).astype(np.uint16)
    image = image.reshape(case.pixels, case.channels)
    report = launch(store(case, how), case, batch, aligned_copy(in_shared_memory(case, image)),
                    policy=policy)  # fmt: skip
    expected = np.zeros_like(batch)
    last = min(case.channel + case.channels, case.sizes[-1])
    for k, place in case.inside():
        expected[place][case.channel : last] = image[k, : last - case.channel]
    assert 0 < len(case.inside()) < case.pixels
    assert (batch == expected).all()
    assert not report.findings


def test_pixels_come_to_every_cta_of_a_mask():
    """Rank 1 of three CTAs loads for itself and rank 2; the mask follows the offsets."""
    case = CASES[2]
    batch, image = batch_of(case), case.image(batch_of(case))
    out = aligned_copy(np.zeros(3 * image.nbytes, np.uint8)).reshape(3, -1)
    tensor = "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
    load_one = load(case)
    first = load_one.index("@%p0 cp.async.bulk.tensor")
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    sent = f"""mov.u32 %r8, %cluster_ctarank; mad.wide.u32 %rd1, %r8, {image.nbytes}, %rd1;
        setp.eq.and.u32 %p3, %r8, 1, %p0; setp.ne.and.u32 %p0, %r8, 0, %p0;
        setp.eq.u32 %p4, %r8, 0; mov.b16 %h5, 6;
        {load_one[:first]} {meet}
        @%p3 {tensor}.multicast::cluster [%r1], {operand(case)}, [%r1+{BYTES}], {{%h0, %h1}}, %h5;
        @%p4 bra END;
        {load_one[load_one.index("W:") :]}
        END: {meet}"""
    report = launch(sent, case, batch, out, grid=(3,), cluster=(3,))
    expected = in_shared_memory(case, image)
    assert not out[0].any()
    assert (out[1:] == expected).all()
    assert not report.findings


def test_without_a_wait_the_load_is_a_race():
    case = CASES[0]
    body = load(case)
    start = body.index("W:")
    unwaited = body[:start] + body[body.index("bra W;") + len("bra W;") :]
    report = launch(unwaited, case, batch_of(case), aligned_copy(np.zeros(BYTES, np.uint8)))
    assert any(finding.check == "race" for finding in report.findings)


def test_pixels_behind_the_memory_are_a_finding():
    """The map describes more images than exist; nothing after them is read."""
    case = CASES[0]
    data = batch_of(case)
    # The kernel may access the whole array that a view belongs to: it ends with the images.
    room = np.zeros(BYTES + data.nbytes, np.uint8)
    out, batch = room[:BYTES], room[BYTES:].view(data.dtype).reshape(data.shape)
    batch[...] = data
    params = case._replace(sizes=(3, 5, 24), pixels=22)
    report = launch(load(params), params, batch, out)
    (finding,) = {each.check for each in report.findings}
    assert finding == "out-of-bounds"


@pytest.mark.parametrize(("change", "message"), [
    ({"start": (-2, 0)}, "coordinate W is -2, must lie in the bounding box, from -1 to 5"),
    ({"start": (6, 0)}, "coordinate W is 6"),
    ({"channel": 4}, "multiple of 16 bytes"),
])  # fmt: skip
def test_places_that_are_refused(change, message):
    case = CASES[0]._replace(**change)
    with pytest.raises(HardwareRefusal, match=message) as caught:
        launch(load(case), case, batch_of(case), aligned_copy(np.zeros(BYTES, np.uint8)))
    assert caught.value.line


def test_offsets_have_the_bits_of_their_rank():
    case = CASES[2]._replace(offsets=(0, 256))
    with pytest.raises(HardwareRefusal, match="offset H is 256, must be below 256"):
        launch(load(case), case, batch_of(case), aligned_copy(np.zeros(BYTES, np.uint8)))


@pytest.mark.parametrize(("change", "message"), [
    ({"lower": (-1, 0)}, "lower corner must not be negative"),
    ({"upper": (-1, 1)}, "the upper not positive"),
    ({"lower": (-1, 0), "start": (-1, 1, 0)}, "no coordinate may be negative"),
])  # fmt: skip
def test_stores_stay_in_the_tensor(change, message):
    case = STORED._replace(**change)
    with pytest.raises(HardwareRefusal, match=message):
        launch(store(case), case, batch_of(case), aligned_copy(np.zeros(BYTES, np.uint8)))


def test_a_map_of_images_is_not_edited_as_one_of_tiles():
    case = CASES[0]
    with pytest.raises(HardwareRefusal, match=r"\.tile on a tensor map of im2col"):
        tensor_map.replace_field(bytearray(case.map(batch_of(case))), "global_dim", 0, 8)


def test_instruction_and_map_have_one_mode():
    case, out = CASES[0], aligned_copy(np.zeros(BYTES, np.uint8))
    tile = load(case, ".tile").replace(", {%h0}", "")
    with pytest.raises(HardwareRefusal, match="a tile mode with a tensor map of im2col mode"):
        launch(tile, case, batch_of(case), out)


@pytest.mark.parametrize(("change", "message"), [
    (lambda text: text.replace("{%h0}", "{%h0, %h1}"), "with 2 im2col offsets, needs 1"),
    (lambda text: text.replace(", {%h0}", ""), "with 0 im2col offsets, needs 1"),
    (lambda text: text.replace("im2col", "im2col::w"), "wide im2col modes are undocumented"),
    (lambda text: text.replace("im2col", "im2col::w::128"), "wide im2col modes are undocumented"),
    (lambda text: text.replace("im2col", "im2col_no_offs"), "unsupported form of cp"),
    (lambda text: text.replace("3d", "2d"), "im2col has 3 to 5 dimensions"),
    (lambda text: text.replace(", %r12}", "}"), "with 2 coordinates, needs 3"),
])  # fmt: skip
def test_forms_that_there_are_not_are_refused_by_name(change, message):
    case = CASES[0]
    with pytest.raises(UnsupportedPtx, match=message) as caught:
        launch(change(load(case)), case, batch_of(case), aligned_copy(np.zeros(BYTES, np.uint8)))
    assert caught.value.line
