"""What PTX instructions should yield, written from the manual with exact arithmetic, for the ISA tests.

Nothing of ptxemu is used here: floats go through `fractions`, integers through Python's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

# -- integers -------------------------------------------------------------------------------


def each(function: Callable[..., int | float], *operands: np.ndarray) -> np.ndarray:
    """function on the Python numbers of every element; integers come back as an object array."""
    rows = zip(*(np.asarray(x).reshape(-1).tolist() for x in operands), strict=True)
    return np.array([function(*row) for row in rows], dtype=object)


def wrap(function: Callable[..., int], bits: int, signed: bool = False) -> Callable[..., np.ndarray]:
    """The same as a function on arrays, reduced modulo 2^bits into the range of the type."""

    def call(*operands: np.ndarray) -> np.ndarray:
        values = [int(x) & ((1 << bits) - 1) for x in each(function, *operands)]
        if signed:
            values = [x - (1 << bits) if x >> bits - 1 else x for x in values]
        return np.array(values, dtype=f"{'i' if signed else 'u'}{bits // 8}")

    return call


def clamp(low: int, high: int) -> Callable[[int], int]:
    return lambda x: max(low, min(high, x))


def truncated_divide(a: int, b: int) -> int:
    """C's division; all ones for a zero divisor (unspecified by the manual)."""
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def truncated_remainder(a: int, b: int) -> int:
    return a - b * truncated_divide(a, b) if b else -1


def funnel(low: int, high: int, amount: int) -> int:
    """shf.l: the upper word of high:low << amount."""
    return ((high << 32 | low) << amount) >> 32 & 0xFFFFFFFF


def extract_field(a: int, start: int, length: int, bits: int, signed: bool) -> int:
    """bfe, after the pseudocode of the manual."""
    start, length = start & 0xFF, length & 0xFF
    top = bits - 1
    sign = a >> min(start + length - 1, top) & 1 if signed and length else 0
    field = 0
    for i in range(bits):
        bit = a >> i + start & 1 if i < length and i + start <= top else sign
        field |= bit << i
    return field


def insert_field(a: int, b: int, start: int, length: int, bits: int) -> int:
    """bfi, after the pseudocode of the manual."""
    start, length = start & 0xFF, length & 0xFF
    field = b
    for i in range(min(length, bits)):
        if start + i < bits:
            field = field & ~(1 << start + i) | (a >> i & 1) << start + i
    return field


def permute(a: int, b: int, selector: int) -> int:
    """prmt without a mode."""
    source = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for i in range(4):
        pick = selector >> 4 * i & 0xF
        byte = source[pick & 7]
        result |= (0xFF * (byte >> 7) if pick & 8 else byte) << 8 * i
    return result


def reversed_bits(a: int, bits: int) -> int:
    return int(f"{a:0{bits}b}"[::-1], 2)


def lookup(a: int, b: int, c: int, table: int) -> int:
    """lop3."""
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


# -- floats ---------------------------------------------------------------------------------

FORMATS = {  # mantissa bits without the leading one, smallest normal exponent, largest finite value
    "f64": (52, -1022, (2 - 2.0**-52) * 2.0**1023),
    "f32": (23, -126, (2 - 2.0**-23) * 2.0**127),
    "f16": (10, -14, 65504.0),
    "bf16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "tf32": (10, -126, (2 - 2.0**-10) * 2.0**127),
    "e4m3": (3, -6, 448.0),
    "e5m2": (2, -14, 57344.0),
    "e2m3": (3, 0, 7.5),
    "e3m2": (2, -2, 28.0),
    "e2m1": (1, 0, 6.0),
}


def rounded(x: Fraction, form: str, how: str = "rn") -> float:
    """An exact number rounded once to a format: rn, rz, rm, rp, rna. Zero comes back as +0."""
    mantissa, least, largest = FORMATS[form]
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, least)
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (exponent - mantissa)
    steps, rest = divmod(size / unit, 1)
    negative = x < 0
    up = {"rz": False, "rm": negative and rest > 0, "rp": not negative and rest > 0,
          "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2 == 1),
          "rna": rest >= Fraction(1, 2)}[how]
    result = (steps + up) * unit
    if result > Fraction(largest):
        inward = how == "rz" or (how == "rm" and not negative) or (how == "rp" and negative)
        result = largest if inward else math.inf
    value = float(result)
    return -value if negative else value


