"""Undefined data: each place that they must not reach, with and without a write before the read;
and harmless uses.
"""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import FOLDER, Program, aligned_copy, check, emulate, read
from ptxemu.machine import state, tensor_map
from ptxemu.watch import watched
from tests.ptxemu import kernels, random_programs

# the thread's number, the start of shared memory, the thread's word of it, and of `out`
PROLOGUE = """.local .align 16 .b8 depot[64];
ld.param.u64 %rd0, [out];
mov.u32 %r0, %tid.x;
mov.u32 %r1, dynamic;
shl.b32 %r2, %r0, 2;
add.u32 %r3, %r1, %r2;
mul.wide.u32 %rd1, %r0, 4;
add.u64 %rd1, %rd0, %rd1;
"""
GLOBAL = "global memory"
INIT = "<st.shared.b32 [%r3], -1;>"  # -1: the value of a word that was never written
READ = f"{INIT} ld.shared.b32 %r10, [%r3];"
STORE = "st.global.b32 [%rd1], %r11;"
ALL_BUT_7 = "setp.ne.u32 %p0, %r0, 7; @%p0 st.shared.b32 [%r3], 0;"
LOW_HALF = "setp.lt.u32 %p0, %r0, 16; @%p0 st.shared.b32 [%r3], 1; ld.shared.b32 %r10, [%r3];"
FIRST = "fence.proxy.async; bar.sync 0; setp.eq.u32 %p0, %r0, 0; @%p0"
BULK_DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
ROW = "shl.b32 %r4, %r0, 4; add.u32 %r4, %r4, %r1;"  # of a matrix: 16 bytes
LOAD_MATRIX = "bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r10}, [%r4];"
STORE_MATRIX = "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r4+1024], {%r10};"
STORE_BYTES = "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r4+1024], {%r10};"
BEHIND = "ld.shared.b32 %r11, [%r3+1024];"
MET = "barrier.cluster.arrive; barrier.cluster.wait;"
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%r1+4096], 128;"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+4096], 0; @!%p1 bra W;"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+4096], 32; bar.warp.sync -1;"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;"
STORE_TMEM = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r0};"
LOAD_TMEM = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r8]; tcgen05.wait::ld.sync.aligned;"
TENSOR_STORE = (  # 384 words are in the tensor, 128 after its end
    f"mov.u64 %rd3, map; cvta.param.u64 %rd3, %rd3; mov.u32 %r4, 0; {INIT} {FIRST}"
    " cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd3, {%r4, %r4}], [%r1];"
    f"{BULK_DONE}"
)

