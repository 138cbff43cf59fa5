"""What each warp of a CTA does, in a few words: its name if the user gave one, else by opcodes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ptxemu.findings import Launch

# In the order in which they are told; the first pattern that an opcode matches is what it is.
_DUTIES = (
    (r"tcgen05\.mma|wgmma\.mma", "MMA"),
    (r"tcgen05\.cp", "TMEM copy"),
    (r"cp\.async\.bulk\.tensor\.\dd\.shared|cp\.async\.bulk\.prefetch\.tensor", "TMA load"),
    (r"cp\.async\.bulk\.shared", "bulk load"),
    (r"cp\.async\.(ca|cg)", "cp.async load"),
    (r"ldu?\.", "load"),
    (r"st\.async|red\.async", "store to a peer"),
    (r"clusterlaunchcontrol\.try_cancel", "scheduling"),
    (r"tcgen05\.ld", "TMEM read"),
    (r"tcgen05\.st", "TMEM write"),
    (r"cp\.async\.bulk\.tensor\.\dd\.global", "TMA store"),
    (r"cp\.reduce\.async\.bulk", "TMA reduction"),
    (r"cp\.async\.bulk\.global", "bulk store"),
    (r"(st|red|atom)\.", "store"),
)
_WITHIN = re.compile(r"(ld|st|red|atom)\.(?!async)(\w+\.)*(param|const|local|shared)\b")
_WAITING = re.compile(r"mbarrier|bar\.|barrier|fence")
_AT_MOST = 4


def roles_of(launch: Launch) -> dict[int, str]:
    """Warp index -> name or description, of every warp that executed something."""
    given = launch.options.roles or {}
    return {
        warp: given.get(warp) or describe(opcodes)
        for warp, opcodes in sorted(launch.by_warp.items())
    } | {warp: name for warp, name in given.items() if warp not in launch.by_warp}


def describe(opcodes: Mapping[str, int]) -> str:
    """Such as "TMA load", "MMA" or "TMEM read, epilogue TMA store", from the opcodes executed."""
    found = {_duty(opcode) for opcode, count in opcodes.items() if count} - {""}
    duties = [name for _, name in _DUTIES if name in found]
    if "TMEM read" in found:
        duties = [f"epilogue {name}" if name.endswith("store") else name for name in duties]
    if duties:
        return ", ".join(duties[:_AT_MOST])
    if any(_WITHIN.match(opcode) and "shared" in opcode for opcode in opcodes):
        return "shared memory only"
    return "barriers only" if any(map(_WAITING.match, opcodes)) else "registers only"


def _duty(opcode: str) -> str:
    if _WITHIN.match(opcode):
        return ""
    return next((name for pattern, name in _DUTIES if re.match(pattern, opcode)), "")
