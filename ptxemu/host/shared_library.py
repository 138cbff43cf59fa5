"""A shared library for x86-64 Linux, written without a compiler: its functions are set at run time.

Each exported function jumps to an address in a table, which the process fills in. So a library that
looks for `libcuda.so.1` by name finds functions of Python. The format is that of the System V ABI:
one segment of code, one of data, and the dynamic section with names, symbols and a hash table.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

_PAGE = 4096
_HEADER, _SEGMENT, _SYMBOL = 64, 56, 24  # bytes of the structures
_JUMP = 8  # bytes of a function: jmp *offset(%rip), padded
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551  # kinds of segments
_READ, _WRITE, _EXECUTE = 4, 2, 1
_HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 4, 5, 6, 10, 11, 14  # dynamic tags
_GLOBAL_FUNCTION = 0x12
_TABLE, _IDLE, _DONE = "ptxemu_functions", "ptxemu_idle", "ptxemu_done"  # exported, too
_GLOBAL_OBJECT = 0x11


def written(path: Path, soname: str, names: Sequence[str], idle: int = 0) -> None:
    """Write a library that exports `names`, functions that return `idle` at first."""
    path.write_bytes(_image(soname, [*names], idle))


class Library:
    """A loaded library of `written`, with the same names.

    addresses: Of the functions, by name.
    harmless: Functions that return 0 instead of `idle` at rest.
    """

    def __init__(self, path: Path, names: Sequence[str], harmless: Container[str] = ()) -> None:
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._table = (ctypes.c_void_p * len(names)).in_dll(self.library, _TABLE)
        idle, done = self._address(_IDLE), self._address(_DONE)
        self._resting: list[ctypes.c_void_p | int | None] = [
            done if name in harmless else idle for name in names
        ]
        self.addresses = {name: self._address(name) for name in names}
        self.rest()

    def _address(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0

    def call(self, functions: Iterable[Any]) -> None:
        """Set the functions, in the order of the names: callbacks of ctypes, which the caller has
        to keep."""
        for number, function in enumerate(functions):
            self._table[number] = ctypes.cast(function, ctypes.c_void_p).value

    def rest(self) -> None:
        """Let functions return a constant. Some are called when the interpreter is gone."""
        self._table[:] = self._resting


def _image(soname: str, names: list[str], idle: int) -> bytes:
    """The bytes of the file; addresses in it are offsets, since code and tables move together."""
    resting = {_IDLE: idle, _DONE: 0}
    functions = [*names, *resting]
    strings, places = _strings([soname, *functions, _TABLE])
    count = len(functions) + 2  # with the empty first symbol and the table
    at_hash = _HEADER + 4 * _SEGMENT
    at_symbols = _aligned(at_hash + 4 * (2 + 1 + count), 8)
    at_strings = at_symbols + _SYMBOL * count
    at_code = _aligned(at_strings + len(strings), 16)
    at_data = _aligned(at_code + _JUMP * len(functions), _PAGE)
    at_table = at_data + 16 * 8
    end = at_table + 8 * len(names)

    symbols = bytes(_SYMBOL)
    for number, name in enumerate(functions):
        at = at_code + _JUMP * number
        symbols += struct.pack("<IBBHQQ", places[name], _GLOBAL_FUNCTION, 0, 1, at, _JUMP)
    size = 8 * len(names)
    symbols += struct.pack("<IBBHQQ", places[_TABLE], _GLOBAL_OBJECT, 0, 2, at_table, size)

    code = b""
    for number in range(len(names)):
        here = at_code + _JUMP * number
        code += b"\xff\x25" + struct.pack("<i", at_table + 8 * number - here - 6) + b"\xcc\xcc"
    for result in resting.values():  # mov eax, result; ret
        code += b"\xb8" + struct.pack("<i", result) + b"\xc3\xcc\xcc"

    tags = {_HASH: at_hash, _STRTAB: at_strings, _SYMTAB: at_symbols, _STRSZ: len(strings),
            _SYMENT: _SYMBOL, _SONAME: places[soname], 0: 0}  # fmt: skip
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in tags.items())
    segments = (
        (_LOAD, _READ | _EXECUTE, 0, at_data, _PAGE),
        (_LOAD, _READ | _WRITE, at_data, end - at_data, _PAGE),
        (_DYNAMIC, _READ | _WRITE, at_data, len(dynamic), 8),
        (_STACK, _READ | _WRITE, 0, 0, 16),
    )
    parts = {
        0: _header(len(segments)) + b"".join(_segment(*each) for each in segments),
        at_hash: _hash_table(count),
        at_symbols: symbols,
        at_strings: strings,
        at_code: code,
        at_data: dynamic,
    }
    image = bytearray(end)
    for at, part in parts.items():
        image[at : at + len(part)] = part
    return bytes(image)


def _header(segments: int) -> bytes:
    identity = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    shared, x86_64 = 3, 62
    return identity + struct.pack(
        "<HHIQQQIHHHHHH", shared, x86_64, 1, 0, _HEADER, 0, 0, _HEADER, _SEGMENT, segments, 64, 0, 0
    )


def _segment(kind: int, flags: int, at: int, size: int, alignment: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, alignment)


def _hash_table(count: int) -> bytes:
    """One bucket with a chain of all symbols: a search compares names."""
    chain = [0, *range(2, count), 0]
    return struct.pack(f"<III{count}I", 1, count, 1, *chain)


def _strings(words: Sequence[str]) -> tuple[bytes, dict[str, int]]:
    table, places = b"\0", {}
    for word in words:
        places[word] = len(table)
        table += word.encode() + b"\0"
    return table, places


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
