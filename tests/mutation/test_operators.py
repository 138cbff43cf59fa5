"""Mutation operators and equivalence rules on a few lines of PTX: what they change, and where they
change nothing.
"""

from __future__ import annotations

import pytest

import ptxemu
from ptxemu.mutation.catalogue import BAR, CLASSES, mutants
from ptxemu.mutation.operators import remove
from ptxemu.mutation.text import Text, spread, statement
from tests.ptxemu import kernels

HEAD = (
    "\n"
    + kernels.HEAD
    + """\
.visible .entry kernel()
{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<9>;
	.shared .align 8 .b8 bar[64];
"""
)
WAIT = """
	{
	.reg .pred P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 10000000;
	@P1 bra.uni DONE;
	bra.uni LAB_WAIT;
	DONE:
	}
"""
CAST = (
    "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%r1], [%rd1,{%r2}], [%r3], %rs1;"
)
ACCUMULATOR = "{%r4,%r5,%r6,%r7}"
MULTIPLY = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {ACCUMULATOR}, "
    "%rd1, %rd2, own, 1, 1, 0, 0;"
)
COMMIT = "wgmma.commit_group.sync.aligned;"


def module(body: str) -> str:
    return f"{HEAD}{body}\n\tret;\n}}\n"


def changed(body: str, kind: str) -> list[str]:
    """Changed lines in each mutant of the class, without comments."""
    (chosen,) = (k for k in CLASSES if k.name == kind)
    found = mutants(Text(module(body)), (chosen,))
    for mutant in found:
        assert mutant.ptx.count("\n") == mutant.text.ptx.count("\n")
        ptxemu.load(mutant.ptx)
    return [" | ".join(m.change.lines[line] for line in sorted(m.change.lines)) for m in found]


