"""Forms that ptxemu takes and sm_90a does not have: an instruction of each, for the driver to
refuse.

What refuses them is asked for its reason, so the list cannot claim too much: a form that a driver
takes is reported as one that should be run.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.conformance.elementwise import HEADER, VERSION
from workbench.conformance.patterns import expand

_REGISTERS = """.reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %w<16>;
.reg .b128 %q<2>; .reg .f32 %f<4>;
"""
_TWO = "{%r0, %r1}"
_FOUR = "{%r0, %r1, %r2, %r3}"
_EIGHT = "{%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}"
_WIDE = "{%w0, %w1, %w2, %w3}"
_GROUPS = "cta_group::{1|2}"
_MMA = "[%r0], %w0, %w1, %r1, {%r2, %r3, %r4, %r5}, %p0"
_PAIR_MMA = "[%r0], %w0, %w1, %r1, {%r2, %r3, %r4, %r5, %r6, %r7, %r8, %r9}, %p0"


def _tensor_core() -> list[str]:
    out = list(expand(f"tcgen05.alloc.{_GROUPS}.sync.aligned.shared::cta.b32 [%r0], 32"))
    out += expand(f"tcgen05.dealloc.{_GROUPS}.sync.aligned.b32 %r0, 32")
    out += expand(f"tcgen05.relinquish_alloc_permit.{_GROUPS}.sync.aligned")
    out += expand("tcgen05.wait::{ld|st}.sync.aligned")
    out += expand("tcgen05.fence::{before|after}_thread_sync")
    ends = "mbarrier::arrive::one.shared::cluster"
    out += expand(f"tcgen05.commit.{_GROUPS}.{ends}.b64 [%r0]")
    out += expand(f"tcgen05.commit.{_GROUPS}.{ends}.multicast::cluster.b64 [%r0], %h0")
    for shape in ("32x32b", "16x64b", "16x128b", "16x256b"):
        first = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}[shape]
        count = 1
        while count * first <= 128:
            listed = ", ".join(f"%r{k % 16}" for k in range(count * first))
            registers = f"{{{listed}}}"
            name = f"{shape}.x{count}"
            out.append(f"tcgen05.ld.sync.aligned.{name}.b32 {registers}, [%r0]")
            out.append(f"tcgen05.st.sync.aligned.{name}.b32 [%r0], {registers}")
            count *= 2
    out.append("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r0}, [%r1], 2")
    out.append("tcgen05.st.sync.aligned.16x32bx2.x1.b32 [%r1], 2, {%r0}")
    out.append("tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r0}, [%r1]")
    out.append("tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%r1], {%r0}")
    for kind in ("f16", "tf32", "f8f6f4", "i8"):
        out.append(f"tcgen05.mma.cta_group::1.kind::{kind} {_MMA}")
        out.append(f"tcgen05.mma.cta_group::2.kind::{kind} {_PAIR_MMA}")
    uses = expand("tcgen05.mma.cta_group::1.kind::f16.collector::a::{fill|use|lastuse|discard}")
    return [*out, *(f"{opcode} {_MMA}" for opcode in uses), *_block_scaled()]


def _block_scaled() -> list[str]:
    """MMAs with scale factors, and the copies that bring them."""
    forms = (
        "mxf8f6f4.block_scale{|.scale_vec::1X|.block32}",
        "mxf4.block_scale{|.scale_vec::2X|.block32}",
        "mxf4nvf4.block_scale.{scale_vec::2X|scale_vec::4X|block16|block32}",
    )
    operands = "[%r0], %w0, %w1, %r1, [%r2], [%r3], %p0"
    out = []
    for form in forms:
        out += expand(f"tcgen05.mma.{_GROUPS}.kind::{form} {operands}")
    shapes = "{128x256b|4x256b|128x128b|64x128b.warpx2::02_13|64x128b.warpx2::01_23|32x128b.warpx4}"
    return [*out, *expand(f"tcgen05.cp.{_GROUPS}.{shapes} [%r0], %w0")]


def _launch_control() -> list[str]:
    name = "clusterlaunchcontrol"
    ends = "mbarrier::complete_tx::bytes"
    return [
        f"{name}.try_cancel.async.shared::cta.{ends}.b128 [%r0], [%r1]",
        f"{name}.try_cancel.async.shared::cta.{ends}.multicast::cluster::all.b128 [%r0], [%r1]",
        f"{name}.query_cancel.is_canceled.pred.b128 %p0, %q0",
        f"{name}.query_cancel.get_first_ctaid.v4.b32.b128 {_FOUR}, %q0",
        *(
            f"{name}.query_cancel.get_first_ctaid::{axis}.b32.b128 %r0, %q0"
            for axis in ("x", "y", "z")
        ),
    ]


def _no_ptx() -> list[str]:
    """What a form's loose list of flags would take and no assembler does."""
    address = "[%w8]"
    out = list(expand("{add|sub|mul}.rn.relu.{f16|bf16} %h0, %h1, %h2"))
    out += expand("{add|sub|mul}.rn.relu.{f16x2|bf16x2} %r0, %r1, %r2")
    for flag in ("L1", "L2", "L2::128B", "L2::evict_last", "const", "local", "param", "tensormap"):
        out.append(f"applypriority.{flag}.L2::evict_normal {address}, 128")
        out.append(f"prefetchu.L1.{flag} {address}")
    out += [f"prefetchu.{flag} {address}" for flag in ("L2", "L2::evict_normal", "global.L1")]
    for flag in ("L1", "L2::128B", "L2::evict_last", "L2::evict_normal", "const", "local"):
        out.append(f"discard.{flag}.L2 {address}, 128")
    out += [f"discard.{flag}.L2 {address}, 128" for flag in ("param", "tensormap")]
    out.append(f"prefetch.global.L2::128B {address}")
    out += expand("{bar|bar.cta}.sync.aligned 0")
    out += expand("{bar|bar.cta}.arrive.aligned 0, 64")
    out += expand("{bar|bar.cta}.red.popc.aligned.u32 %r0, 0, %p0")
    bulk = "mbarrier::complete_tx::bytes"
    for hint in ("L2::64B", "L2::128B", "L2::256B"):
        out.append(f"cp.async.bulk.global.shared::cta.bulk_group.{hint} {address}, [%r0], 16")
        out.append(f"cp.async.bulk.prefetch.L2.global.{hint} {address}, 16")
        for space in ("cta", "cluster"):
            opcode = f"cp.async.bulk.shared::{space}.global.{bulk}.{hint}"
            out.append(f"{opcode} [%r0], {address}, 16, [%r1]")
        out += [f"st.global.{hint}.b32 {address}, %r0", f"ldu.global.{hint}.b32 %r0, {address}"]
    opcode = f"cp.async.bulk.shared::cta.global.{bulk}.multicast::cluster"
    out.append(f"{opcode} [%r0], {address}, 16, [%r1], %h0")
    out += expand("cvt.rn.bf16.{s8|u8} %h0, %h1")
    out += expand("cvt.rzi.{s8|u8}.bf16 %h0, %h1")
    out += ["cvt.rna.f32.s32 %f0, %r0", "cvt.rna.tf32.f64 %r0, %w0"]
    out += expand("cvt.rna.tf32.{f16|bf16} %r0, %h0")
    out += expand("dp4a.{lo|hi}.s32.s32 %r0, %r1, %r2, %r3")
    out += ["exit.uni", "trap.uni", "fence.gl", "fence.sync_restrict::shared::cta::cluster.cluster"]
    out += expand("fence.mbarrier_init.release.{cta|gpu|sys}")
    out += expand("fence.proxy.async{::global|.async.global|.async.shared::cta}")
    out += expand("fence.proxy.async.async.shared::cluster")
    out += expand("fence.proxy.async::shared::{cta|cluster}")
    out += expand("fence.proxy.async.{global|shared::cta}.{async.global|async::global}")
    return out


