"""Refusals of the emulator: each error has its kind, its PTX line, and the line's text."""

from __future__ import annotations

import time

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import POLICIES, aligned_copy
from ptxemu import (
    Deadlock,
    HardwareRefusal,
    LimitExceeded,
    OutOfBounds,
    PtxEmuError,
    PtxSyntaxError,
    UnsupportedPtx,
)
from ptxemu.machine.tensor_map import encode
from tests.ptxemu.kernels import DYNAMIC, HEAD, POINTER, kernel, launch, pointers

SHARED = ".shared .align 16 .b8 fixed[64];\n"
_ARRAY = np.zeros(64, np.uint32)


def marked(text: str) -> tuple[int, str]:
    """Return the line that ends in //!, and its number."""
    return next((k, x) for k, x in enumerate(text.splitlines(), 1) if x.endswith("//!"))


def refused(kind: type[PtxEmuError], message: str, text: str, **how: object) -> None:
    """Check that the launch (or the load) of `text` raises `kind`, naming the line that ends
    in //!"""
    with pytest.raises(kind, match=message) as caught:
        launch(text, **how)
    found = caught.value
    number, line = marked(text)
    assert found.line == number, f"line {found.line} `{found.text}`, not {number}"
    assert found.text.removesuffix("//!").strip() == line.removesuffix("//!").strip()
    assert found.text in str(found)
    assert f"line {number}" in str(found)


# -- one kernel each ------------------------------------------------------------------------

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [fixed], {};"
ALLOCATED = f"{ALLOC.format(32)}\nld.shared.b32 %r1, [fixed];\n"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;"
LOAD_TMEM = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1]; //!"
# the last line is refused, or the one that ends in //!; %rd1 points to 64 words, %rd2 to the
# thread's own
TEXT = {
    "unexpected character": "add.s32 %r1, %r2 # 1;",
    "undeclared register": "add.s32 %r1, %r2, %q7;",
    "expected an operand": "add.s32 %r1, %r2, );",
    "expected ';'": "add.s32 %r1 %r2;",
    "unknown label": "bra NOWHERE;",
    "expected an instruction": ".wonder 5;",
}
BEYOND = {
    "uniform": "mov.u32 %r1, fixed;\nld.shared.b32 %r2, [%r1+64];",
    "lanes": "mov.u32 %r1, fixed;\nmad.lo.u32 %r1, %r0, 4, %r1;\nst.shared.b32 [%r1], %r0;",
    "vector": "mov.u32 %r1, fixed;\nld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1+0x100000];",
    "rank": "mov.u32 %r1, fixed;\nadd.u32 %r1, %r1, 0x3000000;\nld.shared::cluster.b32 %r2, [%r1];",
    "atomic": "mov.u32 %r1, fixed;\natom.shared.add.u32 %r2, [%r1+64], 1;",
    "local": "add.u32 %r3, %r0, 40;\nmul.wide.u32 %rd1, %r3, 4;\nst.local.b32 [%rd1], %r3;",
    "local before": "mul.wide.u32 %rd1, %r0, 4;\nst.local.b32 [%rd1-8], %r0;",
}
MISALIGNED = {
    "uniform": "ld.global.b32 %r1, [%rd1+2];",
    "lanes": "ld.global.b64 %rd3, [%rd2];",
    "vector": "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+8];",
    "store": "st.global.v2.b32 [%rd2], {%r0, %r0};",
    "half": "st.global.b16 [%rd1+1], %h1;",
    "shared": "st.shared.b64 [fixed+4], %rd1;",
    "atomic": "atom.shared.add.u32 %r1, [fixed+2], 1;",
}
# message, and the refused line
UNITS = {
    "allocation size": ("48 columns", ALLOC.format(48)),
    "allocation too large": ("1024 columns", ALLOC.format(1024)),
    "after relinquish": (
        "relinquish",
        f"tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n{ALLOC.format(32)}",
    ),
    "not allocated": ("alloc", f"mov.u32 %r1, 0;\n{LOAD_TMEM}\ntcgen05.wait::ld.sync.aligned;"),
    "beyond the allocation": (
        "alloc",
        f"{ALLOCATED}tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1+32], {{%r2}}; //!\n"
        "tcgen05.wait::st.sync.aligned;",
    ),
    "another warp's lanes": (
        "lane",
        f"{ALLOCATED}add.u32 %r1, %r1, 0x200000;\n{LOAD_TMEM}\ntcgen05.wait::ld.sync.aligned;",
    ),
    "address by lane": (
        "shared address .* differs",
        "mov.u32 %r1, fixed;\nmad.lo.u32 %r1, %r0, 4, %r1;\n"
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
    ),
    "freed by lane": (
        "address of tcgen05.dealloc differs",
        f"{ALLOCATED}add.u32 %r1, %r1, %r0;\n{DEALLOC}",
    ),
    "freed twice": ("dealloc", f"{ALLOCATED}{DEALLOC}\n{DEALLOC}"),
    "no mbarrier": ("no mbarrier", "mbarrier.arrive.shared.b64 _, [fixed];"),
    "mbarrier count": ("count", "mbarrier.init.shared.b64 [fixed], 0;"),
    "mbarrier alignment": ("aligned", "mbarrier.init.shared.b64 [fixed+4], 1;"),
    "barrier number": ("barrier 16", "bar.sync 16;"),
    "barrier count": ("multiple of 32", "bar.sync 1, 40;"),
    "bulk size": (
        "multiples of 16",
        "mbarrier.init.shared.b64 [fixed], 32;\nmov.u64 %rd1, 0x100000;\n"
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes "
        "[fixed+16], [%rd1], 8, [fixed];",
    ),
    "trap": ("trap", "mov.u32 %r1, 1;\nsetp.eq.u32 %p0, %r1, 1;\n@%p0 trap;"),
    "register count": ("multiple of 8", "setmaxnreg.inc.sync.aligned.u32 100;"),
}
REFUSED = [
    *((PtxSyntaxError, message, body) for message, body in TEXT.items()),
    *((OutOfBounds, "shared|bytes of local memory, offset", body) for body in BEYOND.values()),
    *((HardwareRefusal, "misaligned", body) for body in MISALIGNED.values()),
    *((HardwareRefusal, *row) for row in UNITS.values()),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "message", "body"), REFUSED)