_IEEE = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c, "div": lambda a, b: a / b, "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
}


def exact(kind: str, form: str = "f32", how: str = "rn", *, ftz: bool = False, sat: bool = False,
          relu: bool = False) -> Callable[..., np.ndarray]:
    """add, sub, mul, fma, div, rcp or sqrt on float arrays, computed exactly and rounded once.

    ftz flushes subnormal operands and results, keeping the sign; sat clamps to [0, 1] with NaN -> 0;
    relu clamps at 0 and keeps NaN.
    """
    least = 2.0 ** FORMATS[form][1]

    def flush(x: float) -> float:
        return math.copysign(0.0, x) if ftz and abs(x) < least else x

    def one(*operands: float) -> float:
        operands = tuple(flush(x) for x in operands)
        true = _exact_value(kind, operands)
        if true is None:  # not finite: IEEE double arithmetic has the same rules
            with np.errstate(all="ignore"):
                return float(_IEEE[kind](*map(np.float64, operands)))
        if true == 0:
            return math.copysign(0.0, _zero_sign(kind, operands, how))
        value = rounded(true, form, how)
        if ftz and abs(value) <= least:
            small = _unbounded(true, how) if form == "f32" else value
            return value if abs(small) >= least else math.copysign(0.0, true)
        return value

    def call(*operands: np.ndarray) -> np.ndarray:
        out = each(one, *(x.astype(np.float64) for x in operands)).astype(np.float64)
        if sat:
            out = np.where(out > 0, np.minimum(out, 1), 0)
        return np.where(out <= 0, 0, out) if relu else out

    return call


def _unbounded(x: Fraction, how: str) -> float:
    """A small number rounded to 24 bits whatever its exponent: what .ftz.f32 looks at (seen on H100)."""
    scale = Fraction(2) ** 100
    return float(Fraction(rounded(x * scale, "f32", how)) / scale)


def _exact_value(kind: str, operands: tuple[float, ...]) -> Fraction | None:
    """The mathematical result, or None where an operand or the result is not finite."""
    if not all(map(math.isfinite, operands)):
        return None
    values = [Fraction(x) for x in operands]
    if kind == "sqrt":
        return _square_root(values[0]) if values[0] >= 0 else None
    if kind in ("div", "rcp") and values[-1] == 0:
        return None
    return _IEEE[kind](*values)


def _square_root(x: Fraction) -> Fraction:
    """The root, or a number that rounds like it: 200 bits and a sticky one."""
    scaled = x * (1 << 600)
    root = math.isqrt(scaled.numerator // scaled.denominator)
    inexact = Fraction(root * root) != scaled
    return Fraction(2 * root + inexact, 2 << 300)


def _zero_sign(kind: str, operands: tuple[float, ...], how: str) -> float:
    """The sign of an exact zero: of the product, or of addends that agree; else + (rm: -)."""
    signs = [math.copysign(1, x) for x in operands]
    if kind in ("mul", "div", "rcp", "sqrt"):
        return math.prod(signs)
    addends = {"add": signs, "sub": [signs[0], -signs[-1]], "fma": [signs[0] * signs[1 % len(signs)], signs[-1]]}[kind]
    if addends[0] == addends[1]:
        return addends[0]
    return -1.0 if how == "rm" else 1.0


def narrow(form: str, how: str = "rn", *, satfinite: bool = False, relu: bool = False) -> Callable[[np.ndarray], np.ndarray]:
    """f32 -> the values of a narrower float format (not its codes), with NaN kept."""
    largest = FORMATS[form][2]

    def one(x: float) -> float:
        if math.isnan(x):
            return x
        value = rounded(Fraction(x), form, how) if math.isfinite(x) and x else x
        if satfinite and abs(value) > largest:
            value = math.copysign(largest, value)
        value = math.copysign(value, x)
        return 0.0 if relu and value <= 0 else value

    return lambda values: each(one, values.astype(np.float64)).astype(np.float64)


def code_of(form: str) -> Callable[[np.ndarray], np.ndarray]:
    """Values of a narrow format -> its codes: sign, biased exponent, mantissa."""
    mantissa, least, _ = FORMATS[form]
    bits = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}[form]
    nan = {"e4m3": 0x7F, "e5m2": 0x7F}.get(form, (1 << bits - 1) - 1)

    def one(x: float) -> int:
        if math.isnan(x):
            return nan
        sign = (math.copysign(1, x) < 0) << bits - 1
        size = abs(x)
        if size < 2.0**least:
            return sign | int(size / 2.0 ** (least - mantissa))
        power = math.frexp(size)[1] - 1
        return sign | (power - least + 1) << mantissa | int((size / 2.0**power - 1) * 2**mantissa)

    return lambda values: each(one, values).astype(np.int64)


