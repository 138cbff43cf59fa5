"""Results of integer and bit instructions by the manual, on Python integers.

One row per instruction: its operand kinds, destination first, and its function of the form and the
operands. T is the instruction's type, W the type of twice its width. A result may have any number
of bits: whoever stores it takes as many as the destination has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Form(NamedTuple):
    """The relevant parts of an opcode: the types, and the modifiers between them."""

    types: tuple[str, ...]
    flags: frozenset[str]

    @property
    def bits(self) -> int:
        return 1 if self.types[0] == "pred" else int(self.types[0][1:])

    @property
    def signed(self) -> bool:
        return self.types[0][0] == "s"


def wrapped(x: int, kind: str) -> int:
    """x modulo 2^bits, in the range of an integer type; b is unsigned."""
    bits = int(kind[1:])
    x &= (1 << bits) - 1
    return x - (1 << bits) if kind[0] == "s" and x >> bits - 1 else x


def limits(kind: str) -> tuple[int, int]:
    """The smallest and the largest value of an integer type."""
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def clamped(x: int, kind: str) -> int:
    low, high = limits(kind)
    return max(low, min(high, x))


def _divide(f: Form, a: int, b: int) -> int:
    """C's division; all ones for a zero divisor (unspecified by the manual)."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else -1


def _product24(f: Form, a: int, b: int) -> int:
    kind = f"{f.types[0][0]}24"
    return wrapped(a, kind) * wrapped(b, kind)


def _top(a: int) -> int:
    """The most significant bit that is not a copy of the sign, -1 if there is none."""
    return (~a if a < 0 else a).bit_length() - 1


def _extract(f: Form, a: int, start: int, length: int) -> int:
    start, length, top = start & 0xFF, length & 0xFF, f.bits - 1
    sign = a >> min(start + length - 1, top) & 1 if f.signed and length else 0
    bits = (a >> i + start & 1 if i < length and i + start <= top else sign for i in range(f.bits))
    return sum(bit << i for i, bit in enumerate(bits))


def _insert(f: Form, a: int, b: int, start: int, length: int) -> int:
    start = start & 0xFF
    for i in range(min(length & 0xFF, max(f.bits - start, 0))):
        b = b & ~(1 << start + i) | (a >> i & 1) << start + i
    return b


def _nth_bit(f: Form, mask: int, base: int, offset: int) -> int:
    places = [base] if offset == 0 else range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [place for place in places if mask >> place & 1]
    rank = max(abs(offset), 1) - 1
    return found[rank] if rank < len(found) else -1


def _amount(f: Form, n: int) -> int:
    return n & 31 if "wrap" in f.flags else min(n, 32)


def _extend(f: Form, a: int, n: int) -> int:
    size = _amount(f, n)
    return wrapped(a, f"{f.types[0][0]}{size}") if size else 0


def _ones(f: Form, start: int, length: int) -> int:
    return (1 << _amount(f, length)) - 1 << _amount(f, start)