def test_what_is_refused(kind: type[PtxEmuError], message: str, body: str, policy: str) -> None:
    body = body if "//!" in body else f"{body} //!"
    text = kernel(f".local .align 4 .b8 stack[64];\n{POINTER}{body}", ".param .u64 d", SHARED)
    refused(kind, message, text, policy=policy, params=pointers(_ARRAY))


# the checker reads the operation's range before it is done: the bounds are checked first
OUTSIDE = {
    "cp": (
        "SMEM offset 0x40ff0, limit is 0x800",
        f"{ALLOCATED}mov.u64 %rd1, 0x0000400800803fff;\n"
        "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1; //!",
    ),
    "cp columns": (
        "column 0xfff0; allocated columns: 32 at 0",
        f"{ALLOCATED}mov.u64 %rd1, 0x0000400800800000;\n"
        "tcgen05.cp.cta_group::1.4x256b [%r1+0xfff0], %rd1; //!",
    ),
    "shift": (
        "column 0x2000; allocated columns: 32 at 0",
        f"{ALLOCATED}tcgen05.shift.cta_group::1.down [%r1+0x2000]; //!",
    ),
    "store": (
        "column 0x2000; allocated columns: 32 at 0",
        f"{ALLOCATED}tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1+0x2000], {{%r0}}; //!",
    ),
    "map": (
        "write to 128 bytes at",
        "mov.u64 %rd1, 0xFFFFFFFFFFFFFC00;\ntensormap.cp_fenceproxy.global.shared::cta"
        ".tensormap::generic.release.gpu.sync.aligned [%rd1], [fixed], 128; //!",
    ),
}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("case", OUTSIDE)
def test_the_checker_changes_no_bounds(case: str, check: bool) -> None:
    message, body = OUTSIDE[case]
    shared = SHARED.replace("64", "128") if case == "map" else SHARED
    text = kernel(body, before=shared)
    if case == "map" and check:
        found = launch(text, check=check, allocated=[]).findings
        line, _ = marked(text)
        (stray,) = (finding for finding in found if finding.check == "out-of-bounds")
        assert stray.line == line
        assert message in str(stray)
    else:
        refused(HardwareRefusal, message, text, check=check, allocated=[])


