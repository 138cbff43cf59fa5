"""What the emulator refuses: each error has its kind, its PTX line, and the line's text."""

from __future__ import annotations

import time

import numpy as np
import pytest

import ptxemu
from ptxemu import (
    Deadlock,
    HardwareRefusal,
    LimitExceeded,
    Options,
    OutOfBounds,
    PtxEmuError,
    PtxSyntaxError,
    UnsupportedPtx,
)
from ptxemu.machine.tensor_map import encode
from workbench.conformance.ptx_program import POLICIES, aligned_copy

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = """.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<64>;
.reg .b64 %rd<16>;
.reg .f32 %f<8>;
.reg .f64 %fd<4>;
"""


def kernel(body: str, params: str = "", before: str = "") -> str:
    """A module with one kernel around `body`."""
    return f"{HEAD}{before}.visible .entry test({params})\n{{\n{REGISTERS}{body}\nret;\n}}\n"


def launch(text: str, policy: str = "round-robin", **how: object) -> object:
    how.setdefault("grid", (1,))
    how.setdefault("block", (32,))
    limit = how.pop("limit", 20)
    return ptxemu.load(text).launch(options=Options(policy=policy, limit=limit), **how)


def refused(
    kind: type[PtxEmuError], message: str, text: str, where: str, **how: object
) -> PtxEmuError:
    """The launch (or the load) of `text` raises `kind`, naming the line that contains `where`."""
    with pytest.raises(kind, match=message) as caught:
        launch(text, **how)
    found = caught.value
    lines = text.split("\n")
    expected = next(k for k, line in enumerate(lines, 1) if where in line)
    assert found.line == expected, f"line {found.line} `{found.text}`, not {expected}"
    assert where in found.text
    assert where in str(found)
    assert f"line {expected}" in str(found)
    return found


# -- the text -------------------------------------------------------------------------------

SYNTAX = {
    "character": ("#", "unexpected character", "add.s32 %r1, %r2 # 1;"),
    "register": ("undeclared register", "undeclared register", "add.s32 %r1, %r2, %q7;"),
    "operand": ("expected an operand", "expected an operand", "add.s32 %r1, %r2, );"),
    "semicolon": ("expected ';'", "expected ';'", "add.s32 %r1 %r2;"),
    "label": ("unknown label 'NOWHERE'", "unknown label", "bra NOWHERE;"),
    "directive": ("expected an instruction", "expected an instruction", ".wonder 5;"),
}


@pytest.mark.parametrize("case", SYNTAX)
def test_syntax_errors_name_the_line(case: str) -> None:
    _, message, line = SYNTAX[case]
    refused(PtxSyntaxError, message, kernel(f"mov.u32 %r2, 1;\n{line}"), line)


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
        "brx.idx %r1, list;",
    ],
)
def test_unsupported_only_when_executed(line: str) -> None:
    skipped = kernel(f"mov.u32 %r1, 0;\nbra OVER;\n{line}\nOVER:")
    launch(skipped)
    refused(
        UnsupportedPtx,
        "unsupported|unknown|not supported",
        kernel(f"mov.u32 %r1, 0;\nmov.u64 %rd1, 0;\n{line}"),
        line,
    )


def test_what_comes_before_an_unsupported_instruction_happens() -> None:
    out = np.zeros(4, np.uint32)
    body = "ld.param.u64 %rd1, [d];\nmov.u32 %r1, 5;\nst.global.b32 [%rd1], %r1;\nfrobnicate;"
    with pytest.raises(UnsupportedPtx, match="frobnicate"):
        launch(kernel(body, ".param .u64 d"), params=[out.ctypes.data.to_bytes(8, "little")])
    assert out[0] == 5


# -- memory ---------------------------------------------------------------------------------

POINTER = "ld.param.u64 %rd1, [d];\nmov.u32 %r0, %tid.x;\nmad.wide.u32 %rd2, %r0, 4, %rd1;\n"
_ARRAY = np.zeros(64, np.uint32)


