"""The epilogue in the SASS of a grouped GEMM: its work by kind, for 32 columns of an accumulator.

A warp has 32 lanes of an accumulator, a row of the MMA each, and loads columns of it. What stands
in the innermost loops that load is divided by the columns that they load, so that figures of all
configs can be laid beside each other. Cold blocks, such as repeated waits, are counted once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from workbench.sass.listing import Function, Kinds, disassemble, parse, resources
from workbench.sass.softmax import SPILLS, kinds_of

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
    "barriers": (
        *("SYNCS", "BAR", "DEPBAR", "LDGDEPBAR", "FENCE", "MEMBAR", "WARPSYNC", "NOP", "NANOSLEEP"),
    ),
    "branches": ("BRA", "BSSY", "BSYNC", "EXIT", "VOTE", "CALL", "RET"),
    "selection": ("FSETP", "FSEL", "ISETP", "SEL", "PLOP3", "P2R", "R2P", "UISETP", "USEL"),
    "integer and moves": ("",),
}


@dataclass(frozen=True)
class Static:
    """What can be said of a cubin with one kernel without running it.

    spills: instructions that move registers to local memory or back. instructions: all of them.
    loaded: columns that the epilogue's innermost loops load in one turn. epilogue: instructions of
    a warp by kind, per `unit`; around: those of the loop over tiles beside them, in all.
    """

    registers: int
    stack: int
    spills: int
    instructions: int
    unit: str
    loaded: int
    epilogue: dict[str, float]
    around: int

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def static(cubin: Path) -> Static:
    """Read the cubin of a grouped GEMM, a file with one kernel.

    Raises FileNotFoundError without the tools, ValueError for more kernels than one.
    """
    (usage,), (function,) = resources(cubin), parse(disassemble(cubin))
    loaded, epilogue, around = epilogue_of(function)
    return Static(
        registers=usage.registers,
        stack=usage.stack,
        spills=sum(item.opcode.startswith(SPILLS) for item in function.instructions),
        instructions=len(function.instructions),
        unit=UNIT,
        loaded=loaded,
        epilogue=epilogue,
        around=around,
    )


def epilogue_of(function: Function) -> tuple[int, dict[str, float], int]:
    """(columns loaded, instructions by kind per subtile, others of the loop around); nothing where
    no loop loads."""
    heads = [
        head
        for head, body in function.loops.items()
        if any(function.blocks[block].has(MARK) for block in body)
    ]
    inner = frozenset().union(*(function.loops[head] for head in function.innermost(heads)))
    if not inner:
        return 0, {}, 0
    code = function.code(inner)
    loaded = sum(item.repetition for item in code if item.opcode.startswith(MARK))
    counts = kinds_of(code, EPILOGUE_KINDS)
    every = frozenset().union(*(function.loops[head] for head in heads))
    around = len(function.code(every - inner))
    return loaded, {kind: count * COLUMNS / loaded for kind, count in counts.items()}, around
