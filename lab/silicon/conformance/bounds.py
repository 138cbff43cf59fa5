"""The error bounds of approximate instructions, from the PTX ISA manual, and how far results are
from the exact value in units of the bound.

The manual fixes the special values (NaN, infinity, zero) too: those must agree exactly, except
where the exact value lies beyond the type's range. `.ftz` makes zeros of subnormals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lab.silicon.conformance import fragments
from lab.silicon.conformance.exact_arithmetic import FORMATS, values_of
from lab.silicon.conformance.values import PACKED


@dataclass(frozen=True)
class Bound:
    """Largest error: in ulp of the result, relative or absolute; where `inside` holds."""

    unit: str
    value: float
    exact: Callable[..., np.ndarray]
    inside: Callable[..., np.ndarray] = lambda *x: np.ones(x[0].shape, bool)

    def __str__(self) -> str:
        if self.unit == "ulp":
            return f"{self.value:g} ulp"
        return f"2^{np.log2(self.value):g} {self.unit}"


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a / b


def _sensible(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (np.abs(b) >= 2.0**-126) & (np.abs(b) <= 2.0**126)


def _one_turn(x: np.ndarray) -> np.ndarray:
    return np.abs(x) <= np.pi


def _not_around_one(x: np.ndarray) -> np.ndarray:
    return (x <= 0.5) | (x >= 2) | np.isnan(x)


_F32: dict[str, tuple[Bound, ...]] = {
    "ex2": (Bound("ulp", 2, np.exp2),),
    "lg2": (
        Bound("relative", 2.0**-22, np.log2, _not_around_one),
        Bound("absolute", 2.0**-22, np.log2, lambda x: ~_not_around_one(x)),
    ),
    "rcp": (Bound("ulp", 1, lambda x: 1 / x),),
    "sqrt": (Bound("relative", 2.0**-23, np.sqrt),),
    "rsqrt": (Bound("relative", 2.0**-22.9, lambda x: 1 / np.sqrt(x)),),
    "sin": (Bound("absolute", 2.0**-20.5, np.sin, _one_turn),),
    "cos": (Bound("absolute", 2.0**-20.5, np.cos, _one_turn),),
    "tanh": (Bound("relative", 2.0**-11, np.tanh),),
    "div.approx": (Bound("ulp", 2, _quotient, _sensible),),
    "div.full": (Bound("ulp", 2, _quotient),),
}
_NARROW = {
    ("ex2", "f16"): Bound("relative", 2.0**-9.9, np.exp2),
    ("ex2", "bf16"): Bound("relative", 2.0**-7, np.exp2),
    ("tanh", "f16"): Bound("absolute", 2.0**-10.987, np.tanh),
    ("tanh", "bf16"): Bound("absolute", 2.0**-8, np.tanh),
}


def bounds_of(opcode: str) -> tuple[Bound, ...]:
    """The bounds of an approximate instruction; none where every bit counts."""
    parts = opcode.split(".")
    if parts[0] == "mma" and parts[-1] not in ("s32", "popc"):
        exact = functools.partial(fragments.multiplied, opcode)
        return (Bound("of the sum of magnitudes", fragments.unit(opcode), exact),)
    if "approx" not in parts and "full" not in parts:
        return ()
    base = PACKED.get(parts[-1], (parts[-1], 1))[0]
    if base != "f32":
        return (_NARROW[parts[0], base],)
    return _F32.get(".".join(parts[:2])) or _F32[parts[0]]


def split(kind: str, bits: np.ndarray) -> tuple[str, np.ndarray]:
    """(element type, element patterns) of an array of patterns, packed ones as rows."""
    base, count = PACKED.get(kind, (kind, 1))
    if count > 1:
        bits = bits.view(f"u{FORMATS[base].bits // 8}")
    return base, bits


def _spacing(kind: str, exact: np.ndarray) -> np.ndarray:
    least, mantissa = FORMATS[kind].least, FORMATS[kind].mantissa
    size = np.abs(np.where(np.isfinite(exact) & (exact != 0), exact, 1))
    return np.exp2(np.maximum(np.floor(np.log2(size)), least) - mantissa)


def excess(opcode: str, bound: Bound, sources: list[np.ndarray], found: np.ndarray) -> np.ndarray:
    """The error of each result in units of the bound: at most 1 is right; inf: a special value
    that is not the manual's; -1: outside the range in which the manual promises something."""
    if opcode.startswith("mma."):
        return fragments.excess(opcode, sources, found)
    kind, results = split(opcode.split(".")[-1], found)
    values = [values_of(*split(opcode.split(".")[-1], bits)) for bits in sources]
    result = values_of(kind, results)
    smallest, largest = 2.0 ** FORMATS[kind].least, FORMATS[kind].largest
    flush = "ftz" in opcode
    if flush and kind == "f32":
        values = [np.where(np.abs(x) < smallest, np.copysign(0.0, x), x) for x in values]
    with np.errstate(all="ignore"):
        exact = bound.exact(*values)
        unit = {"ulp": _spacing(kind, exact), "relative": np.abs(exact), "absolute": 1.0}
        least = smallest * 2.0 ** -FORMATS[kind].mantissa  # what subnormals are apart
        allowed = np.maximum(bound.value * unit[bound.unit], least)
        error = np.abs(result - exact) / allowed
    special = ~np.isfinite(exact) | (exact == 0)
    agree = (result == exact) | (np.isnan(result) & np.isnan(exact))
    error = np.where(special, np.where(agree, 0.0, np.inf), error)
    over = np.isfinite(exact) & (np.abs(exact) > largest) & (result == np.copysign(np.inf, exact))
    under = flush & (np.abs(exact) < smallest) & (result == 0)
    error = np.where(over | under, 0.0, error)
    error = np.where(np.isnan(error), np.inf, error)
    return np.where(bound.inside(*values), error, -1.0)


def ulps_apart(opcode: str, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return how many representable numbers lie between two results; NaNs agree."""
    kind, a = split(opcode.split(".")[-1], one)
    _, b = split(opcode.split(".")[-1], other)
    sign = np.int64(1) << FORMATS[kind].bits - 1
    both = np.isnan(values_of(kind, a)) & np.isnan(values_of(kind, b))
    ordered = [np.where(x & sign, sign - x, x) for x in (a.astype(np.int64), b.astype(np.int64))]
    return np.where(both, 0, np.abs(ordered[0] - ordered[1]))
