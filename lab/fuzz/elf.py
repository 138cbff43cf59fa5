"""A small relocatable object file for x86-64, of the kinds of sections and relocations that the DSL
writes (System V ABI, AMD64 supplement)."""

from __future__ import annotations

import struct

_TEXT = b"\x90" * 64
_DATA = b"kernel\0" + bytes(57)
_NAMES = b"\0entry\0data_ptx\0outside\0_GLOBAL_OFFSET_TABLE_\0"
_SECTIONS = b"\0.text\0.rodata\0.symtab\0.strtab\0.rela.text\0"
# (offset in .text, kind, symbol, addend): 64, PC64, GOTOFF64, GOT64, GOTPC64.
_RELOCATIONS = ((0, 1, 2, 4), (8, 24, 3, 0), (16, 25, 2, 0), (24, 27, 3, 0), (32, 29, 4, 8))
_HEADER = 64


def sample() -> bytes:
    """It defines `entry` and `data_ptx`, and needs `outside`."""
    symbols = ((0, 0, 0, 0), (1, 1, 0, 64), (7, 2, 0, 64), (16, 0, 0, 0), (24, 0, 0, 0))
    symtab = b"".join(
        struct.pack("<IBBHQQ", name, 0x10 if name else 0, 0, section, value, size)
        for name, section, value, size in symbols
    )
    rela = b"".join(
        struct.pack("<QQq", offset, symbol << 32 | kind, addend)
        for offset, kind, symbol, addend in _RELOCATIONS
    )
    bodies = [_TEXT, _DATA, symtab, _NAMES, rela, _SECTIONS]
    starts = [_HEADER + sum(map(len, bodies[:k])) for k in range(len(bodies))]
    # name, type, flags, body, link, info, alignment
    headers = [(1, 1, 6, 0, 0, 0, 16), (7, 1, 2, 1, 0, 0, 16), (15, 2, 0, 2, 4, 0, 8),
               (23, 3, 0, 3, 0, 0, 1), (31, 4, 0, 4, 3, 1, 8), (0, 3, 0, 5, 0, 0, 1)]  # fmt: skip
    table = bytes(64) + b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, flags, 0, starts[body], len(bodies[body]), link,
                    info, align, 0)
        for name, kind, flags, body, link, info, align in headers
    )  # fmt: skip
    end = _HEADER + sum(map(len, bodies))
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, end, 0, _HEADER, 0, 0, 64, 7, 6)
    return identity + header + b"".join(bodies) + table
