"""The bits of a CUtensorMap: hand-derived words, round trips, refusals."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.tensor_map import (
    DTYPES,
    TensorMap,
    decode,
    encode,
    replace_field,
    transaction_bytes,
)
from ptxemu.numerics.swizzle import BY_NAME
from tests.ptxemu.kernels import kernel, launch, pointers

# bf16 [300, 512] row-major at 0x7f0012345600, box 128 x 64, swizzle 128B:
# w2 = 2 | (2 - 1) << 4 | 10 << 7 | 3 << 13 | 1 << 18 | 1 << 21 (307200 bytes >= 128 KiB)
BF16_WORDS = [0x12345600, 0x7F00, 0x246512, 1024 // 16, *[0] * 4]
BF16_WORDS += [511, 299, *[0] * 3, 63 << 24, 127, 0]


def pack(words: list[int]) -> bytes:
    return struct.pack("<16I", *words) + bytes(64)


def patched(index: int, value: int) -> bytes:
    return pack([*BF16_WORDS[:index], value, *BF16_WORDS[index + 1 :]])


def test_decode_of_hand_derived_words():
    expected = TensorMap(
        address=0x7F0012345600,
        dtype="bf16",
        dims=(512, 300),
        strides=(1024,),
        box=(64, 128),
        swizzle=BY_NAME["128B"],
    )
    assert decode(pack(BF16_WORDS)) == expected
    assert encode(0x7F0012345600, (512, 300), (1024,), (64, 128), "bf16") == pack(BF16_WORDS)


def test_decode_of_a_5d_tf32_map_with_long_strides():
    w2 = 2 | 4 << 4 | 7 << 7 | 3 << 13 | 1 << 16 | 1 << 18 | 1 << 19 | 1 << 21
    strides = [0x100, 0x1000, 0x1230_0000_00, 0x87_6543_2100]  # bytes, up to 40 bits
    high = sum((stride >> 36) << 4 * i for i, stride in enumerate(strides))
    low = [stride >> 4 & 0xFFFFFFFF for stride in strides]
    sizes = [32, 7, 6, 5, 4]
    box = 1 | 2 << 8 | 3 << 16 | 0 << 24
    words = [16, 0, w2, *low, high, *(n - 1 for n in sizes), 31 << 24, box, 0]
    tm = decode(pack(words))
    assert (tm.dtype, tm.dims, tm.strides) == ("tf32", tuple(sizes), tuple(strides))
    assert (tm.box, tm.swizzle) == ((32, 2, 3, 4, 1), BY_NAME["128B_ATOM_32B"])
    assert encode(16, tm.dims, tm.strides, tm.box, "tf32", "128B_ATOM_32B") == pack(words)


# Words 2..15 as the DSL's host code encoded them (4.8.1), with the tensor and the tile.
DSL_MAPS = [
    ("246512 40 0 0 0 0 1ff 12b 0 0 0 3f000000 7f 0",
     "bf16", (512, 300), (1024,), (64, 128), "128B"),
    ("40512 8 0 0 0 0 3f 3f 0 0 0 3f000000 1f 0", "bf16", (64, 64), (128,), (64, 32), "none"),
    ("44392 10 0 0 0 0 3f 3f 0 0 0 f000000 1f 0", "f32", (64, 64), (256,), (16, 32), "64B"),
    ("40302 0 0 0 0 0 1ff 0 0 0 0 7f000000 0 0", "f16", (512,), (), (128,), "none"),
    ("46522 10 400 0 0 0 7f 3f 2 0 0 3f000000 1f 0",
     "bf16", (128, 64, 3), (256, 16384), (64, 32, 1), "128B"),
    ("46532 10 400 c00 0 0 7f 3f 2 1 0 3f000000 1f 0",
     "bf16", (128, 64, 3, 2), (256, 16384, 49152), (64, 32, 1, 1), "128B"),
    ("246042 8 200 800 1800 0 7f 3f 3 2 1 7f000000 1f 0",
     "u8", (128, 64, 4, 3, 2), (128, 8192, 32768, 98304), (128, 32, 1, 1, 1), "128B"),
    ("40112 10 0 0 0 0 3f 3f 0 0 0 1f000000 1f 0", "u32", (64, 64), (256,), (32, 32), "none"),
    ("40212 20 0 0 0 0 3f 3f 0 0 0 1f000000 1f 0", "u64", (64, 64), (512,), (32, 32), "none"),
    ("256392 40 0 0 0 0 ff ff 0 0 0 1f000000 1f 0",
     "tf32", (256, 256), (1024,), (32, 32), "128B"),
    ("c6392 40 0 0 0 0 ff 3f 0 0 0 1f000000 7 0",
     "f32", (256, 64), (1024,), (32, 8), "128B_ATOM_32B"),
    ("466a2 c c00 0 0 0 ff ff 0 0 0 7f000000 7f 0",
     "16u6_align16b", (256, 256, 1), (192, 49152), (128, 128, 1), "128B"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "dtype", "dims", "strides", "box", "swizzle"), DSL_MAPS)
def test_maps_that_the_dsl_encoded(words, dtype, dims, strides, box, swizzle):
    raw = pack([0x1000, 0x5582, *(int(word, 16) for word in words.split())])
    address = 0x5582_0000_1000
    garbage_after = raw[:64] + bytes(range(64))
    expected = TensorMap(address, dtype, dims, strides, box, BY_NAME[swizzle])
    assert decode(garbage_after) == expected
    assert encode(address, dims, strides, box, dtype, swizzle) == raw


SWIZZLED_DTYPES = [
    (dtype, swizzle)
    for dtype in DTYPES
    for swizzle in ("none", "32B", "128B")
    if not (dtype.endswith("align16b") and swizzle == "32B")  # their box row is always 128 bytes
]


@pytest.mark.parametrize(("dtype", "swizzle"), SWIZZLED_DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_encode_then_decode(dtype, rank, swizzle):
    bits = DTYPES[dtype][1]
    inner = 128 if dtype.endswith("align16b") else 32 * 8 // bits
    dims = (256, 5, 6, 7, 8)[:rank]
    strides = (4096, 32768, 2**20, 2**37)[: rank - 1]
    box = (inner, 3, 1, 2, 4)[:rank]
    tm = decode(encode(64, dims, strides, box, dtype, swizzle))
    assert tm == TensorMap(64, dtype, dims, strides, box, BY_NAME[swizzle])
    assert tm.rank == rank
    assert transaction_bytes(tm) == tm.rows * inner * bits // 8
    span = 0 if swizzle == "none" else BY_NAME[swizzle].span  # a row is one row of the pattern
    assert tm.box_bytes == tm.rows * max(tm.smem_row_bytes, span)


@pytest.mark.parametrize("bit", [0, 2, 3, 11, 12, 16, *range(22, 32)])
def test_unexplained_bits_of_word_2(bit):
    with pytest.raises(UnsupportedPtx, match=r"word 2 .*0x"):
        decode(patched(2, BF16_WORDS[2] ^ 1 << bit))


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (2, BF16_WORDS[2] & ~(0xF << 7) | 3 << 7),  # type 3
        (2, BF16_WORDS[2] & ~(0xF << 7) | 14 << 7),  # type 14
        (2, BF16_WORDS[2] | 3 << 19),  # 64-byte atoms
        (2, BF16_WORDS[2] & ~(3 << 13) | 1 << 13 | 1 << 19),  # 32B swizzle of 32-byte atoms
        (2, BF16_WORDS[2] | 7 << 4),  # rank 8
        (4, 64),  # a third dimension's stride
        (7, 1 << 4),
        (10, 4),  # a third dimension's size
        (13, 63 << 24 | 1),  # element stride 2
        (13, 63 << 24 | 1 << 15),
        (14, 127 | 1 << 8),  # a third dimension's box side
        (15, 1),
    ],
)
def test_other_unexplained_words(word, value):
    with pytest.raises(UnsupportedPtx, match=f"word {word} "):
        decode(patched(word, value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": 8}, "base 0x8 not 16-byte aligned"),
        ({"strides": (1000,)}, "stride of dimension 1 is 1000"),
        ({"box": (128, 8)}, "row is 256 bytes, limit of swizzle 128B is 128"),
        ({"box": (12, 8)}, "box row is 12 x 16 bits"),
        ({"box": (64, 257)}, "limit is 256"),
        ({"box": (64,)}, "1 box sides"),
        ({"dims": (64, 0)}, "limit is 2"),
        ({"dtype": "16u4_align16b"}, r"16U4_ALIGN16B box\[0\] is 64"),
        ({"dtype": "16u6_align16b"}, r"16U6_ALIGN16B box\[0\] is 64"),
    ],
)
def test_what_the_driver_rejects(changes, message):
    good = {"address": 0, "dims": (512, 300), "strides": (1024,), "box": (64, 8), "dtype": "bf16"}
    with pytest.raises(HardwareRefusal, match=message):
        encode(**{**good, **changes})


def test_decode_checks_what_replace_may_have_broken():
    with pytest.raises(HardwareRefusal, match="base 0x12345608"):
        decode(pack([0x12345608, 0, *BF16_WORDS[2:]]))
    with pytest.raises(HardwareRefusal, match="64 bytes, must be 128"):
        decode(bytes(64))


@pytest.mark.parametrize("buffer", [bytearray, lambda raw: np.frombuffer(raw, np.uint8).copy()])
def test_replace_field(buffer):
    raw = buffer(encode(0, (64, 8, 2), (128, 1024), (64, 4, 1), "bf16"))
    replace_field(raw, "global_address", 0, 0x7F00_0000_1230)
    replace_field(raw, "global_dim", 1, 77)
    replace_field(raw, "global_stride", 1, 0xAB_0000_0010)
    tm = decode(bytes(raw))
    assert (tm.address, tm.dims, tm.strides) == (
        0x7F00_0000_1230,
        (64, 77, 2),
        (128, 0xAB_0000_0010),
    )


FIELDS = [
    ("rank", 0, 2, {}),
    ("rank", 0, 1, {"dims": (64, 8), "strides": (128,), "box": (64, 4)}),
    ("box_dim", 0, 32, {"box": (32, 4, 1)}),
    ("box_dim", 1, 256, {"box": (64, 256, 1)}),
    ("box_dim", 2, 2, {"box": (64, 4, 2)}),
    ("element_stride", 1, 1, {}),
    ("interleave_layout", 0, 0, {}),
    ("fill_mode", 0, 1, {"nan_fill": True}),
    ("elemtype", 0, 1, {"dtype": "u16"}),
    ("elemtype", 0, 6, {"dtype": "f16"}),
    ("swizzle_atomicity", 0, 1, {"swizzle": "128B_ATOM_32B"}),
    ("swizzle_mode", 0, 3, {}),
]


@pytest.mark.parametrize(("field", "ordinal", "value", "changes"), FIELDS)
def test_a_replaced_field_is_as_if_encoded(field, ordinal, value, changes):
    given = {"dims": (64, 8, 2), "strides": (128, 1024), "box": (64, 4, 1), "dtype": "bf16"}
    raw = bytearray(encode(0, **given))
    replace_field(raw, field, ordinal, value)
    assert decode(bytes(raw)) == decode(encode(0, **{**given, **changes}))


CODES = {  # codes of a field, by its meaning in `encode`
    "elemtype": (
        "dtype", "tf32", [(2, "u32"), (3, "u32"), (7, "f32"), (11, "tf32"), (5, "u64"), (9, "f64")]
    ),
    "swizzle_mode": ("swizzle", "32B", [(0, "none"), (1, "32B"), (2, "64B")]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [(field, *code) for field, (_, _, codes) in CODES.items() for code in codes],
)
def test_codes_of_replaced_maps(field, value, name):
    argument, before, _ = CODES[field]
    given = {"dims": (16, 8), "strides": (128,), "box": (4, 4), "dtype": "u32", "swizzle": "32B"}
    raw = bytearray(encode(0, **given | {argument: before}))
    replace_field(raw, field, 0, value)
    assert decode(bytes(raw)) == decode(encode(0, **given | {argument: name}))


@pytest.mark.parametrize(
    ("field", "ordinal", "value", "error"),
    [
        ("global_stride", 0, 24, HardwareRefusal),
        ("global_stride", 4, 32, HardwareRefusal),
        ("global_dim", 5, 1, HardwareRefusal),
        ("swizzle_mode", 0, 4, UnsupportedPtx),
        ("interleave_layout", 0, 1, UnsupportedPtx),
        ("elemtype", 0, 8, UnsupportedPtx),
        ("elemtype", 0, 16, HardwareRefusal),
        ("rank", 0, 5, HardwareRefusal),
        ("box_dim", 0, 257, HardwareRefusal),
        ("box_dim", 5, 1, HardwareRefusal),
        ("element_stride", 1, 9, HardwareRefusal),
        ("fill_mode", 0, 2, HardwareRefusal),
    ],
)
def test_replace_field_refusals(field, ordinal, value, error):
    with pytest.raises(error):
        replace_field(bytearray(128), field, ordinal, value)


def test_a_copy_obeys_replaced_fields():
    """The box grows over the end of the tensor, with NaN there."""
    memory, out = np.zeros(256 + 128, np.uint8), np.zeros(8, np.float32)
    start = -memory.ctypes.data % 128
    source = memory[start + 128 : start + 144].view(np.float32)
    source[:] = range(1, 5)
    raw = memory[start : start + 128]
    raw[:] = np.frombuffer(
        encode(source.ctypes.data, (4,), (), (4,), "f32", swizzle="none"), np.uint8
    )
    edit = "tensormap.replace.tile.{}.global.b1024.b32 [%rd1], {};\n".format
    body = f"""ld.param.u64 %rd1, [d]; ld.param.u64 %rd2, [o]; mov.u32 %r2, 8; mov.u32 %r3, 0;
    {edit("rank", 0)} {edit("box_dim", "0, %r2")} {edit("fill_mode", 1)} {edit("elemtype", 7)}
    {edit("interleave_layout", 0)} {edit("swizzle_mode", 0)} {edit("element_stride", "0, 1")}
    fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;
    mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 32;
    cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
      [box], [%rd1, {{%r3}}], [bar];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra WAIT;
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [box]; st.v4.b32 [%rd2], {{%r4, %r5, %r6, %r7}};
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [box+16];
    st.v4.b32 [%rd2+16], {{%r4, %r5, %r6, %r7}};"""
    shared = ".shared .align 128 .b8 box[32];\n.shared .align 8 .b64 bar;\n"
    program = kernel(body, ".param .u64 d, .param .u64 o", before=shared)
    launch(program, params=pointers(raw, out), memory=[memory, out], block=(1,))
    assert out[:4].tolist() == [1, 2, 3, 4]
    assert np.isnan(out[4:]).all()


# fields of an f32 map [6, 16] with a box of [4, 8]: name, ordinal or none, value
FROM_ZEROS = [
    ("rank", None, 1), ("box_dim", 0, 8), ("box_dim", 1, 4), ("global_dim", 0, 16),
    ("global_dim", 1, 6), ("global_stride", 0, 64), ("element_stride", 0, 1),
    ("element_stride", 1, 1), ("elemtype", None, 7), ("interleave_layout", None, 0),
    ("swizzle_mode", None, 0), ("fill_mode", None, 0),
]  # fmt: skip


def test_a_map_may_be_built_from_zeros():
    """Nothing sets the version that the driver's encoder writes."""
    raw = bytearray(128)
    for field, ordinal, value in [*FROM_ZEROS, ("global_address", None, 0x7F0000123000)]:
        replace_field(raw, field, ordinal or 0, value)
    assert decode(bytes(raw)) == decode(
        encode(0x7F0000123000, (16, 6), (64,), (8, 4), "f32", swizzle="none")
    )
    im2col = struct.unpack("<16I", bytes(raw)[:64])
    with pytest.raises(UnsupportedPtx, match="word 2"):
        decode(pack([*im2col[:2], im2col[2] | 1, *im2col[3:]]))


