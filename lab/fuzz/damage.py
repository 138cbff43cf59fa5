"""Damage to files, at random from a seed: bytes of any file, and values of JSON."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

# Numbers that sizes, counts and offsets are set to.
EXTREMES = (0, 1, 2, 7, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 62,
            (1 << 63) - 1, (1 << 64) - 1)  # fmt: skip
_TEXT_BYTES = 64  # more are not copied into another place of a text
_DEEP = 3_000  # levels of nesting
# What a value of JSON is replaced by; the text itself for what Python's json does not write.
_RAW = ("NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "1" + "0" * 30, "1" + "0" * 5_000,
        "true", "null", '""', "[]", "{}", '"\\ud800"', '"../../x"', '"' + "y" * 5_000 + '"', "1.5",
        "-0.0", "[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP)  # fmt: skip

Damage = Callable[[bytes, random.Random], bytes]


def flipped(data: bytes, order: random.Random) -> bytes:
    """1 to 8 bits are inverted."""
    found = bytearray(data)
    for _ in range(order.randint(1, 8)):
        if found:
            found[order.randrange(len(found))] ^= 1 << order.randrange(8)
    return bytes(found)


def cut(data: bytes, order: random.Random) -> bytes:
    """The end is missing."""
    return data[: order.randrange(len(data) + 1)]


def grown(data: bytes, order: random.Random) -> bytes:
    """Bytes are inserted."""
    at = order.randrange(len(data) + 1)
    return data[:at] + order.randbytes(order.randint(1, 200)) + data[at:]


def swapped(data: bytes, order: random.Random) -> bytes:
    """Two parts have changed places."""
    a, b, c, d = sorted(order.randrange(len(data) + 1) for _ in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def repeated(data: bytes, order: random.Random) -> bytes:
    """A part stands twice."""
    a, b = sorted(order.randrange(len(data) + 1) for _ in range(2))
    return data[:b] + data[a:b] + data[b:]


def overwritten(data: bytes, order: random.Random) -> bytes:
    """A number of 1 to 8 bytes is an extreme one; most headers stand in the beginning."""
    size = order.choice((1, 2, 4, 4, 8, 8))
    room = len(data) - size
    if room <= 0:
        return data
    at = order.randrange(min(room, 256) if order.random() < 0.7 else room)
    value = order.choice(EXTREMES) % (1 << 8 * size)
    return data[:at] + value.to_bytes(size, "little") + data[at + size :]


def digits(data: bytes, order: random.Random) -> bytes:
    """A number in a text is another one."""
    places = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    if not places:
        return flipped(data, order)
    start = end = order.choice(places)
    while end < len(data) and chr(data[end]).isdigit():
        end += 1
    return data[:start] + str(order.choice((-1, *EXTREMES))).encode() + data[end:]


def words(data: bytes, order: random.Random) -> bytes:
    """A word of a text stands in the place of another one, or is missing."""
    found = data.split(b" ")
    if len(found) < 2:
        return cut(data, order)
    at = order.randrange(len(found))
    found[at] = order.choice((b"", *(found[order.randrange(len(found))][:_TEXT_BYTES],)))
    return b" ".join(found)


def json_damage(data: bytes, order: random.Random) -> bytes:
    """A value is of another type or extreme, is missing, stands twice, or has another name."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return flipped(data, order)
    raw: list[str] = []
    for _ in range(order.choice((1, 1, 1, 2, 5))):
        places = [*_places(content)]
        if places:
            _change(order, *order.choice(places), raw)
    text = json.dumps(content)
    for number, value in enumerate(raw):
        text = text.replace(f'"\\u0000{number}"', value)
    if order.random() < 0.1:  # a key stands twice
        text = text.replace("{", '{"format": 1, "format": 2, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value."""
    items: Any = ()
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    for key, value in items:
        yield content, key
        yield from _places(value)


def _change(order: random.Random, container: Any, key: Any, raw: list[str]) -> None:
    how = order.randrange(5)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, dict):
        container[f"{key}_"] = container.pop(key)
    elif how == 2 and isinstance(container[key], int | float):
        container[key] = order.choice((-1, -container[key], container[key] + 1, *EXTREMES))
    else:
        container[key] = f"\0{len(raw)}"
        raw.append(order.choice(_RAW))


BINARY: tuple[Damage, ...] = (
    flipped, cut, grown, swapped, repeated, overwritten, overwritten, overwritten,
)  # fmt: skip
TEXT: tuple[Damage, ...] = (flipped, cut, grown, swapped, repeated, digits, digits, words, words)
JSON: tuple[Damage, ...] = (flipped, cut, swapped, digits, *[json_damage] * 6)


def damaged(data: bytes, how: tuple[Damage, ...], seed: str) -> bytes:
    """Apply one to three random damages."""
    order = random.Random(seed)
    for _ in range(order.choice((1, 1, 1, 2, 3))):
        data = order.choice(how)(data, order)
    return data


_TEXT = b"\x90" * 64
_DATA = b"kernel\0" + bytes(57)
_NAMES = b"\0entry\0data_ptx\0outside\0_GLOBAL_OFFSET_TABLE_\0"
_SECTIONS = b"\0.text\0.rodata\0.symtab\0.strtab\0.rela.text\0"
# (offset in .text, kind, symbol, addend): 64, PC64, GOTOFF64, GOT64, GOTPC64.
_RELOCATIONS = ((0, 1, 2, 4), (8, 24, 3, 0), (16, 25, 2, 0), (24, 27, 3, 0), (32, 29, 4, 8))
_HEADER = 64


def sample() -> bytes:
    """Build a cubin that defines `entry` and `data_ptx` and needs `outside`."""
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
