"""The loop over keys in the SASS of a decode kernel: its work by kind.

sm_90a, and GPUs of mma.sync alone: of a warp that streams its keys, per step of 16 keys. sm_100a:
of an epilogue warp, softmax and correction, per tile of 128 keys. Cold blocks, such as repeated
waits, are counted once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cycle_model.sass.flow import (
    BARRIERS,
    SELECTION,
    SPILLS,
    Function,
    Kinds,
    kinds_of,
)
from cycle_model.sass.tools import read
from gqa_lowlatency.config import DecodeConfig
from kernelkit.compile.arch import PORTABLE, written_for
from lab.sass.softmax import mufu_distance, times_of

# What kernels are written for -> (what the loop has, what an iteration is at least)
LOOPS = {
    **dict.fromkeys(("sm_90a", PORTABLE), (("HMMA", "LDGSTS"), "step of 16 keys")),
    "sm_100a": (("LDTM", "MUFU.EX2"), "tile of 128 keys"),
}
MMA_SHAPE = (16, 8)  # k, n of an HMMA: columns of the head or keys, query rows

LOOP_KINDS: Kinds = {
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


def figures(cubin: Path, config: DecodeConfig, arch: str) -> dict[str, Any]:
    """Of the cubin of `config`, a file with one kernel: what `read` says, and the loop over keys.

    unit: of `loop`, instructions by kind, and of `stalls`, the cycles that stall counts ask for.
    mufu_distance: see `lab.sass.softmax`. The last two are 0 where there is no such loop, or
    several.
    """
    found, function = read(cubin)
    return found | {"unit": LOOPS[written_for(arch)][1], **loop_of(function, config, arch)}


def loop_of(function: Function, config: DecodeConfig, arch: str) -> dict[str, Any]:
    """What `figures` says of the innermost loop with the marks of `arch`."""
    inner = function.innermost(function.loops_with(*LOOPS[written_for(arch)][0]))
    if len(inner) != 1:
        return {"loop": {}, "stalls": 0.0, "mufu_distance": 0}
    code = function.code(function.loops[inner[0]])
    counts = kinds_of(code, LOOP_KINDS)
    steps = counts["HMMA"] / products(config) if written_for(arch) != "sm_100a" else 1
    loop = {kind: count / steps for kind, count in counts.items()}
    return {
        "loop": loop,
        "stalls": times_of(code)[-1] / steps,
        "mufu_distance": mufu_distance(code),
    }


def products(config: DecodeConfig) -> int:
    """HMMA of a step: those of S^T = K Q^T and as many of O^T += V^T P."""
    k, n = MMA_SHAPE
    return 2 * (config.head_dim // k) * (config.columns // n)
