"""The syntax tree: what the parser yields and the resolver and code generator read.

Operands are small frozen dataclasses; an instruction keeps its opcode as written, split at the
dots, so that an emitter can look at modifiers without a second grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

# Line information: PTX ISA, "Debugging Directives". A `.loc` holds until the next one.
Place = tuple[int, ...]  # file number, line, column


@dataclass(frozen=True)
class Location:
    """A place in a source file; `caller` is the place of the call that was inlined there.

    `files` is the module's table, which a compiler writes behind the code.
    """

    place: Place
    files: dict[int, str] = field(repr=False, compare=False)
    caller: Location | None = None

    def __str__(self) -> str:
        """ "path:line", the path as the compiler wrote it."""
        file, line, *_ = self.place
        return f"{self.files.get(file, f'file {file}')}:{line}"

    def frames(self) -> list[str]:
        """This place, then the calls around it, from the inside out."""
        return [str(self), *(self.caller.frames() if self.caller else ())]


class LineInfo:
    """Keeps the location that holds where the parser is."""

    def __init__(self, files: dict[int, str]) -> None:
        self._files = files
        self._known: dict[Place, Location] = {}
        self.here: Location | None = None

    def enter_function(self) -> None:
        """Reset the location, which does not extend from one function to the next."""
        self._known.clear()
        self.here = None

    def loc(self, words: Sequence[str]) -> None:
        """`.loc file line column[, function_name label[, inlined_at file line column]]`.

        The place of a call names its own caller where it was a location before. Line 0 is code
        that the compiler made up; it counts as belonging to the place before. So does column 0,
        where no statement of a function is: the DSL gives it, with the line of the function or the
        one behind it, to stores whose own place it has lost.
        """
        caller = None
        if "inlined_at" in words:
            at = words.index("inlined_at") + 1
            place = _place(words[at : at + 3])
            caller = self._known.get(place) or Location(place, self._files)
        place = _place(words[1:4])
        lost = len(place) > 2 and not place[2] and self.here is not None
        if place[1] and not (lost and caller is None):
            self.here = self._known[place] = Location(place, self._files, caller)


def _place(words: Sequence[str]) -> Place:
    return tuple(int(word) for word in words)


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
    """Base of all operands, which are copied and pickled by their fields."""

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
    """An instruction. `parts` is the opcode split at dots: ("add", "rn", "f32")."""

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
    """A kernel: parameters in order, register types, variables, and a flat statement list.

    `body` holds `Instr` and label strings in program order. `lists` holds the labels of each
    `.branchtargets`, by its own label. `framed` has the registers of functions with frames, and
    `pointers` the addresses of such functions, by the labels of their bodies (`syntax.frames`).
    """

    name: str
    params: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name -> type such as "b32", "pred"
    variables: list[Variable] = field(default_factory=list)
    body: list[Any] = field(default_factory=list[Any])
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    target: str = ""  # of its module, such as "sm_100a"
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)
    framed: set[str] = field(default_factory=set[str])
    pointers: dict[str, int] = field(default_factory=dict)


@dataclass
class ModuleTree:
    """A parsed PTX module."""

    entries: dict[str, Entry] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)  # declared or defined .func names
    addresses: dict[str, int] = field(default_factory=dict)  # of the functions that it defines
    files: dict[int, str] = field(default_factory=dict)  # .file number -> path