# -- the text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        HEAD + ".visible .entry k()\n{\n.reg .b32 %r1;\n{\n",
        HEAD + ".func f()\n{\n",
        HEAD + ".wonder\n",
    ],
)
def test_syntax_errors_of_the_module(text: str) -> None:
    with pytest.raises(PtxSyntaxError) as caught:
        ptxemu.load(text)
    assert caught.value.line


@pytest.mark.parametrize(
    "line",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.wonder.s32 %r1, %r1, %r1;",
        "add.u128 %r1, %r1, %r1;",
        "ld.global.texture.b32 %r1, [%rd1];",
        "mov.u32 %r1, nobody;",
        "mov.u32 %r1, %pm0;",
        "call.uni (%r1), f, (%r2);",
        "vadd.s32.s32.s32 %r1, %r1.b0, %r2.h1;",
        "vadd2.s32.s32.s32 %r1.h10, %r1, %r2.h32, %r1;",
        "add.s32 %r1, %r1.b0, 1;",
    ],
)
def test_unsupported_only_when_executed(line: str) -> None:
    launch(kernel(f"mov.u32 %r1, 0;\nbra OVER;\n{line}\nOVER:"))
    executed = kernel(f"mov.u32 %r1, 0;\nmov.u64 %rd1, 0;\n{line} //!")
    refused(UnsupportedPtx, "unsupported|unknown|not supported", executed)


def test_what_comes_before_an_unsupported_instruction_happens() -> None:
    out = np.zeros(4, np.uint32)
    body = "ld.param.u64 %rd1, [d];\nmov.u32 %r1, 5;\nst.global.b32 [%rd1], %r1;\nfrobnicate;"
    with pytest.raises(UnsupportedPtx, match="frobnicate"):
        launch(kernel(body, ".param .u64 d"), params=pointers(out))
    assert out[0] == 5


# -- memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [None, [_ARRAY]])
@pytest.mark.parametrize(
    "address", [0x40, 0x10000, 0x7FFF_FFFF_F000, 1 << 60, 0xFFFF_FFFF_FFFF_0000]
)
@pytest.mark.parametrize(
    "line",
    [
        "ld.global.b32 %r1, [%rd2];",
        "st.global.b32 [%rd2], %r0;",
        "ld.b32 %r1, [%rd1];",
        "st.global.v4.b32 [%rd1], {%r0, %r0, %r0, %r0};",
        "red.global.add.u32 [%rd2], 1;",
    ],
)
def test_wild_global_pointers(line: str, address: int, memory: list | None) -> None:
    text = kernel(f"{POINTER}{line} //!", ".param .u64 d")
    params = [address.to_bytes(8, "little")]
    refused(OutOfBounds, "may touch|no state space", text, memory=memory, params=params)


def test_global_bounds_are_exact() -> None:
    text = kernel(POINTER + "st.global.b32 [%rd2+128], %r0; //!", ".param .u64 d")
    launch(text, _ARRAY)
    short = [(_ARRAY.ctypes.data, 252)]
    refused(OutOfBounds, "may touch", text, memory=short, params=pointers(_ARRAY))


def test_lanes_that_are_masked_off_touch_nothing() -> None:
    body = POINTER + (
        "setp.lt.u32 %p0, %r0, 64;\n@!%p0 ld.global.b32 %r1, [%rd2];\n@%p0 bra OVER;\n"
        "st.global.b32 [%rd2], %r0;\nOVER:"
    )
    launch(kernel(body, ".param .u64 d"), memory=[], params=[(0x40).to_bytes(8, "little")])


