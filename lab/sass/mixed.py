"""The main loop in the SASS of the product of numbers and weights of four bits: its work by kind,
of a warp that makes bf16 of weights, for the K of an MMA.

The loop is the innermost one that multiplies, on Blackwell the one that stores to tensor memory.
Cold blocks, such as repeated waits, are counted once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cycle_model.sass.flow import BARRIERS, SELECTION, SPILLS, Function, Kinds, kinds_of
from cycle_model.sass.tools import read
from moe.mixed.config import DEPTH, ROWS, MixedConfig

# of an architecture and of rows of x: the instruction that every unit of weights ends with, and the
# K that it takes, None for that of an MMA
MARKS = {
    ("sm_90a", "bf16"): ("HGMMA", None), ("sm_90a", "e4m3"): ("QGMMA", None),
    ("sm_100a", "bf16"): ("STTM", DEPTH),
}  # fmt: skip
LOOP_KINDS: Kinds = {
    **{mark: (mark,) for mark, _ in MARKS.values()},
    "bf16 products": ("HMUL2", "HFMA2"),
    "LOP3": ("LOP3", "PLOP3"),
    "shifts": ("SHF", "USHF"),
    "PRMT": ("PRMT",),
    "LDS, STS": ("LDS", "STS"),
    "WARPGROUP": ("WARPGROUP",),
    "spills": SPILLS,
    "barriers": BARRIERS,
    "branches": ("BRA", "BSSY", "BSYNC", "EXIT", "VOTE", "CALL", "RET"),
    "selection": SELECTION,
    "integer and moves": ("",),
}


def figures(cubin: Path, config: MixedConfig, arch: str) -> dict[str, Any]:
    """Of the cubin of `config`, a file with one kernel: what `read` says, and the main loop.

    loop: instructions of a warp by kind, per `unit`; turn: the K of a turn. Nothing and 0 where no
    loop does so, or several do.
    """
    found, function = read(cubin)
    unit = f"{config.step} of K, {config.parts} x {ROWS} rows of weights"
    return found | {"unit": unit, **loop_of(function, config, arch)}


def loop_of(function: Function, config: MixedConfig, arch: str) -> dict[str, Any]:
    """What `figures` says of the innermost loop with the mark."""
    mark, depth = MARKS[arch, config.x]
    inner = function.innermost(function.loops_with(mark))
    if len(inner) != 1:
        return {"loop": {}, "turn": 0}
    counts = kinds_of(function.code(function.loops[inner[0]]), LOOP_KINDS)
    steps = counts[mark] / config.parts * ((depth or config.step) // config.step)
    loop = {kind: count / steps for kind, count in counts.items()}
    return {"loop": loop, "turn": round(steps * config.step)}
