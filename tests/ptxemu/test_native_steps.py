"""Steps executed by primitives: the same data, bytes and errors as in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.codegen import program
from ptxemu.errors import PtxEmuError
from ptxemu.module import Module
from ptxemu.native.library import library
from tests.ptxemu.kernels import POINTER, kernel, launch

pytestmark = pytest.mark.skipif(library() is None, reason="llvmlite is not installed")

PARAMS = ".param .u64 a, .param .u64 b, .param .u64 c"
SHARED = ".shared .align 16 .b8 room[2048];\n"
# %rd5: the lane's offset; %p1: whether it takes part
LANE = """
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c];
mov.u32 %r0, %tid.x; mad.wide.u32 %rd4, %r0, 4, %rd2; ld.global.u32 %r1, [%rd4];
shr.u32 %r2, %r1, 31; setp.ne.u32 %p1, %r2, 0; and.b32 %r1, %r1, 0x7fffffff;
cvt.u64.u32 %rd5, %r1; mov.u32 %r3, room; add.u32 %r3, %r3, %r1; add.u64 %rd6, %rd1, %rd5;
mad.wide.u32 %rd7, %r0, 32, %rd3;
"""
REGISTER = {8: "%h", 16: "%h", 32: "%r", 64: "%rd"}


def access(space: str, bits: int, count: int, *, store: bool) -> str:
    """Each participating lane moves its elements between its offset and its place in `c`."""
    first = {"%h": 1, "%r": 10, "%rd": 8}[REGISTER[bits]]
    names = [f"{REGISTER[bits]}{first + k}" for k in range(count)]
    vector = f".v{count}" * (count > 1)
    data = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    where = {"shared": "[%r3]", "global": "[%rd6]"}[space]
    own = [f"[%rd7+{k * bits // 8}]" for k in range(count)]
    if store:
        pairs = zip(names, own, strict=True)
        taken = "".join(f"ld.global.b{bits} {name}, {place};\n" for name, place in pairs)
        return f"{taken}@%p1 st.{space}{vector}.b{bits} {where}, {data};\n"
    zeros = "".join(f"mov.b{max(bits, 16)} {name}, 0;\n" for name in names)
    pairs = zip(own, names, strict=True)
    put = "".join(f"st.global.b{bits} {place}, {name};\n" for place, name in pairs)
    return f"{zeros}@%p1 ld.{space}{vector}.b{bits} {data}, {where};\n{put}"


# copies `a` to shared memory and back
FILL = """mov.u32 %r6, room; mad.lo.u32 %r6, %r0, 64, %r6; mad.wide.u32 %rd8, %r0, 64, %rd1;
""" + "".join(
    f"ld.global.b64 %rd9, [%rd8+{k}]; st.shared.b64 [%r6+{k}], %rd9;\n" for k in range(0, 64, 8)
)
DRAIN = "".join(
    f"ld.shared.b64 %rd9, [%r6+{k}]; st.global.b64 [%rd8+{k}], %rd9;\n" for k in range(0, 64, 8)
)


def outcome(text: str, arrays: list[np.ndarray], **how: object) -> tuple[object, ...]:
    """Data, byte counts and error of a launch; addresses in the error are relative."""
    arrays = [array.copy() for array in arrays]
    try:
        report = launch(Module(text), *arrays, **how)
        said: object = sorted(report.bytes.items())
    except PtxEmuError as error:
        said = str(error).replace(f"{arrays[0].ctypes.data >> 12:x}", "BASE").split(" at 0x")[0]
    return said, [array.tobytes() for array in arrays]


def alike(
    monkeypatch: pytest.MonkeyPatch, text: str, arrays: list[np.ndarray], **how: object
) -> bool:
    """Whether the launch has the same outcome with and without primitives."""
    native = outcome(text, arrays, **how)
    with monkeypatch.context() as patch:
        patch.setattr(program, "library", lambda: None)
        return native == outcome(text, arrays, **how)


def offsets(rng: np.random.Generator, nbytes: int, how: str) -> np.ndarray:
    """Offsets of 32 lanes in 2 KiB, mostly aligned and inside; the top bit marks participating
    lanes."""
    slots = 2048 // nbytes
    lanes = rng.integers(0, 4 if how == "same" else slots, 32) * nbytes
    if how == "misaligned":
        lanes[rng.integers(32)] += rng.integers(1, nbytes) if nbytes > 1 else 0
    if how == "outside":
        lanes[rng.integers(32)] = 2048 * 1024 - rng.integers(0, 2) * nbytes
    active = rng.integers(0, 2, 32) if rng.integers(3) else np.ones(32, np.int64)
    return (lanes | active << 31).astype(np.uint32)


@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("space", ["shared", "global"])
def test_accesses_are_those_of_numpy(monkeypatch, space: str, store: bool) -> None:
    rng = np.random.default_rng(7)
    for bits in (8, 16, 32, 64):
        for count in (1, 2, 4):
            if bits * count > 128:
                continue
            body = FILL + access(space, bits, count, store=store) + DRAIN
            text = kernel(SHARED + LANE + body, PARAMS)
            for how in ("inside", "same", "misaligned", "outside"):
                data = rng.integers(0, 256, 2048, np.uint8)
                own = rng.integers(0, 256, 1024, np.uint8)
                arrays = [data, offsets(rng, bits * count // 8, how), own]
                assert alike(monkeypatch, text, arrays), (bits, count, how)


TENSOR = """.shared .align 16 .b8 room[16];
mov.u32 %r3, room; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 64;
ld.shared.u32 %r4, [%r3]; ld.param.u64 %rd1, [a]; mov.u32 %r0, %tid.x;
mad.wide.u32 %rd2, %r0, 4, %rd1; shr.u32 %r5, %r0, 5; shl.b32 %r5, %r5, 21;
add.u32 %r6, %r4, ADDRESS;
ld.global.u32 %r10, [%rd2]; ld.global.u32 %r11, [%rd2+512];
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r6], {%r10, %r11}; tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r12, %r13}, [%r6]; tcgen05.wait::ld.sync.aligned;
add.u32 %r12, %r12, 1;
st.global.u32 [%rd2+512], %r12; st.global.u32 [%rd2], %r13;
"""


@pytest.mark.parametrize("address", ["%r5", "0", "62", "63", "0x00100000", "0x00200000", "600"])
def test_tensor_memory_is_that_of_numpy(monkeypatch, address: str) -> None:
    """At the warp's own lane, at 0, at the last columns, beyond them, at other warps' lanes."""
    data = np.arange(256, dtype=np.uint32)
    text = kernel(TENSOR.replace("ADDRESS", address), ".param .u64 a")
    assert alike(monkeypatch, text, [data], block=(128,))


def together(rng: np.random.Generator) -> str:
    """Shuffles, reductions, votes and an election, each with its result added to %r20."""
    lines = ["mov.u32 %r20, 0;"]
    for mode in ("up", "down", "bfly", "idx"):
        lane = rng.choice(["%r12", str(rng.integers(32))])
        clamp = rng.choice(["%r13", "31", "0", "0x1c1f", "0x1800"])
        lines.append(f"shfl.sync.{mode}.b32 %r14|%p2, %r10, {lane}, {clamp}, 0xffffffff;")
        lines.append("selp.u32 %r15, 3, 5, %p2; mad.lo.u32 %r20, %r20, %r15, %r14;")
    for mode in ("add", "min", "max", "and", "or", "xor"):
        type_ = "b32" if mode in ("and", "or", "xor") else rng.choice(["u32", "s32"])
        lines.append(f"redux.sync.{mode}.{type_} %r14, %r10, 0xffffffff;")
        lines.append("mad.lo.u32 %r20, %r20, 7, %r14;")
    for mode in ("min", "max", "min.abs", "max.abs", "min.NaN", "max.abs.NaN"):
        lines.append(f"redux.sync.{mode}.f32 %f2, %f1, 0xffffffff; mov.b32 %r14, %f2;")
        lines.append("mad.lo.u32 %r20, %r20, 11, %r14;")
    lines.append("setp.lt.u32 %p2, %r10, %r11; vote.sync.ballot.b32 %r14, %p2, 0xffffffff;")
    for mode in ("all", "any", "uni"):
        lines.append(f"vote.sync.{mode}.pred %p3, %p2, 0xffffffff; selp.u32 %r15, 1, 0, %p3;")
        lines.append("mad.lo.u32 %r20, %r20, 13, %r15; add.u32 %r20, %r20, %r14;")
    lines.append("elect.sync %r14|%p3, 0xffffffff; @%p3 add.u32 %r20, %r20, 17;")
    return "\n".join([*lines, "mad.lo.u32 %r20, %r20, 19, %r14;"])


@pytest.mark.parametrize("lanes", [32, 23], ids=["warp", "part"])
@pytest.mark.parametrize("seed", range(6))
def test_what_lanes_do_together_is_that_of_numpy(monkeypatch, seed: int, lanes: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (4, 32), np.uint32)
    floats = rng.choice(np.array([0, -0.0, 1, -1, 3, np.inf, -np.inf, np.nan], np.float32), 32)
    words[3] = (floats if seed % 2 else -np.abs(floats)).view(np.uint32)
    words[0] >>= np.uint32(rng.integers(32))
    text = "".join(f"ld.global.u32 %r{10 + k}, [%rd2+{128 * k}];\n" for k in range(4))
    text += "mov.b32 %f1, %r13;\n" + together(rng) + "\nst.global.u32 [%rd2], %r20;"
    module = kernel(POINTER + text, ".param .u64 d")
    assert alike(monkeypatch, module, [words], block=(lanes,))
