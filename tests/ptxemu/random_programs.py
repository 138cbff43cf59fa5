"""Random structured programs: as PTX for the emulator, and run thread by thread in plain Python.

A statement knows both how it is written and what it does to one thread, so the two cannot drift
apart. What they aim at is everything around the instructions: divergence and reconvergence,
registers that are scalars until lanes disagree, parallel moves, equal operations that get grouped.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

REGISTERS = 9
MEMORY_WORDS = 64
_MASK = 0xFFFFFFFF
_IMMEDIATES = (0, 1, 2, 3, 7, 31, 100, _MASK, 0x5555, 0x7F800001, 0x3F800000, 0x80000000)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def _float(x: int) -> np.float32:
    return np.array([x], np.uint32).view(np.float32)[0]


def _bits(x: np.float32) -> int:
    return 0x7FFFFFFF if x != x else int(np.array([x], np.float32).view(np.uint32)[0])


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda a, b: a + b & _MASK,
    "sub.u32": lambda a, b: a - b & _MASK,
    "mul.lo.u32": lambda a, b: a * b & _MASK,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "min.s32": lambda a, b: min(_signed(a), _signed(b)) & _MASK,
    "max.u32": max,
    "shl.b32": lambda a, b: a << b & _MASK if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "add.f32": lambda a, b: _bits(_float(a) + _float(b)),
    "mul.f32": lambda a, b: _bits(_float(a) * _float(b)),
    "sub.f32": lambda a, b: _bits(_float(a) - _float(b)),
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "lt.f32": lambda a, b: bool(_float(a) < _float(b)),
    "neu.f32": lambda a, b: not bool(_float(a) == _float(b)),
    "lt.s32": lambda a, b: _signed(a) < _signed(b),
    "eq.u32": lambda a, b: a == b,
    "gt.u32": lambda a, b: a > b,
}


class ThreadExit(Exception):
    """The thread leaves the program."""


@dataclass
class Thread:
    """One thread of the interpreter."""

    registers: list[int]
    memory: list[int]

    def value(self, operand: tuple[str, int]) -> int:
        kind, number = operand
        return self.registers[number] if kind == "r" else number


@dataclass
class Writer:
    """Lines of PTX, with fresh names for labels, counters and predicates."""

    lines: list[str] = field(default_factory=list)
    names: Iterator[int] = field(default_factory=itertools.count)
    counters: int = 0

    def line(self, text: str) -> None:
        self.lines.append(text)

    def label(self) -> str:
        return f"L{next(self.names)}"


def _text(operand: tuple[str, int], opcode: str = "") -> str:
    kind, number = operand
    if kind == "r":
        return f"%r{number}"
    return f"0f{number:08X}" if ".f32" in opcode else str(number)


@dataclass(frozen=True)
class Condition:
    how: str
    left: tuple[str, int]
    right: tuple[str, int]

    def emit(self, w: Writer) -> str:
        predicate = f"%p{next(w.names) % 4}"
        operands = f"{_text(self.left, self.how)}, {_text(self.right, self.how)}"
        w.line(f"setp.{self.how} {predicate}, {operands};")
        return predicate

    def holds(self, thread: Thread) -> bool:
        return COMPARISONS[self.how](thread.value(self.left), thread.value(self.right))


@dataclass(frozen=True)
class Operation:
    """target = a <opcode> b, under a guard where there is one."""

    opcode: str
    target: int
    a: tuple[str, int]
    b: tuple[str, int]
    guard: Condition | None = None

    def emit(self, w: Writer) -> None:
        prefix = f"@{self.guard.emit(w)} " if self.guard else ""
        operands = f"{_text(self.a, self.opcode)}, {_text(self.b, self.opcode)}"
        w.line(f"{prefix}{self.opcode} %r{self.target}, {operands};")

    def run(self, thread: Thread) -> None:
        if self.guard is None or self.guard.holds(thread):
            result = OPERATIONS[self.opcode](thread.value(self.a), thread.value(self.b))
            thread.registers[self.target] = result


@dataclass(frozen=True)
class Group:
    """Equal operations on values read before any is written: what the emulator makes a matrix."""

    parts: tuple[Operation, ...]

    def emit(self, w: Writer) -> None:
        for number, part in enumerate(self.parts):
            operands = f"{_text(part.a, part.opcode)}, {_text(part.b, part.opcode)}"
            w.line(f"{part.opcode} %g{number}, {operands};")
        for number, part in enumerate(self.parts):
            w.line(f"mov.b32 %r{part.target}, %g{number};")

    def run(self, thread: Thread) -> None:
        values = [OPERATIONS[p.opcode](thread.value(p.a), thread.value(p.b)) for p in self.parts]
        for part, value in zip(self.parts, values, strict=True):
            thread.registers[part.target] = value


@dataclass(frozen=True)
class Swap:
    a: int
    b: int

    def emit(self, w: Writer) -> None:
        w.line(f"mov.b32 %t0, %r{self.a};")
        w.line(f"mov.b32 %r{self.a}, %r{self.b};")
        w.line(f"mov.b32 %r{self.b}, %t0;")

    def run(self, thread: Thread) -> None:
        r = thread.registers
        r[self.a], r[self.b] = r[self.b], r[self.a]


@dataclass(frozen=True)
class Select:
    target: int
    yes: tuple[str, int]
    no: tuple[str, int]
    condition: Condition

    def emit(self, w: Writer) -> None:
        predicate = self.condition.emit(w)
        w.line(f"selp.b32 %r{self.target}, {_text(self.yes)}, {_text(self.no)}, {predicate};")

    def run(self, thread: Thread) -> None:
        chosen = self.yes if self.condition.holds(thread) else self.no
        thread.registers[self.target] = thread.value(chosen)


@dataclass(frozen=True)
class Load:
    """target = memory[index modulo its size]."""

    target: int
    index: int

    def emit(self, w: Writer) -> None:
        w.line(f"and.b32 %t0, %r{self.index}, {MEMORY_WORDS - 1};")
        w.line("mad.wide.u32 %rd2, %t0, 4, %rd1;")
        w.line(f"ld.global.b32 %r{self.target}, [%rd2];")

    def run(self, thread: Thread) -> None:
        index = thread.registers[self.index] % MEMORY_WORDS
        thread.registers[self.target] = thread.memory[index]


@dataclass(frozen=True)
class Exit:
    condition: Condition

    def emit(self, w: Writer) -> None:
        w.line(f"@{self.condition.emit(w)} bra END;")

    def run(self, thread: Thread) -> None:
        if self.condition.holds(thread):
            raise ThreadExit


@dataclass(frozen=True)
class If:
    condition: Condition
    then: tuple
    otherwise: tuple

    def emit(self, w: Writer) -> None:
        predicate, other, end = self.condition.emit(w), w.label(), w.label()
        w.line(f"@!{predicate} bra {other};")
        for statement in self.then:
            statement.emit(w)
        w.line(f"bra {end};")
        w.line(f"{other}:")
        for statement in self.otherwise:
            statement.emit(w)
        w.line(f"{end}:")

    def run(self, thread: Thread) -> None:
        for statement in self.then if self.condition.holds(thread) else self.otherwise:
            statement.run(thread)


@dataclass(frozen=True)
class Loop:
    """One to four trips, by the low bits of a register: lanes leave at different times."""

    register: int
    body: tuple
    leave: Condition | None

    def emit(self, w: Writer) -> None:
        counter, limit = f"%c{w.counters}", f"%l{w.counters}"
        w.counters += 1
        start, end = w.label(), w.label()
        w.line(f"mov.b32 {counter}, 0;")
        w.line(f"and.b32 {limit}, %r{self.register}, 3;")
        w.line(f"{start}:")
        for statement in self.body:
            statement.emit(w)
        if self.leave:
            w.line(f"@{self.leave.emit(w)} bra {end};")
        w.line(f"add.u32 {counter}, {counter}, 1;")
        w.line(f"setp.le.u32 %p5, {counter}, {limit};")
        w.line(f"@%p5 bra {start};")
        w.line(f"{end}:")

    def run(self, thread: Thread) -> None:
        for _ in range((thread.registers[self.register] & 3) + 1):
            for statement in self.body:
                statement.run(thread)
            if self.leave and self.leave.holds(thread):
                return


class Generator:
    """Draws statements. `rng` decides everything, so a seed names a program."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def program(self) -> tuple:
        return tuple(self.statement(0) for _ in range(self.rng.randrange(4, 14)))

    def register(self) -> int:
        return self.rng.randrange(REGISTERS)

    def operand(self) -> tuple[str, int]:
        if self.rng.random() < 0.75:
            return "r", self.register()
        return "i", self.rng.choice(_IMMEDIATES)

    def condition(self) -> Condition:
        how = self.rng.choice(tuple(COMPARISONS))
        return Condition(how, ("r", self.register()), self.operand())

    def operation(self, guarded: bool = False) -> Operation:
        opcode = self.rng.choice(tuple(OPERATIONS))
        guard = self.condition() if guarded else None
        return Operation(opcode, self.register(), self.operand(), self.operand(), guard)

    def block(self, depth: int) -> tuple:
        return tuple(self.statement(depth) for _ in range(self.rng.randrange(1, 6)))

    def group(self) -> Group:
        first = self.operation()
        rest = (
            Operation(first.opcode, self.register(), self.operand(), self.operand())
            for _ in range(4)
        )
        return Group((first, *rest))

    def statement(self, depth: int) -> object:
        draw = self.rng.random()
        if depth < 3 and draw < 0.18:
            return If(self.condition(), self.block(depth + 1), self.block(depth + 1))
        if depth < 2 and draw < 0.26:
            leave = self.condition() if self.rng.random() < 0.3 else None
            return Loop(self.register(), self.block(depth + 1), leave)
        if draw < 0.29:
            return Exit(self.condition())
        if draw < 0.38:
            return Select(self.register(), self.operand(), self.operand(), self.condition())
        if draw < 0.46:
            return Swap(self.register(), self.register())
        if draw < 0.52:
            return self.group()
        if draw < 0.58:
            return Load(self.register(), self.register())
        return self.operation(guarded=draw < 0.66)


