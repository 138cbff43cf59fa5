"""Random structured programs as PTX, and the result of running their threads one by one.

They test everything around instructions: divergence and reconvergence, registers that are scalars
until lanes disagree, parallel moves, grouping of equal operations. `semantics` defines the
instructions.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import defaultdict

import numpy as np

from lab.silicon.conformance.semantics import Lanes
from tests.ptxemu.kernels import kernel

REGISTERS = 9
MEMORY_WORDS = 64
_IMMEDIATES = (0, 1, 2, 3, 7, 31, 100, 0xFFFFFFFF, 0x5555, 0x7F800001, 0x3F800000, 0x80000000)
_OPERATIONS = (
    *("add.u32", "sub.u32", "mul.lo.u32", "xor.b32", "and.b32", "or.b32", "min.s32", "max.u32"),
    *("shl.b32", "shr.u32", "add.f32", "mul.f32", "sub.f32"),
)
_COMPARISONS = ("lt.f32", "neu.f32", "lt.s32", "eq.u32", "gt.u32")
_LOAD = re.compile(r"ld\.global\.b32 (%\w+), \[(%\w+)\+?(\d*)\];")

Condition = tuple[str, str, str]  # a comparison and its operands: registers or immediates


def _written(opcode: str, *operands: str) -> str:
    """Format operands: an immediate float by its bits."""
    if opcode.endswith("f32"):
        operands = tuple(x if x[0] == "%" else f"0f{int(x):08X}" for x in operands)
    return ", ".join(operands)


class Generator:
    """Writer of random statements. `rng` decides everything, so a seed identifies a program."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.names = itertools.count()  # of labels and predicates
        self.counters = 0  # of loops
        for _ in range(rng.randrange(4, 14)):
            self.statement(0)

    # -- what is drawn

    def register(self) -> str:
        return f"%r{self.rng.randrange(REGISTERS)}"

    def operand(self) -> str:
        return self.register() if self.rng.random() < 0.75 else str(self.rng.choice(_IMMEDIATES))

    def condition(self) -> Condition:
        return self.rng.choice(_COMPARISONS), self.register(), self.operand()

    def statement(self, depth: int) -> None:
        draw = self.rng.random()
        if depth < 3 and draw < 0.18:
            self.branch(depth)
        elif depth < 2 and draw < 0.26:
            self.loop(depth)
        elif draw < 0.29:
            self.write(f"@{self.test(self.condition())} bra END;")
        elif draw < 0.38:
            self.select()
        elif draw < 0.46:
            a, b = self.register(), self.register()
            self.write(f"mov.b32 %t0, {a};", f"mov.b32 {a}, {b};", f"mov.b32 {b}, %t0;")
        elif draw < 0.52:
            self.group()
        elif draw < 0.58:
            self.load()
        else:
            self.operation(guarded=draw < 0.66)

    def block(self, depth: int) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            self.statement(depth)

    # -- what is written

    def write(self, *lines: str) -> None:
        self.lines += lines

    def label(self) -> str:
        return f"L{next(self.names)}"

    def test(self, condition: Condition) -> str:
        """Write a comparison; return its predicate."""
        how, *operands = condition
        predicate = f"%p{next(self.names) % 4}"
        self.write(f"setp.{how} {predicate}, {_written(how, *operands)};")
        return predicate

    def operation(self, guarded: bool) -> None:
        opcode = self.rng.choice(_OPERATIONS)
        condition = self.condition() if guarded else None
        target, a, b = self.register(), self.operand(), self.operand()
        guard = f"@{self.test(condition)} " if condition else ""
        self.write(f"{guard}{opcode} {target}, {_written(opcode, a, b)};")

    def group(self) -> None:
        """Equal operations on values read before any is written: the emulator makes a matrix."""
        opcode = self.rng.choice(_OPERATIONS)
        parts = [(self.register(), self.operand(), self.operand()) for _ in range(5)]
        for k, (_, a, b) in enumerate(parts):
            self.write(f"{opcode} %g{k}, {_written(opcode, a, b)};")
        for k, (target, _, _) in enumerate(parts):
            self.write(f"mov.b32 {target}, %g{k};")

    def select(self) -> None:
        target, yes, no = self.register(), self.operand(), self.operand()
        condition = self.condition()
        self.write(f"selp.b32 {target}, {yes}, {no}, {self.test(condition)};")

    def load(self) -> None:
        """Load a word of memory, at an index modulo its size."""
        target, index = self.register(), self.register()
        self.write(f"and.b32 %t0, {index}, {MEMORY_WORDS - 1};", "mad.wide.u32 %rd2, %t0, 4, %rd1;")
        self.write(f"ld.global.b32 {target}, [%rd2];")

    def branch(self, depth: int) -> None:
        predicate, other, end = self.test(self.condition()), self.label(), self.label()
        self.write(f"@!{predicate} bra {other};")
        self.block(depth + 1)
        self.write(f"bra {end};", f"{other}:")
        self.block(depth + 1)
        self.write(f"{end}:")

    def loop(self, depth: int) -> None:
        """Write a loop of one to four trips, by the low bits of a register: lanes leave at
        different times."""
        leave = self.condition() if self.rng.random() < 0.3 else None
        counter, limit = f"%c{self.counters}", f"%l{self.counters}"
        self.counters += 1
        start, end = self.label(), self.label()
        self.write(f"mov.b32 {counter}, 0;", f"and.b32 {limit}, {self.register()}, 3;", f"{start}:")
        self.block(depth + 1)
        if leave:
            self.write(f"@{self.test(leave)} bra {end};")
        self.write(f"add.u32 {counter}, {counter}, 1;", f"setp.le.u32 %p5, {counter}, {limit};")
        self.write(f"@%p5 bra {start};", f"{end}:")