# PTX in which <> encloses the write of the data that are read; with the report if it is left out
SINKS = {
    "st.global": (GLOBAL, f"{READ} st.global.b32 [%rd1], %r10;"),
    "generic st": (GLOBAL, f"{READ} st.b32 [%rd1], %r10;"),
    "red.global": (GLOBAL, f"{READ} red.global.add.u32 [%rd1], %r10;"),
    "bulk store": (
        GLOBAL,
        f"{INIT} {FIRST} cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 128;"
        f"{BULK_DONE}",
    ),
    "bulk reduction": (
        GLOBAL,
        f"{INIT} {FIRST} cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"
        f" [%rd0], [%r1], 128;{BULK_DONE}",
    ),
    "tensor store": (GLOBAL, TENSOR_STORE),
    "address": ("an address", f"{READ} mad.lo.u32 %r11, %r10, 0, %r3; ld.shared.b32 %r12, [%r11];"),
    "branch": (
        "a branch",
        f"{READ} setp.ne.u32 %p0, %r10, -1; @%p0 bra D; st.global.b32 [%rd1], %r0; D:",
    ),
    "predicate": (
        "the predicate of an instruction",
        f"{READ} setp.ne.u32 %p0, %r10, 5; @%p0 st.global.b32 [%rd1], %r0;",
    ),
    "bar.sync": ("a barrier operand", f"{READ} add.u32 %r11, %r10, 1; bar.sync %r11;"),
    "vote": (
        "a barrier operand",
        f"{READ} setp.ne.u32 %p0, %r10, 5; barrier.cta.red.or.aligned.pred %p1, 0, 32, !%p0;"
        "vote.sync.any.pred %p1, %p1, -1; @%p1 bra D; st.global.b32 [%rd1], %r0; D:",
    ),
    "parity": (
        "a barrier operand",
        f"{READ} add.u32 %r11, %r10, 1; mbarrier.init.shared.b64 [%r1+4096], 1024;"
        "bar.warp.sync -1; mbarrier.arrive.shared.b64 _, [%r1+4096], 32;"
        "W: mbarrier.try_wait.parity.shared.b64 %p0, [%r1+4096], %r11; @!%p0 bra W;",
    ),
}
# the same for instructions that compute %r11, which is then stored
FLOWS = {
    "computed": f"{READ} mad.lo.u32 %r11, %r10, %r0, 3;",
    "in later blocks": f"{READ} mov.u32 %r11, 0; bar.sync 0; add.u32 %r11, %r11, %r10; bar.sync 0;",
    "round a loop": f"{READ} mov.u32 %r11, %r10; mov.u32 %r4, 0; L: add.u32 %r11, %r11, 1;"
    "add.u32 %r4, %r4, 1; setp.lt.u32 %p0, %r4, 3; @%p0 bra L;",
    "one lane": f"{ALL_BUT_7} {READ} mov.u32 %r11, %r10;",
    "chosen": f"{READ} setp.lt.u32 %p1, %r0, 16; selp.b32 %r11, %r10, %r0, %p1;",
    "choice": f"{READ} setp.eq.u32 %p1, %r10, 3; selp.b32 %r11, 1, 2, %p1;",
    "shuffled": f"{ALL_BUT_7} {READ} shfl.sync.idx.b32 %r11, %r10, 7, 31, -1;",
    "vote": f"{READ} setp.eq.u32 %p1, %r10, 3; vote.sync.any.pred %p2, %p1, -1;"
    "selp.b32 %r11, 1, 2, %p2;",
    "reduction": f"{READ} redux.sync.add.u32 %r11, %r10, -1;",
    "half of a pair": f"{READ} mov.b64 %rd2, {{%r0, %r10}}; add.rn.f32x2 %rd2, %rd2, %rd2;"
    "mov.b64 {%r12, %r11}, %rd2;",
    "through shared memory": f"{READ} st.shared.b32 [%r3+1024], %r10; {BEHIND}",
    "a byte": "add.u32 %r4, %r1, %r0; <st.shared.u8 [%r4+100], %r0;> ld.shared.u8 %r11, [%r4+100];",
    "atomic": f"{INIT} atom.shared.add.u32 %r11, [%r3], 1;",
    "reduced in shared memory": f"{INIT} red.shared.add.u32 [%r3], 1; ld.shared.b32 %r11, [%r3];",
    "local memory": "mov.u64 %rd4, depot;"
    "<st.local.b32 [%rd4+8], %r0;> ld.local.b32 %r11, [%rd4+8];",
    "matrices": f"{ROW} <st.shared.v4.b32 [%r4], {{%r0, %r0, %r0, %r0}};>"
    f"{LOAD_MATRIX} {STORE_MATRIX} bar.warp.sync -1; {BEHIND}",
    "a matrix of bytes": f"{ROW} {READ} {STORE_BYTES} bar.warp.sync -1; {BEHIND}",
    "st.async": "mbarrier.init.shared.b64 [%r1+4096], 1; setp.eq.u32 %p0, %r0, 0; bar.sync 0;"
    f"@%p0 {EXPECT} {READ}"
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r3+1024], %r10, [%r1+4096];"
    f"{WAIT} {BEHIND}",
    "copied to a peer": "mbarrier.init.shared.b64 [%r1+4096], 1;"
    f"fence.mbarrier_init.release.cluster; {INIT} fence.proxy.async; {MET}"
    "mov.u32 %r5, %cluster_ctarank; xor.b32 %r5, %r5, 1; setp.eq.u32 %p0, %r0, 0;"
    f"mapa.shared::cluster.u32 %r6, %r1, %r5; add.u32 %r7, %r6, 4096; @%p0 {EXPECT}"
    "@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    f" [%r6+1024], [%r1], 128, [%r7]; {WAIT} {MET} {BEHIND}",
    "tensor memory": f"{ALLOC} ld.shared.b32 %r8, [%r1+4096];"
    "<tcgen05.st.sync.aligned.32x32b.x2.b32 [%r8], {%r0, %r0};> tcgen05.wait::st.sync.aligned;"
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r10, %r11}, [%r8]; tcgen05.wait::ld.sync.aligned;"
    f"{DEALLOC}",
    # the contents of an earlier allocation are gone
    "tensor memory again": f"{ALLOC} ld.shared.b32 %r8, [%r1+4096]; {STORE_TMEM}"
    f"tcgen05.wait::st.sync.aligned; {DEALLOC} {ALLOC}"
    f"<{STORE_TMEM}> tcgen05.wait::st.sync.aligned; {LOAD_TMEM} {DEALLOC}",
}
REPORTED = SINKS | {name: (GLOBAL, f"{body} {STORE}") for name, body in FLOWS.items()}
# Uses of undefined data that have no visible effect.
HARMLESS = {
    "never used": "ld.shared.b32 %r10, [%r3];",
    "dropped lanes": f"{LOW_HALF} add.u32 %r11, %r10, 1; @%p0 st.global.b32 [%rd1], %r11;",
    "not chosen": f"{LOW_HALF} selp.b32 %r11, %r10, 5, %p0; {STORE}",
    "masked": f"ld.shared.b32 %r10, [%r3]; mov.u32 %r4, 0; and.b32 %r11, %r10, %r4; {STORE}",
    "false whatever it is": "ld.shared.b32 %r10, [%r3]; setp.eq.u32 %p0, %r10, 3;"
    "setp.gt.u32 %p1, %r0, 99; and.pred %p0, %p0, %p1; @%p0 st.global.b32 [%rd1], %r0;",
    "another lane's": f"{ALL_BUT_7} ld.shared.b32 %r10, [%r3];"
    f"shfl.sync.idx.b32 %r11, %r10, 3, 31, -1; {STORE}",
    "outvoted": f"{ALL_BUT_7} ld.shared.b32 %r10, [%r3]; setp.eq.u32 %p1, %r10, 0;"
    f"vote.sync.any.pred %p2, %p1, -1; selp.b32 %r11, 1, 2, %p2; {STORE}",
    "the other half": "ld.shared.b32 %r10, [%r3]; mov.b64 %rd2, {%r0, %r10};"
    f"add.rn.f32x2 %rd2, %rd2, %rd2; mov.b64 {{%r11, %r12}}, %rd2; {STORE}",
    "overwritten": f"ld.shared.b32 %r11, [%r3]; mov.u32 %r11, %r0; {STORE}",
    "overwritten later": "setp.gt.u32 %p0, %r0, 99; ld.shared.b32 %r11, [%r3];"
    f"@%p0 st.global.b32 [%rd1], %r11; mov.u32 %r11, %r0; bar.sync 0; {STORE}",
    "a column of a matrix": f"{ROW} and.b32 %r5, %r0, 3;"
    "setp.lt.u32 %p0, %r0, 6; @%p0 st.shared.v4.b32 [%r4], {%r0, %r0, %r0, %r0};"
    f"{LOAD_MATRIX} setp.lt.u32 %p1, %r5, 3; @%p1 st.global.b32 [%rd1], %r10;",
    "overwritten in memory": "ld.shared.b32 %r10, [%r3]; st.shared.b32 [%r3+1024], %r10;"
    f"st.shared.b32 [%r3+1024], %r0; {BEHIND} {STORE}",
    "a column stored": f"{ROW} and.b32 %r5, %r0, 3;"
    "setp.lt.u32 %p0, %r0, 28; @%p0 st.shared.b32 [%r3], 1; ld.shared.b32 %r10, [%r3];"
    f"{STORE_MATRIX} bar.warp.sync -1; {BEHIND} setp.lt.u32 %p1, %r5, 3; @%p1 {STORE}",
    "a byte row stored": f"{ROW} and.b32 %r5, %r0, 3;"
    "setp.lt.u32 %p0, %r5, 3; @%p0 st.shared.b32 [%r3], 1; ld.shared.b32 %r10, [%r3];"
    f"{STORE_BYTES} bar.warp.sync -1; {BEHIND} setp.lt.u32 %p1, %r0, 24; @%p1 {STORE}",
    "a byte column stored": f"{ROW} and.b32 %r5, %r0, 1; {LOW_HALF}"
    f"{STORE_BYTES} bar.warp.sync -1; {BEHIND} setp.eq.u32 %p1, %r5, 0; @%p1 {STORE}",
    "behind the end of a tensor": TENSOR_STORE,
}
LAUNCHES = {
    "copied to a peer": {"grid": (2,), "cluster": (2,)},
    "tensor store": {"block": (384,)},
    "behind the end of a tensor": {"block": (384,)},
}