def test_read_only_memory() -> None:
    constant = np.arange(64, dtype=np.uint32)
    constant.setflags(write=False)
    copied = "ld.global.b32 %r1, [%rd2];\nst.global.b32 [%rd2], %r1; //!"
    text = kernel(POINTER + copied, ".param .u64 d")
    refused(OutOfBounds, "write", text, memory=[constant], params=pointers(constant))


@pytest.mark.parametrize("policy", POLICIES)
def test_asynchronous_errors_name_the_instruction_that_issued(policy: str) -> None:
    body = """mbarrier.init.shared.b64 [fixed], 32;
mov.u64 %rd1, 0x100000;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [fixed+16], [%rd1], 32, [fixed]; //!
mbarrier.arrive.expect_tx.shared.b64 _, [fixed], 32;
W:
mbarrier.try_wait.parity.shared.b64 %p0, [fixed], 0;
@!%p0 bra W;"""
    refused(OutOfBounds, "may touch", kernel(body, before=SHARED), policy=policy)


# -- the launch -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"block": (1025,)}, "1025 threads"),
        ({"block": (0,)}, ">= 1"),
        ({"grid": (3,), "cluster": (2,)}, "multiple of cluster"),
        ({"grid": (32,), "cluster": (32,)}, "at most 16"),
        ({"grid": (1, 1, 1, 1)}, "dimensions"),
        ({"smem_bytes": 232_449}, "232449"),
    ],
)
def test_bad_launches(how: dict, message: str) -> None:
    with pytest.raises(HardwareRefusal, match=message):
        launch(kernel(""), **how)


def test_required_block() -> None:
    text = kernel("").replace("test()", "test()\n.reqntid 64\n")
    launch(text, block=(64,))
    with pytest.raises(HardwareRefusal, match="reqntid"):
        launch(text)


def test_parameters_are_checked() -> None:
    text = kernel("", ".param .u64 a, .param .b32 b")
    launch(text, params=[bytes(8), bytes(4)])
    with pytest.raises(ValueError, match="takes 2"):
        launch(text, params=[bytes(8)])
    with pytest.raises(ValueError, match="parameter 1 has 8 bytes"):
        launch(text, params=[bytes(8), bytes(8)])
    with pytest.raises(ValueError, match="no entry"):
        launch(text, entry="other", params=[])


# -- hangs ----------------------------------------------------------------------------------


