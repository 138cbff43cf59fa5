"""bra, exit, ret, trap, call, nop-like hints: PTX ISA "Control Flow Instructions", "Miscellaneous".

Control transfer itself is the terminator of a block (syntax.resolve); nothing is emitted here.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from functools import partial

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.access import SHARED_WINDOW
from ptxemu.machine.memory import GlobalMemory
from ptxemu.machine.state import Warp
from ptxemu.numerics import PerLane
from ptxemu.syntax.tree import Args, Instr, Sym


@op("bra exit ret trap", flags="uni")
def terminator(c: Lower, i: Instr, f: Match) -> None:
    """The block's terminator."""


@op("nanosleep", types="u32")
def sleep(c: Lower, i: Instr, f: Match) -> None:
    """Time is not modelled."""


@op("setmaxnreg", types="u32", flags="inc dec sync aligned")
def set_registers(c: Lower, i: Instr, f: Match) -> None:
    """Register budgets have no effect here; notes say where a warpgroup is not of one mind."""
    c.effect(f"require_warpgroup(w, {i.operands[0].value})")


@op("griddepcontrol", flags="launch_dependents wait")
def grid_dependency(c: Lower, i: Instr, f: Match) -> None:
    """Launches run one after the other, so every dependency is met; listeners hear of the wait."""
    if "wait" in f.flags:
        c.announce("grid_waited(w)")


@op("pmevent brkpt", section="pmevent, brkpt")
@op("pmevent.mask", section="pmevent")
def ignored(c: Lower, i: Instr, f: Match) -> None:
    """Profiler and debugger hooks."""


@runtime
def require_warpgroup(w: Warp, count: int) -> None:
    """The count must be legal; `Cta.check_warpgroups` looks at the whole warpgroup at the end."""
    if count % 8 or not 24 <= count <= 256:
        raise HardwareRefusal(f"setmaxnreg {count}; must be a multiple of 8 from 24 to 256")
    w.register_counts.append(count)


@runtime
def clock(w: Warp) -> int:
    """Instructions executed by this warp so far; time is not modelled."""
    return sum(n * c for n, c in zip(w.program.lengths, w.counts, strict=True))


# call of vprintf, the device's printf: PTX ISA "call"; CUDA C++ Programming Guide, "Formatted
# Output". Functions that the module defines are inlined (`syntax.inline`); every other is refused.

_CONVERSION = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(ll|l|hh|h|z|j|t)?([diuoxXcsfFeEgGp%])")
_UNPACK = dict.fromkeys("dic", "iq") | dict.fromkeys("fFeEgG", "dd")  # narrow, wide; else IQ


@op("call", flags="uni")
def call(c: Lower, i: Instr, f: Match) -> None:
    """(result), vprintf, (template, arguments); the result has no address, so no use."""
    functions = [operand.name for operand in i.operands if isinstance(operand, Sym)]
    if functions != ["vprintf"] or not isinstance(i.operands[-1], Args):
        raise UnsupportedPtx("unsupported call: of a function other than vprintf")
    template, values = (c.arguments[item.name] for item in i.operands[-1].items)
    c.effect("print_formatted(w, {0}, {1})", template, values)


def formatted(
    template: str, memory: Callable[[int, int], bytes], string: Callable[[int], str]
) -> str:
    """Return printf's output.

    memory(offset, nbytes): the arguments, each aligned to its size.
    string(address): the text of a %s.
    """
    offset = 0

    def replace(found: re.Match[str]) -> str:
        nonlocal offset
        layout, length, kind = found.groups()
        if kind == "%":
            return "%"
        codes = _UNPACK.get(kind, "IQ")
        code = codes[length in ("ll", "l", "z", "j", "t") or kind in "sp"]
        size = struct.calcsize(code)
        start = -(-offset // size) * size
        offset = start + size
        (value,) = struct.unpack(code, memory(start, size))
        if kind == "s":
            value = string(value)
        if kind == "p":
            layout, kind = f"#{layout}", "x"
        return f"%{layout}{'d' if kind == 'u' else kind}" % value

    return _CONVERSION.sub(replace, template)


_LONGEST = 1 << 16  # characters of a string; beyond, its end is taken to be missing


def _string_at(memory: GlobalMemory, address: int) -> str:
    """Read a text up to its NUL, and check every byte."""
    text = bytearray()
    while len(text) < _LONGEST and (byte := memory.load(address + len(text), 1)):
        text.append(byte)
    return text.decode(errors="replace")


@runtime
def print_formatted(w: Warp, template: PerLane, values: PerLane) -> None:
    """Each active thread prints for itself, at once and in the order of lanes."""
    for lane, (text, start) in zip(w.lanes(), w.each_lane(template, values), strict=True):
        first = start & (SHARED_WINDOW - 1)  # the arguments lie in local memory

        def memory(offset: int, nbytes: int, lane: int = lane, first: int = first) -> bytes:
            assert w.local is not None, "the arguments were stored"
            return w.local[lane, first + offset : first + offset + nbytes].tobytes()

        string = partial(_string_at, w.machine.memory)
        name = f"[{w.name()} lane {lane}] " if w.machine.options.name_printf else ""
        sys.stdout.write(name + formatted(string(text), memory, string))
