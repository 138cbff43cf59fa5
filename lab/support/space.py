"""Ask a function's own checks which combinations of its arguments it accepts.

A `Space` has factors, such as the GPU or the page size, with the values that are asked. A call has
a value of every factor. Nothing is compiled: the call is made while kernels are only collected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey

Row = Mapping[str, str]  # factor -> value
REFUSALS = (TypeError, ValueError, NotImplementedError)
GPU, UNKNOWN = "GPU", "sm_75"
OWN = ("sm_100a", "sm_103a", "sm_90a")  # the GPUs with kernels of their own come first
GPUS = (*OWN, *(arch for arch in ARCHITECTURES if arch not in OWN), UNKNOWN)
# What differs between two errors of one limit: names of architectures, dtypes and formats, numbers.
_VALUES = re.compile(
    r"sm_\d+a?|torch\.\w+|\b(?:bf16|fp16|fp32|e4m3|nvfp4|mxfp4|mxfp8)\b|-?\d[\d.e+-]*"
)


@dataclass(frozen=True)
class Space:
    """The calls of a function that are asked.

    name: the function, as the page calls it.
    about: what the values mean, in a sentence or two.
    factors: factor -> values; the first is the default.
    table: factors whose combinations are all asked; the GPU is the first. Where more than a few
        values of the last but one run on a kernel, the last one is asked of the first and the last
        of these.
    contexts: factors of the table that options may depend on.
    call: makes the call of a row; raises what the function raises.
    wrong: runs an accepted row in the emulator; returns what is out of tolerance.
    kernel: the name to show for the kernels of a call.
    """

    name: str
    about: str
    factors: Mapping[str, Sequence[str]]
    table: tuple[str, ...]
    contexts: tuple[str, ...]
    call: Callable[[Row], Any]
    wrong: Callable[[Row], list[str]]
    kernel: Callable[[list[KernelKey]], str] = field(default=lambda keys: module_of(keys[-1]))

    @property
    def default(self) -> dict[str, str]:
        """The row of defaults."""
        return {name: values[0] for name, values in self.factors.items()}

    @property
    def options(self) -> list[str]:
        """Factors outside the table."""
        return [name for name in self.factors if name not in self.table]

    def verdict(self, row: Row) -> Verdict:
        """Return what the function says to the call of a row."""
        with collecting() as keys:
            try:
                self.call(row)
            except REFUSALS as error:
                return Verdict("", f"{type(error).__name__}: {error}")
        return Verdict(self.kernel(keys), "")


def module_of(key: KernelKey) -> str:
    """The folder of a kernel, `fmha.sm100` for `fmha.sm100.kernel`."""
    return key.source.partition(":")[0].removesuffix(".kernel")


@dataclass(frozen=True)
class Verdict:
    """The kernel of an accepted call, or the text of a refusal."""

    kernel: str
    refusal: str

    @property
    def accepted(self) -> bool:
        """Whether the call is accepted."""
        return not self.refusal

    @property
    def limit(self) -> str:
        """The refusal without its values: equal for all calls that exceed the same limit."""
        return limit_of(self.refusal)


def limit_of(refusal: str) -> str:
    """Return the text of a refusal with its values left out."""
    return _VALUES.sub("#", refusal)


Box = tuple[frozenset[str], ...]


def boxes(points: Iterable[tuple[str, ...]]) -> list[Box]:
    """Fold points into disjoint boxes: a set of values for each place of a point."""
    found: dict[Box, None] = dict.fromkeys(
        tuple(frozenset((value,)) for value in point) for point in points
    )
    width = len(next(iter(found), ()))
    for place in reversed(range(width)):
        merged: dict[Box, frozenset[str]] = {}
        for box in found:
            rest = (*box[:place], *box[place + 1 :])
            merged[rest] = merged.get(rest, frozenset()) | box[place]
        found = dict.fromkeys((*rest[:place], one, *rest[place:]) for rest, one in merged.items())
    return list(found)