def equivalent(body: str, kind: str) -> list[bool]:
    """Whether each mutant of the class is equivalent."""
    (chosen,) = (k for k in CLASSES if k.name == kind)
    return [bool(mutant.equivalent) for mutant in mutants(Text(module(body)), (chosen,))]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("remove mbarrier wait", WAIT, ["setp.eq.u32 P1, 0, 0;"]),
        ("remove named barrier", "@%p1 bar.sync 1, 64;", [""]),
        ("remove warp barrier", "bar.warp.sync -1;", [""]),
        ("remove cluster wait", "barrier.cluster.wait;", [""]),
        ("remove arrival", "mbarrier.arrive.shared.b64 %rd1, [%r1], %r2;", [""]),
        ("remove arrival", "mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], %r2;", []),
        ("remove arrival with bytes", "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 8;", [""]),
        ("weaken arrival: relaxed", "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];",
         ["mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r1];"]),
        ("weaken wait: relaxed", "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;",
         ["mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p1, [%r1], 0;"]),
        ("weaken wait: relaxed", "mbarrier.try_wait.parity.relaxed.cta.b64 %p1, [%rd1], 0;", []),
        ("weaken scope: cluster to cta", "fence.acq_rel.cluster;", ["fence.acq_rel.cta;"]),
        ("weaken scope: cluster to cta", "fence.mbarrier_init.release.cluster;", []),
        ("weaken proxy fence: other space", "fence.proxy.async.shared::cta;",
         ["fence.proxy.async.global;"]),
        ("weaken bulk wait_group: one more", "cp.async.bulk.wait_group.read 1;",
         ["cp.async.bulk.wait_group.read 2;"]),
        ("change parity", WAIT,
         ["{ .reg .b32 mutant; xor.b32 mutant, %r2, 1; "
          "mbarrier.try_wait.parity.shared.b64 P1, [%r1], mutant, 10000000; }"]),
        ("change init count -1", "mov.b32 %r2, 1;\nmbarrier.init.shared.b64 [%r1], %r2;", []),
        ("change expected bytes -16",
         "mov.b32 %r2, 0;\nmbarrier.arrive.expect_tx.shared.b64 _, [%r1], %r2;", []),
        ("change barrier threads -32", "bar.sync 1, 32;", []),
        ("change barrier id", "bar.sync 1, 64;", []),
        ("change barrier id", "bar.sync 0;\nbar.sync 0;", []),
        ("change arrival count +1", "mbarrier.arrive.shared.b64 _, [%r1], 1;",
         ["mbarrier.arrive.shared.b64 _, [%r1], 2;"]),
        ("change arrival count +1", "mbarrier.arrive.shared.b64 _, [%r1];", []),
        ("weaken named barrier: arrival alone", "bar.sync 1, 64;", ["bar.arrive 1, 64;"]),
        ("weaken named barrier: arrival alone", "bar.sync 1;", []),
        ("change init count +1", "mbarrier.init.shared.b64 [%r1], %r2;",
         ["{ .reg .b32 mutant; add.s32 mutant, %r2, 1; mbarrier.init.shared.b64 [%r1], mutant; }"]),
        ("change alloc columns",
         "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;",
         ["tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;"]),
        ("repeat arrival", "mbarrier.arrive.shared.b64 _, [%r1];",
         ["mbarrier.arrive.shared.b64 _, [%r1]; mbarrier.arrive.shared.b64 _, [%r1];"]),
        ("misdirect wait", "mbarrier.try_wait.parity.shared.b64 %p1, [%r1+8], 0;",
         ["mbarrier.try_wait.parity.shared.b64 %p1, [%r1+0], 0;"]),
        ("misdirect arrival", "mbarrier.arrive.shared.b64 %rd1, [%r1], 2;",
         ["mbarrier.arrive.shared.b64 %rd1, [%r1+8], 2;"]),
        ("misdirect arrival back", "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];",
         ["@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1+-8];"]),
        ("remove wait::st", "// tcgen05.wait::st.sync.aligned;", []),
        ("remove wgmma fence", "wgmma.fence.sync.aligned;", [""]),
        ("weaken wgmma wait: one more", "wgmma.wait_group.sync.aligned 0;",
         ["wgmma.wait_group.sync.aligned 1;"]),
        ("remove barrier vote", "bar.red.or.pred %p1, 1, 64, %p2;", ["mov.pred %p1, %p2;"]),
        ("remove barrier vote", "@%p3 barrier.cta.red.and.aligned.pred %p1, 1, !%p2;",
         ["@%p3 not.pred %p1, %p2;"]),
        ("remove barrier vote", "bar.red.popc.u32 %r1, 1, 64, !%p2;", ["selp.u32 %r1, 0, 1, %p2;"]),
        ("weaken barrier vote: arrival alone", "bar.red.or.pred %p1, %r1, 64, %p2;",
         ["bar.arrive %r1, 64; mov.pred %p1, %p2;"]),
        ("weaken barrier vote: own vote", "bar.red.or.pred %p1, 1, 64, %p2;",
         ["bar.sync 1, 64; mov.pred %p1, %p2;"]),
        ("weaken barrier vote: own vote", "bar.red.or.pred %p1, 1, %p2;", []),
        ("change vote threads -32", "bar.red.or.pred %p1, 1, 64, %p2;",
         ["bar.red.or.pred %p1, 1, 32, %p2;"]),
        ("change vote threads +32", "bar.red.or.pred %p1, 1, %p2;", []),
        ("change vote: and", "bar.red.or.pred %p1, 1, 64, %p2;",
         ["bar.red.and.pred %p1, 1, 64, %p2;"]),
        ("change barrier id", "bar.sync 1, 64;\nbar.red.or.pred %p1, 1, 64, %p2;",
         ["bar.sync 2, 64;", "bar.red.or.pred %p1, 2, 64, %p2;"]),
        ("change barrier id", "bar.red.or.pred %p1, 1, %p2;\nbar.red.or.pred %p1, 1, %p2;", []),
        ("change peer", "mapa.shared::cluster.u32 %r1, %r2, 0;",
         ["mapa.shared::cluster.u32 %r1, %r2, 1;"]),
        ("change multicast mask to 1", CAST,
         ["{ .reg .b16 mutant; and.b16 mutant, %rs1, 1; "
          + CAST.replace("%rs1", "mutant") + " }"]),
        ("change multicast mask to 2", CAST.replace(".multicast::cluster", ""), []),
        ("move wgmma behind commit_group", f"{{ .reg .pred own;\n{MULTIPLY}\n}}\n{COMMIT}",
         [f"{COMMIT} {MULTIPLY} | "]),
        ("move st.shared behind proxy fence",
         "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};\nfence.proxy.async.shared::cta;",
         [" | fence.proxy.async.shared::cta; "
          "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};"]),
        ("remove cp.async commit_group", "cp.async.commit_group;", [""]),
        ("remove tensormap fence",
         "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;\nfence.proxy.async;", [""]),
        ("weaken memory order: relaxed", "atom.acq_rel.gpu.global.add.u32 %r1, [%rd1], 1;",
         ["atom.relaxed.gpu.global.add.u32 %r1, [%rd1], 1;"]),
        ("weaken memory order: relaxed", "ld.relaxed.gpu.global.u32 %r1, [%rd1];", []),
        ("misdirect remote store",
         "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3];",
         ["st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3+8];"]),
        ("value lt to le", "setp.lt.s32 %p1, %r1, 5;\nsetp.ltu.f32 %p1, %r1, %r2;",
         ["setp.le.s32 %p1, %r1, 5;"]),
        ("value number +1", "add.s32 %r1, %r2, 5;\nadd.s32 %r1, %r2, %r3;",
         ["add.s32 %r1, %r2, 6;"]),
        ("value shift -1", "shl.b32 %r1, %r2, 0;", []),
        ("value selection", "selp.b32 %r1, %r2, %r3, %p1;", ["selp.b32 %r1, %r3, %r2, %p1;"]),
        ("value rounding", "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r2;", []),
    ],
)  # fmt: skip
def test_what_becomes_of_an_instruction(kind, before, after):
    assert changed(before, kind) == after