def _no_memory_access() -> list[str]:
    """The same of fences, loads and stores."""
    address, out = "[%w8]", []
    flags = "acq_rel acquire cluster gpu release sc"
    out += [f"membar.{flag}.gl" for flag in flags.split()]
    out += expand("membar.sync_restrict::shared::{cta|cluster|cta::cluster}.gl")
    out += expand("ld.{release.gpu.global|global.wb|global.wt|global.unified}.b32 %r0, [%w8]")
    spaces = "const local param param::entry shared shared::cta shared::cluster"
    out += [f"ldu.{space}.b32 %r0, {address}" for space in spaces.split()]
    orders = "ca cg cs cv lu wb wt nc unified weak volatile"
    out += [f"ldu.global.{how}.b32 %r0, {address}" for how in orders.split()]
    out += expand("ldu.{relaxed|acquire|release|mmio}.{cta|cluster|gpu|sys}.global.b32 %r0, [%w8]")
    for hint in ("evict_first", "evict_last", "evict_normal", "evict_unchanged", "no_allocate"):
        out.append(f"ldu.global.L1::{hint}.b32 %r0, {address}")
        out.append(f"ldu.global.L2::{hint}.b32 %r0, {address}")
    out += [
        f"ldu.global.L2::cache_hint.b32 %r0, {address}, %w1",
        f"ldu.global.v8.b32 {_EIGHT}, [%w8]",
    ]
    out += expand("st.{acquire.gpu.global|global.ca|global.cv|global.lu|global.nc}.b32 [%w8], %r0")
    out += ["st.const.b32 [%w8], %r0", "st.global.unified.b32 [%w8], %r0"]
    return out