def lines(body: str, *, initialised: bool = True) -> str:
    """Return a body without the marks <>, or without the marked instructions."""
    return re.sub("<(.*?)>", r"\1" if initialised else "", body).replace(";", ";\n")


def program(body: str) -> str:
    params = ".param .u64 out, .param .align 64 .b8 map[128]"
    return kernels.kernel(PROLOGUE + body, params, kernels.DYNAMIC)


def launch(body: str, **how: object) -> tuple[ptxemu.LaunchReport, np.ndarray]:
    """Return the report, and 1024 words at `out`; `map` is a tensor in them, 24 rows of 16 words,
    with a box of 32 rows."""
    out = aligned_copy(np.zeros(1024, np.uint32))
    encoded = tensor_map.encode(out.ctypes.data, (16, 24), (64,), (16, 32), "u32", "none")
    how |= {"params": [*kernels.pointers(out), bytes(encoded)], "memory": [out]}
    return kernels.launch(program(body), smem_bytes=8192, check=True, **how), out


def found(report: ptxemu.LaunchReport) -> list[ptxemu.Finding]:
    return [finding for finding in report.findings if finding.check == "uninitialised"]


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("name", REPORTED)
def test_only_undefined_data_is_reported(name: str, policy: str) -> None:
    sink, body = REPORTED[name]
    how = LAUNCHES.get(name, {}) | {"policy": policy}
    for initialised in (True, False):
        report, _ = launch(lines(body, initialised=initialised), **how)
        messages = [finding.message.split(" gets ")[0] for finding in found(report)]
        assert messages == ([] if initialised else [sink])


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_show_is_not_reported(name: str) -> None:
    report, _ = launch(lines(HARMLESS[name]), **LAUNCHES.get(name, {}))
    assert not found(report)


