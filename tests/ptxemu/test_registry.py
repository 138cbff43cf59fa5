"""Opcode matching: the longest prefix wins, flags and types are all known, nothing is guessed."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance import hw_runner
from lab.silicon.conformance.ptx_program import FOLDER, POLICIES, Program, check, emulate, read
from ptxemu.codegen.blocks import require_target
from ptxemu.errors import UnsupportedPtx
from ptxemu.ops import registry
from ptxemu.syntax.tree import Instr
from tests.ptxemu import kernels


def instr(opcode: str) -> Instr:
    return Instr(opcode, (), None, 7, f"{opcode};")


@pytest.mark.parametrize(
    ("opcode", "name", "flags", "types"),
    [
        ("add.s32", "add", set(), ("s32",)),
        ("add.rn.ftz.f32", "add", {"rn", "ftz"}, ("f32",)),
        ("add.cc.u32", "add.cc", set(), ("u32",)),
        ("fma.rn.f32.bf16", "fma", {"rn"}, ("f32", "bf16")),
        ("cvt.rn.satfinite.e4m3x2.f32", "cvt", {"rn", "satfinite"}, ("e4m3x2", "f32")),
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group",
            "cp.async.bulk.tensor",
            {"2d", "global", "shared::cta", "tile", "bulk_group"},
            (),
        ),
        ("bar.sync", "bar.sync", set(), ()),
        ("mad.hi.sat.s32", "mad", {"hi", "sat"}, ("s32",)),
        ("prmt.b32.f4e", "prmt.b32.f4e", set(), ()),
    ],
)
def test_forms(opcode: str, name: str, flags: set[str], types: tuple[str, ...]) -> None:
    found = registry.match(instr(opcode))
    assert (found.form.name, set(found.flags), found.types) == (name, flags, types)


UNKNOWN = "frobnicate add add.wonder.s32 add.rn.s32 add.f128 mul.wide.f32 cvt.f32 bar"

NOT_OF_HALF = (
    "add.relu.f16 sub.rn.relu.f16x2 mul.relu.bf16 add.ftz.bf16 mul.sat.bf16x2 fma.rn.ftz.bf16 "
    "fma.rn.sat.relu.f16 neg.ftz.bf16 abs.ftz.bf16x2 min.ftz.bf16 ex2.approx.ftz.f16 "
    "tanh.approx.ftz.bf16"
)


@pytest.mark.parametrize(
    "opcode", [*UNKNOWN.split(), *NOT_OF_HALF.split(), "tcgen05.mma.cta_group::3.kind::f16"]
)
def test_what_is_not_known_is_refused_with_its_line(opcode: str) -> None:
    with pytest.raises(UnsupportedPtx, match="unsupported") as caught:
        registry.match(instr(opcode))
    assert (caught.value.line, caught.value.text) == (7, f"{opcode};")


def test_every_form_names_its_section_of_the_manual() -> None:
    forms = registry.supported()
    assert len(forms) > 100
    assert all(form.section for form in forms)


def test_forms_of_one_name_do_not_hide_each_other() -> None:
    """Given two forms of one name, neither accepts everything that the other does."""
    by_name: dict[str, list[registry.Form]] = {}
    for form in registry.supported():
        by_name.setdefault(form.name, []).append(form)
    for name, forms in by_name.items():
        for k, later in enumerate(forms):
            for earlier in forms[:k]:
                hidden = (
                    len(earlier.types) == len(later.types)
                    and later.flags <= earlier.flags
                    and all(a <= b for a, b in zip(later.types, earlier.types, strict=True))
                )
                assert not hidden, f"{name}: {later.types} is hidden"


# Every program of `ptx/`: under each policy in the emulator, and with --hw on a GPU.
#
# The format of a program is described in `ptx_program`.

FILES = sorted(FOLDER.glob("*.ptx"))


@cache
def _loaded(name: str) -> tuple[Program, ptxemu.Module]:
    program = read(FOLDER / f"{name}.ptx")
    return program, ptxemu.load(program.text)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_program(name: str, policy: str) -> None:
    program, module = _loaded(name)
    check(program, emulate(program, module, ptxemu.Options(policy=policy, seed=1, limit=20)))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("matrix_bytes", (".trans", ""), r"stmatrix of b8 without \.trans"),
        ("shifted_a_mma", ("[%r6], [%r14]", "[%r6], %rd10"), r"\.ashift with A in shared memory"),
        ("shifted_a_mma", ("a::discard", "a::use"), r"\.ashift with \.collector::a::fill or ::use"),
    ],
)
def test_what_no_assembler_takes(name: str, change: tuple[str, str], message: str) -> None:
    program = read(FOLDER / f"{name}.ptx")
    module = ptxemu.load(program.text.replace(*change))
    with pytest.raises(UnsupportedPtx, match=message):
        emulate(program, module, ptxemu.Options())


@pytest.mark.hw
@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_program_on_gpu(name: str) -> None:
    program, _ = _loaded(name)
    check(program, hw_runner.run(program))


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


# whole instructions, if operands decide
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