def decoded(form: str) -> Callable[[np.ndarray], np.ndarray]:
    """Codes of a narrow format -> values."""
    mantissa, least, _ = FORMATS[form]
    bits = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}[form]

    def one(code: int) -> float:
        size = code & (1 << bits - 1) - 1
        if (form == "e4m3" and size == 0x7F) or (form == "e5m2" and size > 0x7C):
            return math.nan
        if form == "e5m2" and size == 0x7C:
            value = math.inf
        elif size >> mantissa == 0:
            value = size * 2.0 ** (least - mantissa)
        else:
            value = (1 + (size & (1 << mantissa) - 1) / 2**mantissa) * 2.0 ** ((size >> mantissa) - 1 + least)
        return -value if code >> bits - 1 & 1 else value

    return lambda codes: each(one, codes).astype(np.float64)


def halves(words: np.ndarray, dtype: type = np.float16) -> tuple[np.ndarray, np.ndarray]:
    """Packed words -> (low, high), each as `dtype`."""
    pairs = np.ascontiguousarray(words).view(dtype).reshape(len(words), 2)
    return pairs[:, 0], pairs[:, 1]


def packed(low: np.ndarray, high: np.ndarray, dtype: type = np.float16) -> np.ndarray:
    """(low, high) -> words of twice their width."""
    pairs = np.stack([np.asarray(low).astype(dtype), np.asarray(high).astype(dtype)], 1)
    pairs = np.where(pairs != pairs, dtype(np.nan), pairs) if np.dtype(dtype).kind == "f" else pairs
    return np.ascontiguousarray(pairs.astype(dtype)).view(f"u{2 * pairs.itemsize}").reshape(-1)