# threads, message, and the line
DEADLOCKS = {
    "an mbarrier": (
        32,
        ("warp 0 of cta(0,0,0)", "parity 0", "0x400", "8 of 40 arrivals", "512 bytes"),
        "mbarrier.init.shared.b64 [fixed], 40;\nmov.u32 %r1, 0;\n"
        "mbarrier.arrive.expect_tx.shared.b64 _, [fixed], 16;\nbra.uni W;\n"
        "W:\nmbarrier.try_wait.parity.shared.b64 %p0, [fixed], %r1; //!\n@!%p0 bra W;",
    ),
    "a named barrier": (
        128,
        ("barrier 3 of cta(0,0,0): 64 of 128 threads", "warp 1"),
        "mov.u32 %r0, %tid.x;\nsetp.ge.u32 %p0, %r0, 64;\n@%p0 bra W;\n"
        "bar.sync 3, 128; //!\nbra DONE;\nW:\nbar.sync 4, 64;\nDONE:",
    ),
    "two barriers of one warp": (
        32,
        ("waits for the other lanes", "0x0000ffff", "0xffff0000"),
        "mov.u32 %r0, %tid.x;\nsetp.ge.u32 %p0, %r0, 16;\n@%p0 bra W;\n"
        "bar.sync 0; //!\nbra DONE;\nW:\nbar.sync 1;\nDONE:",
    ),
    "polling for ever": (
        32,
        ("poll without end",),
        "mbarrier.init.shared.b64 [fixed], 64;\nW:\n"
        "mbarrier.test_wait.parity.shared.b64 %p0, [fixed], 0; //!\n@!%p0 bra W;",
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_names_warp_line_barrier_and_what_is_missing(name: str, policy: str) -> None:
    threads, parts, body = DEADLOCKS[name]
    text = kernel(body, before=SHARED)
    with pytest.raises(Deadlock) as caught:
        launch(text, block=(threads,), policy=policy)
    number, line = marked(text)
    for part in (*parts, f"line {number}", line.split(" ")[0]):
        assert part in str(caught.value)


def test_a_cta_that_exits_leaves_the_cluster_barrier() -> None:
    body = (
        "mov.u32 %r0, %cluster_ctarank;\nsetp.eq.u32 %p0, %r0, 1;\n@%p0 exit;\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    )
    launch(kernel(body), grid=(2,), cluster=(2,))


def test_a_thread_waits_for_the_cluster_before_it_arrives_again() -> None:
    """Twice in one phase, it would stand for a thread that has not come."""
    arrive, wait = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"
    launch(kernel("\n".join((arrive, wait, arrive, wait))), grid=(2,), cluster=(2,))
    with pytest.raises(HardwareRefusal, match="has not waited"):
        launch(kernel("\n".join((arrive, arrive, wait))), grid=(2,), cluster=(2,))


ENDLESS = kernel("mov.u32 %r1, 0;\nL:\nadd.u32 %r1, %r1, 1;\nbra L;")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_endless_loop_meets_the_limit(policy: str) -> None:
    began = time.perf_counter()
    with pytest.raises(LimitExceeded, match="limit"):
        launch(ENDLESS, policy=policy, limit=0.2)
    assert time.perf_counter() - began < 5


def test_a_long_loop_is_not_a_hang() -> None:
    """The loop has more iterations than the poll detector examines, and only arithmetic in them."""
    out = np.zeros(4, np.uint32)
    body = (
        "ld.param.u64 %rd1, [d];\nmov.u32 %r1, 0;\nL:\nadd.u32 %r1, %r1, 1;\n"
        "setp.lt.u32 %p0, %r1, 300000;\n@%p0 bra L;\nst.global.b32 [%rd1], %r1;"
    )
    launch(kernel(body, ".param .u64 d"), policy="random", params=pointers(out))
    assert out[0] == 300_000


def test_a_launch_that_would_take_too_long_says_so_early() -> None:
    body = "mov.u32 %r1, 0;\nL:\nadd.u32 %r1, %r1, 1;\nsetp.lt.u32 %p0, %r1, 20000;\n@%p0 bra L;"
    began = time.perf_counter()
    with pytest.raises(LimitExceeded, match="estimated at"):
        launch(kernel(body), grid=(100_000,), limit=30)
    assert time.perf_counter() - began < 10


TENSOR = """mov.u32 %r1, dynamic;
mbarrier.init.shared.b64 [%r1+2048], 32;
mov.u64 %rd2, m;
cvta.param.u64 %rd2, %rd2;
mov.u32 %r2, {x};
mov.u32 %r3, {y};
{copy}
"""
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
    "[%r1], [%rd2, {%r2, %r3}], [%r1+2048];"
)
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {%r2, %r3}], [%r1];"


@pytest.mark.parametrize(
    ("copy", "x", "y", "message"),
    [
        (LOAD, 4, 0, "multiple of 16 bytes"),
        (STORE, -4, 0, "multiple of 16 bytes"),
        (STORE, -8, 0, "negative"),
        (STORE, 0, -1, "negative"),
        (LOAD.replace("[%r1],", "[%r1+64],"), 0, 0, "128-byte aligned"),
    ],
)
def test_tensor_boxes_that_hardware_refuses(copy: str, x: int, y: int, message: str) -> None:
    """Measured on an H200, which raises an illegal instruction."""
    data = aligned_copy(np.zeros(4096, np.uint16))
    described = encode(data.ctypes.data, (64, 64), (128,), (64, 8), "u16", "none")
    body = TENSOR.format(copy=f"{copy} //!", x=x, y=y)
    text = kernel(body, ".param .align 64 .b8 m[128]", DYNAMIC)
    how = {"smem_bytes": 4096, "params": [described], "memory": [data]}
    refused(HardwareRefusal, message, text, **how)