def test_barrier_id_changes_where_others_use_it():
    body = "bar.sync %r3, 64;\nbar.sync %r3, 64;\nbar.sync %r4, 64;"
    assert len(changed(body, "change barrier id")) == 2


STORE = "st.shared.b32 [%r1], %r2;"
ARRIVE = "mbarrier.arrive.shared.b64 %rd1, [%r3], %r4;"


@pytest.mark.parametrize(
    ("body", "moves"),
    [
        (f"{STORE}\nadd.s32 %r5, %r5, 1;\n{ARRIVE}", True),
        (f"{STORE}\nadd.s32 %r1, %r1, 4;\n{ARRIVE}", False),  # its address changes
        (f"{STORE}\n{ARRIVE.replace('%r3', '%r5')}\n{ARRIVE}", True),  # only the first of them
        (f"@%p1 bra L;\n{STORE}\nL:\n{ARRIVE}", False),  # not for every lane
        (f"{STORE}\n@%p1 bra L;\nadd.s32 %r5, %r5, 1;\nL:\n{ARRIVE}", True),
        (f"L:\n{STORE}\n@%p1 bra L;\n{ARRIVE}", False),  # not as often
        (f"{STORE}{WAIT}{ARRIVE}", True),
    ],
)
def test_an_access_moves_behind_its_release(body, moves):
    found = changed(body, "move st.shared behind arrival")
    assert len(found) == moves
    if moves:
        assert found[0].startswith(" | ")
        assert found[0].endswith(f"; {STORE}")


@pytest.mark.parametrize("elected", [True, False])
def test_an_mma_moves_behind_its_commit_where_the_same_lane_issues_both(elected):
    choose = "elect.sync %r9|%p1, -1;" if elected else "setp.eq.s32 %p1, %r7, 0;"
    mma = "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p3;"
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];"
    body = "".join(
        f"{choose}\nnot.pred %p2, %p1;\n@%p2 bra L{k};\n{what}\nL{k}:\n"
        for k, what in enumerate((mma, commit))
    )
    assert len(changed(body, "move mma behind commit")) == elected


LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r9];\ntcgen05.wait::ld.sync.aligned;"


@pytest.mark.parametrize("after", ["add.f32 %r5, %r1, %r2;", "st.shared.b32 [%r9], %r1;", ""])
def test_no_use_of_registers_stands_for_a_wait(after):
    """ptxas keeps no order between a use and the arrival; the checker knows only stores."""
    assert equivalent(f"{LOAD}\n{after}\n{ARRIVE}", "remove wait::ld") == [False]


@pytest.mark.parametrize(
    ("before", "weakened"),
    [
        ("", False),
        (STORE, True),
        (f"{STORE}\nbar.sync 0;", False),
        (f"@%p1 bra L;\n{STORE}\nL:", True),
        (f"L:\n@%p1 bra M;\n{STORE}\nbra L;\nM:", True),
    ],
)
def test_an_arrival_with_bytes_is_relaxed_where_its_thread_wrote(before, weakened):
    body = f"{before}\nmbarrier.arrive.expect_tx.shared.b64 _, [%r3], 16;"
    assert len(changed(body, "weaken arrival with bytes: relaxed")) == weakened


@pytest.mark.parametrize(
    ("between", "moves"),
    [
        ("", True),
        ("add.s32 %r5, %r5, 1;", True),
        ("add.s32 %r2, %r2, 1;", False),  # its parity changes
    ],
)
def test_a_wait_moves_behind_the_access_that_it_guards(between, moves):
    found = changed(f"{WAIT}{between}\n{STORE}", "move wait behind access")
    assert len(found) == moves
    for change in found:
        assert change.startswith(f"setp.eq.u32 P1, 0, 0; | {STORE} {{ .reg .pred late; WAIT: ")


def test_of_two_waits_the_last_one_guards():
    assert len(changed(f"{WAIT}{WAIT}{STORE}", "move wait behind access")) == 1


