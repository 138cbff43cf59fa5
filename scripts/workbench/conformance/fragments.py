"""Fragments of mma.sync after the manual's figures, element by element, and products of them.

Matrices are arrays of bit patterns [matrix, row, column], fragments uint32 [matrix, register,
lane]. Nothing of ptxemu is used here. PTX ISA: "Matrix fragments for mma.m16n8k4" and those behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from workbench.conformance.exact_arithmetic import values_of

M, N = 16, 8
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
BITS |= {"f32": 32, "s32": 32}
# rounding steps of an accumulation with single and with half precision, relative to what is summed
_STEP = {"f32": 2.0**-23, "f16": 2.0**-10}
_LARGEST = {"f32": 2.0**127, "f16": 65504.0}

Place = Callable[[int, int, int], tuple[int, int]]  # (lane, element, its bits) -> (row, column)


def place_a(lane: int, element: int, bits: int) -> tuple[int, int]:
    """Where a lane's element of A stands: registers hold upper and lower halves in turn."""
    each = 32 // bits
    register, position = divmod(element, each)
    column = each * (lane & 3) + position + 4 * each * (register >> 1)
    return (lane >> 2) + 8 * (register & 1), column


def place_b(lane: int, element: int, bits: int) -> tuple[int, int]:
    each = 32 // bits
    register, position = divmod(element, each)
    return each * (lane & 3) + position + 4 * each * register, lane >> 2


def place_d(lane: int, element: int, bits: int) -> tuple[int, int]:
    """Of C and D."""
    return (lane >> 2) + (8 if element >= 2 else 0), 2 * (lane & 3) + (element & 1)


def elements(place: Place, type_: str, count: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(lane, register, position in it, row, column) of all `count` elements of a matrix."""
    each = 32 // BITS[type_]
    for lane in range(32):
        for element in range(count // 32):
            register, position = divmod(element, each)
            yield lane, register, position, *place(lane, element, BITS[type_])


def scatter(codes: np.ndarray, type_: str, place: Place) -> np.ndarray:
    """Matrices -> fragments."""
    count, bits = codes[0].size, BITS[type_]
    words = np.zeros((len(codes), count * bits // 1024, 32), np.uint32)
    for lane, register, position, row, column in elements(place, type_, count):
        words[:, register, lane] |= codes[:, row, column].astype(np.uint32) << position * bits
    return words


def gather(words: np.ndarray, type_: str, place: Place, shape: tuple[int, int]) -> np.ndarray:
    """Fragments -> matrices of `shape`."""
    bits = BITS[type_]
    codes = np.zeros((len(words), *shape), np.uint32)
    for lane, register, position, row, column in elements(place, type_, shape[0] * shape[1]):
        codes[:, row, column] = words[:, register, lane] >> position * bits & ((1 << bits) - 1)
    return codes


# -- numbers ------------------------------------------------------------------------------------


def codes_of(values: np.ndarray, type_: str) -> np.ndarray:
    """Bit patterns of numbers, rounded or cut where the type has no such number."""
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
    _, a_type, b_type, c_type = opcode.split(".")[-4:]
    k = depth(opcode)
    wanted = ((a_type, place_a, (M, k)), (b_type, place_b, (k, N)), (c_type, place_d, (M, N)))
    out = []
    for words, (type_, place, shape) in zip(fragments, wanted, strict=True):
        registers = shape[0] * shape[1] * BITS[type_] // 1024
        codes = gather(words.view(np.uint32).reshape(-1, registers, 32), type_, place, shape)
        out.append(values_of(type_, codes))
    return out


def depth(opcode: str) -> int:
    """Columns of A."""
    (shape,) = (part for part in opcode.split(".") if part.startswith("m16n8k"))
    return int(shape.removeprefix("m16n8k"))


def multiplied(opcode: str, fragments: list[np.ndarray]) -> np.ndarray:
    """D's fragments, exact but for one rounding; fragments: of A, B and C."""
    a, b, c = operands(opcode, fragments)
    total = np.zeros_like(c)
    for row in range(M):
        for column in range(N):
            total[:, row, column] = (a[:, row, :] * b[:, :, column]).sum(1) + c[:, row, column]
    type_ = opcode.split(".")[-4]
    if ".satfinite" in opcode:
        total = total.clip(-(2.0**31), 2.0**31 - 1)
    return scatter(codes_of(total, type_), type_, place_d)


def unit(opcode: str) -> float:
    """What the manual allows an element of D to be off, of the sum of the magnitudes in it."""
    return (depth(opcode) + 1) * _STEP[opcode.split(".")[-4]]


def excess(opcode: str, fragments: list[np.ndarray], found: np.ndarray) -> np.ndarray:
    """The error of each element of D (in the order of its fragments) in units of what the manual
    allows: at most 1 is right, -1 is where it allows anything.

    Products are exact; they and C are summed in any order and with any rounding, in at least single
    or half precision: each of the k additions may be off by one unit of the sum of all magnitudes.
    What could overflow on the way is free.
    """
    a, b, c = operands(opcode, fragments)
    type_ = opcode.split(".")[-4]
    with np.errstate(all="ignore"):
        magnitude = np.abs(a) @ np.abs(b) + np.abs(c)
        allowed = unit(opcode) * magnitude
        registers = M * N * BITS[type_] // 1024
        words = found.view(np.uint32).reshape(-1, registers, 32)
        result = values_of(type_, gather(words, type_, place_d, (M, N)))
        error = np.abs(result - (a @ b + c)) / np.maximum(allowed, np.finfo(np.float64).tiny)
    error = np.where(np.isnan(error), np.inf, error)
    return np.where(magnitude < _LARGEST[type_], error, -1.0).ravel()