def test_a_finding_names_the_read_and_the_use() -> None:
    body = "ld.shared.b32 %r10, [%r3];\nadd.u32 %r11, %r10, %r0;\nst.global.b32 [%rd1], %r11;"
    (finding,) = found(launch(body)[0])
    read, use = finding.accesses
    assert (read.role, read.what, read.space) == (
        "ld.shared.b32", "read", "shared memory of cta(0,0,0)"
    )  # fmt: skip
    assert (read.first, read.last) == (1024, 1024 + 127)
    assert (use.role, use.line) == ("st.global.b32", finding.line)
    assert use.line == read.line + 2
    assert "warp 0" in read.agent
    assert finding.missing
    assert finding.rule == "ld"


def test_steps_before_the_read_happen_once() -> None:
    """The block that reads undefined data continues where it stopped."""
    body = (
        "atom.global.add.u32 %r5, [%rd0+2048], 1; ld.shared.b32 %r10, [%r3];"
        "red.global.add.u32 [%rd0+2052], 1; sub.u32 %r11, %r10, %r10; add.u32 %r11, %r11, %r5;"
        f"{STORE}"
    )
    report, out = launch(body.replace(";", ";\n"))
    assert len(found(report)) == 1
    assert out[512] == out[513] == 32
    assert (out[:32] == np.arange(32)).all()