FENCE = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize(
    ("after", "same"),
    [
        (f"{FENCE}\n{ARRIVE}", True),
        (f"{ARRIVE}\n{FENCE}", False),
        (f"@%p1 bra L;\n{FENCE}\nL:\n{ARRIVE}", False),  # not on every path
        (f"L:\n@%p1 bra M;\n{STORE}\nbra L;\nM:\n{FENCE}", True),
        (f"fence.proxy.async.global;\n{ARRIVE}", False),
        (f"@%p1 {FENCE}\n{ARRIVE}", False),
        ("", False),  # the end of the thread publishes, too
    ],
)
@pytest.mark.parametrize("kind", ["remove proxy fence", "weaken proxy fence: other space"])
def test_a_proxy_fence_before_another(after, same, kind):
    assert equivalent(f"{FENCE}\n{after}", kind)[0] == same


TEST = "mbarrier.try_wait.parity.shared.b64 %p1, [%r1+8], %r2;"


@pytest.mark.parametrize(
    ("between", "same"),
    [
        ("", True),
        ("add.s32 %r5, %r5, 8;", True),
        ("add.s32 %r2, %r2, 1;", False),  # another parity
        ("add.s32 %r1, %r1, 8;", False),  # another mbarrier
        ("@%p2 add.s32 %r1, %r1, 8;", False),
        ("L:", False),  # reached from elsewhere without the first wait
    ],
)
@pytest.mark.parametrize("kind", ["remove mbarrier wait", "weaken wait: relaxed"])
def test_a_wait_behind_the_same_wait(between, same, kind):
    body = f"@%p3 bra L;\n{TEST}\n{between}\nadd.s32 %r9, %r1, 8;\n"
    body += TEST.replace("[%r1+8]", "[%r9]") + ("" if between == "L:" else "\nL:")
    assert equivalent(body, kind) == [False, same]


@pytest.mark.parametrize(("second", "same"), [("%p3", True), ("%p4", False), ("!%p3", False)])
def test_a_wait_behind_the_same_wait_under_the_same_condition(second, same):
    body = f"@%p3 bra L;\n{TEST}\nL:\nadd.s32 %r5, %r5, 8;\n@{second} bra M;\n{TEST}\nM:"
    assert equivalent(body, "remove mbarrier wait")[-1] == same


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (STORE, STORE, True),
        ("ld.shared.b32 %r7, [%r1];", STORE, False),
        (STORE, "ld.shared.b32 %r7, [%r1];", False),
        (STORE, f"{TEST}\nld.shared.b32 %r7, [%r1];", True),
    ],
)
def test_a_warp_barrier_between_writes(before, after, same):
    body = f"{before}\nbar.warp.sync -1;\n{after}"
    assert equivalent(body, "remove warp barrier") == [same]


WARPGROUP_FENCE = "wgmma.fence.sync.aligned;"
OWN = MULTIPLY.replace("own", "%p1")


@pytest.mark.parametrize(
    ("between", "same"),
    [
        ("", True),
        (OWN, True),  # by the tensor core
        ("add.f32 %r8, %r8, %r9;", True),
        ("add.f32 %r4, %r8, %r9;", False),
        ("add.f32 %r8, %r4, %r9;", False),
        ("@%p2 bra L;\nadd.f32 %r8, %r4, %r9;\nL:", False),
        ("L:", False),  # reached from elsewhere without the first fence
    ],
)
def test_a_warpgroup_fence_behind_another(between, same):
    leave = "@%p3 bra L;\n" if between == "L:" else ""
    body = f"{leave}{WARPGROUP_FENCE}\n{between}\n{WARPGROUP_FENCE}\n{OWN}"
    assert equivalent(body, "remove wgmma fence")[-1] is same


def test_a_proxy_fence_before_a_product_is_needed():
    body = f"{FENCE}\n{OWN}\n{FENCE}\n{ARRIVE}"
    assert not equivalent(body, "remove proxy fence")[0]


def test_instructions_of_one_line_are_mutated_each_by_itself():
    inline = "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [%r1], 0; "
    inline += "@!done bra WAIT; bar.sync 0; } // inline"
    text = Text(module(f"{inline}\nmov.b64 {{%r1, %r2}}, %rd1; // one; of them"))
    assert text.ptx.splitlines()[-4:-2] == ["\t}", "mov.b64 {%r1, %r2}, %rd1; // one; of them"]
    assert spread(text.ptx) == text.ptx
    ((change,),) = [list(remove(BAR)(text))]
    assert text.changed(change.lines).count("bar.sync 0;") == 1  # as a comment
    assert len(changed(inline, "change parity")) == 1


def test_a_statement_keeps_its_operands():
    line = "@!%p1 tcgen05.mma.cta_group::1 [%r1+8], %rd1, {%r2, %r3}, !%p2; // and a comment"
    found = statement(line)
    assert (found.guard, found.opcode) == ("@!%p1 ", "tcgen05.mma.cta_group::1")
    assert found.operands == ("[%r1+8]", "%rd1", "{%r2,%r3}", "!%p2")


def test_names_of_classes_are_unique():
    names = [kind.name for kind in CLASSES]
    assert len(names) == len(set(names))
