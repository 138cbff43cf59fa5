"""Fragments of mma.sync after the manual's figures, element by element, and products of them.

Matrices are arrays of bit patterns [matrix, row, column], fragments uint32 [matrix, register,
lane]. Nothing of ptxemu is used here. PTX ISA: "Matrix fragments for mma.m16n8k4" and those behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

from lab.silicon.conformance.exact_arithmetic import values_of

M, N = 16, 8  # of most shapes; `rows` knows the others
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
BITS |= {"f32": 32, "s32": 32, "f64": 64, "s4": 4, "u4": 4, "b1": 1}
# rounding steps of an accumulation with double, single and half precision, relative to what is
# summed
_STEP = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10}
_LARGEST = {"f64": 2.0**1023, "f32": 2.0**127, "f16": 65504.0}
_SHAPE = re.compile(r"(?:^|\.)m(\d+)n8k(\d+)\.")

Place = Callable[[int, int, int], tuple[int, int]]  # (lane, element, its bits) -> (row, column)


def per_register(bits: int) -> int:
    """Elements of so many bits in a register, which has 64 bits where one element has."""
    return max(1, 32 // bits)


def place_a(lane: int, element: int, bits: int) -> tuple[int, int]:
    """Return the position of a lane's element of A: registers alternate between upper and lower
    halves. With 8 rows there is one register."""
    each = per_register(bits)
    register, position = divmod(element, each)
    column = each * (lane & 3) + position + 4 * each * (register >> 1)
    return (lane >> 2) + 8 * (register & 1), column


def place_b(lane: int, element: int, bits: int) -> tuple[int, int]:
    each = per_register(bits)
    register, position = divmod(element, each)
    return each * (lane & 3) + position + 4 * each * register, lane >> 2


def place_d(lane: int, element: int, bits: int) -> tuple[int, int]:
    """Place of an element of C and D."""
    return (lane >> 2) + (8 if element >= 2 else 0), 2 * (lane & 3) + (element & 1)


def elements(place: Place, type_: str, count: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(lane, register, position in it, row, column) of all `count` elements of a matrix."""
    each = per_register(BITS[type_])
    for lane in range(32):
        for element in range(count // 32):
            register, position = divmod(element, each)
            yield lane, register, position, *place(lane, element, BITS[type_])


def word_type(type_: str) -> type[np.unsignedinteger]:
    """Type of a register of a fragment."""
    return np.uint64 if BITS[type_] == 64 else np.uint32


def register_count(type_: str, count: int) -> int:
    """Registers of a lane that a matrix of `count` elements takes."""
    return count // 32 // per_register(BITS[type_])


def scatter(codes: np.ndarray, type_: str, place: Place) -> np.ndarray:
    """Matrices -> fragments."""
    count, bits = codes[0].size, BITS[type_]
    kind = word_type(type_)
    words = np.zeros((len(codes), register_count(type_, count), 32), kind)
    for lane, register, position, row, column in elements(place, type_, count):
        words[:, register, lane] |= codes[:, row, column].astype(kind) << kind(position * bits)
    return words


def gather(words: np.ndarray, type_: str, place: Place, shape: tuple[int, int]) -> np.ndarray:
    """Fragments -> matrices of `shape`."""
    bits = BITS[type_]
    kind = word_type(type_)
    codes, mask = np.zeros((len(words), *shape), kind), kind((1 << bits) - 1)
    for lane, register, position, row, column in elements(place, type_, shape[0] * shape[1]):
        codes[:, row, column] = words[:, register, lane] >> kind(position * bits) & mask
    return codes


# -- numbers ------------------------------------------------------------------------------------


def numbers_of(type_: str, codes: np.ndarray) -> np.ndarray:
    """float64 of bit patterns; of the types that memory does not have, too."""
    if type_ in ("b1", "u4"):
        return codes.astype(np.float64)
    if type_ == "s4":
        return (codes ^ 8).astype(np.float64) - 8
    return values_of(type_, codes)


def codes_of(values: np.ndarray, type_: str) -> np.ndarray:
    """Bit patterns of numbers, rounded or cut where the type has no such number."""
    if type_ == "f64":
        return values.astype(np.float64).view(np.uint64)
    if type_ in ("f32", "tf32", "bf16"):
        kept, shift = {"f32": (32, 0), "tf32": (19, 0), "bf16": (16, 16)}[type_]
        bits = values.astype(np.float32).view(np.uint32)
        return (bits & (0xFFFFFFFF << 32 - kept & 0xFFFFFFFF)) >> shift
    if type_ in ("f16", "e5m2"):
        bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        return bits if type_ == "f16" else bits >> 8
    if type_ == "e4m3":
        magnitudes = values_of("e4m3", np.arange(127))
        below = np.searchsorted(magnitudes, np.abs(values), side="right") - 1
        return below.astype(np.uint32) | np.signbit(values).astype(np.uint32) << 7
    return values.astype(np.int64).astype(np.uint32) & np.uint32((1 << BITS[type_]) - 1)


# -- products -----------------------------------------------------------------------------------


def operands(opcode: str, fragments: list[np.ndarray]) -> list[np.ndarray]:
    """The matrices A, B and C, float64, of their fragments."""
    _, a_type, b_type, c_type = types_of(opcode)
    m, k = rows(opcode), depth(opcode)
    wanted = ((a_type, place_a, (m, k)), (b_type, place_b, (k, N)), (c_type, place_d, (m, N)))
    out = []
    for words, (type_, place, shape) in zip(fragments, wanted, strict=True):
        registers = register_count(type_, shape[0] * shape[1])
        codes = gather(words.view(word_type(type_)).reshape(-1, registers, 32), type_, place, shape)
        out.append(numbers_of(type_, codes))
    return out


def types_of(opcode: str) -> list[str]:
    """Types of D, A, B and C."""
    return opcode.removesuffix(".xor.popc").removesuffix(".and.popc").split(".")[-4:]


def rows(opcode: str) -> int:
    """Rows of A."""
    (shape,) = _SHAPE.findall(opcode)
    return int(shape[0])


def depth(opcode: str) -> int:
    """Columns of A."""
    (shape,) = _SHAPE.findall(opcode)
    return int(shape[1])


def multiplied(opcode: str, fragments: list[np.ndarray]) -> np.ndarray:
    """D's fragments, exact but for one rounding; fragments: of A, B and C."""
    a, b, c = operands(opcode, fragments)
    total = np.zeros_like(c)
    combined: Callable[..., np.ndarray] = np.not_equal if ".xor." in opcode else np.multiply
    for row in range(rows(opcode)):
        for column in range(N):
            terms = combined(a[:, row, :], b[:, :, column])
            total[:, row, column] = terms.sum(1) + c[:, row, column]
    type_ = types_of(opcode)[0]
    if ".satfinite" in opcode:
        total = total.clip(-(2.0**31), 2.0**31 - 1)
    return scatter(codes_of(total, type_), type_, place_d)


def unit(opcode: str) -> float:
    """Return the error that the manual allows for an element of D, relative to the sum of
    magnitudes."""
    return (depth(opcode) + 1) * _STEP[types_of(opcode)[0]]


def excess(opcode: str, fragments: list[np.ndarray], found: np.ndarray) -> np.ndarray:
    """The error of each element of D (in the order of its fragments) in units of what the manual
    allows: at most 1 is right, -1 is where it allows anything.

    Products are exact; they and C are summed in any order and with any rounding, in at least single
    or half precision: each of the k additions may be off by one unit of the sum of all magnitudes.
    What could overflow on the way is free.
    """
    a, b, c = operands(opcode, fragments)
    type_, m = types_of(opcode)[0], rows(opcode)
    with np.errstate(all="ignore"):
        magnitude = np.abs(a) @ np.abs(b) + np.abs(c)
        allowed = unit(opcode) * magnitude
        words = found.view(word_type(type_)).reshape(-1, register_count(type_, m * N), 32)
        result = numbers_of(type_, gather(words, type_, place_d, (m, N)))
        error = np.abs(result - (a @ b + c)) / np.maximum(allowed, np.finfo(np.float64).tiny)
    error = np.where(np.isnan(error), np.inf, error)
    return np.where(magnitude < _LARGEST[type_], error, -1.0).ravel()
