"""The main loop in the SASS of Hopper's product of numbers and weights of four bits: its work by
kind, of a warp that computes, for the K of an MMA.

The loop is the innermost one that multiplies. Cold blocks, such as repeated waits, are counted
once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cycle_model.sass.flow import Function
from cycle_model.sass.instruction import BARRIERS, SELECTION, SPILLS, Kinds, kinds_of
from cycle_model.sass.listing import read
from moe.mixed.config import ROWS, MixedConfig

MARKS = {"bf16": "HGMMA", "e4m3": "QGMMA"}  # by what rows of x are in
LOOP_KINDS: Kinds = {
    **{mark: (mark,) for mark in MARKS.values()},
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


def figures(cubin: Path, config: MixedConfig) -> dict[str, Any]:
    """Of the cubin of `config`, a file with one kernel: what `read` says, and the main loop.

    loop: instructions of a warp by kind, per `unit`; turn: the K of a turn. Nothing and 0 where no
    loop multiplies, or several do.
    """
    found, function = read(cubin)
    unit = f"{config.step} of K, {config.parts} x {ROWS} rows of weights"
    return found | {"unit": unit, **loop_of(function, config)}


def loop_of(function: Function, config: MixedConfig) -> dict[str, Any]:
    """What `figures` says of the innermost loop with the mark."""
    inner = function.innermost(function.loops_with(MARKS[config.x]))
    if len(inner) != 1:
        return {"loop": {}, "turn": 0}
    counts = kinds_of(function.code(function.loops[inner[0]]), LOOP_KINDS)
    steps = counts[MARKS[config.x]] / config.parts
    loop = {kind: count / steps for kind, count in counts.items()}
    return {"loop": loop, "turn": round(steps * config.step)}
