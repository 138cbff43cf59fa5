"""What a `.target` does not have is refused by name, and what it has is not; textures, too."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu.codegen.targets import require_target
from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.tree import Instr
from tests.ptxemu import kernels

TARGETS = "80 89 90 90a 100 100a 103a 120 120a".split()
# opcodes, and the targets of those above for which ptxas assembles them
HAVE = {
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": TARGETS,
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32": TARGETS[1:],
    "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64": TARGETS[2:],
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64": TARGETS,
    "mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.e2m1.e3m2.f32": ["120a"],
    "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": TARGETS,
    "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8": ["100a", "103a", "120a"],
    "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64": ["100a", "103a", "120a"],
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16": TARGETS,
    "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8": ["100a", "103a", "120a"],
    "stmatrix.sync.aligned.m8n8.x1.shared.b16": TARGETS[2:],
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes":
        TARGETS[4:],
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group": ["100a", "103a"],
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes": TARGETS[2:],
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2":
        ["100a", "103a"],
    "cp.async.ca.shared.global": TARGETS,
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128":
        TARGETS[4:],
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32": ["100a", "103a"],
    "tcgen05.mma.sp.cta_group::2.kind::f16": ["100a", "103a"],
    "tcgen05.mma.sp.cta_group::1.kind::i8": ["100a"],
    "wgmma.fence.sync.aligned": ["90a"],
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16": ["90a"],
    "setmaxnreg.dec.sync.aligned.u32": ["90a", "100a", "103a", "120a"],
    "tensormap.replace.tile.global_address.global.b1024.b64": ["90a", "100a", "103a", "120a"],
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
    "cvt.rz.ue8m0x2.f32": ["100a", "103a", "120a"],
    "cvt.rn.satfinite.e2m3x2.f32": ["100a", "103a", "120a"],
    "barrier.cluster.arrive.aligned": TARGETS[2:],
    "mbarrier.try_wait.shared.b64": TARGETS[2:],
    "mbarrier.test_wait.shared.b64": TARGETS,
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32": TARGETS[2:],
    "griddepcontrol.wait": TARGETS[2:],
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
