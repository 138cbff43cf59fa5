"""What a `.target` does not have is refused by name, and what it has is not; textures, too."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu.codegen.blocks import require_target
from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.tree import Instr
from tests.ptxemu import kernels

TARGETS = "80 89 90 90a 100 100a 103a 110a 120 120a".split()
CORE = ["100a", "103a", "110a"]  # with tensor memory
OWN = [*CORE, "120a"]
# opcodes, and the targets of those above for which ptxas assembles them
HAVE = {
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": TARGETS,
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32": TARGETS[1:],
    "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64": TARGETS[2:],
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64": TARGETS,
    "mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.e2m1.e3m2.f32": ["120a"],
    "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": TARGETS,
    "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8": OWN,
    "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64": OWN,
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16": TARGETS,
    "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8": OWN,
    "stmatrix.sync.aligned.m8n8.x1.shared.b16": TARGETS[2:],
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes":
        TARGETS[4:],
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group": CORE,
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes": TARGETS[2:],
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2":
        CORE,
    "cp.async.ca.shared.global": TARGETS,
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128":
        TARGETS[4:],
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32": CORE,
    "tcgen05.mma.sp.cta_group::2.kind::f16": CORE,
    "tcgen05.mma.sp.cta_group::1.kind::i8": ["100a", "110a"],
    "wgmma.fence.sync.aligned": ["90a"],
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16": ["90a"],
    "setmaxnreg.dec.sync.aligned.u32": ["90a", *OWN],
    "tensormap.replace.tile.global_address.global.b1024.b64": ["90a", *OWN],
    "redux.sync.min.f32": ["100a", "103a"],
    "redux.sync.min.s32": TARGETS,
    "add.rn.f32x2": TARGETS[4:],
    "add.f32x2": TARGETS[4:],
    "fma.rn.f32.bf16": TARGETS[4:],
    "cvt.rn.satfinite.tf32.f32": TARGETS[4:],
    "max.relu.s16x2": TARGETS[2:],
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32": TARGETS[2:],
    "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.f32.e4m3.e4m3.f32": TARGETS[1:],
    "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.f16.e4m3.e4m3.f16": ["120a"],
    "ld.global.v8.b32": TARGETS[4:],
    "ld.global.v4.b32": TARGETS,
    "cvt.rn.satfinite.e4m3x2.f32": TARGETS[1:],
    "cvt.rz.ue8m0x2.f32": OWN,
    "cvt.rn.satfinite.e2m3x2.f32": OWN,
    "barrier.cluster.arrive.aligned": TARGETS[2:],
    "mbarrier.try_wait.shared.b64": TARGETS[2:],
    "mbarrier.test_wait.shared.b64": TARGETS,
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32": TARGETS[2:],
    "griddepcontrol.wait": TARGETS[2:],
    "redux.sync.max.abs.NaN.f32": ["100a", "103a"],
    "fence.acq_rel.cluster": TARGETS[2:],
    "fence.acq_rel.gpu": TARGETS,
    "fence.release.gpu": TARGETS[2:],
    "fence.mbarrier_init.release.cluster": TARGETS[2:],
    "fence.proxy.tensormap::generic.acquire.gpu": TARGETS[2:],
    "fence.proxy.alias": TARGETS,
    "getctarank.shared::cluster.u32": TARGETS[2:],
    "ld.shared::cluster.b32": TARGETS[2:],
    "ld.acquire.cluster.global.b32": TARGETS[2:],
    "ld.shared::cta.b32": TARGETS,
    "red.shared::cluster.add.u32": TARGETS[2:],
    "red.global.add.v4.f32": TARGETS[2:],
    "red.global.add.noftz.bf16x2": TARGETS[2:],
    "red.global.add.noftz.f16x2": TARGETS,
    "mbarrier.arrive.expect_tx.shared.b64": TARGETS[2:],
    "mbarrier.complete_tx.relaxed.cta.shared.b64": TARGETS[2:],
    "mbarrier.expect_tx.relaxed.cta.shared.b64": TARGETS[2:],
    "mbarrier.arrive.relaxed.cta.shared::cta.b64": TARGETS[2:],
    "mbarrier.arrive.release.cta.shared::cta.b64": TARGETS,
    "mbarrier.arrive.release.cluster.shared::cluster.b64": TARGETS[2:],
    "prefetch.tensormap": TARGETS[2:],
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned":
        TARGETS[2:],
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
    ".multicast::cluster::all.b128": OWN,
    "add.rn.bf16x2": TARGETS[2:],
    "sub.bf16": TARGETS[2:],
    "mul.bf16x2": TARGETS[2:],
    "fma.rn.bf16x2": TARGETS,
    "max.NaN.bf16x2": TARGETS,
    "ex2.approx.ftz.bf16x2": TARGETS[2:],
    "ex2.approx.f16x2": TARGETS,
    "tanh.approx.bf16": TARGETS[2:],
    "setp.eq.bf16x2": TARGETS[2:],
    "set.ne.bf16.s32": TARGETS[2:],
    "setp.eq.f16x2": TARGETS,
    "cvt.rn.bf16x2.f32": TARGETS,
    "cvt.f32.bf16": TARGETS,
    "cvt.rn.bf16.s32": TARGETS[2:],
    "cvt.f64.bf16": TARGETS[2:],
    "cvt.rn.relu.tf32.f32": TARGETS[2:],
    "cvt.rna.tf32.f32": TARGETS,
    "max.xorsign.abs.f32": TARGETS[1:],
    "max.relu.s32": TARGETS[2:],
}  # fmt: skip


@pytest.mark.parametrize("opcode", HAVE)
def test_each_target_has_what_ptxas_assembles_for_it(opcode: str) -> None:
    instr = Instr(opcode, (), None, 7, opcode)
    for target in TARGETS:
        if target in HAVE[opcode]:
            require_target(instr, f"sm_{target}")
            continue
        with pytest.raises(UnsupportedPtx, match="needs sm_") as caught:
            require_target(instr, f"sm_{target}")
        assert caught.value.line == 7
        assert opcode in str(caught.value)


# whole instructions, where operands decide
OPERANDS = {
    "mbarrier.arrive.shared.b64 %rd0, [%r0], %r1;": TARGETS[2:],
    "mbarrier.arrive.shared.b64 %rd0, [%r0];": TARGETS,
    "mbarrier.arrive.noComplete.shared.b64 %rd0, [%r0], 1;": TARGETS,
    "mbarrier.arrive_drop.shared.b64 %rd0, [%r0], 2;": TARGETS[2:],
    "mov.u32 %r0, %cluster_ctarank;": TARGETS[2:],
    "mov.u32 %r0, %nclusterid.x;": TARGETS[2:],
    "mov.pred %p0, %is_explicit_cluster;": TARGETS[2:],
    "mov.u32 %r0, %total_smem_size;": TARGETS,
    "mov.u32 %r0, %nctaid.x;": TARGETS,
    "max.f32 %f0, %f1, %f2, %f3;": TARGETS[4:],
    "max.f32 %f0, %f1, %f2;": TARGETS,
}


@pytest.mark.parametrize("text", OPERANDS)
def test_operands_may_need_a_target(text: str) -> None:
    instr = ptxemu.load(kernels.kernel(text)).entry(None).body[0]
    for target in TARGETS:
        if target in OPERANDS[text]:
            require_target(instr, f"sm_{target}")
            continue
        with pytest.raises(UnsupportedPtx, match=rf"needs sm_\d+, .*sm_{target}") as caught:
            require_target(instr, f"sm_{target}")
        assert instr.opcode in str(caught.value)


@pytest.mark.parametrize("target", ["sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_120f"])
def test_modules_of_every_target_run(target: str) -> None:
    out = np.zeros(32, np.uint32)
    body = f"{kernels.POINTER} st.global.b32 [%rd2], %r0;"
    text = kernels.kernel(body, ".param .u64 d").replace("sm_100a", target)
    kernels.launch(text, out)
    assert (out == np.arange(32)).all()


def test_an_instruction_is_refused_when_it_would_be_executed() -> None:
    body = f"{kernels.POINTER} setp.eq.u32 %p0, %r0, %s;\n@%p0 setmaxnreg.dec.sync.aligned.u32 40;"
    for lane, refused in (("0", True), ("77", False)):
        text = kernels.kernel(body.replace("%s", lane), ".param .u64 d")
        text = text.replace("sm_100a", "sm_89")
        if not refused:
            kernels.launch(text, np.zeros(32, np.uint32))
            continue
        with pytest.raises(UnsupportedPtx, match="sm_89") as caught:
            kernels.launch(text, np.zeros(32, np.uint32))
        assert "setmaxnreg" in text.splitlines()[caught.value.line - 1]


@pytest.mark.parametrize("kind", ["texref", "samplerref", "surfref"])
def test_textures_are_refused_by_name(kind: str) -> None:
    text = kernels.kernel("", "", f".global .{kind} picture;\n")
    with pytest.raises(UnsupportedPtx, match="textures") as caught:
        ptxemu.load(text)
    assert kind in text.splitlines()[caught.value.line - 1]


@pytest.mark.parametrize("instruction", [
    "tex.1d.v4.f32.s32 {%f0, %f1, %f2, %f3}, [%rd0, {%r0}];",
    "tld4.r.2d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [%rd0, {%f4, %f5}];",
    "suld.b.1d.b32.trap {%r1}, [%rd0, {%r0}];",
    "sust.b.1d.b32.trap [%rd0, {%r0}], {%r1};",
    "txq.width.b32 %r1, [%rd0];",
])  # fmt: skip
def test_instructions_of_textures_are_refused_by_name(instruction: str) -> None:
    with pytest.raises(UnsupportedPtx, match=instruction.split(".")[0]) as caught:
        kernels.launch(kernels.kernel(f"mov.u32 %r0, 0; mov.u64 %rd0, 0;\n{instruction}"))
    assert caught.value.line
