"""Loads a relocatable ELF object of x86-64 host code into this process, without a linker.

The DSL turns a host function into position-independent code of the large model, which needs a
global offset table and four kinds of relocation (System V ABI, AMD64 supplement, section 4.4).
Anything else raises ObjectError, which names it.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_RELOCATABLE, _X86_64 = 1, 62
_RELA, _NOBITS, _SYMTAB = 4, 8, 2  # section types
_ALLOC, _EXECUTABLE, _WRITABLE = 2, 4, 1  # section flags
_UNDEFINED, _FIRST_RESERVED = 0, 0xFF00  # section indices of symbols
_R_64, _R_PC64, _R_GOTOFF64, _R_GOT64, _R_GOTPC64 = 1, 24, 25, 27, 29
MOST_BYTES = 256 << 20  # of what is loaded
_GOT_SYMBOL = "_GLOBAL_OFFSET_TABLE_"
_WORD = 8


class ObjectError(ValueError):
    """Bytes that are no object file, or one that asks for what is not implemented."""


@dataclass(frozen=True)
class Section:
    """A header of the section table."""

    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int


@dataclass(frozen=True)
class Symbol:
    """An entry of the symbol table; section 0 means undefined."""

    name: str
    section: int
    value: int
    size: int


class HostObject:
    """The parsed file: what it defines, what it needs."""

    def __init__(self, data: bytes) -> None:
        kind = data[16:20]
        if data[:6] != _MAGIC or kind != struct.pack("<HH", _RELOCATABLE, _X86_64):
            raise ObjectError("not a relocatable ELF object for x86-64")
        self.data = data
        try:
            self.sections = self._read_sections()
            self._check_sections()
            self.symbols = self._read_symbols()
        except ObjectError:
            raise
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise ObjectError(f"a damaged object file: {error}") from error

    def _read_sections(self) -> list[Section]:
        (table,) = struct.unpack_from("<Q", self.data, 40)
        size, count, names = struct.unpack_from("<HHH", self.data, 58)
        headers = [
            struct.unpack_from("<IIQQQQIIQ", self.data, table + size * index)
            for index in range(count)
        ]
        base = headers[names][4]
        return [
            Section(self._text(base + name), kind, flags, offset, length, link, info, max(align, 1))
            for name, kind, flags, _, offset, length, link, info, align in headers
        ]

    def _check_sections(self) -> None:
        """Everything lies within the file, and what is loaded is no larger than MOST_BYTES."""
        room = MOST_BYTES
        for section in self.sections:
            inside = section.offset + section.size <= len(self.data)
            room -= section.size + section.align if section.flags & _ALLOC else 0
            power = section.align & (section.align - 1) == 0
            if not power or room < 0 or not (inside or section.kind == _NOBITS):
                raise ObjectError(
                    f"section {section.name!r:.80} has {section.size} bytes at {section.offset}, "
                    f"aligned to {section.align}, in a file of {len(self.data)}"
                )

    def _read_symbols(self) -> list[Symbol]:
        (table,) = [section for section in self.sections if section.kind == _SYMTAB]
        names = self.sections[table.link].offset
        found = []
        for offset in range(table.offset, table.offset + table.size, 24):
            name, _, _, section, value, size = struct.unpack_from("<IBBHQQ", self.data, offset)
            found.append(Symbol(self._text(names + name), section, value, size))
            if _UNDEFINED < section < _FIRST_RESERVED and value > self.sections[section].size:
                raise ObjectError(f"symbol {found[-1].name!r:.80} is outside its section")
        return found

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    @property
    def undefined(self) -> list[str]:
        """Names that the loader has to be told an address for."""
        return [
            symbol.name
            for symbol in self.symbols
            if symbol.section == _UNDEFINED and symbol.name not in ("", _GOT_SYMBOL)
        ]

    def constant(self, suffix: str) -> bytes:
        """The bytes of the one data symbol whose name ends so; b'' where there is none."""
        for symbol in self.symbols:
            if symbol.name.endswith(suffix) and symbol.size and symbol.section < _FIRST_RESERVED:
                section = self.sections[symbol.section]
                if section.kind != _NOBITS:
                    start = section.offset + symbol.value
                    return self.data[start : start + symbol.size]
        return b""

    def relocations(self) -> list[tuple[Section, list[tuple[int, int, Symbol, int]]]]:
        """(section that is changed, its (offset, kind, symbol, addend)) of loaded sections."""
        found = []
        for table in self.sections:
            if table.kind != _RELA:
                continue
            if table.info >= len(self.sections):
                raise ObjectError(
                    f"relocations {table.name!r:.80} of section {table.info}, which does not exist"
                )
            if not self.sections[table.info].flags & _ALLOC:
                continue
            found.append((self.sections[table.info], [*self._entries(table)]))
        return found

    def _entries(self, table: Section) -> Iterator[tuple[int, int, Symbol, int]]:
        room = self.sections[table.info].size - _WORD
        if table.size % 24:
            raise ObjectError(
                f"relocations {table.name!r:.80} of {table.size} bytes, not a multiple of 24"
            )
        for offset in range(table.offset, table.offset + table.size, 24):
            where, info, addend = struct.unpack_from("<QQq", self.data, offset)
            if where > room or info >> 32 >= len(self.symbols):
                raise ObjectError(
                    f"relocation at {where} against symbol {info >> 32} is out of range"
                )
            yield where, info & 0xFFFFFFFF, self.symbols[info >> 32], addend


class LoadedObject:
    """A host object in memory, its code executable. The memory goes with this object: who has an
    address of it keeps it.

    resolve(name) -> address of an undefined symbol; it raises for one that it does not know.
    """

    def __init__(self, parsed: HostObject, resolve: Callable[[str], int]) -> None:
        self._parsed = parsed
        self._relocations = parsed.relocations()
        undefined = parsed.undefined
        self._outside = {name: resolve(name) for name in undefined}
        self._got_slots: dict[str, int] = {}
        size = self._lay_out()
        self._memory = mmap.mmap(-1, size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._copy_sections()
        self._relocate()
        self._protect()

    def address(self, name: str) -> int:
        """Return the address of a symbol; KeyError if the object does not define it."""
        for symbol in self._parsed.symbols:
            if symbol.name == name and symbol.section != _UNDEFINED:
                return self._address_of(symbol)
        raise KeyError(name)

    def _lay_out(self) -> int:
        """Give every loaded section its place, code on pages of its own, and the table a place."""
        self._places: dict[int, int] = {}
        position = 0
        loaded = [
            (not section.flags & _EXECUTABLE, index, section)
            for index, section in enumerate(self._parsed.sections)
            if section.flags & _ALLOC
        ]
        self._code_bytes = 0
        for is_data, index, section in sorted(loaded, key=lambda entry: entry[:2]):
            if is_data and not self._code_bytes:
                position = self._code_bytes = _up(position, mmap.PAGESIZE)
            position = _up(position, section.align)
            self._places[index] = position
            position += section.size
        self._got = _up(position, _WORD)
        entries = {
            symbol.name or str(id(symbol))
            for _, relocations in self._relocations
            for _, kind, symbol, _ in relocations
            if kind == _R_GOT64
        }
        for name in sorted(entries):
            self._got_slots[name] = len(self._got_slots) * _WORD
        return _up(self._got + _WORD * max(len(self._got_slots), 1), mmap.PAGESIZE)

    def _copy_sections(self) -> None:
        for index, place in self._places.items():
            section = self._parsed.sections[index]
            if section.kind != _NOBITS:
                data = self._parsed.data[section.offset : section.offset + section.size]
                self._memory[place : place + section.size] = data

    def _relocate(self) -> None:
        numbers = {id(section): index for index, section in enumerate(self._parsed.sections)}
        got = self._base + self._got
        for section, entries in self._relocations:
            start = self._places[numbers[id(section)]]
            for offset, kind, symbol, addend in entries:
                place = self._base + start + offset
                if kind == _R_GOTPC64:
                    value = got + addend - place
                elif kind == _R_GOT64:
                    slot = self._got_slots[symbol.name or str(id(symbol))]
                    self._write(self._got + slot, self._address_of(symbol))
                    value = slot + addend
                elif kind in (_R_64, _R_PC64, _R_GOTOFF64):
                    relative = {_R_64: 0, _R_PC64: place, _R_GOTOFF64: got}[kind]
                    value = self._address_of(symbol) + addend - relative
                else:
                    raise ObjectError(f"relocation of unknown kind {kind} against {symbol.name!r}")
                self._write(start + offset, value)

    def _write(self, offset: int, value: int) -> None:
        struct.pack_into("<Q", self._memory, offset, value & (1 << 64) - 1)

    def _address_of(self, symbol: Symbol) -> int:
        if symbol.section == _UNDEFINED:
            if symbol.name not in self._outside:
                raise ObjectError(f"a relocation against {symbol.name!r:.80}, which has no address")
            return self._outside[symbol.name]
        if symbol.section >= _FIRST_RESERVED or symbol.section not in self._places:
            raise ObjectError(f"symbol {symbol.name!r} is not in a loaded section")
        return self._base + self._places[symbol.section] + symbol.value

    def _protect(self) -> None:
        """Code executable and no longer writable."""
        if not self._code_bytes:
            return
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        if protect(self._base, self._code_bytes, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(
                ctypes.get_errno(), "the system does not allow generated code to be executed"
            )


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
