"""The epilogue in the SASS of a grouped GEMM: its work by kind, for 32 columns of an accumulator.

A warp has 32 lanes of an accumulator, a row of the MMA each, and loads columns of it. What stands
in the innermost loops that load is divided by the columns that they load, so that figures of all
configs can be laid beside each other. Cold blocks, such as repeated waits, are counted once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cycle_model.sass.flow import BARRIERS, SELECTION, SPILLS, Function, Kinds, kinds_of
from cycle_model.sass.tools import read

MARK = "LDTM"
COLUMNS = 32  # of a subtile; its rows are the 128 lanes of four warps
UNIT = f"128 x {COLUMNS} subtile"

EPILOGUE_KINDS: Kinds = {
    "LDTM": (MARK,),
    "MUFU": ("MUFU",),
    "FFMA2, FMUL2, FADD2": ("FFMA2", "FMUL2", "FADD2"),
    "FFMA, FMUL, FADD": ("FFMA", "FMUL", "FADD", "HFMA", "HMUL"),
    "FMNMX": ("FMNMX", "VIMNMX"),
    "conversions": ("F2FP", "F2F", "HADD2", "I2F", "F2I"),
    "SHFL, REDUX": ("SHFL", "REDUX", "CREDUX"),
    "LDS, STS": ("LDS", "STS"),
    "LDG, STG": ("LDG", "STG", "RED", "ATOM"),
    "TMA and bulk copies": ("UTMA", "UBLKCP"),
    "spills": SPILLS,
    "barriers": BARRIERS,
    "branches": ("BRA", "BSSY", "BSYNC", "EXIT", "VOTE", "CALL", "RET"),
    "selection": SELECTION,
    "integer and moves": ("",),
}


def figures(cubin: Path) -> dict[str, Any]:
    """Of the cubin of a grouped GEMM, a file with one kernel: what `read` says, and the epilogue.

    loaded: columns that the epilogue's innermost loops load in one turn. epilogue: instructions of
    a warp by kind, per `unit`; around: those of the loop over tiles beside them, in all.
    """
    found, function = read(cubin)
    loaded, epilogue, around = epilogue_of(function)
    return found | {"unit": UNIT, "loaded": loaded, "epilogue": epilogue, "around": around}


def epilogue_of(function: Function) -> tuple[int, dict[str, float], int]:
    """(columns loaded, instructions by kind per subtile, others of the loop around); nothing where
    no loop loads."""
    heads = function.loops_with(MARK)
    inner = frozenset().union(*(function.loops[head] for head in function.innermost(heads)))
    if not inner:
        return 0, {}, 0
    code = function.code(inner)
    loaded = sum(item.repetition for item in code if item.opcode.startswith(MARK))
    counts = kinds_of(code, EPILOGUE_KINDS)
    every = frozenset().union(*(function.loops[head] for head in heads))
    around = len(function.code(every - inner))
    return loaded, {kind: count * COLUMNS / loaded for kind, count in counts.items()}, around
