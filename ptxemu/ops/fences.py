"""fence, membar, fence.proxy: PTX ISA "membar / fence".

Memory is sequentially consistent between warps here, so only the proxy fences have an effect: they
make ordinary shared-memory stores visible to the async proxy (see `Cta.unfenced`).
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.machine.warp import Warp
from ptxemu.syntax.tree import Instr

_SCOPE = "cta cluster gpu sys"


@op(
    "fence membar",
    flags=f"{_SCOPE} sc acq_rel acquire release sync_restrict::shared::cta::cluster "
    "sync_restrict::shared::cta sync_restrict::shared::cluster gl",
    section="membar, fence",
)
def fence(c: Lower, i: Instr, f: Match) -> None:
    """Orders memory accesses; nothing is reordered here, and only listeners hear of it."""
    c.announce(f"fence(w, {'cta' in f.flags})")


@op("fence.mbarrier_init", flags=f"release {_SCOPE}", section="membar, fence")
def fence_mbarrier_init(c: Lower, i: Instr, f: Match) -> None:
    """Makes mbarrier.init visible in the cluster; it is at once here."""
    c.announce("fence_init(w)")


@op(
    "fence.proxy",
    flags="alias async async::global async::shared::cta async::shared::cluster async.global "
    "global shared::cta shared::cluster async.shared::cta async.shared::cluster async.global",
    section="membar, fence",
)
def fence_proxy(c: Lower, i: Instr, f: Match) -> None:
    flags = {part for flag in f.flags for part in flag.replace("async::", "async ").split()}
    if "alias" in flags:
        return
    spaces = tuple(
        name for name in ("shared", "global") if any(part.startswith(name) for part in flags)
    )
    if "shared" in spaces or not spaces:
        c.effect(f"fence_proxy_async(w, {not spaces or 'shared::cluster' in flags})")
    c.announce(f"fence_proxy(w, {spaces or ('shared', 'global')})")


@op("fence.proxy.tensormap::generic", flags=f"acquire release {_SCOPE}", section="membar, fence")
def fence_tensormap(c: Lower, i: Instr, f: Match) -> None:
    """Tensor maps are read when an instruction that uses them is issued."""


@runtime
def fence_proxy_async(w: Warp, everywhere: bool) -> None:
    for cta in w.cluster.ctas if everywhere else (w.cta,):
        cta.fence_async()