def test_a_kernel_builds_a_map_from_zeros():
    """As Triton's make_tensor_descriptor: zeros in shared memory, all fields, then a copy of the
    map to global memory. The box is partly out of bounds."""
    source = np.arange(1, 97, dtype=np.float32).reshape(6, 16)
    memory, out = np.zeros(256 + source.nbytes, np.uint8), np.full(32, 77, np.float32)
    start = -memory.ctypes.data % 128
    values = memory[start + 128 : start + 128 + source.nbytes].view(np.float32)
    values[:] = source.reshape(-1)
    edits = ""
    for field, ordinal, value in FROM_ZEROS:
        width, what = ("64", "%rd5") if field == "global_stride" else ("32", "%r5")
        move = f"mov.b{width} {what}, {value}; " if ordinal is not None else ""
        operands = str(value) if ordinal is None else f"{ordinal}, {what}"
        edits += f"{move}tensormap.replace.tile.{field}.shared::cta.b1024.b{width} [map], "
        edits += f"{operands};\n"
    body = f"""ld.param.u64 %rd1, [d]; ld.param.u64 %rd2, [o]; mov.u32 %r0, %tid.x;
    ld.param.u64 %rd3, [m]; setp.eq.u32 %p0, %r0, 0; mov.u32 %r4, map;
    mad.lo.u32 %r3, %r0, 4, %r4; st.shared.b32 [%r3], 0; bar.warp.sync -1;
    @!%p0 bra COPY;
    tensormap.replace.tile.global_address.shared::cta.b1024.b64 [map], %rd3;
    {edits}
    COPY: bar.warp.sync -1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
      [%rd1], [map], 128;
    fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;
    @%p0 mbarrier.init.shared.b64 [bar], 1; fence.proxy.async.shared::cta; bar.warp.sync -1;
    mov.u32 %r6, 12; mov.u32 %r7, 3;
    @!%p0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
      [box], [%rd1, {{%r6, %r7}}], [bar];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra WAIT;
    mov.u32 %r8, box; mad.lo.u32 %r8, %r0, 4, %r8; ld.shared.b32 %r9, [%r8];
    mad.wide.u32 %rd6, %r0, 4, %rd2; st.global.b32 [%rd6], %r9;"""
    shared = ".shared .align 128 .b8 box[128], map[128];\n.shared .align 8 .b64 bar;\n"
    program = kernel(body, ".param .u64 d, .param .u64 o, .param .u64 m", before=shared)
    params = pointers(memory[start:], out, values)
    report = launch(program, params=params, memory=[memory, out], check=True)
    expected = np.zeros((4, 8), np.float32)
    expected[:3, :4] = source[3:, 12:]
    assert (out.reshape(4, 8) == expected).all()
    assert [finding.message for finding in report.findings if finding.severity == "error"] == []