def _pointer(address: int) -> dict:
    return {"params": [address.to_bytes(8, "little")]}


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
    refused(
        OutOfBounds,
        "may touch|no state space",
        kernel(POINTER + line, ".param .u64 d"),
        line,
        memory=memory,
        **_pointer(address),
    )


def test_global_bounds_are_exact() -> None:
    text = kernel(POINTER + "st.global.b32 [%rd2+128], %r0;", ".param .u64 d")
    launch(text, memory=[_ARRAY], **_pointer(_ARRAY.ctypes.data))
    refused(
        OutOfBounds,
        "may touch",
        text,
        "st.global.b32",
        memory=[(_ARRAY.ctypes.data, 252)],
        **_pointer(_ARRAY.ctypes.data),
    )


def test_lanes_that_are_masked_off_touch_nothing() -> None:
    body = POINTER + (
        "setp.lt.u32 %p0, %r0, 64;\n@!%p0 ld.global.b32 %r1, [%rd2];\n@%p0 bra OVER;\n"
        "st.global.b32 [%rd2], %r0;\nOVER:"
    )
    launch(kernel(body, ".param .u64 d"), memory=[], **_pointer(0x40))


def test_read_only_memory() -> None:
    constant = np.arange(64, dtype=np.uint32)
    constant.setflags(write=False)
    text = kernel(
        POINTER + "ld.global.b32 %r1, [%rd2];\nst.global.b32 [%rd2], %r1;", ".param .u64 d"
    )
    refused(
        OutOfBounds,
        "write",
        text,
        "st.global.b32",
        memory=[constant],
        **_pointer(constant.ctypes.data),
    )


SHARED = ".shared .align 16 .b8 fixed[64];\n"
BEYOND = {
    "uniform": "mov.u32 %r1, fixed;\nld.shared.b32 %r2, [%r1+64];",
    "lanes": (
        "mov.u32 %r1, fixed;\nmov.u32 %r2, %tid.x;\nmad.lo.u32 %r1, %r2, 4, %r1;\n"
        "st.shared.b32 [%r1], %r2;"
    ),
    "vector": "mov.u32 %r1, fixed;\nld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1+0x100000];",
    "rank": "mov.u32 %r1, fixed;\nadd.u32 %r1, %r1, 0x3000000;\nld.shared::cluster.b32 %r2, [%r1];",
    "atomic": "mov.u32 %r1, fixed;\natom.shared.add.u32 %r2, [%r1+64], 1;",
    "local": (
        "mov.u32 %r3, %tid.x;\nadd.u32 %r3, %r3, 40;\nmul.wide.u32 %rd1, %r3, 4;\n"
        "st.local.b32 [%rd1], %r3;"
    ),
}


@pytest.mark.parametrize("case", BEYOND)
def test_shared_and_local_bounds(case: str) -> None:
    body = ".local .align 4 .b8 stack[64];\n" + BEYOND[case]
    refused(
        OutOfBounds,
        "shared|out of bounds",
        kernel(body, before=SHARED),
        BEYOND[case].split("\n")[-1],
    )


MISALIGNED = {
    "uniform": "ld.global.b32 %r1, [%rd1+2];",
    "lanes": "ld.global.b64 %rd3, [%rd2];",
    "vector": "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+8];",
    "store": "st.global.v2.b32 [%rd2], {%r0, %r0};",
    "half": "st.global.b16 [%rd1+1], %h1;",
    "shared": "st.shared.b64 [fixed+4], %rd1;",
    "atomic": "atom.shared.add.u32 %r1, [fixed+2], 1;",
}


@pytest.mark.parametrize("case", MISALIGNED)
def test_misaligned_accesses(case: str) -> None:
    text = kernel(POINTER + MISALIGNED[case], ".param .u64 d", SHARED)
    refused(HardwareRefusal, "misaligned", text, MISALIGNED[case], **_pointer(_ARRAY.ctypes.data))