def bf16(codes: np.ndarray) -> np.ndarray:
    """bf16 codes -> f32."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: np.ndarray, how: str = "rn") -> np.ndarray:
    """Numbers -> bf16 codes; NaN is 0x7fff."""

    def one(x: float) -> int:
        if math.isnan(x):
            return 0x7FFF
        value = rounded(Fraction(x), "bf16", how) if math.isfinite(x) and x else x
        return int(np.float32(value).view(np.uint32)) >> 16

    return np.array([one(x) for x in values.tolist()], np.uint16)


# -- programs of ptx/*.ptx ------------------------------------------------------------------


def nested_if(t: int) -> int:
    if t % 2 == 0:
        return t + ((t ^ 255) if t > 20 else 1000)
    return t + 1 + (7 * t if t < 16 else t + 300)


def exits_early(t: int) -> int:
    lane = t % 32
    if lane < 4:
        return 7
    if lane < 20:
        return lane + 100
    return 8 if t > 31 else 12


def phi_moves() -> np.ndarray:
    lanes = np.arange(32)
    varying, uniform = [lanes + 10, lanes + 20, lanes + 30], [np.full(32, k) for k in (1, 2, 3)]
    rows = [np.choose((np.arange(3)[:, None] + lanes % 4 + 1) % 3, [v[None] for v in varying])]
    rows.append(np.choose((np.arange(3)[:, None] - lanes % 4 - 1) % 3, [u[None] for u in uniform]))
    return np.concatenate(rows)


def guarded(a: np.ndarray) -> np.ndarray:
    first = np.arange(32) < 12
    total = np.where(first, a, 18).astype(np.uint32) + np.uint32(5)
    return np.concatenate([np.where(first, total, 0), np.full(32, 5)])


def promoted(a: np.ndarray) -> np.ndarray:
    part = np.arange(32) < 9
    product = np.where(part, (a[0] + a[1]) * np.uint32(3), a[0] * a[1])
    return np.concatenate([product, np.full(32, 11), np.where(part, 3, a[1])])


def grouped(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    values = a.reshape(8, 32)
    product = (values * b[:, None]).astype(np.float32)
    fused = exact("fma")(product.reshape(-1), values[::-1].reshape(-1), np.full(256, 0.5)).astype(np.float32)
    bounded = np.maximum(fused.reshape(8, 32), b[0])
    rows = bounded[np.arange(8) ^ 1] - values
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return np.concatenate([rows.reshape(-1), total])


def shuffle_source(mode: str, b: int, c: int, lane: int) -> tuple[int, bool]:
    """(source lane, in range), after the pseudocode of shfl.sync."""
    b, bound, segment = b & 31, c & 31, c >> 8 & 31
    least, most = lane & segment, lane & segment | bound & ~segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": least | b & ~segment}[mode]
    valid = source >= most if mode == "up" else source <= most
    return (source if valid else lane), valid


def shuffles(a: np.ndarray, forms: list) -> np.ndarray:
    rows = []
    for mode, b, c in forms:
        found = [shuffle_source(mode, int(np.resize(b, 32)[lane]), c, lane) for lane in range(32)]
        rows += [[a[source] for source, _ in found], [valid for _, valid in found]]
    return np.array(rows)


def votes() -> np.ndarray:
    lanes = np.arange(32)
    part = lanes & 2 != 0
    rows = [0b11111, 1, 0xFFFFFFFF, lanes == 0]
    return np.array([np.broadcast_to(row, 32) for row in rows]
                    + [np.where(part, row, 0) for row in (0xCCCCCCCC, 0b01100, lanes == 2, 0)])


def warp_groups(a: np.ndarray) -> np.ndarray:
    lanes = np.arange(32)
    half, quarter = lanes // 16, lanes // 8
    bits = np.uint32(1) << lanes.astype(np.uint32)

    def among(chosen: np.ndarray) -> list[int]:
        return [int(bits[chosen & (half == half[lane])].sum()) for lane in range(32)]

    return np.array([
        among(a > 3),
        [int(a[half == half[lane]].sum()) for lane in range(32)],
        [int(bits[(half == half[lane]) & (a == a[lane])].sum()) for lane in range(32)],
        [int((a[quarter == quarter[lane]] > 3).any()) for lane in range(32)],
        a[quarter * 8],
        np.where(lanes % 8 == 0, quarter * 8, 99),
    ])


_REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
           "xor": np.bitwise_xor}


def reductions(a: np.ndarray, forms: list[str]) -> np.ndarray:
    rows = []
    for form in forms:
        name, kind = form.split(".")
        for values in (a, np.full(32, a[5])):
            values = values.view(np.int32) if kind[0] == "s" else values
            total = _REDUCE[name].reduce(values.astype(np.int64)) & 0xFFFFFFFF
            rows.append([total] * 32)
    return np.array(rows)


def float_reductions(a: np.ndarray, forms: list[str]) -> np.ndarray:
    rows = []
    for form in forms:
        for values in (a[:32], a[32:]):
            values = np.abs(values) if "abs" in form else values
            numbers = values[~np.isnan(values)]
            if not len(numbers) or ("NaN" in form and len(numbers) < 32):
                rows.append([np.nan] * 32)
                continue
            key = lambda x: (x, math.copysign(1, x))  # noqa: E731
            rows.append([(min if "min" in form else max)(numbers.tolist(), key=key)] * 32)
    return np.array(rows)


def matches(a: np.ndarray) -> np.ndarray:
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    same = [int(bits[a == x].sum()) for x in a]
    low = [int(bits[:8][a[:8] == a[lane]].sum()) if lane < 8 else 0 for lane in range(32)]
    return np.array([same, [0] * 32, [0xFFFFFFFF] * 32, same, low])


def copied(a: np.ndarray) -> np.ndarray:
    """What memory_widths writes: pieces of `a` at the same offsets."""
    out = np.zeros_like(a)
    for start, end in ((0, 32), (64, 128), (128, 512), (512, 1024), (1024, 2048)):
        out[start:end] = a[start:end]
    return out


def wide_copies(a: np.ndarray) -> np.ndarray:
    swapped = a[32:64] << np.uint64(32) | a[32:64] >> np.uint64(32)
    pairs = np.stack([a[64:128].reshape(32, 2)[:, 1], np.full(32, 5, np.uint64)], 1).reshape(-1)
    backwards = a[128:256].reshape(32, 4)[:, ::-1].reshape(-1)
    word = a[1] << np.uint64(32) | a[1] >> np.uint64(32)
    fixed = np.uint64(7 << 32 | 0x3F800000)
    return np.concatenate([a[:32], swapped, pairs, a[128:192], backwards, np.full(32, a[1]), np.full(32, word),
                           np.full(32, fixed)])


def spaces(a: np.ndarray) -> np.ndarray:
    lanes = np.arange(48)
    table = np.array([10, 20, 30, 64])
    local = np.where(lanes % 16 == 0, lanes, a) if False else a  # element tid % 16 is read before [0] is written
    return np.concatenate([a[::-1], np.where(lanes < 40, a[::-1], 1) + 1, local + lanes + 77, np.full(48, 7),
                           table[lanes % 4] + 20])


def cluster_exchange() -> np.ndarray:
    """What cluster_memory reads: the next CTA's numbers, those of rank 2, and the leader's counter."""
    ctas, lanes = np.arange(8)[:, None], np.arange(32)
    base, rank = ctas // 4 * 4, ctas % 4
    following = (base + (rank + 1) % 4) * 100 + lanes
    second = (base + 2) * 100 + lanes
    return np.stack([following, second, (rank + 1) % 4 * 1000 + 20 + 0 * lanes])


def indices() -> np.ndarray:
    rows = []
    for cta in range(16):
        x, y = cta % 4, cta // 4
        for thread in range(16):
            rows.append([thread % 4, thread // 4 % 2, thread // 8, x % 2 + y % 2 * 2, x % 2, y % 2, x // 2, y // 2,
                         2, 4, thread, 0, (1 << thread) - 1, 0xFFFFFFFF ^ (1 << thread) - 1, 1, 9])
    return np.array(rows)


def atomics(m: np.ndarray, a: np.ndarray, forms: list[str]) -> np.ndarray:
    """Lanes one after the other."""
    out = [int(x) for x in m]
    signed = lambda x: x - (1 << 32) if x >> 31 else x  # noqa: E731
    steps = {
        "add": lambda old, x: old + x, "and": lambda old, x: old & x, "or": lambda old, x: old | x,
        "xor": lambda old, x: old ^ x, "inc": lambda old, x: 0 if old >= x else old + 1,
        "dec": lambda old, x: x if old == 0 or old > x else old - 1,
    }
    for k, form in enumerate(forms):
        name, kind = form.split(".")
        key = signed if kind[0] == "s" else int
        step = steps.get(name) or (lambda old, x, n=name, key=key: {"min": min, "max": max}[n](old, x, key=key))
        for x in a.tolist():
            out[k] = step(out[k], x) & 0xFFFFFFFF
    for lane, x in enumerate(a.tolist()):
        out[16 + lane % 4] = out[16 + lane % 4] + x & 0xFFFFFFFF
    out[20] = out[20] + 30 & 0xFFFFFFFF
    for lane in range(32):
        out[21] = 77 if out[21] == lane else out[21]
    out[22] = int(a[9])
    total = (out[25] << 32 | out[24]) + sum(int(x) << 20 for x in a) & (1 << 64) - 1
    most = max(out[27] << 32 | out[26], *(int(x) << 20 for x in a))
    out[24:28] = total & 0xFFFFFFFF, total >> 32, most & 0xFFFFFFFF, most >> 32
    return np.array(out)


def float_atomics(m: np.ndarray, a: np.ndarray) -> np.ndarray:
    total = a.sum()
    return m + np.array([total, 32, total, -total, -total, total, total, 64, 0, 0], np.float32)


def async_copies(a: np.ndarray) -> np.ndarray:
    t = np.arange(64)
    small = np.where(t % 2, a[:64], 0)
    ignored = np.where(t[:, None] < 20, 0, a[256:384].reshape(64, 2))
    half = a[256:512].reshape(64, 4).copy()
    half[:, 2:] = 0
    return np.concatenate([a[:256], small, ignored.reshape(-1), np.zeros(64), half[::-1].reshape(-1)])


def tile(tensor: np.ndarray, position: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """A box of a tensor (outermost first) at a position (innermost first), zero outside."""
    out = np.zeros(box, tensor.dtype)
    for index in np.ndindex(*box):
        where = [i + p for i, p in zip(index, position[::-1], strict=True)]
        if all(0 <= w < n for w, n in zip(where, tensor.shape, strict=True)):
            out[index] = tensor[tuple(where)]
    return out


def untile(box: np.ndarray, shape: tuple[int, ...], position: tuple[int, ...],
           into: np.ndarray | None = None) -> np.ndarray:
    """A tensor of zeros (or `into`) with a box stored at a position (innermost first)."""
    out = np.zeros(shape, box.dtype) if into is None else into
    for index in np.ndindex(*box.shape):
        where = [i + p for i, p in zip(index, position[::-1], strict=True)]
        if all(0 <= w < n for w, n in zip(where, shape, strict=True)):
            out[tuple(where)] = box[index]
    return out


def stored_2d(a: np.ndarray) -> np.ndarray:
    tensor = a[:3840].reshape(48, 80)
    out = untile(tile(tensor, (-6, 3), (8, 64)), (48, 80), (-6, 2))
    return untile(tile(tensor, (40, 44), (8, 64)), (48, 80), (30, -3), out)


def tmem_16x256b(a: np.ndarray) -> np.ndarray:
    """tcgen05.ld.16x256b.x2 from column 16: register 4j + {0, 1} of lane t is row t / 4, column
    8j + 2 (t % 4) + {0, 1}; registers {2, 3} are eight rows below."""
    cells = a.reshape(128, 32)
    out = np.empty((128, 8), a.dtype)
    for thread in range(128):
        first, t = thread // 32 * 32, thread % 32
        for r in range(8):
            out[thread, r] = cells[first + t // 4 + r // 2 % 2 * 8, 16 + r // 4 * 8 + t % 4 * 2 + r % 2]
    return out


def param_values(v: np.ndarray, w: np.ndarray) -> np.ndarray:
    scalars = [v[0], int(v[1:2].view(np.int8)[0]), v[2:4].view(np.uint16)[0], int(v[4:6].view(np.int16)[0]), v[7],
               v[12:16].view(np.uint32)[0], w[6]]
    rows = [np.full(32, int(x) & 0xFFFFFFFF) for x in scalars]
    return np.concatenate([*rows, w, w])


def partial_warps(a: np.ndarray) -> np.ndarray:
    first = np.arange(52) < 32
    odd = np.where(first, (a[:32] & 1).sum(), (a[32:] & 1).sum())
    picked = np.where(first, a[19], a[51])
    trips = [sum(range(3, max(t % 8, 4))) for t in range(52)]
    return np.concatenate([a[::-1], odd ^ picked, trips])


def matrix_fragments(a: np.ndarray, transposed: bool) -> np.ndarray:
    """ldmatrix: lane t gets elements 2 (t % 4) and + 1 of row (or column) t / 4 of every matrix."""
    matrices = a.reshape(-1, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).reshape(-1).view(np.uint32)