# -- random programs ------------------------------------------------------------------------

_SHARED = ".shared .align 4 .b8 words[256];\n"


def _random_program(seed: int) -> str:
    """A register starts as a shared word that only some lanes have written, and one register is
    stored."""
    rng = random.Random(seed)
    program = random_programs.Generator(rng)
    text = random_programs.ptx_of(program, ("lane",) * random_programs.REGISTERS)
    begin = f"mul.lo.u32 %r{random_programs.REGISTERS - 1}, %t1, {random_programs.REGISTERS};"
    read = f"""
    mov.u32 %t0, words; mad.lo.u32 %t0, %t1, 4, %t0; setp.gt.u32 %p0, %t1, {rng.randrange(32)};
    @%p0 st.shared.b32 [%t0], %t1;
    ld.shared.b32 %r{rng.randrange(random_programs.REGISTERS)}, [%t0];"""
    kept = f"%r{rng.randrange(random_programs.REGISTERS)};"
    lines = text.replace(begin, begin + read).replace(".visible", f"{_SHARED}.visible").split("\n")
    return "\n".join(x for x in lines if "st.global" not in x or x.endswith(kept))


def test_what_is_not_reported_does_not_depend_on_undefined_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory before the launch is poisoned differently."""
    memory = np.arange(random_programs.MEMORY_WORDS, dtype=np.uint32)
    silent = differing = 0
    for seed in range(24):
        module = ptxemu.load(_random_program(seed))
        outputs, reported = [], []
        for poison in (0x00, 0x3F, 0xFF):
            monkeypatch.setattr(state, "POISON_BYTE", poison)
            outputs.append(np.zeros((32, random_programs.REGISTERS), np.uint32))
            report = kernels.launch(module, memory, outputs[-1], check=True)
            reported.append(bool(found(report)))
        differs = any((out != outputs[0]).any() for out in outputs)
        assert not differs or all(reported), seed
        silent += not any(reported)
        differing += differs
    assert silent >= 4
    assert differing >= 4


def checked(program: Program, text: str) -> tuple[list[ptxemu.Finding], dict[str, np.ndarray]]:
    """Return findings of undefined data in the program with another text, and its outputs."""
    with watched(check=True) as reports:
        outputs = emulate(program, ptxemu.load(text), ptxemu.Options())
    return found(reports.launches[0]), outputs


_FILL_A = "    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3+0];\n"  # the first row of %tid
_FIRST_STORE = "    st.global.v4.b32 [%rd1+0]"
_LAST_STORE = "    tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n    @%p1 exit;"
MMAS = {
    "right": ([], []),
    "a part of B": ([("    st.shared.v4.b32 [%r5+8576]", "    //")], [GLOBAL]),
    "rows of A": ([(_FILL_A, f"    @!%p2 bra FILLED;\n{_FILL_A}")], [GLOBAL]),
    "rows of A that are dropped": (
        [
            (_FILL_A, f"    @!%p2 bra FILLED;\n{_FILL_A}"),
            (_FIRST_STORE, f"    @!%p2 bra STORED;\n{_FIRST_STORE}"),
            (_LAST_STORE, f"STORED:\n{_LAST_STORE}"),
        ],
        [],
    ),
    "added to nothing": ([("setp.ne.u32 %p3", "setp.eq.u32 %p3")], [GLOBAL]),
    "enabled by what": (
        [
            (
                "    setp.ne.u32 %p3, %r0, %r0;",
                "ld.shared.b32 %r4, [%r9+32]; setp.ne.u32 %p3, %r4, -1;",
            )
        ],
        ["an address, descriptor or flag of an MMA"],
    ),
}


@pytest.mark.parametrize("name", MMAS)
def test_products_of_undefined_data(name: str) -> None:
    mma_program = read(FOLDER / "tcgen05_mma.ptx")
    changes, expected = MMAS[name]
    text = mma_program.text
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    findings, _ = checked(mma_program, text)
    assert [f.message.split(" gets ")[0] for f in findings] == expected


_TENSOR, _SHARED_MEMORY = "tensor memory of cta({},0,0)", "shared memory of cta({},0,0)"
# (program, removed or replaced text) -> source of the undefined data in each of its CTAs: memory,
# its columns or bytes
SCALED: dict[tuple[str, str, str], tuple[str, range]] = {
    ("block_scaled_mma", "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r14]", "//"): (
        _TENSOR, range(32, 36),
    ),
    ("block_scaled_mma", "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r15]", "//"): (
        _TENSOR, range(36, 37),
    ),
    ("block_scaled_mma", "st.shared.v4.b32 [%r4+10240]", "//"): (
        _SHARED_MEMORY, range(1024 + 10240, 1024 + 12288),
    ),
    ("block_scaled_pair", "tcgen05.cp.cta_group::2.32x128b.warpx4", "//"): (_TENSOR, range(32, 34)),
    ("block_scaled_pair", "tcgen05.cp.cta_group::2.64x128b.warpx2::01_23", "//"): (
        _TENSOR, range(36, 37),
    ),
    ("narrow_a_mma", "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64", "//"): (
        _TENSOR, range(32, 40),
    ),
    ("narrow_a_mma", "st.shared.v4.b32 [%r3+48]", "//"): (
        _SHARED_MEMORY, range(1024, 1024 + 8192),
    ),
}  # fmt: skip
_WHOLE = {mma_program: (mma_program, "ret;", "ret;") for mma_program, *_ in SCALED}


@pytest.mark.parametrize(("name", "line", "instead"), [*_WHOLE.values(), *SCALED])
def test_undefined_scale_factors_and_copies(name: str, line: str, instead: str) -> None:
    mma_program = read(FOLDER / f"{name}.ptx")
    assert line in mma_program.text
    text = mma_program.text.replace(line, instead + line if instead == "//" else instead)
    findings, _ = checked(mma_program, text)
    assert bool(findings) == (instead == "//")
    for finding in findings:
        source, (space, extent) = finding.accesses[0], SCALED[name, line, instead]
        assert source.space in (space.format(0), space.format(1))
        assert source.first in extent
        assert source.last in extent


@pytest.mark.parametrize(("stored", "shows"), [(2, True), (3, False), (4, False)])
def test_padding_of_operands_may_be_undefined(stored: int, shows: bool) -> None:
    """A has two defined words in 16 bytes of shared memory for e2m1, and three for e3m2."""
    mma_program = read(FOLDER / "narrow_a_mma.ptx")
    text = mma_program.text.replace("[%r6], [%r14], %rd11", "[%r6], %rd10, %rd11")
    text = "\n".join(line for line in text.split("\n") if "tcgen05.cp" not in line)
    for offset in range(0, 64, 16):
        whole = f"st.shared.v4.b32 [%r3+{offset}], {{%r10, %r11, %r12, %r13}};"
        assert whole in text
        words = [f"st.shared.b32 [%r3+{offset + 4 * k}], %r{10 + k};" for k in range(stored)]
        text = text.replace(whole, " ".join(words))
    findings, outputs = checked(mma_program, text)
    assert bool(findings) == shows
    if not shows:
        check(mma_program, outputs)


@pytest.mark.parametrize(("thread", "shows"), [(63, False), (64, True), (65, True), (66, False)])
def test_undefined_rows_of_a_that_an_mma_moves(thread: int, shows: bool) -> None:
    """Row 65 is undefined, and after the first MMA row 64, too; each thread stores a row of D."""
    mma_program = read(FOLDER / "shifted_a_mma.ptx")
    first, store = "    setp.eq.u32 %p0, %r0, 0;\n", "    st.shared.v4.b32 [%r3+16]"
    assert first in mma_program.text
    assert store in mma_program.text
    which = f"    setp.ne.u32 %p5, %r0, 32;\n    setp.eq.u32 %p6, %r0, {thread};\n"
    text = mma_program.text.replace(first, first + which).replace(store, f"    @%p5{store}")
    text = text.replace("    st.global", "    @%p6 st.global")
    assert bool(checked(mma_program, text)[0]) == shows
