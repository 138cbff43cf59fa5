"""A write to a watched range, and how it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ptxemu.syntax.tree import Instr

_SHOWN = 4  # words of a value
_LINE = 120  # characters of an instruction
_EXPONENT = 12  # decimal, of what may be meant as f32


@dataclass
class Write:
    """One write.

    agent       such as "warp 4 of cta(0,0,0)" or "TMA, issued by ...".
    first, last what it reached of the watched range, which begins at `low`.
    value       the whole range after it: bytes, uint8; of tensor memory cells, uint32 [column,
                lane]. None until it is read back.
    """

    order: int
    agent: str
    instr: Instr | None
    lanes: tuple[int, ...]
    first: int
    last: int
    low: int
    value: np.ndarray | None = None

    @property
    def source(self) -> str:
        """Such as "file.py:257"; "" without line information."""
        return self.instr.source if self.instr else ""

    def __str__(self) -> str:
        parts = [f"#{self.order} {self.agent}"]
        if self.lanes:
            parts.append(f"lanes {_ranges(self.lanes)}")
        parts.append(self._what())
        if self.source:
            parts.append(self.source)
        if self.instr:
            parts.append(f"PTX line {self.instr.line} `{short_text(self.instr)}`")
        return "  ".join(parts)

    def _what(self) -> str:
        """The range, and the first words that are in it now."""
        if self.value is not None and self.value.ndim == 2:
            words = self.value[self.first - self.low][:_SHOWN]
            return f"columns {self.first}..{self.last}, from lane 0 {words_text(words)}"
        place = f"[{self.first:#x}..{self.last:#x}]"
        if self.value is None:
            return place
        raw = self.value[self.first - self.low : self.last + 1 - self.low]
        size = next(n for n in (4, 2, 1) if self.first % n == 0 and len(raw) % n == 0)
        return f"{place} = {words_text(raw.view(f'u{size}')[:_SHOWN])}"


def short_text(instr: Instr) -> str:
    """An instruction in one line; some have a hundred operands."""
    text = " ".join(instr.text.split())
    return text if len(text) <= _LINE else f"{text[:_LINE]}..."


def words_text(words: np.ndarray) -> str:
    """In hex, and as f32 where they look like such: 32 bits, of a magnitude that people use."""
    text = " ".join(f"{int(word):#x}" for word in words)
    if words.dtype.itemsize != 4:
        return text
    with np.errstate(all="ignore"):
        floats = np.ascontiguousarray(words).view(np.float32)
        plausible = (floats == 0) | (np.abs(np.log10(np.abs(floats))) < _EXPONENT)
    if not plausible.all() or not words.any():
        return text
    return f"{text} (f32 {' '.join(f'{value:.6g}' for value in floats.tolist())})"


def _ranges(lanes: Iterable[int]) -> str:
    """Of 0, 1, 2, 3, 7 "0..3,7"."""
    runs: list[list[int]] = []
    for lane in sorted(set(lanes)):
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ",".join(f"{a}..{b}" if b > a else str(a) for a, b in runs)