_SELECTED = {  # the manual's table: bytes for selectors 0 to 3, most significant first
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def _permute(f: Form, a: int, b: int, selector: int) -> int:
    for mode in f.flags:
        selector = _SELECTED[mode][selector & 3]
    source = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for i in range(4):
        pick = selector >> 4 * i & 0xF
        byte = source[pick & 7]
        result |= (0xFF * (byte >> 7) if pick & 8 else byte) << 8 * i
    return result


def _lookup(f: Form, a: int, b: int, c: int, table: int) -> int:
    bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
    return sum((table >> row & 1) << i for i, row in enumerate(bits))


def _dot(f: Form, a: int, b: int, c: int) -> int:
    """dp4a, and dp2a of the halves of a and two bytes of b."""
    step = 16 if f.flags else 8
    first = 2 if "hi" in f.flags else 0
    pairs = (
        (wrapped(a >> step * i, f"{f.types[0][0]}{step}"), wrapped(b >> 8 * (first + i), kind_b))
        for i in range(32 // step)
        for kind_b in [f"{f.types[1][0]}8"]
    )
    return c + sum(x * y for x, y in pairs)


def _packed(f: Form, a: int, b: int, c: int = 0) -> int:
    """cvt.pack: a above b, both saturated; the 8-bit forms shift c in above them."""
    kind, bits = f.types[0], f.bits
    high, low = (clamped(x, kind) & (1 << bits) - 1 for x in (a, b))
    return c << 2 * bits | high << bits | low


Function = Callable[..., int]
TABLE: dict[str, tuple[str, Function]] = {
    "add": ("T T T", lambda f, a, b: a + b),
    "sub": ("T T T", lambda f, a, b: a - b),
    "mul.lo": ("T T T", lambda f, a, b: a * b),
    "mul.hi": ("T T T", lambda f, a, b: a * b >> f.bits),
    "mul.wide": ("W T T", lambda f, a, b: a * b),
    "mad.lo": ("T T T T", lambda f, a, b, c: a * b + c),
    "mad.hi": ("T T T T", lambda f, a, b, c: (a * b >> f.bits) + c),
    "mad.wide": ("W T T W", lambda f, a, b, c: a * b + c),
    "mul24.lo": ("T T T", _product24),
    "mul24.hi": ("T T T", lambda f, a, b: _product24(f, a, b) >> 16),
    "mad24.lo": ("T T T T", lambda f, a, b, c: _product24(f, a, b) + c),
    "mad24.hi": ("T T T T", lambda f, a, b, c: (_product24(f, a, b) >> 16) + c),
    "div": ("T T T", _divide),
    "rem": ("T T T", lambda f, a, b: a - b * _divide(f, a, b) if b else -1),
    "min": ("T T T", lambda f, a, b: min(a, b)),
    "max": ("T T T", lambda f, a, b: max(a, b)),
    "sad": ("T T T T", lambda f, a, b, c: c + abs(a - b)),
    "abs": ("T T", lambda f, a: abs(a)),
    "neg": ("T T", lambda f, a: -a),
    "and": ("T T T", lambda f, a, b: a & b),
    "or": ("T T T", lambda f, a, b: a | b),
    "xor": ("T T T", lambda f, a, b: a ^ b),
    "not": ("T T", lambda f, a: ~a),
    "cnot": ("T T", lambda f, a: a == 0),
    "mov": ("T T", lambda f, a: a),
    "shl": ("T T u32", lambda f, a, n: a << min(n, 64)),
    "shr": ("T T u32", lambda f, a, n: a >> min(n, 64)),
    "shf.l": ("u32 u32 u32 u32", lambda f, a, b, n: (b << 32 | a) << _amount(f, n) >> 32),
    "shf.r": ("u32 u32 u32 u32", lambda f, a, b, n: (b << 32 | a) >> _amount(f, n)),
    "popc": ("u32 T", lambda f, a: a.bit_count()),
    "clz": ("u32 T", lambda f, a: f.bits - a.bit_length()),
    "brev": ("T T", lambda f, a: int(f"{a:0{f.bits}b}"[::-1], 2)),
    "bfind": ("u32 T", lambda f, a: _top(a)),
    "bfind.shiftamt": ("u32 T", lambda f, a: f.bits - 1 - _top(a) if _top(a) >= 0 else -1),
    "bfe": ("T T u32 u32", _extract),
    "bfi": ("T T T u32 u32", _insert),
    "fns": ("u32 u32 u32 s32", _nth_bit),
    "bmsk": ("u32 u32 u32", _ones),
    "szext": ("T T u32", _extend),
    "prmt": ("u32 u32 u32 u32", _permute),
    "lop3": ("u32 u32 u32 u32 u32", _lookup),
    "dp4a": ("u32 u32 u32 u32", _dot),
    "dp2a": ("u32 u32 u32 u32", _dot),
    "cvt.pack": ("u32 s32 s32 u32", _packed),
}
PARTS = ("lo", "hi", "wide", "l", "r", "shiftamt", "pack")  # modifiers that make another row


def integer(name: str, form: Form) -> tuple[list[str], Function]:
    """Operand kinds and function of an instruction on integers or bits."""
    key = next((f"{name}.{part}" for part in PARTS if part in form.flags), name)
    kinds, function = TABLE.get(key) or TABLE[name]
    kind = form.types[0]
    wide = f"{kind[0]}{2 * form.bits}"
    operands = [kind if k == "T" else wide if k == "W" else k for k in kinds.split()]

    def call(*values: int) -> int:
        result = function(form, *values)
        if "sat" in form.flags and name != "cvt":
            return clamped(result, kind)
        return max(result, 0) if "relu" in form.flags else result

    return operands, call


def with_carry(name: str, form: Form) -> tuple[list[str], Callable[..., tuple[int, int]]]:
    """add, sub and mad of extended precision: the carry comes last, and the result is (sum,
    carry). A borrow is a carry of 1."""
    unsigned = f"u{form.bits}"
    root = name.removesuffix("c") if name in ("addc", "subc", "madc") else name
    _, function = TABLE.get(f"{root}.{'hi' if 'hi' in form.flags else 'lo'}") or TABLE[root]

    def call(*values: int) -> tuple[int, int]:
        *operands, carry = values
        carry = carry if name != root else 0
        if root == "mad":
            a, b, c = operands
            total = wrapped(function(form, a, b, 0), unsigned) + wrapped(c, unsigned) + carry
            return total, total >> form.bits
        a, b = (wrapped(x, unsigned) for x in operands)
        total = function(form, a, b) + (carry if root == "add" else -carry)
        return total, total >> form.bits & 1

    return [form.types[0]] * (len("dabc") if root == "mad" else len("dab")), call