def ptx_of(program: tuple, kinds: tuple[str, ...]) -> str:
    """The program as PTX: memory m, and d [thread, register] for what is left in the registers.

    kinds: how each register starts, 'lane' (thread x number) or 'uniform' (a word of m).
    """
    w = Writer()
    for number, kind in enumerate(kinds):
        if kind == "lane":
            w.line(f"mul.lo.u32 %r{number}, %t1, {number + 1};")
        else:
            w.line(f"ld.global.b32 %r{number}, [%rd1+{4 * number}];")
    for statement in program:
        statement.emit(w)
    w.line("END:")
    w.line(f"mad.wide.u32 %rd4, %t1, {4 * REGISTERS}, %rd3;")
    for number in range(REGISTERS):
        w.line(f"st.global.b32 [%rd4+{4 * number}], %r{number};")
    names = f"%r<{REGISTERS}>, %t<2>, %g<5>, %c<{w.counters + 1}>, %l<{w.counters + 1}>"
    body = "\n    ".join(w.lines)
    return f"""
.version 8.7
.target sm_100a
.address_size 64
.visible .entry random_program(.param .u64 m, .param .u64 d)
{{
    .reg .pred %p<6>;
    .reg .b32 {names};
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [m];
    ld.param.u64 %rd3, [d];
    mov.u32 %t1, %tid.x;
    {body}
    ret;
}}
"""


def expected(
    program: tuple, kinds: tuple[str, ...], memory: np.ndarray, threads: int
) -> np.ndarray:
    """d after every thread has run by itself: uint32 [threads, REGISTERS]."""
    words = memory.tolist()
    out = np.zeros((threads, REGISTERS), np.uint32)
    for number in range(threads):
        start = [
            number * (k + 1) & _MASK if kind == "lane" else words[k] for k, kind in enumerate(kinds)
        ]
        thread = Thread(start, words)
        try:
            for statement in program:
                statement.run(thread)
        except ThreadExit:
            pass
        out[number] = thread.registers
    return out
