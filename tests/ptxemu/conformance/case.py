"""A conformance case: a program, and what each of its outputs says about which forms."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

import ptxemu
from tests.ptxemu.ptx_program import Program, emulate


@dataclass(frozen=True)
class Output:
    """One output buffer: the forms that made it, from how many random inputs.

    `label` names what it holds once and for all: recorded digests are found by it.
    """

    label: str
    forms: tuple[str, ...]
    inputs: int
    approximate: bool = False
    rows: tuple[tuple[str, ...], ...] = ()  # forms of equal parts of the output, one after another

    def parts(self, found: np.ndarray) -> list[tuple[tuple[str, ...], np.ndarray]]:
        """(forms, what they made)."""
        if not self.rows:
            return [(self.forms, found)]
        return list(zip(self.rows, found.reshape(len(self.rows), -1), strict=True))


@dataclass(frozen=True)
class Case:
    name: str
    program: Program
    outputs: dict[str, Output]

    def emulated(self, options: ptxemu.Options | None = None) -> dict[str, np.ndarray]:
        module = ptxemu.load(self.program.text)
        return emulate(self.program, module, options or ptxemu.Options(limit=None))


def digest(found: np.ndarray) -> str:
    """64 bits that stand for an output."""
    return hashlib.sha256(found.tobytes()).hexdigest()[:16]