# How threads affect each other at the end of a program; the first two are right.
_SHARED = """.shared .b32 s[64];
mov.u32 %t0, %tid.x;
mov.u32 %g0, s;
mad.lo.u32 %t0, %t0, 4, %g0;
st.shared.b32 [%t0], %r0;
{barrier}ld.shared.b32 %r1, [%g0+4];"""
EXCHANGES = {
    "none": "",
    "shared memory": _SHARED.format(barrier="bar.sync 0;\n"),
    "shared memory without a barrier": _SHARED.format(barrier=""),
    "a counter that others load": "atom.global.add.u32 %r0, [%rd1], 1;",
    "stores to one word": "st.global.b32 [%rd1+8], %r0;",
    "a store out of bounds": "st.global.b32 [%rd1+1073741824], %r0;",
}


def _statements(program: Generator, kinds: tuple[str, ...]) -> list[str]:
    """All statements before the end, where the registers are stored."""
    start = {"lane": "mul.lo.u32 %r{0}, %t1, {1};", "uniform": "ld.global.b32 %r{0}, [%rd1+{2}];"}
    return [
        *(start[kind].format(k, k + 1, 4 * k) for k, kind in enumerate(kinds)),
        *program.lines,
        "END:",
    ]


def ptx_of(program: Generator, kinds: tuple[str, ...], exchange: str = "") -> str:
    """The program as PTX: memory m, and d [thread of the grid, register] for the final registers.

    kinds: how each register starts, 'lane' (thread x number) or 'uniform' (a word of m).
    exchange: statements by which threads affect each other, after those of the program.
    """
    loops = program.counters + 1
    lines = [
        f".reg .b32 %t<4>, %g<5>, %c<{loops}>, %l<{loops}>;",
        "ld.param.u64 %rd1, [m];",
        "ld.param.u64 %rd3, [d];",
        *("mov.u32 %t1, %tid.x;", "mov.u32 %t2, %ctaid.x;", "mov.u32 %t3, %ntid.x;"),
        "mad.lo.u32 %t1, %t2, %t3, %t1;",
        *_statements(program, kinds),
        exchange,
        f"mad.wide.u32 %rd4, %t1, {4 * REGISTERS}, %rd3;",
        *(f"st.global.b32 [%rd4+{4 * k}], %r{k};" for k in range(REGISTERS)),
    ]
    return kernel("\n".join(lines), ".param .u64 m, .param .u64 d")


def _thread(statements: list[str], number: int, memory: list[int]) -> list[int]:
    """Return the final registers of one thread."""
    one = Lanes({"%t1": [number], "%rd1": [0]}, defaultdict(lambda: 32))
    at = 0
    while (line := statements[at]) != "END:":
        at += 1
        guard, jump, label = line.rpartition("bra ")
        if jump:
            if not guard or one.read("pred", guard[1:].rstrip())[0]:
                at = statements.index(f"{label[:-1]}:")
        elif load := _LOAD.match(line):
            target, base, offset = load.groups()
            address = one.registers[base][0] + int(offset or 0)
            one.registers[target] = [memory[address // 4]]
        elif not line.endswith(":"):
            one.execute(line.removesuffix(";"))
    return [one.registers[f"%r{k}"][0] for k in range(REGISTERS)]


def expected(
    program: Generator, kinds: tuple[str, ...], memory: np.ndarray, threads: int
) -> np.ndarray:
    """Return d after every thread has run by itself: uint32 [threads, REGISTERS]."""
    statements, words = _statements(program, kinds), memory.tolist()
    return np.array([_thread(statements, k, words) for k in range(threads)], np.uint32)
