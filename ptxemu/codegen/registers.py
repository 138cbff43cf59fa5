"""How each virtual register is kept between blocks: its type, its slots, and whether it may be
scalar.

PTX registers are untyped, so the analysis counts how each one is used and keeps it in the form that
needs fewest conversions: b32 as u32 or f32, b64 as u64 or as a pair of 32-bit halves (packed
f32x2). Any choice is correct. A register that depends on the lane by nature is always an array; any
other is a Python scalar until a write under a partial mask makes it differ between lanes.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from ptxemu.codegen.values import VARYING, Value
from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.tree import TYPE_BITS


class RegisterFile:
    """The registers of one entry. Filled by the analysis pass, then read-only after `settle()`."""

    # What `ptxemu.plain` keeps of one that is settled.
    PLAIN = (
        *("_width", "_float_votes", "_pair_votes", "_alias", "_deps", "_varying", "_slots"),
        *("slot_count", "frozen"),
    )

    def __init__(self, declared: dict[str, str]) -> None:
        self._width = {
            name: max(TYPE_BITS[type_], 16) if type_ != "pred" else 1
            for name, type_ in declared.items()
        }
        self._float_votes: dict[str, int] = defaultdict(int)
        self._pair_votes: dict[str, int] = defaultdict(int)
        self._alias: dict[str, str] = {}
        self._deps: dict[str, set[str]] = defaultdict(set)
        self._varying: set[str] = set()
        self._slots: dict[str, tuple[tuple[int, str], ...]] = {}
        self.slot_count = 0
        self.frozen = False

    def width(self, name: str) -> int:
        return self._width[name]

    @cached_property
    def wide(self) -> frozenset[str]:
        """Registers of 64 bits and more."""
        return frozenset(name for name, width in self._width.items() if width >= 64)

    # -- recorded by the analysis pass ------------------------------------------------------

    def vote(self, name: str, type_: str, count: int = 1) -> None:
        """An operand asked for this register as `type_`."""
        if self.frozen:
            return
        if type_ == "pair":
            self._pair_votes[name] += count
        elif type_ in ("f32", "f64"):
            self._float_votes[name] += count
        else:
            self._float_votes[name] -= count
            self._pair_votes[name] -= count

    def define(self, name: str, value: Value | tuple[Value, Value]) -> None:
        if self.frozen:
            return
        for part in value if isinstance(value, tuple) else (value,):
            self._deps[name] |= part.deps
            if part.type in ("f32", "f64"):
                self._float_votes[name] += 1

    def alias(self, target: str, source: str) -> None:
        """A move: both registers should be kept alike."""
        if not self.frozen and self._width[target] == self._width[source]:
            a, b = self.root(target), self.root(source)
            if a != b:
                self._alias[a] = b

    def root(self, name: str) -> str:
        """One name for all registers that moves connect with it."""
        while name in self._alias:
            name = self._alias[name]
        return name

    # -- decided once -----------------------------------------------------------------------

    def settle(self) -> None:
        """Decide kinds, slots and uniformity from what was recorded."""
        self.frozen = True
        floats: dict[str, int] = defaultdict(int)
        pairs: dict[str, int] = defaultdict(int)
        for name in self._width:
            floats[self.root(name)] += self._float_votes[name]
            pairs[self.root(name)] += self._pair_votes[name]
        for name, width in self._width.items():
            root = self.root(name)
            self._slots[name] = self._layout(name, width, floats[root], pairs[root])
        self._spread_varying()
        self._float_votes, self._pair_votes, self._deps = {}, {}, {}  # they have done their duty

    def _layout(
        self, name: str, width: int, floats: int, pairs: int
    ) -> tuple[tuple[int, str], ...]:
        types: tuple[str, ...]
        if width == 128:
            types = ("u64", "u64")
        elif width == 64 and pairs > 0:
            types = ("f32", "f32")
        elif width in (32, 64) and floats > 0:
            types = (f"f{width}",)
        elif width == 1:
            types = ("pred",)
        else:
            types = (f"u{width}",)
        first = self.slot_count
        self.slot_count += len(types)
        return tuple((first + k, type_) for k, type_ in enumerate(types))

    def _spread_varying(self) -> None:
        """Registers that depend, through any definition, on what differs between lanes."""
        users: dict[str, list[str]] = defaultdict(list)
        for name, deps in self._deps.items():
            for dep in deps:
                users[dep].append(name)
        pending = [VARYING]
        while pending:
            for user in users.get(pending.pop(), ()):
                if user not in self._varying:
                    self._varying.add(user)
                    pending.append(user)

    def slots(self, name: str) -> tuple[tuple[int, str], ...]:
        if not self.frozen:
            width = self._width.get(name)
            if width is None:
                raise UnsupportedPtx(f"undeclared register {name}")
            if width == 128:
                return ((0, "u64"), (0, "u64"))
            return ((0, "pred" if width == 1 else f"u{width}"),)
        return self._slots[name]

    def always_varying(self, name: str) -> bool:
        return name in self._varying
