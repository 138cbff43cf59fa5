"""Names in nested `{ }` scopes: each becomes unique by its scope's number, as inline assembly
repeats its labels and registers.
"""

from __future__ import annotations

VECTORS = {"v2": ("x", "y"), "v4": ("x", "y", "z", "w")}


class Scopes:
    """The scopes around one place of one function, innermost last. `vectors` maps the unique name
    of a vector register to the names of its elements, which are registers of their own."""

    def __init__(self) -> None:
        self._names: list[dict[str, str]] = [{}]
        self._numbers = [0]
        self._count = 0
        self.vectors: dict[str, tuple[str, ...]] = {}

    def enter(self, labels: set[str]) -> None:
        """A scope begins; its labels are known ahead of use, as a branch may go forward."""
        self._count += 1
        self._names.append({name: f"{name}@{self._count}" for name in labels})
        self._numbers.append(self._count)

    def leave(self) -> None:
        self._names.pop()
        self._numbers.pop()

    def declare(self, name: str) -> str:
        """The unique name of a register, variable or label that is declared here."""
        if len(self._names) == 1:
            return name
        return self._names[-1].setdefault(name, f"{name}@{self._numbers[-1]}")

    def declare_register(self, name: str, vector: str) -> tuple[str, ...]:
        """The registers behind a declared name: itself, or the elements of a `vector` (v2, v4)."""
        unique = self.declare(name)
        if not vector:
            return (unique,)
        self.vectors[unique] = tuple(self.declare(f"{name}.{part}") for part in VECTORS[vector])
        return self.vectors[unique]

    def resolve(self, name: str) -> str:
        """The unique name that `name` stands for here."""
        for scope in reversed(self._names):
            if name in scope:
                return scope[name]
        return name