# -- units ----------------------------------------------------------------------------------

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [fixed], {};\n"
UNITS = {
    "allocation size": (ALLOC.format(48), "48 columns", "tcgen05.alloc"),
    "allocation too large": (ALLOC.format(1024), "1024 columns", "tcgen05.alloc"),
    "after relinquish": (
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n" + ALLOC.format(32),
        "relinquish",
        "tcgen05.alloc",
    ),
    "not allocated": (
        (
            "mov.u32 %r1, 0;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];\n"
            "tcgen05.wait::ld.sync.aligned;"
        ),
        "alloc",
        "tcgen05.ld",
    ),
    "beyond the allocation": (
        ALLOC.format(32)
        + "ld.shared.b32 %r1, [fixed];\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r1+32], {%r2};\n"
        "tcgen05.wait::st.sync.aligned;",
        "alloc",
        "tcgen05.st",
    ),
    "another warp's lanes": (
        ALLOC.format(32) + "ld.shared.b32 %r1, [fixed];\nadd.u32 %r1, %r1, 0x200000;\n"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];\ntcgen05.wait::ld.sync.aligned;",
        "lane",
        "tcgen05.ld",
    ),
    "freed twice": (
        ALLOC.format(32)
        + "ld.shared.b32 %r1, [fixed];\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;\n"
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32; //again",
        "dealloc",
        "//again",
    ),
    "no mbarrier": ("mbarrier.arrive.shared.b64 _, [fixed];", "no mbarrier", "mbarrier.arrive"),
    "mbarrier count": ("mbarrier.init.shared.b64 [fixed], 0;", "count", "mbarrier.init"),
    "mbarrier alignment": ("mbarrier.init.shared.b64 [fixed+4], 1;", "aligned", "mbarrier.init"),
    "barrier number": ("bar.sync 16;", "barrier 16", "bar.sync"),
    "barrier count": ("bar.sync 1, 40;", "multiple of 32", "bar.sync"),
    "bulk size": (
        "mbarrier.init.shared.b64 [fixed], 32;\nmov.u64 %rd1, 0x100000;\n"
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes "
        "[fixed+16], [%rd1], 8, [fixed];",
        "multiples of 16",
        "cp.async.bulk",
    ),
    "trap": ("mov.u32 %r1, 1;\nsetp.eq.u32 %p0, %r1, 1;\n@%p0 trap;", "trap", "trap"),
    "register count": ("setmaxnreg.inc.sync.aligned.u32 100;", "multiple of 8", "setmaxnreg"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", UNITS)
def test_units_refuse(case: str, policy: str) -> None:
    body, message, where = UNITS[case]
    refused(HardwareRefusal, message, kernel(body, before=SHARED), where, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_asynchronous_errors_name_the_instruction_that_issued(policy: str) -> None:
    body = """mbarrier.init.shared.b64 [fixed], 32;
mov.u64 %rd1, 0x100000;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [fixed+16], [%rd1], 32, [fixed];
mbarrier.arrive.expect_tx.shared.b64 _, [fixed], 32;
W:
mbarrier.try_wait.parity.shared.b64 %p0, [fixed], 0;
@!%p0 bra W;"""
    refused(OutOfBounds, "may touch", kernel(body, before=SHARED), "cp.async.bulk", policy=policy)


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


def test_options_are_checked() -> None:
    for wrong in ({"policy": "fast"}, {"resident": 0}, {"limit": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Options(**wrong)


# -- hangs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_deadlock_names_warp_line_barrier_and_what_is_missing(policy: str) -> None:
    body = """mbarrier.init.shared.b64 [fixed], 40;
mov.u32 %r1, 0;
mbarrier.arrive.expect_tx.shared.b64 _, [fixed], 16;
bra.uni W;
W:
mbarrier.try_wait.parity.shared.b64 %p0, [fixed], %r1;
@!%p0 bra W;"""
    with pytest.raises(Deadlock) as caught:
        launch(kernel(body, before=SHARED), policy=policy)
    text = str(caught.value)
    line = (
        kernel(body, before=SHARED)
        .split("\n")
        .index("mbarrier.try_wait.parity.shared.b64 %p0, [fixed], %r1;")
        + 1
    )
    for part in (
        "warp 0 of cta(0,0,0)",
        f"line {line}",
        "mbarrier.try_wait",
        "parity 0",
        "0x400",
        "8 of 40 arrivals",
        "512 bytes",
    ):
        assert part in text


@pytest.mark.parametrize("policy", POLICIES)
def test_deadlock_at_a_named_barrier_counts_arrivals(policy: str) -> None:
    body = (
        "mov.u32 %r0, %tid.x;\nsetp.ge.u32 %p0, %r0, 64;\n@%p0 bra W;\n"
        "bar.sync 3, 128;\nbra DONE;\nW:\nbar.sync 4, 64;\nDONE:"
    )
    with pytest.raises(Deadlock, match=r"barrier 3 of cta\(0,0,0\): 64 of 128 threads") as caught:
        launch(kernel(body), block=(128,), policy=policy)
    assert "warp 1" in str(caught.value)


def test_divergent_aligned_barrier_hangs() -> None:
    body = (
        "mov.u32 %r0, %tid.x;\nsetp.ge.u32 %p0, %r0, 16;\n@%p0 bra W;\nbar.sync 0;\n"
        "bra DONE;\nW:\nbar.sync 1;\nDONE:"
    )
    with pytest.raises(Deadlock, match="waits for the other lanes") as caught:
        launch(kernel(body))
    assert "0x0000ffff" in str(caught.value)
    assert "0xffff0000" in str(caught.value)


def test_a_cta_that_exits_leaves_the_cluster_barrier() -> None:
    body = (
        "mov.u32 %r0, %cluster_ctarank;\nsetp.eq.u32 %p0, %r0, 1;\n@%p0 exit;\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    )
    launch(kernel(body), grid=(2,), cluster=(2,))


@pytest.mark.parametrize("policy", POLICIES)
def test_polling_for_ever_is_a_deadlock(policy: str) -> None:
    body = (
        "mbarrier.init.shared.b64 [fixed], 64;\nW:\n"
        "mbarrier.test_wait.parity.shared.b64 %p0, [fixed], 0;\n@!%p0 bra W;"
    )
    with pytest.raises(Deadlock, match="poll without end"):
        launch(kernel(body, before=SHARED), policy=policy)


ENDLESS = kernel("mov.u32 %r1, 0;\nL:\nadd.u32 %r1, %r1, 1;\nbra L;")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_endless_loop_meets_the_limit(policy: str) -> None:
    began = time.perf_counter()
    with pytest.raises(LimitExceeded, match="limit"):
        launch(ENDLESS, policy=policy, limit=0.2)
    assert time.perf_counter() - began < 5


def test_a_long_loop_is_not_a_hang() -> None:
    """More turns than the poll detector looks at, and nothing but arithmetic in them."""
    out = np.zeros(4, np.uint32)
    body = (
        "ld.param.u64 %rd1, [d];\nmov.u32 %r1, 0;\nL:\nadd.u32 %r1, %r1, 1;\n"
        "setp.lt.u32 %p0, %r1, 300000;\n@%p0 bra L;\nst.global.b32 [%rd1], %r1;"
    )
    launch(kernel(body, ".param .u64 d"), policy="random", **_pointer(out.ctypes.data))
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
    """As measured on an H200, which raises an illegal instruction."""
    data = aligned_copy(np.zeros(4096, np.uint16))
    described = encode(data.ctypes.data, (64, 64), (128,), (64, 8), "u16", "none")
    text = kernel(
        TENSOR.format(copy=copy, x=x, y=y),
        ".param .align 64 .b8 m[128]",
        ".extern .shared .align 1024 .b8 dynamic[];\n",
    )
    refused(
        HardwareRefusal, message, text, copy, smem_bytes=4096, params=[described], memory=[data]
    )
