"""Writes the programs of conformance cases that are no elementwise instruction.

A body may use %p0.., %h0.. (16 bits), %r0.., %w0.. (64 bits), %q0.. (128 bits), and the parameters'
values as %<name>; %thread, %lane, %cta and %rank (of the CTA in its cluster) are set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lab.silicon.conformance import elementwise
from lab.silicon.conformance.case import Case, Output
from lab.silicon.conformance.ptx_program import Buffer, Map, Program, Value
from lab.silicon.conformance.values import random_bytes

_OPCODE = re.compile(r"(?:^|[;{\n]|:\s|@!?%?\w+)\s*([a-z][\w.:]*\.[\w.:]+)(?=[\s;])")
_PLAIN = re.compile(r"(?:^|[;{\n])\s*(?:@!?%?\w+\s+)?(pmevent|trap|brkpt|exit|ret)(?=[\s;])")
_PROLOGUE = """.reg .pred %p<16>; .reg .b16 %h<40>; .reg .b32 %r<80>; .reg .b64 %w<80>;
.reg .b128 %q<8>; .reg .b32 %thread, %lane, %cta, %rank;
mov.u32 %thread, %tid.x; mov.u32 %lane, %laneid; mov.u32 %cta, %ctaid.x;
mov.u32 %rank, %cluster_ctarank;"""
EVICT_FIRST = "0x12f0000000000000"  # a cache policy that means nothing to results
THREADS, CTAS = 128, 8  # of a launch, where a case does not say otherwise
INPUTS = THREADS * CTAS
# the number of the thread in the grid, and four times it
INDEX = f"mad.lo.u32 %r60, %cta, {THREADS}, %thread; mul.wide.u32 %w60, %r60, 4;"


def registers(bits: int, count: int, first: int = 0) -> list[str]:
    """Names of registers of so many bits each."""
    letter = {16: "h", 32: "r", 64: "w"}[bits]
    return [f"%{letter}{first + k}" for k in range(count)]


def braced(names: list[str]) -> str:
    """Format a register, or several as a vector."""
    return names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"


def policy(opcode: str) -> str:
    """The operand that a cache hint of an opcode takes."""
    return f", {EVICT_FIRST}" if "cache_hint" in opcode else ""


def hinted(k: int) -> tuple[str, str]:
    """Every other time a cache hint, with its operand."""
    hint = ("", ".L2::cache_hint")[k % 2]
    return hint, policy(hint)


def random_buffer(name: str, seed: str, dtype: str, count: int) -> Buffer:
    """An input of random bits."""
    size = np.dtype(dtype).itemsize
    return Buffer(name, random_bytes(f"{seed} {name}", count * size).view(dtype))


def output(name: str, dtype: str, count: int) -> Buffer:
    """An output that starts as zeros."""
    data = np.zeros(count, dtype)
    return Buffer(name, data, data)


def opcodes(text: str) -> tuple[str, ...]:
    """The instructions of a program, without their operands."""
    lines = (line.split("//")[0] for line in text.split("\n"))
    code = "\n".join(lines)
    return tuple(dict.fromkeys([*_OPCODE.findall(code), *_PLAIN.findall(code)]))


def forms_of(text: str, subject: str) -> tuple[str, ...]:
    """The opcodes in a program that are a word of `subject` or begin with one and a dot."""
    found = opcodes(text)
    words = subject.split()
    return tuple(f for f in found if any(f == w or f.startswith(f"{w}.") for w in words))


def _parameter(param: Buffer | Map | Value) -> str:
    if isinstance(param, Buffer):
        return f".param .u64 {param.name}"
    size = 128 if isinstance(param, Map) else param.data.nbytes
    return f".param .align 64 .b8 {param.name}[{size}]"


def _fetch(param: Buffer | Map | Value) -> str:
    """A map's value is its generic address."""
    if isinstance(param, Buffer):
        return f".reg .b64 %{param.name}; ld.param.u64 %{param.name}, [{param.name}];"
    if isinstance(param, Value):
        return ""
    name = param.name
    return f".reg .b64 %{name}; mov.b64 %{name}, {name}; cvta.param.u64 %{name}, %{name};"


def case(
    name: str,
    subject: str,
    body: Sequence[str],
    params: list[Buffer | Map | Value],
    *,
    inputs: int = INPUTS,
    declared: str = "",
    module: str = "",
    rows: tuple[tuple[str, ...], ...] = (),
    **launch: object,
) -> Case:
    """Make a program whose outputs all test every form of the subject in it.

    body: its statements.
    declared: variables of the kernel, as `.shared .align 128 .b8 s[1024];`.
    module: declarations of the module.
    rows: see `Output`.
    """
    inside = "\n".join([_PROLOGUE, *map(_fetch, params), declared, *body])
    lines = [line for line in inside.split("\n") if line]
    text = elementwise.module(map(_parameter, params), lines, module)
    launch = {"grid": (CTAS,), "block": (THREADS,), **launch}
    program = Program(name, text, params=params, **launch)
    forms = forms_of("\n".join(body), subject)
    if not forms:
        raise ValueError(f"{name}: no instruction of {subject!r}")
    outputs = {
        buffer.name: Output(f"{name} {buffer.name}", forms, inputs, rows=rows)
        for buffer in program.outputs()
    }
    return Case(name, program, outputs)
