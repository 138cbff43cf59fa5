"""The softmax loops in the SASS of an attention kernel: their work by kind, where they publish.

Work is counted per warp and tile of 128 columns, between loop head and back edge. Not counted are:

- the conditional block that rescales O (the correction, which is kept separately),
- repeated waits,
- the longer copies of code that exists more than once for rare rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from cycle_model.sass.flow import SPILLS, Function, Instruction, Kinds, is_serialised, kinds_of
from cycle_model.sass.tools import disassemble, parse, resources

SOFTMAX_EX2 = 32  # exponentials in a body from which on it is a softmax loop
TILE_COLUMNS = 128
P_COLUMNS = 8  # TMEM columns from which on a store is one of P, not of row statistics
RETRY_LIMIT = 24  # instructions at most of a cold block that only repeats a wait
PARKED = ("MOV.SPILL", "R2UR.FILL")  # uniform registers kept in others: moves, no memory
WORK = ("MUFU.EX2", "LDTM", "STTM", "R2P", "FSEL", "FMNMX", "F2FP")

SOFTMAX_KINDS: Kinds = {
    "MUFU.EX2": ("MUFU.EX2",),
    "MUFU other": ("MUFU",),
    "FFMA2": ("FFMA2",),
    "FADD2": ("FADD2",),
    "FMUL2": ("FMUL2",),
    "scalar float": ("FFMA", "FADD", "FMUL", "FSETP", "HFMA", "HADD", "HMUL"),
    "F2FP": ("F2FP",),
    "FMNMX": ("FMNMX",),
    "LDTM, STTM": ("LDTM", "STTM"),
    "STS, LDS": ("STS", "LDS", "ATOMS"),
    "spills": SPILLS,
    "barriers": (
        *("SYNCS", "BAR", "FENCE", "MEMBAR", "WARPSYNC", "UCGABAR", "DEPBAR", "NOP", "NANOSLEEP"),
    ),
    "branches": ("BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET", "VOTE", "UVOTE"),
    "moves": ("MOV", "UMOV", "IMAD.MOV", "IMAD.U32", "R2UR", "CS2R", "S2R", "S2UR", "LDC", "LDCU"),
    "mask": (
        *("R2P", "FSEL", "SEL", "USEL", "ISETP", "UISETP", "LOP3", "ULOP3", "PLOP3", "UPLOP3"),
        *("BMSK", "UBMSK", "SHF", "USHF", "VIMNMX", "UVIMNMX", "PRMT", "UPRMT", "P2R"),
    ),
    "other": ("",),
}


@dataclass(frozen=True)
class Publishes:
    """Times of publishing in the body, as shares of the cycles by its stall counts; None if
    absent.

    load: first and last load of S.
    statistics: last store of row statistics.
    p: first and last store of P.
    ready: the last arrival on an mbarrier, if it comes after P.
    adds_after: FADD2 instructions after it, for the row sum.
    """

    load: tuple[float, float] | None
    statistics: float | None
    p: tuple[float, float] | None
    ready: float | None
    adds_after: int


@dataclass(frozen=True)
class SoftmaxLoop:
    """A copy of the tile loop of the softmax role.

    body: its instructions in execution order, without correction, wait retries and rare copies.
    correction: the conditional block that rescales O.
    rare: the copies for rare rows, far ones and those with a negative factor.
    tiles: tiles per iteration.
    nested: addresses of loops inside that do more than wait: their bodies count once here.
    """

    address: int
    body: tuple[Instruction, ...]
    correction: tuple[Instruction, ...]
    rare: tuple[Instruction, ...]
    tiles: int
    nested: tuple[int, ...]

    @property
    def total(self) -> float:
        """Instructions per warp and tile, correction excluded."""
        return len(self.body) / self.tiles

    @property
    def masked(self) -> bool:
        """True when scores are selected by column."""
        return self.opcodes()["FSEL"] + self.opcodes()["SEL"] >= TILE_COLUMNS // 2

    @property
    def spills(self) -> int:
        """Instructions that move registers to memory or back, correction and copies included."""
        return _count((*self.body, *self.correction, *self.rare), SPILLS)

    @property
    def stalls(self) -> float:
        """Cycles of a tile that the compiler alone asks for: the sum of the stall counts."""
        return times_of(self.body)[-1] / self.tiles

    @property
    def mufu_distance(self) -> int:
        """See `mufu_distance`."""
        return mufu_distance(self.body)

    def opcodes(self) -> Counter:
        """Instructions by the first word of their opcode."""
        return Counter(item.word for item in self.body)

    def kinds(self) -> dict[str, float]:
        """Instructions per tile by kind, in the order of SOFTMAX_KINDS."""
        counts = kinds_of(self.body, SOFTMAX_KINDS)
        return {kind: count / self.tiles for kind, count in counts.items()}

    def publishes(self) -> Publishes:
        """Positions of what other warps wait for; P stores are wide STTM, or vector STS where P
        waits in SMEM."""
        body = self.body
        times = times_of(body)

        def share(index: int) -> float:
            return times[index] / times[-1]

        def places(*heads: str) -> list[int]:
            return [i for i, item in enumerate(body) if item.opcode.startswith(heads)]

        loads = places("LDTM")
        wide = [i for i in places("STTM") if body[i].repetition >= P_COLUMNS]
        p = wide or places("STS.128", "STS.64")
        statistics = sorted({*places("STTM", "STS")} - {*p})
        ready = [i for i in places("SYNCS.ARRIVE") if p and i > p[-1]]
        return Publishes(
            load=(share(loads[0]), share(loads[-1])) if loads else None,
            statistics=share(statistics[-1]) if statistics else None,
            p=(share(p[0]), share(p[-1])) if p else None,
            ready=share(ready[-1]) if ready else None,
            adds_after=sum(i > ready[-1] for i in places("FADD2")) if ready else 0,
        )


@dataclass(frozen=True)
class Static:
    """Properties of a cubin with one kernel that are known without running it.

    spills: instructions that move registers to local memory or back.
    parked: instructions that keep uniform registers in others.
    others: see `other_loops`.
    outside: exponentials in no loop, see `exponentials_outside`.
    serialised: products of Hopper's tensor core, see `is_serialised`.
    """

    registers: int
    stack: int
    spills: int
    parked: int
    loops: tuple[SoftmaxLoop, ...]
    others: dict[int, dict[str, int]]
    outside: int
    serialised: bool | None

    def as_dict(self) -> dict:
        """Return the fields for JSON, with the properties of every loop."""
        said = ("address", "masked", "total", "tiles", "nested", "stalls", "mufu_distance")
        loops = [
            {name: getattr(loop, name) for name in said}
            | {"kinds": loop.kinds(), "correction": len(loop.correction), "rare": len(loop.rare)}
            | {"publishes": asdict(loop.publishes())}
            for loop in self.loops
        ]
        names = ("registers", "stack", "spills", "parked", "outside", "serialised")
        others = {f"{address:#x}": words for address, words in self.others.items()}
        return {name: getattr(self, name) for name in names} | {"loops": loops, "others": others}


def times_of(code: Sequence[Instruction]) -> list[int]:
    """Return the cycle in which each instruction lets the next one issue, by its stall counts."""
    return list(accumulate(max(item.control.stall, 1) for item in code))


def mufu_distance(code: Sequence[Instruction]) -> int:
    """Cycles from one MUFU.EX2 to the next, as stall counts have it, that come most often; 0 where
    there are not two. The unit takes one every 8 cycles; what is beyond that is lost."""
    issued = zip(code, [0, *times_of(code)], strict=False)
    times = [time for item, time in issued if item.opcode.startswith("MUFU.EX2")]
    apart = Counter(after - before for before, after in pairwise(times))
    return apart.most_common(1)[0][0] if apart else 0


def static(cubin: Path) -> Static:
    """Read a cubin with one kernel.

    Raises FileNotFoundError without the tools, ValueError for more kernels than one.
    """
    (usage,), (function,) = resources(cubin), parse(disassemble(cubin))
    return Static(
        registers=usage.registers,
        stack=usage.stack,
        spills=_count(function.instructions, SPILLS),
        parked=_count(function.instructions, PARKED),
        loops=tuple(softmax_loops(function)),
        others=other_loops(function),
        outside=exponentials_outside(function),
        serialised=is_serialised(function),
    )


def softmax_loops(function: Function) -> list[SoftmaxLoop]:
    """The innermost loops with exponentials, by address."""
    heads = [head for head, body in function.loops.items() if _exponentials(function, body)]
    inner = function.innermost(heads)
    return sorted((_softmax_loop(function, h) for h in inner), key=lambda loop: loop.address)


def other_loops(function: Function) -> dict[int, dict[str, int]]:
    """Address -> opcodes of softmax work in loops neither around a softmax loop nor inside one.

    A tile loop that a compiler split in two shows up here, and so does a rolled epilogue.
    """
    covered, result = _softmax_blocks(function), {}
    for head, body in function.loops.items():
        code = function.code(body)
        work = dict(Counter(item.word for item in code if item.opcode.startswith(WORK)))
        if head not in covered and work:
            result[function.address(head)] = work
    return dict(sorted(result.items()))


def exponentials_outside(function: Function) -> int:
    """MUFU.EX2 in no softmax loop: a tile that ptxas knows to come once at most is no loop."""
    return _count(function.code(set(function.order) - _softmax_blocks(function)), "MUFU.EX2")


def _softmax_blocks(function: Function) -> frozenset[int]:
    bodies = [body for body in function.loops.values() if _exponentials(function, body)]
    return frozenset().union(*bodies)


def _exponentials(function: Function, body: Iterable[int]) -> bool:
    return _count(function.code(body), "MUFU.EX2") >= SOFTMAX_EX2


def _count(code: Iterable[Instruction], heads: str | tuple[str, ...]) -> int:
    return sum(item.opcode.startswith(heads) for item in code)


def _softmax_loop(function: Function, head: int) -> SoftmaxLoop:
    body = function.loops[head]
    correction = _correction(function, body)
    rest = body - correction - _retries(function, body)
    rare = _rare(function, rest)
    rest -= rare
    code = function.code(rest)
    columns = sum(item.repetition for item in code if item.opcode.startswith("LDTM"))
    nested = [
        other
        for other in function.loops
        if other in rest - {head}
        and any(function.blocks[block].has(*WORK) for block in function.loops[other])
    ]
    return SoftmaxLoop(
        address=function.address(head),
        body=code,
        correction=function.code(correction),
        rare=function.code(rare),
        tiles=max(1, round(columns / TILE_COLUMNS)),
        nested=tuple(map(function.address, nested)),
    )


def _rare(function: Function, body: frozenset[int]) -> frozenset[int]:
    """Return the longer copy if a branch chooses between two copies of the exponentials.

    Innermost branches come first, so that a copy with a branch of its own counts once.
    """
    dropped: frozenset[int] = frozenset()
    while True:
        ways: dict[int, list[frozenset[int]]] = {}
        for block, region in function.guarded(body):
            if _exponentials(function, region - dropped):
                ways.setdefault(block, []).append(region - dropped)
        pairs = [copies for copies in ways.values() if len(copies) == 2]
        if not pairs:
            return dropped
        innermost = min(pairs, key=lambda copies: sum(map(len, copies)))
        dropped |= max(innermost, key=lambda copy: len(function.code(copy)))


def _retries(function: Function, body: frozenset[int]) -> frozenset[int]:
    """Cold blocks that repeat an mbarrier wait whose first try stands in the body."""
    found = frozenset()
    for block, region in function.guarded(body):
        code = function.code(region)
        waits = any("TRYWAIT" in item.opcode for item in code)
        works = any(item.opcode.startswith(WORK) for item in code)
        tried = function.blocks[block].has("SYNCS")
        if tried and waits and not works and len(code) < RETRY_LIMIT:
            found |= region
    return found


def _correction(function: Function, body: frozenset[int]) -> frozenset[int]:
    """The largest conditional region that loads, multiplies and stores TMEM: it rescales O."""
    steps = ("LDTM", "FMUL", "STTM")
    found = [
        region
        for _, region in function.guarded(body)
        if all(_count(function.code(region), step) for step in steps)
        and not _count(function.code(region), "MUFU.EX2")
    ]
    return max(found, key=len, default=frozenset())