def _no_barrier() -> list[str]:
    """The same of mbarriers."""
    shared, out = "[%r0]", []
    for name in ("arrive", "arrive.expect_tx", "arrive_drop", "arrive_drop.expect_tx"):
        for how in ("acquire.cta", "release.gpu", "release.sys"):
            out.append(f"mbarrier.{name}.{how}.shared.b64 %w0, {shared}, 1")
    for name in ("expect_tx", "complete_tx"):
        for how in ("acquire.cta", "release.cta", "relaxed.gpu", "relaxed.sys"):
            out.append(f"mbarrier.{name}.{how}.shared.b64 {shared}, 1")
    out += [
        "mbarrier.init.shared::cluster.b64 [%r0], 1",
        "mbarrier.inval.shared::cluster.b64 [%r0]",
    ]
    for name in ("test_wait", "try_wait"):
        for how in ("acquire.gpu.shared", "acquire.sys.shared", "release.cta.shared"):
            out.append(f"mbarrier.{name}.parity.{how}.b64 %p0, {shared}, 0")
        out.append(f"mbarrier.{name}.parity.shared::cluster.b64 %p0, {shared}, 0")
    return out


def _no_others() -> list[str]:
    out = list(expand("mov.{f16|bf16} %h0, %h1"))
    out += expand("mov.{f16x2|bf16x2} %r0, %r1")
    out += expand("red.{acquire|acq_rel}.gpu.global.add.u32 [%w8], %r0")
    out += ["red.global.exch.b32 [%w8], %r0", "red.global.cas.b32 [%w8], %r0, %r1"]
    out += ["red.global.cas.b16 [%w8], %h0, %h1"]
    out += expand("set.eq.f32.{f16|bf16} %f0, %h0, %h1")
    out += expand("setp.{lo|ls|hi|hs}.{f16x2|bf16x2} %p0|%p1, %r0, %r1")
    out += expand("tanh.approx.ftz.{f16|bf16} %h0, %h1")
    out += expand("tanh.approx.ftz.{f16x2|bf16x2} %r0, %r1")
    copy = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.acquire.gpu.sync.aligned"
    return [*out, "tanh.approx.ftz.f32 %f0, %f1", f"{copy} [%w8], [%r0], 128"]


def instructions() -> list[str]:
    """The instructions, each with operands."""
    out = _tensor_core() + _launch_control() + _no_ptx()
    out += _no_memory_access() + _no_barrier() + _no_others()
    out += expand("redux.sync.{min|max}{|.abs}{|.NaN}.f32 %f0, %f1, 0xffffffff")
    for t in ("b32", "u32", "s32", "f32"):
        out.append(f"ld.global.v8.{t} {_EIGHT}, [%w8]")
        out.append(f"st.global.v8.{t} [%w8], {_EIGHT}")
    for t in ("b64", "u64", "s64", "f64"):
        out.append(f"ld.global.v4.{t} {_WIDE}, [%w8]")
        out.append(f"st.global.v4.{t} [%w8], {_WIDE}")
    for hint in ("L2::evict_last", "L2::evict_first", "L2::evict_normal"):
        out.append(f"ld.global.{hint}.v8.b32 {_EIGHT}, [%w8]")
        out.append(f"st.global.{hint}.v8.b32 [%w8], {_EIGHT}")
    for group in ("cta_group::1", "cta_group::2"):
        out.append(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
            f"{group} [%r0], [%w0, {_TWO}], [%r2]"
        )
    return out


def question(chosen: Sequence[str]) -> tuple[str, int]:
    """A module with one instruction per line, and the line of the first; see `refusals`."""
    body = "\n".join(f"{text};" for text in chosen)
    head = HEADER.format(version=VERSION)
    text = f"{head}.visible .entry test()\n{{\n{_REGISTERS}{body}\nret;\n}}\n"
    return text, HEADER.count("\n") + 3 + _REGISTERS.count("\n")
