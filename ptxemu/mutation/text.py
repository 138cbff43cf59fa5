"""Lines of a PTX text with the parser's instructions, and rewriting of one instruction.

A change replaces whole lines, so that line numbers mean the same in a kernel and in its mutants.
They are those of the text that `spread` makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ptxemu.syntax.lexer import tokenize
from ptxemu.syntax.parser import parse
from ptxemu.syntax.tree import Addr, Args, Imm, Instr, Not, Pair, Reg, Vec

_SCRATCH = "mutant"  # a register of the scope that a changed operand opens
_OPERATIONS = {"add": int.__add__, "and": int.__and__, "xor": int.__xor__}
_OPENING, _CLOSING = "[{(", "]})"


@dataclass(frozen=True)
class Statement:
    """An instruction as text: '@%p1 ', 'mov.b32', ('%r1', '0')."""

    guard: str
    opcode: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.guard}{self.opcode} {', '.join(self.operands)};".replace(" ;", ";")

    def with_opcode(self, old: str, new: str) -> Statement:
        """Replace the first occurrence of `old` in the opcode."""
        return replace(self, opcode=self.opcode.replace(old, new, 1))

    def with_operand(self, index: int, text: str) -> Statement:
        operands = list(self.operands)
        operands[index] = text
        return replace(self, operands=tuple(operands))

    def computed(self, index: int, operation: str, value: int, bits: int = 32) -> str:
        """Text of the statement with `operation` (add, and, xor) applied to an operand first."""
        operand = self.operands[index]
        if operand.lstrip("-").isdigit():
            return str(self.with_operand(index, str(_OPERATIONS[operation](int(operand), value))))
        type_ = f"{'s' if operation == 'add' else 'b'}{bits}"
        changed = self.with_operand(index, _SCRATCH)
        return (
            f"{{ .reg .b{bits} {_SCRATCH}; {operation}.{type_} {_SCRATCH}, {operand}, {value}; "
            f"{changed} }}"
        )

    def displaced(self, index: int, nbytes: int) -> Statement:
        """An address operand so many bytes further on."""
        address = self.operands[index].removesuffix("]")
        base, _, offset = address.partition("+")
        return self.with_operand(index, f"{base}+{int(offset or 0) + nbytes}]")


def statement(line: str) -> Statement:
    """The only instruction on a line; comments are dropped."""
    words = [text for _, text, _ in tokenize(line)]
    guard = ""
    if words[0] == "@":
        length = 3 if words[1] == "!" else 2
        guard, words = "".join(words[:length]) + " ", words[length:]
    opcode, *rest = words
    operands, depth = [""], 0
    for word in rest[:-1]:
        depth += (word in _OPENING) - (word in _CLOSING)
        if word == "," and depth == 0:
            operands.append("")
        else:
            operands[-1] += word
    return Statement(guard, opcode, tuple(filter(None, operands)))


@dataclass(frozen=True)
class Observed:
    """Lines, by what a run has shown of them.

    Attributes:
        unheard: Arrivals after the last phase of their mbarrier that any thread waits for, and
            inits of mbarriers without such a wait.
        last: Bulk commit_group and wait_group after which the warp writes, signals and issues
            nothing.
        implied: Waits for mbarriers, copies or bulk copies that never give their warp new
            knowledge.
        executed: All executed lines; None if not observed.
    """

    unheard: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    implied: frozenset[int] = frozenset()
    executed: frozenset[int] | None = None


class Text:
    """A PTX module: its lines, and `body`, all statements (`Instr` and labels) in order."""

    def __init__(self, ptx: str, observed: Observed | None = None) -> None:
        self.ptx = spread(ptx)
        self.observed = observed or Observed()
        self.lines = self.ptx.split("\n")
        self.body = [item for entry in parse(self.ptx).entries.values() for item in entry.body]
        self.places = {item.line: k for k, item in enumerate(self.body) if isinstance(item, Instr)}

    def line(self, number: int) -> str:
        return self.lines[number - 1].strip()

    def statement(self, instr: Instr) -> Statement:
        code = self.line(instr.line).partition("//")[0].strip()
        if not code.endswith(";"):
            raise ValueError(f"line {instr.line} is not one instruction: {code}")
        return statement(code)

    def find(self, pattern: str) -> Iterator[Instr]:
        """Yield instructions whose opcode begins with the regular expression."""
        matches = re.compile(rf"(?:{pattern})(?![A-Za-z0-9_])").match
        yield from (i for i in self.body if isinstance(i, Instr) and matches(i.opcode))

    def changed(self, lines: Mapping[int, str]) -> str:
        """The module with other text on some lines; the old one stays as a comment."""
        return changed(self.ptx, lines)

    @cached_property
    def labels(self) -> dict[str, int]:
        """Label -> its place in `body`."""
        return {item: k for k, item in enumerate(self.body) if isinstance(item, str)}

    @cached_property
    def first(self) -> Instr:
        """The first instruction."""
        return next(item for item in self.body if isinstance(item, Instr))

    @cached_property
    def settings(self) -> dict[Reg, list[Instr]]:
        """Register -> the instructions that write it."""
        found: dict[Reg, list[Instr]] = {}
        for item in self.body:
            for reg in written(item) if isinstance(item, Instr) else ():
                found.setdefault(reg, []).append(item)
        return found

    @cached_property
    def branches(self) -> list[tuple[int, int, Instr]]:
        """(place, place of its target, branch) of every branch."""
        return [
            (k, self.labels[item.operands[0].name], item)
            for k, item in enumerate(self.body)
            if isinstance(item, Instr) and item.root == "bra"
        ]

    def target(self, instr: Instr) -> int | None:
        """Return the target of a branch as a place in `body`; None for another instruction."""
        return self.labels[instr.operands[0].name] if instr.root == "bra" else None

    def constant(self, place: int, operand: object) -> int | None:
        """Return the value of the operand at `place` if the preceding text determines it."""
        if isinstance(operand, Imm):
            return int(operand.value)
        for item in reversed(self.body[:place]):
            if isinstance(item, Instr) and operand in written(item):
                source = item.operands[-1]
                moved = item.root == "mov" and item.guard is None and isinstance(source, Imm)
                return int(source.value) if moved else None
        return None


_PART = re.compile(r"[{}]|[\w$%]+\s*:(?!:)|[^;]*(?:;|$)")  # a brace, a label, or an instruction


@lru_cache(maxsize=64)
def spread(ptx: str) -> str:
    """The module with one instruction on a line, and no brace or label before it, which inline PTX
    often has; the same text where that is so already."""
    return "\n".join(part for line in ptx.split("\n") for part in _parts(line))


def _parts(line: str) -> list[str]:
    code = line.partition("//")[0].strip()
    parts: list[str] = []
    while code:
        found = _PART.match(code)
        assert found  # the last alternative matches anything
        parts.append(f"\t{found[0]}")
        code = code[found.end() :].lstrip()
    return parts if ";" in line and len(parts) > 1 else [line]


def changed(ptx: str, lines: Mapping[int, str]) -> str:
    """PTX with other text on some lines, by their number; the old one stays as a comment."""
    text = ptx.split("\n")
    for number, new in lines.items():
        old = text[number - 1].strip()
        text[number - 1] = f"\t{new} // mutant of: {old}".replace("\t ", "\t")
    return "\n".join(text)


_READ_ONLY = re.compile(
    r"st\.|red\.|bra|ret|exit|bar(?!\S*\.red)|fence|membar|prefetch|mbarrier\.init|mbarrier\.inval"
    r"|cp\.|tcgen05\.(?!ld)|setmaxnreg|griddepcontrol|stmatrix|mbarrier\.(?:expect|complete)_tx"
)


def written(instr: Instr) -> set[Reg]:
    """Registers that an instruction writes: its first operand, unless it has no result."""
    if not instr.operands or _READ_ONLY.match(instr.opcode):
        return set()
    first = instr.operands[0]
    return set() if isinstance(first, Addr) else set(_registers(first))


def used(instr: Instr) -> set[Reg]:
    """Registers that an instruction reads."""
    first = 1 if written(instr) else 0
    found = {reg for operand in instr.operands[first:] for reg in _registers(operand)}
    return found if instr.guard is None else found | set(_registers(instr.guard))


def _registers(operand: object) -> Iterator[Reg]:
    if isinstance(operand, Reg):
        yield operand
    elif isinstance(operand, Not):
        yield operand.reg
    elif isinstance(operand, Pair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)
    elif isinstance(operand, Vec | Args):
        for item in operand.items:
            yield from _registers(item)
    elif isinstance(operand, Addr):
        yield from _registers(operand.base)
        for item in operand.coords:
            yield from _registers(item)
