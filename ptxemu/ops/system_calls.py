"""call of functions that the CUDA driver supplies: vprintf, __assertfail, malloc and free. PTX ISA
"call"; CUDA C++ Programming Guide, "Formatted Output", "Assertion", "Dynamic Global Memory
Allocation and Operations".

Functions that the module defines are in `syntax.inline` and `syntax.frames`; others are refused.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from functools import partial

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import AssertionFailed, UnsupportedPtx
from ptxemu.machine.access import SHARED_WINDOW
from ptxemu.machine.heap import HEAP
from ptxemu.machine.memory import GlobalMemory
from ptxemu.machine.state import Warp
from ptxemu.numerics import PerLane
from ptxemu.syntax.tree import Args, Instr, Sym

# name: (template of the call, number of arguments, type of the result or "")
_FUNCTIONS = {
    "vprintf": ("print_formatted(w, {0}, {1})", 2, "u32"),
    "__assertfail": ("fail_assertion(w, {0}, {1}, {2}, {3})", 5, ""),
    "malloc": ("allocate(w, {0})", 1, "u64"),
    "free": ("release(w, {0})", 1, ""),
}


@op("call", flags="uni")
def call(c: Lower, i: Instr, f: Match) -> None:
    """Call (result), function, (arguments). The result is read in the same block."""
    names = [operand.name for operand in i.operands if isinstance(operand, Sym)]
    template, count, kind = _FUNCTIONS.get(names[0] if names else "", ("", 0, ""))
    lists = [operand.items for operand in i.operands if isinstance(operand, Args)]
    if not template or not lists or len(lists[-1]) != count:
        raise UnsupportedPtx(
            f"unsupported call of {names[0] if names else 'an address'}: the module does not"
            f" define it, and the emulator has only {', '.join(_FUNCTIONS)}"
        )
    values = [c.arguments[item.name] for item in lists[-1]]
    if not kind:
        c.effect(template, *values)
        return
    result = c.effect(template, *values, results=[(kind, False)])[0]
    if len(lists) > 1 and lists[0]:
        c.arguments[lists[0][0].name] = result


# -- printf ----------------------------------------------------------------------------------

_CONVERSION = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(ll|l|hh|h|z|j|t)?([diuoxXcsfFeEgGp%])")
_UNPACK = dict.fromkeys("dic", "iq") | dict.fromkeys("fFeEgG", "dd")  # narrow, wide; else IQ


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
def print_formatted(w: Warp, template: PerLane, values: PerLane) -> np.ndarray:
    """Each active thread prints for itself, at once and in the order of lanes; returns the number
    of arguments, per lane."""
    printed = np.zeros(32, np.uint32)
    for lane, (text, start) in zip(w.lanes(), w.each_lane(template, values), strict=True):
        first = start & (SHARED_WINDOW - 1)  # the arguments lie in local memory

        def memory(offset: int, nbytes: int, lane: int = lane, first: int = first) -> bytes:
            assert w.local is not None, "the arguments were stored"
            return w.local[lane, first + offset : first + offset + nbytes].tobytes()

        string = partial(_string_at, w.machine.memory)
        name = f"[{w.name()} lane {lane}] " if w.machine.options.name_printf else ""
        words = string(text)
        sys.stdout.write(name + formatted(words, memory, string))
        printed[lane] = sum(found[3] != "%" for found in _CONVERSION.finditer(words))
    return printed


# -- assert ----------------------------------------------------------------------------------


@runtime
def fail_assertion(
    w: Warp, message: PerLane, file: PerLane, line: PerLane, function: PerLane
) -> None:
    """Raise AssertionFailed for the first active thread."""
    text, path, number, name = next(iter(w.each_lane(message, file, line, function)))
    said, where, inside = (
        _string_at(w.machine.memory, address) if address else "" for address in (text, path, name)
    )
    lanes = w.lanes()
    thread = tuple(int(axis[lanes[0]]) for axis in w.tid)
    others = f" and {len(lanes) - 1} more of its warp" if len(lanes) > 1 else ""
    raise AssertionFailed(
        f"{where}:{number}: {inside}{': ' if inside else ''}block {w.cta.ctaid}, thread"
        f" {thread}{others}: assertion `{said}` failed"
    )


# -- the heap --------------------------------------------------------------------------------


@runtime
def allocate(w: Warp, nbytes: PerLane) -> np.ndarray:
    """malloc for each active thread: addresses, 0 where the heap is full."""
    out = np.zeros(32, np.uint64)
    for lane, (size,) in zip(w.lanes(), w.each_lane(nbytes), strict=True):
        out[lane] = HEAP.allocate(size, w.machine.memory)
    return out


@runtime
def release(w: Warp, address: PerLane) -> None:
    """free for each active thread; a null pointer is ignored."""
    for (start,) in w.each_lane(address):
        HEAP.release(start, w.machine.memory)
