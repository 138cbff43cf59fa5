"""Landmarks and work: the terms in which PTX and SASS are compared.

A landmark is an instruction whose effect other warps or units notice: a barrier, an asynchronous
operation, or a wait for one. The compiler keeps landmarks in order. Work may be moved by the
compiler, but is kept. It is a vector of counts in units of `Work`. It distinguishes paths with the
same landmarks, such as the two copies of a loop with and without a mask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from cycle_model.sass.flow import Instruction
from ptxemu.syntax.tree import Instr

# Landmarks. A recording holds the events of those in DYNAMIC; the text determines the others.
INIT, ARRIVE, EXPECT, COMPLETE, WAIT, TEST = "init", "arrive", "expect", "complete", "wait", "test"
LOAD, STORE, SEND, MMA, FILL, COMMIT = "load", "store", "send", "mma", "fill", "commit"
BULK_COMMIT, COPY_COMMIT, GROUP_WAIT = "bulk commit", "copy commit", "group wait"
COPY_ARRIVE = "copy arrive"
BARRIER, CLUSTER_ARRIVE, CLUSTER_WAIT = "barrier", "cluster arrive", "cluster wait"
WGMMA, WGMMA_WAIT = "wgmma", "wgmma wait"
CANCEL = "cancel"
DYNAMIC = {INIT, ARRIVE, EXPECT, COMPLETE, WAIT, LOAD, STORE, SEND, MMA, FILL, COMMIT, COPY_ARRIVE}
DYNAMIC |= {BARRIER, CANCEL, TEST}

# SASS may have more of these than PTX: a quick look before a wait, the commit of wait_all, waits
# between FP8 products whose sums are added up elsewhere.
OPTIONAL = {TEST, COPY_COMMIT, WGMMA_WAIT}
MOST_GROUPS = 32

# No work is moved across these: a waiting warp may have to jump back.
SETTLING = {WAIT, BARRIER, CLUSTER_WAIT}

# Kinds of work, and the weight of one unit of each: four bytes of a lane, an instruction.
WEIGHTS = {
    "global load": 4,
    "global store": 4,
    "shared load": 4,
    "shared store": 4,
    "copy": 16,
    "matrix": 16,
    "mma": 16,
    "atomic": 8,
    "shuffle": 8,
    "special": 8,
    "float": 1,
    "select": 1,
}
KINDS = tuple(WEIGHTS)
ATOMIC_WORK = KINDS.index("atomic")
ACCESSES = tuple(k for k, name in enumerate(KINDS) if name.endswith((" load", " store")))
Vector = tuple[int, ...]
NO_WORK: Vector = (0,) * len(KINDS)


class Symbol(NamedTuple):
    """An instruction as the binder sees it.

    Attributes:
        landmark: Name if the instruction is a landmark, else "".
        kind: Class of its work.
        amount: Weighted amount of its work.
        relaxed: Whether it arrives at a barrier of another CTA and orders nothing.
    """

    landmark: str = ""
    kind: int = -1
    amount: int = 0
    relaxed: bool = False


NOTHING = Symbol()


def stream(landmark: str, relaxed: bool) -> str:
    """Return the stream of a landmark, or "" for none.

    Landmarks of different streams may be reordered, those of one stream keep their order. The
    streams are accesses to tensor memory, and operations on another CTA, relaxed arrivals
    included. A landmark without a stream is never reordered.
    """
    if landmark.startswith("tmem"):
        return "tmem"
    return SEND if landmark == SEND or relaxed else ""


def _work(kind: str, units: int = 1) -> Symbol:
    return Symbol(kind=KINDS.index(kind), amount=units * WEIGHTS[kind])


# -- PTX ----------------------------------------------------------------------------------------

_PTX_LANDMARKS = (
    ("mbarrier.init", INIT),
    ("mbarrier.arrive", ARRIVE),
    ("mbarrier.expect_tx", EXPECT),
    ("mbarrier.complete_tx", COMPLETE),
    ("mbarrier.try_wait", WAIT),
    ("mbarrier.test_wait", TEST),
    ("cp.async.bulk.commit_group", BULK_COMMIT),
    ("cp.async.bulk.wait_group", GROUP_WAIT),
    ("cp.async.bulk.prefetch", ""),
    ("cp.async.commit_group", COPY_COMMIT),
    ("cp.async.wait_", GROUP_WAIT),
    ("cp.async.mbarrier.arrive", COPY_ARRIVE),
    ("cp.reduce.async.bulk", STORE),
    ("st.async", SEND),
    ("red.async", SEND),
    ("tcgen05.mma", MMA),
    ("tcgen05.cp", FILL),
    ("tcgen05.commit", COMMIT),
    ("wgmma.mma_async", WGMMA),
    ("wgmma.wait_group", WGMMA_WAIT),
    ("barrier.cluster.arrive", CLUSTER_ARRIVE),
    ("barrier.cluster.wait", CLUSTER_WAIT),
    ("bar.warp", ""),
    ("bar.", BARRIER),
    ("barrier.", BARRIER),
    ("clusterlaunchcontrol.try_cancel", CANCEL),
)
_SPECIAL = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div", "rem")
_TYPE = re.compile(r"[a-z](\d+)(x2)?$")


def of_ptx(instr: Instr) -> Symbol:
    """Return the symbol that a PTX instruction should leave in the machine code."""
    opcode, parts = instr.opcode, instr.parts
    if opcode.startswith("cp.async.bulk"):
        return _of_bulk_copy(instr)
    for head, landmark in _PTX_LANDMARKS:
        if opcode.startswith(head):
            away = "relaxed" in instr.parts and "shared::cluster" in instr.parts
            return Symbol(landmark, relaxed=landmark == ARRIVE and away)
    if opcode.startswith(("tcgen05.ld", "tcgen05.st")):
        return Symbol(f"tmem {parts[1]} {_registers(instr)}")
    root = parts[0]
    if root in ("ld", "st", "ldu"):
        return _of_access(instr)
    if root == "cp" and parts[1] == "async":
        return _work("copy")
    if root in ("ldmatrix", "stmatrix"):
        return _work("matrix")
    if root == "mma":
        return _work("mma")
    if root in ("atom", "red"):
        return _work("atomic")
    if root in ("shfl", "redux"):
        return _work("shuffle")
    if root in _SPECIAL:
        return _work("special")
    if root == "selp":
        return _work("select")
    if root in ("add", "sub", "mul", "fma") and parts[-1] in ("f32", "f32x2"):
        return _work("float")
    return NOTHING


def _of_bulk_copy(instr: Instr) -> Symbol:
    """Loads go to shared memory from global memory, sends from that of a CTA."""
    for head, landmark in _PTX_LANDMARKS:
        if head.startswith("cp.async.bulk") and instr.opcode.startswith(head):
            return Symbol(landmark)
    spaces = [part for part in instr.parts if part in ("global", "shared::cluster", "shared::cta")]
    if "prefetch" in instr.parts or not spaces:
        return NOTHING
    if spaces[0] == "global":
        return Symbol(STORE)
    return Symbol(LOAD if spaces[-1] == "global" else SEND)


def _of_access(instr: Instr) -> Symbol:
    direction = "load" if instr.parts[0] != "st" else "store"
    if "param" in instr.parts or "local" in instr.parts or "const" in instr.parts:
        return NOTHING
    shared = any(part.startswith("shared") for part in instr.parts)
    found = _TYPE.match(instr.parts[-1])
    count = next((int(part[1:]) for part in instr.parts if re.fullmatch(r"v\d", part)), 1)
    words = max(int(found[1]) * count // 32, 1) if found else count
    return _work(f"{'shared' if shared else 'global'} {direction}", words)


def _registers(instr: Instr) -> int:
    """Return the number of registers per lane of a tcgen05.ld or .st."""
    shape = next(part for part in instr.parts if re.fullmatch(r"\d+x\d+b|16x32bx2", part))
    times = next(int(part[1:]) for part in instr.parts if re.fullmatch(r"x\d+", part))
    return times * {"16x128b": 2, "16x256b": 4}.get(shape, 1)


# -- SASS ---------------------------------------------------------------------------------------

_SASS_LANDMARKS = (
    ("SYNCS.EXCH", INIT),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT", WAIT),
    ("SYNCS.PHASECHK", TEST),
    ("UTMALDG", LOAD),
    ("UBLKCP.S.G", LOAD),
    ("UBLKCP.G.S", STORE),
    ("UBLKCP", SEND),
    ("UTMASTG", STORE),
    ("UTMAREDG", STORE),
    ("UBLKRED", STORE),
    ("UTMACMDFLUSH", BULK_COMMIT),
    ("LDGDEPBAR", COPY_COMMIT),
    ("ARRIVES.LDGSTSBAR", COPY_ARRIVE),
    ("STAS", SEND),
    ("REDAS", SEND),
    ("UTCBAR", COMMIT),
    ("UTCCP", FILL),
    ("HGMMA", WGMMA),
    ("QGMMA", WGMMA),
    ("IGMMA", WGMMA),
    ("BGMMA", WGMMA),
    ("WARPGROUP.DEPBAR", WGMMA_WAIT),
    ("BAR.", BARRIER),
    ("UCGABAR_ARV", CLUSTER_ARRIVE),
    ("UCGABAR_WAIT", CLUSTER_WAIT),
    ("UGETNEXTWORKID", CANCEL),
)
_SASS_WORK = {
    "LDG": "global load",
    "LD": "global load",
    "STG": "global store",
    "ST": "global store",
    "LDS": "shared load",
    "STS": "shared store",
    "LDGSTS": "copy",
    "LDSM": "matrix",
    "STSM": "matrix",
    "HMMA": "mma",
    "QMMA": "mma",
    "OMMA": "mma",
    "IMMA": "mma",
    "DMMA": "mma",
    "ATOM": "atomic",
    "ATOMG": "atomic",
    "ATOMS": "atomic",
    "RED": "atomic",
    "REDG": "atomic",
    "SHFL": "shuffle",
    "REDUX": "shuffle",
    "CREDUX": "shuffle",
    "MUFU": "special",
    "FSEL": "select",
    "SEL": "select",
    "FADD": "float",
    "FMUL": "float",
    "FFMA": "float",
    "FADD2": "float",
    "FMUL2": "float",
    "FFMA2": "float",
}
_WIDTH = re.compile(r"\.(64|128|256)\b")


def of_function(items: Sequence[Instruction]) -> list[Symbol]:
    """Return the symbol of each instruction of a kernel.

    Where each lane initialises an mbarrier, the compiler stores its 64-bit words and then
    invalidates what the unit knew of them; these stores count as initialisations.
    """
    symbols = [of_sass(item) for item in items]
    for number, item in enumerate(items):
        at = number - 1 if item.opcode.startswith("SYNCS.CCTL.IVALL") else -1
        while at >= 0 and not symbols[at].landmark and items[at].word not in ("EXIT", "RET"):
            if items[at].opcode == "STS.64":
                symbols[at] = Symbol(INIT)
            at -= 1
    return symbols


def of_sass(item: Instruction) -> Symbol:
    """Return the symbol of a SASS instruction."""
    opcode, word = item.opcode, item.word
    if word in ("LDTM", "STTM"):
        return Symbol(f"tmem {word[:2].lower()} {_columns(item)}")
    if word.startswith("UTC") and word.endswith("MMA"):
        return Symbol(MMA)
    if opcode.startswith("SYNCS.ARRIVE"):
        return Symbol(EXPECT if ".A0T" in opcode else ARRIVE)
    if word == "DEPBAR":
        return _of_depbar(item)
    for head, landmark in _SASS_LANDMARKS:
        if opcode.startswith(head):
            return Symbol(landmark)
    kind = _SASS_WORK.get(word)
    if kind is None:
        return NOTHING
    width = _WIDTH.search(opcode)
    wide = kind.endswith(("load", "store")) and width is not None
    return _work(kind, int(width[1]) // 32 if wide and width else 1)


def _columns(item: Instruction) -> int:
    """Registers of a lane."""
    return item.repetition * {"16dp128bit": 2, "16dp256bit": 4}.get(
        next((part for part in item.opcode.split(".") if "dp" in part), ""), 1
    )


def _of_depbar(item: Instruction) -> Symbol:
    """Return a wait for groups of copies; with a count beyond all groups it is the compiler's."""
    count = re.search(r"^SB0, 0x([0-9a-f]+)", item.operands)
    return Symbol(GROUP_WAIT) if count and int(count[1], 16) < MOST_GROUPS else NOTHING
