"""Forms that ptxemu takes and sm_90a does not have: an instruction of each, for the driver to
refuse.

What refuses them is asked for its reason, so the list cannot claim too much: a form that a driver
takes is reported as one that should be run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lab.silicon.conformance.elementwise import HEADER, module
from lab.silicon.conformance.patterns import expand

_REGISTERS = """.reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %w<16>;
.reg .b128 %q<2>; .reg .f32 %f<4>;"""
_EIGHT = "{%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}"
_WIDE = "{%w0, %w1, %w2, %w3}"

_MMA = "[%r0], %w0, %w1, %r1, {%r2, %r3, %r4, %r5}, %p0"
_PAIR_MMA = "[%r0], %w0, %w1, %r1, {%r2, %r3, %r4, %r5, %r6, %r7, %r8, %r9}, %p0"
_SCALED_MMA = "[%r0], %w0, %w1, %r1, [%r2], [%r3], %p0"
_COMMIT = "tcgen05.commit.cta_group::{1|2}.mbarrier::arrive::one.shared::cluster"
_TENSOR_CORE = (
    "tcgen05.alloc.cta_group::{1|2}.sync.aligned.shared::cta.b32 [%r0], 32",
    "tcgen05.dealloc.cta_group::{1|2}.sync.aligned.b32 %r0, 32",
    "tcgen05.relinquish_alloc_permit.cta_group::{1|2}.sync.aligned",
    "tcgen05.wait::{ld|st}.sync.aligned",
    "tcgen05.fence::{before|after}_thread_sync",
    f"{_COMMIT}.b64 [%r0]",
    f"{_COMMIT}.multicast::cluster.b64 [%r0], %h0",
    "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r0}, [%r1], 2",
    "tcgen05.st.sync.aligned.16x32bx2.x1.b32 [%r1], 2, {%r0}",
    "tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r0}, [%r1]",
    "tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%r1], {%r0}",
    f"tcgen05.mma.cta_group::1.kind::{{f16|tf32|f8f6f4|i8}} {_MMA}",
    f"tcgen05.mma.cta_group::2.kind::{{f16|tf32|f8f6f4|i8}} {_PAIR_MMA}",
    f"tcgen05.mma.cta_group::1.kind::f16.collector::a::{{fill|use|lastuse|discard}} {_MMA}",
    *(
        f"tcgen05.mma.cta_group::{{1|2}}.kind::{form} {_SCALED_MMA}"
        for form in (
            "mxf8f6f4.block_scale{|.scale_vec::1X|.block32}",
            "mxf4.block_scale{|.scale_vec::2X|.block32}",
            "mxf4nvf4.block_scale.{scale_vec::2X|scale_vec::4X|block16|block32}",
        )
    ),
    "tcgen05.cp.cta_group::{1|2}.{128x256b|4x256b|128x128b|32x128b.warpx4} [%r0], %w0",
    "tcgen05.cp.cta_group::{1|2}.64x128b.warpx2::{02_13|01_23} [%r0], %w0",
)
_C4, _A4, _B2 = "{%f0, %f1, %f2, %f3}", "{%r0, %r1, %r2, %r3}", "{%r4, %r5}"
_IDS = "%r6, {0, 0}, %r7, {0, 0}"
_NARROW_MMA = (
    f"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.e2m1.e3m2.f32 {_C4}, {_A4}, {_B2}, {_C4}",
    "mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f16.e2m1.e3m2.f16"
    f" {{%r8, %r9}}, {_A4}, {_B2}, {{%r8, %r9}}",
    "mma.sync.aligned.kind::mxf8f6f4.block_scale.m16n8k32.row.col.f32.e2m1.e3m2.f32.ue8m0"
    f" {_C4}, {_A4}, {_B2}, {_C4}, {_IDS}",
    "mma.sync.aligned.kind::mxf4.block_scale.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0"
    f" {_C4}, {_A4}, {_B2}, {_C4}, {_IDS}",
    "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32"
    f".ue4m3 {_C4}, {_A4}, {_B2}, {_C4}, {_IDS}",
)
_CONTROL = "clusterlaunchcontrol.query_cancel"
_CANCEL = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
_LAUNCH_CONTROL = (
    f"{_CANCEL}{{|.multicast::cluster::all}}.b128 [%r0], [%r1]",
    f"{_CONTROL}.is_canceled.pred.b128 %p0, %q0",
    f"{_CONTROL}.get_first_ctaid.v4.b32.b128 {{%r0, %r1, %r2, %r3}}, %q0",
    f"{_CONTROL}.get_first_ctaid::{{x|y|z}}.b32.b128 %r0, %q0",
)
_REDUX = ("redux.sync.{min|max}{|.abs}{|.NaN}.f32 %f0, %f1, 0xffffffff",)
_WIDE_ACCESS = (
    f"ld.global.v8.{{b32|u32|s32|f32}} {_EIGHT}, [%w8]",
    f"st.global.v8.{{b32|u32|s32|f32}} [%w8], {_EIGHT}",
    f"ld.global.v4.{{b64|u64|s64|f64}} {_WIDE}, [%w8]",
    f"st.global.v4.{{b64|u64|s64|f64}} [%w8], {_WIDE}",
    f"ld.global.L2::{{evict_last|evict_first|evict_normal}}.v8.b32 {_EIGHT}, [%w8]",
    f"st.global.L2::{{evict_last|evict_first|evict_normal}}.v8.b32 [%w8], {_EIGHT}",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
    "{cta_group::1|cta_group::2} [%r0], [%w0, {%r0, %r1}], [%r2]",
)

# what a form's loose list of flags would take and no assembler does
_BULK = "global.mbarrier::complete_tx::bytes"
_CACHED = "{L1|L2|L2::128B|L2::evict_last|const|local|param|tensormap}"
_HINT = "{L2::64B|L2::128B|L2::256B}"
_EVICTION = "{evict_first|evict_last|evict_normal|evict_unchanged|no_allocate}"
_NO_PTX = (
    "{add|sub|mul}.rn.relu.{f16|bf16} %h0, %h1, %h2",
    "{add|sub|mul}.rn.relu.{f16x2|bf16x2} %r0, %r1, %r2",
    f"applypriority.{_CACHED}.L2::evict_normal [%w8], 128",
    f"prefetchu.L1.{_CACHED} [%w8]",
    "prefetchu.{L2|L2::evict_normal|global.L1} [%w8]",
    "discard.{L1|L2::128B|L2::evict_last|L2::evict_normal}.L2 [%w8], 128",
    "discard.{const|local|param|tensormap}.L2 [%w8], 128",
    "prefetch.global.L2::128B [%w8]",
    "{bar|bar.cta}.sync.aligned 0",
    "{bar|bar.cta}.arrive.aligned 0, 64",
    "{bar|bar.cta}.red.popc.aligned.u32 %r0, 0, %p0",
    f"cp.async.bulk.global.shared::cta.bulk_group.{_HINT} [%w8], [%r0], 16",
    f"cp.async.bulk.prefetch.L2.global.{_HINT} [%w8], 16",
    f"cp.async.bulk.shared::{{cta|cluster}}.{_BULK}.{_HINT} [%r0], [%w8], 16, [%r1]",
    f"cp.async.bulk.shared::cta.{_BULK}.multicast::cluster [%r0], [%w8], 16, [%r1], %h0",
    f"st.global.{_HINT}.b32 [%w8], %r0",
    f"ldu.global.{_HINT}.b32 %r0, [%w8]",
    "cvt.rn.bf16.{s8|u8} %h0, %h1",
    "cvt.rzi.{s8|u8}.bf16 %h0, %h1",
    "cvt.rna.f32.s32 %f0, %r0",
    "cvt.rna.tf32.f64 %r0, %w0",
    "cvt.rna.tf32.{f16|bf16} %r0, %h0",
    "dp4a.{lo|hi}.s32.s32 %r0, %r1, %r2, %r3",
    "{exit|trap}.uni",
    "fence.gl",
    "fence.sync_restrict::shared::cta::cluster.cluster",
    "fence.mbarrier_init.release.{cta|gpu|sys}",
    "fence.proxy.async{::global|.async.global|.async.shared::cta|.async.shared::cluster}",
    "fence.proxy.async::shared::{cta|cluster}",
    "fence.proxy.async.{global|shared::cta}.{async.global|async::global}",
    "membar.{acq_rel|acquire|cluster|gpu|release|sc}.gl",
    "membar.sync_restrict::shared::{cta|cluster|cta::cluster}.gl",
    "ld.{release.gpu.global|global.wb|global.wt|global.unified}.b32 %r0, [%w8]",
    "ldu.{const|local|param|param::entry|shared|shared::cta|shared::cluster}.b32 %r0, [%w8]",
    "ldu.global.{ca|cg|cs|cv|lu|wb|wt|nc|unified|weak|volatile}.b32 %r0, [%w8]",
    "ldu.{relaxed|acquire|release|mmio}.{cta|cluster|gpu|sys}.global.b32 %r0, [%w8]",
    f"ldu.global.{{L1|L2}}::{_EVICTION}.b32 %r0, [%w8]",
    "ldu.global.L2::cache_hint.b32 %r0, [%w8], %w1",
    f"ldu.global.v8.b32 {_EIGHT}, [%w8]",
    "st.{acquire.gpu.global|global.ca|global.cv|global.lu|global.nc}.b32 [%w8], %r0",
    "st.{const|global.unified}.b32 [%w8], %r0",
    "mbarrier.arrive{|_drop}{|.expect_tx}.{acquire.cta|release.gpu|release.sys}.shared.b64"
    " %w0, [%r0], 1",
    "mbarrier.{expect_tx|complete_tx}.{acquire.cta|release.cta|relaxed.gpu|relaxed.sys}.shared.b64"
    " [%r0], 1",
    "mbarrier.init.shared::cluster.b64 [%r0], 1",
    "mbarrier.inval.shared::cluster.b64 [%r0]",
    "mbarrier.{test|try}_wait.parity.{acquire.gpu|acquire.sys|release.cta}.shared.b64"
    " %p0, [%r0], 0",
    "mbarrier.{test|try}_wait.parity.shared::cluster.b64 %p0, [%r0], 0",
    "mov.{f16|bf16} %h0, %h1",
    "mov.{f16x2|bf16x2} %r0, %r1",
    "red.{acquire|acq_rel}.gpu.global.add.u32 [%w8], %r0",
    "red.global.exch.b32 [%w8], %r0",
    "red.global.cas.b32 [%w8], %r0, %r1",
    "red.global.cas.b16 [%w8], %h0, %h1",
    "set.eq.f32.{f16|bf16} %f0, %h0, %h1",
    "setp.{lo|ls|hi|hs}.{f16x2|bf16x2} %p0|%p1, %r0, %r1",
    "tanh.approx.ftz.{f16|bf16} %h0, %h1",
    "tanh.approx.ftz.{f16x2|bf16x2} %r0, %r1",
    "tanh.approx.ftz.f32 %f0, %f1",
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.acquire.gpu.sync.aligned"
    " [%w8], [%r0], 128",
)


def _moves() -> Iterator[str]:
    """tcgen05.ld and .st of every shape and length."""
    for shape, first in (("32x32b", 1), ("16x64b", 1), ("16x128b", 2), ("16x256b", 4)):
        for count in (1, 2, 4, 8, 16, 32, 64, 128):
            if count * first <= 128:
                registers = ", ".join(f"%r{k % 16}" for k in range(count * first))
                name = f"sync.aligned.{shape}.x{count}.b32"
                yield f"tcgen05.ld.{name} {{{registers}}}, [%r0]"
                yield f"tcgen05.st.{name} [%r0], {{{registers}}}"


def instructions() -> list[str]:
    """The instructions, each with operands."""
    patterns = (
        *(*_TENSOR_CORE, *_NARROW_MMA, *_LAUNCH_CONTROL, *_REDUX, *_WIDE_ACCESS),
        *_NO_PTX,
    )
    return [*_moves(), *(text for pattern in patterns for text in expand(pattern))]


def question(chosen: Sequence[str]) -> tuple[str, int]:
    """A module with one instruction per line, and the line of the first; see `refusals`."""
    body = [_REGISTERS, *(f"{text};" for text in chosen)]
    return module((), body), HEADER.count("\n") + 4 + _REGISTERS.count("\n")
