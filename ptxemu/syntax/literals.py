"""Numbers of a PTX text: integers as they are written, and limits of counts, sizes and depths."""

from __future__ import annotations

MOST_REGISTERS = 1 << 20  # of an entry
MOST_BYTES = 1 << 30  # of a variable
MOST_NESTED = 100  # brackets in brackets, calls in calls
MOST_CALLS = 10_000  # inlined into an entry
_MOST_DIGITS = 100  # of an integer; in binary a number of 64 bits has 66


def integer_literal(text: str) -> int:
    """Decimal, 0x, 0b, or octal with a leading 0; U says unsigned. ValueError for anything else."""
    digits = text.rstrip("U")
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    return int(digits, 8 if octal else 0)


def register_count(count: int, known: int) -> range:
    """Numbers of so many registers, in an entry that has `known` others. ValueError for too many,
    or less than none."""
    if not 0 <= count <= MOST_REGISTERS - known:
        raise ValueError(f"{count} registers beside {known}, at most {MOST_REGISTERS} in a kernel")
    return range(count)


def variable_bytes(nbytes: int, align: int, initial: int) -> int:
    """The size of a variable. ValueError for one that is too large, for more `initial` bytes than
    it has, and for an alignment that is not a power of two."""
    if initial > nbytes:
        raise ValueError(f"an initialiser of {initial} bytes for a variable of {nbytes}")
    if not 0 <= nbytes <= MOST_BYTES:
        raise ValueError(f"a variable of {nbytes} bytes, at most {MOST_BYTES}")
    if align < 0 or align & (align - 1) or align > MOST_BYTES:
        raise ValueError(f".align {align}, expected a power of two")
    return nbytes
