"""The machine code that a host module hands to the CUDA runtime: an ELF file, or a fat binary with
one in it. It is not executed here; who records a launch wants to read it."""

from __future__ import annotations

import ctypes
import struct

_ELF, _FAT_BINARY = b"\x7fELF", b"\x50\xed\x55\xba"
_FAT_HEADER = 16  # bytes; the size of what follows is in the last 8
_FAT_ENTRY_SIZE = slice(8, 16)  # in the header of the first entry
_MOST = 1 << 30  # bytes


def cubin_at(address: int) -> bytes:
    """The ELF file at an address, b"" where there is none."""
    head = ctypes.string_at(address, 4) if address else b""
    if head == _ELF:
        return ctypes.string_at(address, _elf_size(ctypes.string_at(address, 64)))
    if head != _FAT_BINARY:
        return b""
    (size,) = struct.unpack_from("<Q", ctypes.string_at(address, _FAT_HEADER), 8)
    whole = ctypes.string_at(address, _FAT_HEADER + min(size, _MOST))
    start = whole.find(_ELF)
    if start < 0:
        return b""
    (size,) = struct.unpack("<Q", whole[_FAT_HEADER:][_FAT_ENTRY_SIZE])
    return whole[start : start + size]


def _elf_size(header: bytes) -> int:
    """Where its last table ends."""
    program, sections = struct.unpack_from("<QQ", header, 32)
    program_size, programs, section_size, count = struct.unpack_from("<4H", header, 54)
    return max(program + program_size * programs, sections + section_size * count)
