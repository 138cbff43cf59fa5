"""Flow of undefined data through an instruction: its sources, and operands that must be defined.

A `Flow` is derived from one instruction, once. Its `kind` is how the registers that it writes
follow from those that it reads; `check.taint` has a rule for each kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ptxemu.syntax.tree import CARRY, TYPE_BITS, Addr, Args, Instr, Not, Pair, Reg, Vec

# Kinds whose instructions reach memory or other agents; all others are of registers alone.
MEMORY = frozenset(("load", "load matrix", "store", "store matrix", "atomic", "operation"))
_BARRIERS = ("mbarrier", "bar", "barrier")
_OPERATIONS = (*_BARRIERS, "cp", "tcgen05", "tensormap")
# root -> kind, where that is all there is to know
_ROOTS = {
    "ld": "load",
    "ldu": "load",
    "ldmatrix": "load matrix",
    "stmatrix": "store matrix",
    "atom": "atomic",
    "red": "atomic",
    "selp": "select",
    "and": "mask",
    "or": "mask",
    "shfl": "shuffle",
    "vote": "vote",
    "match": "group",
    "redux": "group",
    "mma": "product",
    "movmatrix": "transposed",
}


METADATA = "the sparsity metadata of an MMA"  # where undefined data must not get
METADATA_AT = {"mma": 4, "wgmma": 3}  # which operand they are, where a register has them


class UndefinedRead(Exception):
    """A block that assumes defined registers reads undefined data.

    The block goes on in the form that follows such data (`codegen.tainted`).
    """


@dataclass(frozen=True)
class Flow:
    """Flow of undefined data through one instruction.

    targets: registers written, in order; None is the sink `_`.
    sources: registers read as data; None is an operand that is no register.
    watched: registers that must not be undefined.
    sink: reason for `watched`.
    wide: registers with 64 bits or more, and so two halves.
    """

    site: int
    instr: Instr
    kind: str
    targets: tuple[str | None, ...]
    sources: tuple[str | None, ...]
    watched: tuple[str, ...]
    sink: str
    wide: frozenset[str]

    @property
    def element_bytes(self) -> int:
        """Number of bytes of one register that a load or a store moves."""
        return max(TYPE_BITS.get(self.instr.type, 32) // 8, 1)


def values_of(instr: Instr) -> tuple[tuple[object, str], ...]:
    """Operands, with their types, whose values the rule needs."""
    kind, operands = _ROOTS.get(instr.root), instr.operands
    if kind == "select":
        return ((operands[3], "pred"),)
    if kind == "mask":
        width = TYPE_BITS[instr.type]
        type_ = "pred" if width == 1 else f"u{width}"
        return ((operands[1], type_), (operands[2], type_))
    if kind == "shuffle":
        return ((operands[2], "u32"), (operands[3], "u32"))
    if kind == "vote":
        return ((operands[1], "pred"), (operands[2], "u32"))
    return ((operands[2], "u32"),) if kind == "group" else ()


def flow_of(site: int, instr: Instr, written: set[str], wide: frozenset[str]) -> Flow:
    """Return the flow of an instruction.

    Args:
        site: number of the instruction.
        instr: the instruction.
        written: registers that the instruction writes.
        wide: registers of the entry with 64 bits or more.
    """
    operands = instr.operands
    targets: tuple[Any, ...] = ()
    if operands and set(names(operands[0])) & written and not isinstance(operands[0], Addr):
        targets, operands = _items(operands[0]), operands[1:]
    targets += tuple(sorted(written - set(targets)))
    kind = _kind(instr, targets, operands)
    watched: list[str] = []
    sources: list[str | None] = []
    if kind == "store" and instr.root == "tcgen05":
        operands = (operands[0], operands[-1])
    elif is_sparse(instr):
        position = METADATA_AT[instr.root] - (len(instr.operands) - len(operands))
        watched += names(operands[position])
        operands = (*operands[:position], *operands[position + 1 :])
    elif instr.root == "wmma" and kind in MEMORY:
        watched += [name for stride in instr.operands[2:] for name in names(stride)]
        operands = operands[: len(operands) - len(instr.operands[2:])]
    elif instr.root == "brx" or instr.opcode == "call.frame":
        watched += names(operands[0])
    for operand in operands:
        if kind in MEMORY and (isinstance(operand, Addr) or kind == "operation"):
            watched += names(operand)
        else:
            sources += _items(operand)
    if instr.root in ("addc", "subc", "madc"):
        sources.append(CARRY)
    involved = {*targets, *sources} - {None}
    return Flow(
        site,
        instr,
        kind,
        targets,
        tuple(sources),
        tuple(watched),
        _sink(instr),
        frozenset(involved & wide),
    )


def is_sparse(instr: Instr) -> bool:
    """An MMA of a warp or a warpgroup that has metadata in a register."""
    return instr.root in METADATA_AT and any(part.startswith("sp") for part in instr.parts[1:3])


def _kind(instr: Instr, targets: tuple[Any, ...], operands: tuple[Any, ...]) -> str:
    root = instr.root
    if root == "st":
        return "values" if "param" in instr.parts else "store"
    if root == "mov":
        if isinstance(operands[0], Vec):
            return "pack"
        return "unpack" if len(targets) > 1 else "halves"
    if instr.opcode.startswith(("tcgen05.ld.", "wmma.load.")):
        return "load"
    if instr.opcode.startswith(("tcgen05.st.", "wmma.store.")):
        return "store"
    if root in _OPERATIONS or instr.opcode.startswith("clusterlaunchcontrol.try_cancel"):
        return "operation"
    if instr.type == "f32x2":
        return "halves"
    return _ROOTS.get(root, "values")


def _sink(instr: Instr) -> str:
    if instr.root in _BARRIERS:
        return "a barrier operand"
    if instr.root in ("brx", "call"):
        return "the index of a branch" if instr.root == "brx" else "the address of a function"
    if is_sparse(instr):
        return METADATA
    if instr.opcode.startswith("tcgen05.mma"):
        return "an address, descriptor or flag of an MMA"
    return "an address"


def names(operand: object) -> list[str]:
    """The registers of an operand."""
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Not):
        return [operand.reg.name]
    if isinstance(operand, Addr):
        return [name for part in (operand.base, *operand.coords) for name in names(part)]
    if isinstance(operand, (Vec, Args)):
        return [name for item in operand.items for name in names(item)]
    if isinstance(operand, Pair):
        return names(operand.first) + names(operand.second)
    return []


def _items(operand: object) -> tuple[str | None, ...]:
    """The parts of an operand in order, None where one is no register."""
    parts: tuple[Any, ...] = (operand,)
    if isinstance(operand, Vec):
        parts = operand.items
    elif isinstance(operand, Pair):
        parts = (operand.first, operand.second)
    return tuple(next(iter(names(part)), None) for part in parts)
