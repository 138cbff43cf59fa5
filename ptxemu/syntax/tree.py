"""The syntax tree: what the parser yields and the resolver and code generator read.

Operands are small frozen dataclasses; an instruction keeps its opcode as written, split at the
dots, so that an emitter can look at modifiers without a second grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

from ptxemu.syntax.line_info import Location

CARRY = "CC.CF"  # the condition-code register of add.cc and its like; no PTX register is called so
# Bits of every type that instructions name.
TYPE_BITS = {
    name: bits
    for bits, names in {
        1: "pred",
        8: "b8 u8 s8 e4m3 e5m2 e2m1x2",
        16: "b16 u16 s16 f16 bf16 e4m3x2 e5m2x2 e2m3x2 e3m2x2 ue8m0x2 s2f6x2",
        32: "b32 u32 s32 f32 tf32 f16x2 bf16x2 u16x2 s16x2 e4m3x4 e5m2x4",
        64: "b64 u64 s64 f64 f32x2",
        128: "b128",
    }.items()
    for name in names.split()
}


class Operand:
    """What all operands are: copied and kept by their fields."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = type(self)
        return kind, _values_of(kind)(self)


@cache
def _values_of(kind: Any) -> Callable[[Operand], tuple[Any, ...]]:
    """Gives the fields of an operand of that kind."""
    if len(kind.__slots__) > 1:
        return attrgetter(*kind.__slots__)
    only = attrgetter(*kind.__slots__)
    return lambda operand: (only(operand),)


@dataclass(frozen=True, slots=True)
class Reg(Operand):
    """A virtual register, by its scope-resolved name."""

    name: str


@dataclass(frozen=True, slots=True)
class Special(Operand):
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm(Operand):
    """An immediate. `value` is an int (two's complement not applied yet) or, for decimals, a float.

    `float_bits` is the width of a `0f`/`0d` literal, whose `value` then holds the raw bits.
    """

    value: int | float
    float_bits: int = 0


@dataclass(frozen=True, slots=True)
class Sym(Operand):
    """The address of a module, shared or parameter symbol, or a label, plus a constant."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Not(Operand):
    """A negated predicate operand `!%p`."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Vec(Operand):
    """A brace list `{a, b, ...}`; `None` stands for the sink `_`."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pair(Operand):
    """Two destinations written `a|b`; `None` stands for the sink `_`."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Addr(Operand):
    """A bracketed address `[base + offset]`, or `[map, {coordinates}]` of a tensor instruction."""

    base: object  # Reg | Sym | Imm
    offset: int = 0
    coords: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Args(Operand):
    """A parenthesised list in a call."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Instr:
    """One instruction. `parts` is the opcode split at dots: ("add", "rn", "f32")."""

    opcode: str
    operands: tuple[Any, ...]
    guard: Reg | Not | None
    line: int
    text: str
    location: Location | None = field(default=None, compare=False, repr=False)

    @property
    def source(self) -> str:
        """ "path/file.py:123", the innermost frame; "" without line information."""
        return str(self.location or "")

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    @property
    def root(self) -> str:
        return self.parts[0]

    @property
    def type(self) -> str:
        """The last part: for most instructions the operand type."""
        return self.parts[-1]


@dataclass(frozen=True)
class Variable:
    """A `.param`, `.shared`, `.global`, `.const` or `.local` declaration."""

    name: str
    space: str
    type: str
    align: int
    nbytes: int
    init: tuple[Any, ...] = ()
    extern: bool = False


@dataclass
class Entry:
    """One kernel: parameters in order, register types, variables, and a flat statement list.

    `body` holds `Instr` and label strings in program order.
    """

    name: str
    params: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name -> type such as "b32", "pred"
    variables: list[Variable] = field(default_factory=list)
    body: list[Any] = field(default_factory=list[Any])
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    target: str = ""  # of its module, such as "sm_100a"


@dataclass
class ModuleTree:
    """A parsed PTX module."""

    entries: dict[str, Entry] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)  # declared or defined .func names
    files: dict[int, str] = field(default_factory=dict)  # .file number -> path
