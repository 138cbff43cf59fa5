"""A conformance case: a program, and what each of its outputs says about which forms."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

import ptxemu
from lab.silicon.conformance.ptx_program import Program, emulate


@dataclass(frozen=True)
class Output:
    """An output buffer: its contents, the forms that made it, and the number of random inputs."""

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
    recorded: bool = True  # a digest is kept: the inputs are the same with any numpy
    sums: bool = False  # of any numbers: the bits are those of `accumulation="aligned"` alone

    @property
    def forms(self) -> set[str]:
        """Forms that the outputs test."""
        rows = (row for output in self.outputs.values() for row in output.rows or (output.forms,))
        return {form for row in rows for form in row}

    def digest(self, found: dict[str, np.ndarray]) -> str:
        """64 bits that stand for all outputs in which every bit counts."""
        exact = [name for name, output in self.outputs.items() if not output.approximate]
        parts = (found[name].tobytes() for name in sorted(exact))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def digest_of_sums(self, found: dict[str, np.ndarray]) -> str:
        """Return the digest of all outputs."""
        parts = (found[name].tobytes() for name in sorted(self.outputs))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def emulated(self, options: ptxemu.Options | None = None) -> dict[str, np.ndarray]:
        module = ptxemu.load(self.program.text)
        return emulate(self.program, module, options or ptxemu.Options(limit=None))
