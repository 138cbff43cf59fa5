"""The loops that matter of a kernel in its SASS: over keys of decode, over K of the product of
numbers and weights of four bits, and the epilogue of the grouped GEMM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cycle_model.sass.flow import BARRIERS, SELECTION, SPILLS, Function, Kinds, kinds_of
from cycle_model.sass.tools import read
from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.portable.plan import PortablePlan
from kernelkit.compile.arch import PORTABLE, written_for
from lab.sass.softmax import mufu_distance, times_of
from moe.mixed.config import DEPTH, ROWS, MixedConfig

# What kernels are written for -> (what the loop has, what an iteration is at least)
LOOPS = {
    **dict.fromkeys(("sm_90a", PORTABLE), (("HMMA", "LDGSTS"), "step of 16 keys")),
    "sm_100a": (("LDTM", "MUFU.EX2"), "tile of 128 keys"),
}
MMA_SHAPE = (16, 8)  # k, n of an HMMA: columns of the head or keys, query rows

DECODE_KINDS: Kinds = {
    "HMMA": ("HMMA",),
    "LDSM": ("LDSM",),
    "MOVM": ("MOVM",),
    "LDGSTS": ("LDGSTS",),
    "LDTM, STTM": ("LDTM", "STTM"),
    "LDS, STS": ("LDS", "STS"),
    "MUFU": ("MUFU",),
    "SHFL, REDUX": ("SHFL", "REDUX", "CREDUX"),
    "conversions": ("F2FP", "F2F", "HADD2"),
    "floating point": ("FFMA", "FADD", "FMUL", "FMNMX", "HFMA", "HMUL"),
    "spills": SPILLS,
    "barriers": BARRIERS,
    "branches": ("BRA", "BSSY", "BSYNC", "EXIT", "VOTE"),
    "selection": SELECTION,
    "integer and moves": ("",),
}


def decode_figures(cubin: Path, config: DecodeConfig, arch: str) -> dict[str, Any]:
    """Figures of the cubin of `config`, a file with one kernel: what `read` says, and the loop over
    keys.

    unit: of `loop`, instructions by kind, and of `stalls`, the cycles that stall counts ask for.
    mufu_distance: see `lab.sass.softmax`. The last two are 0 where there is no such loop, or
    several.
    """
    found, function = read(cubin)
    return found | {"unit": LOOPS[written_for(arch)][1], **decode_loop(function, config, arch)}


def decode_loop(function: Function, config: DecodeConfig, arch: str) -> dict[str, Any]:
    """Return the `figures` of the innermost loop with the marks of `arch`."""
    inner = function.innermost(function.loops_with(*LOOPS[written_for(arch)][0]))
    if len(inner) != 1:
        return {"loop": {}, "stalls": 0.0, "mufu_distance": 0}
    code = function.code(function.loops[inner[0]])
    counts = kinds_of(code, DECODE_KINDS)
    steps = counts["HMMA"] / products(config) if written_for(arch) != "sm_100a" else 1
    loop = {kind: count / steps for kind, count in counts.items()}
    return {
        "loop": loop,
        "stalls": times_of(code)[-1] / steps,
        "mufu_distance": mufu_distance(code),
    }


def products(config: DecodeConfig) -> int:
    """HMMA of a warp and step: those of S^T = K Q^T and as many of O^T += V^T P."""
    k, n = MMA_SHAPE
    return 2 * (PortablePlan(config).dims // k) * (config.columns // n)


# The main loop in the SASS of the product of numbers and weights of four bits: its work by kind,
# of a warp that makes bf16 of weights, for the K of an MMA.
#
# The loop is the innermost one that multiplies, on Blackwell the one that stores to tensor memory.
# Cold blocks, such as repeated waits, are counted once.


# of an architecture and of rows of x: the instruction that every unit of weights ends with, and the
# K that it takes, None for that of an MMA
MARKS = {
    ("sm_90a", "bf16"): ("HGMMA", None), ("sm_90a", "e4m3"): ("QGMMA", None),
    ("sm_100a", "bf16"): ("STTM", DEPTH),
}  # fmt: skip
MIXED_KINDS: Kinds = {
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


def mixed_figures(cubin: Path, config: MixedConfig, arch: str) -> dict[str, Any]:
    """Return figures of the cubin of `config`, a file with one kernel: those of `read`, and the
    main loop.

    loop: instructions of a warp by kind, per `unit`.
    turn: the K of an iteration.
    These are empty and 0 unless exactly one loop matches.
    """
    found, function = read(cubin)
    unit = f"{config.step} of K, {config.parts} x {ROWS} rows of weights"
    return found | {"unit": unit, **mixed_loop(function, config, arch)}


def mixed_loop(function: Function, config: MixedConfig, arch: str) -> dict[str, Any]:
    """Return the `figures` of the innermost loop with the mark."""
    mark, depth = MARKS[arch, config.x]
    inner = function.innermost(function.loops_with(mark))
    if len(inner) != 1:
        return {"loop": {}, "turn": 0}
    counts = kinds_of(function.code(function.loops[inner[0]]), MIXED_KINDS)
    steps = counts[mark] / config.parts * ((depth or config.step) // config.step)
    loop = {kind: count / steps for kind, count in counts.items()}
    return {"loop": loop, "turn": round(steps * config.step)}


# The epilogue in the SASS of a grouped GEMM: its work by kind, for 32 columns of an accumulator.
#
# A warp has 32 lanes of an accumulator, a row of the MMA each, and loads columns of it. What stands
# in the innermost loops that load is divided by the columns that they load, so that figures of all
# configs can be laid beside each other. Cold blocks, such as repeated waits, are counted once.


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


def epilogue_figures(cubin: Path) -> dict[str, Any]:
    """Return figures of the cubin of a grouped GEMM, a file with one kernel: those of `read`,
    and the epilogue.

    loaded: columns that the epilogue's innermost loops load in one iteration.
    epilogue: instructions of a warp by kind, per `unit`.
    around: total of the other instructions in the loop over tiles.
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
