"""fence, membar, fence.proxy: PTX ISA "membar / fence".

Memory is sequentially consistent between warps here, so only the proxy fences have an effect: they
make ordinary shared-memory stores visible to the async proxy (see `Cta.unfenced`).
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.ops.registry import Match, op, runtime
from ptxemu.syntax.tree import Instr

_SCOPE = "cta cluster gpu sys"


@op(
    "fence membar",
    flags=f"{_SCOPE} sc acq_rel acquire release sync_restrict::shared::cta::cluster "
    "sync_restrict::shared::cta sync_restrict::shared::cluster gl",
    section="membar, fence",
)
def fence(c: Lower, i: Instr, f: Match) -> None:
    """Orders memory accesses; nothing is reordered here."""


@op("fence.mbarrier_init", flags=f"release {_SCOPE}", section="membar, fence")
def fence_mbarrier_init(c: Lower, i: Instr, f: Match) -> None:
    """Makes mbarrier.init visible in the cluster; it is at once here."""


@op(
    "fence.proxy",
    flags="alias async async::global async::shared::cta async::shared::cluster async.global "
    "global shared::cta shared::cluster async.shared::cta async.shared::cluster async.global",
    section="membar, fence",
)
def fence_proxy(c: Lower, i: Instr, f: Match) -> None:
    if "shared::cta" in f.flags or "async" in f.flags:
        everywhere = "shared::cta" not in f.flags and "global" not in f.flags
        if "global" not in f.flags:
            c.effect(f"fence_proxy_async(w, {everywhere})")


@op("fence.proxy.tensormap::generic", flags=f"acquire release {_SCOPE}", section="membar, fence")
def fence_tensormap(c: Lower, i: Instr, f: Match) -> None:
    """Tensor maps are read when an instruction that uses them is issued."""


@runtime
def fence_proxy_async(w: object, everywhere: bool) -> None:
    for cta in w.cluster.ctas if everywhere else (w.cta,):
        cta.fence_async()
