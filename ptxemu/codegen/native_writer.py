"""Nodes -> Python source whose elementwise work is done by primitives.

Pure nodes on lanes become operations of a *segment*, in the order of the program; a line of Python
that needs one of their values is preceded by a call of the segment so far. All else is as
`emit.BlockWriter` has it: steps are calls in Python, scalars are Python's.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ptxemu.codegen.emit import BlockWriter
from ptxemu.codegen.lower import Store
from ptxemu.codegen.values import DTYPE, Node, Value, bits_of_double, bits_of_float
from ptxemu.native.frame import Frame, Plan
from ptxemu.native.ir import BITS, TABLE, Key, row_bytes
from ptxemu.native.lanes import OPERATIONS, Ballot, Lanes, Reduction, Shuffle
from ptxemu.native.memory import ACCESSES, Access, TensorAccess
from ptxemu.native.recipes import Recipe, Ref, recipe

_MANY_CELLS = 256  # beyond it they are left to values of lanes
_CELL_OF = {"f": "d", "s": "q", "u": "Q", "p": "Q"}  # the type of a scalar's cell


@dataclass(eq=False)
class Spot:
    """Room for a value, or for the rows of a matrix, from its first event to its last."""

    dtype: str
    rows: int = 0
    first: int = -1
    last: int = -1
    place: int = 0


@dataclass(frozen=True, eq=False)
class Home:
    """Place of a value: `offset` bytes into a spot, or at the place `offset` without a spot."""

    spot: Spot | None
    offset: int = 0

    @property
    def place(self) -> int:
        return self.offset + (self.spot.place if self.spot else 0)


Operation = tuple[Key, tuple[Home, ...]]


@dataclass(eq=False)
class NativeWriter(BlockWriter):
    """partial: as of `Lower`."""

    frame: Frame | None = None
    partial: int = 0
    homes: dict[Value, Home] = field(default_factory=dict)
    planned: dict[Value, Home] = field(default_factory=dict)  # rows of a matrix to come
    matrices: dict[Node, Spot] = field(default_factory=dict)  # operands that a step wants stacked
    spots: list[Spot] = field(default_factory=list)
    segment: list[Operation] = field(default_factory=list)
    segments: list[list[Operation]] = field(default_factory=list)
    views: dict[str, tuple[Home, str, int]] = field(default_factory=dict)  # name, dtype, rows
    named: dict[str, Spot] = field(default_factory=dict)  # by a line that is not written yet
    spread: dict[tuple[Value, str], Home] = field(default_factory=dict)  # scalars
    mask: Home | None = None  # of the active lanes
    cells: int = 0
    events: int = 0
    order: dict[Node, int] = field(default_factory=dict)
    step: Node | None = None
    borrows: bool = False

    # -- preparation ------------------------------------------------------------------------

    def load(self, nodes: list[Node]) -> None:
        self.order = {node: k for k, node in enumerate(nodes)}
        for node in nodes:
            if node.rows and self._wants_rows(node):
                spot = self.matrices[node] = self._spot(DTYPE[node.rows[0].type], len(node.rows))
                for row, value in enumerate(node.rows):
                    if value.node is not None and value.node.pure and not value.uniform:
                        self.planned.setdefault(value, row_of(spot, row))

    def _wants_rows(self, node: Node) -> bool:
        """The operands that a step wants stacked shall lie in the scratch."""
        return not all(value.uniform for value in node.rows)

    def _spot(self, dtype: str, rows: int = 0) -> Spot:
        spot = Spot(dtype, rows)
        self.spots.append(spot)
        return spot

    def _new(self, dtype: str, value: Value | None = None) -> Home:
        """A home for a result; that of a value may be planned."""
        planned = self.planned.pop(value, None) if value else None
        return planned or Home(self._spot(dtype))

    def _touch(self, spot: Spot | None) -> None:
        if spot is not None:
            spot.first = self.events if spot.first < 0 else spot.first
            spot.last = self.events

    # -- operations -------------------------------------------------------------------------

    def _operate(self, name: str, types: tuple[str, ...], *homes: Home) -> None:
        """homes: of the result and of the operands."""
        self.events += 1
        for home in homes:
            self._touch(home.spot)
        self.segment.append(((name, types), homes))

    def flush(self) -> None:
        """Call the segment before the next line."""
        if self.segment:
            self.line(self._call())

    def _call(self) -> str:
        """The segment so far, to be written in a line."""
        self.segments.append(self.segment)
        self.segment = []
        return f"segment_{len(self.segments) - 1}(w.file, w.context)"

    def line(self, text: str, step: int = -1) -> None:
        self.events += 1
        for name in [name for name in self.named if name in text]:
            self._touch(self.named.pop(name))  # a value lives until the line that names it
        super().line(text, step)

    def _home(self, value: Value, dtype: str) -> Home:
        """Return the home of a value's 32 lanes; a scalar is spread to them."""
        if value.const is not None:
            return self._constant(value.const, dtype)
        if value.uniform:
            return self._spread(value, dtype)
        if value not in self.homes:
            self._take(value)
        return self.homes[value]

    def _constant(self, number: Any, dtype: str) -> Home:
        assert self.frame is not None
        return Home(None, self.frame.constant(_bits(number, dtype), dtype))

    def _spread(self, value: Value, dtype: str) -> Home:
        key = value, dtype
        if key not in self.spread:
            self.line(f"{_CELL_OF[value.type[0]]}_cells[{self.cells}] = {self.expr(value)}")
            self.spread[key] = self._new(dtype)
            self._operate("splat", (dtype,), self.spread[key], self._cell())
        return self.spread[key]

    def _cell(self) -> Home:
        assert self.frame is not None
        self.cells += 1
        return Home(None, self.frame.cell(self.cells - 1))

    def _register(self, value: Value) -> int | None:
        """The place in the file of a register that is an array there."""
        text = value.expr or ""
        return self.frame.offsets.get(int(text[2:-1])) if self.frame and text[:2] == "R[" else None

    def _take(self, value: Value) -> None:
        """A value of lanes that a register or a name of Python's has."""
        register, dtype = self._register(value), DTYPE[value.type]
        if register is not None:
            self.homes[value] = Home(None, register)
        else:
            self.homes[value] = self._written(self._new(dtype), dtype, super().expr(value))

    def _written(self, home: Home, dtype: str, text: str) -> Home:
        """The home, after a line that fills it from Python."""
        self.flush()
        self.line(f"{self._view(home, dtype)}[...] = {text}")
        return home

    def _view(self, home: Home, dtype: str, rows: int = 0) -> str:
        """The name of a value in the scratch."""
        assert home.spot is not None, "a register is moved before it is named"
        self.events += 1
        self._touch(home.spot)
        name = f"{'m' if rows else 'x'}{self.spots.index(home.spot)}_{home.offset}_{dtype}"
        self.views[name] = home, dtype, rows
        self.named[name] = home.spot
        return name

    # -- what the lines of Python see -------------------------------------------------------

    def _available(self, value: Value) -> bool:
        return value in self.homes or super()._available(value)

    def expr(self, value: Value) -> str:
        if value.uniform or value.const is not None:
            return super().expr(value)
        if value not in self.homes:
            if self._register(value) is None:
                return super().expr(value)
            self._take(value)
        dtype = DTYPE[value.type]
        return self._lent(self._in_scratch(self.homes[value], dtype), dtype)

    def _in_scratch(self, home: Home, dtype: str) -> Home:
        """Itself, or a copy of a register."""
        if home.spot is not None:
            return home
        copy = self._new(dtype)
        self._operate("move", (dtype,), copy, home)
        return copy

    def _lent(self, home: Home, dtype: str, rows: int = 0) -> str:
        self.flush()
        name = self._view(home, dtype, rows)
        return name if self.borrows else f"{name}.copy()"

    def stack(self, values: list[Value]) -> str:
        spot = self.matrices.get(self.step) if self.step else None
        if spot is None:
            return super().stack(values)
        self._stacked(spot, values)
        return self._lent(Home(spot), spot.dtype, len(values))

    def _stacked(self, spot: Spot, values: Sequence[Value]) -> None:
        """Every value in its row."""
        for row, value in enumerate(values):
            source, wanted = self._home(value, spot.dtype), row_of(spot, row)
            if source.spot is not spot or source.offset != wanted.offset:
                self._operate("move", (spot.dtype,), wanted, source)

    # -- emission ---------------------------------------------------------------------------

    def require(self, values: tuple[Value, ...]) -> None:
        needed: set[Node] = set()
        stack = self._behind(values)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += self._behind(node.srcs)
        for node in sorted(needed, key=self.order.__getitem__):
            self._pure(node)

    def _pure(self, node: Node) -> None:
        self.instr = node.instr
        out = node.outs[0]
        if node.lanes and self._of_first_lane(node):
            return
        if out.uniform or (node.view and node.srcs[0] not in self.homes):
            self._single(node)  # of two names of lanes that are yet to come
            return
        types = tuple(DTYPE[value.type] for value in node.srcs)
        uniform = tuple(value.uniform for value in node.srcs)
        found = recipe(node.text, types, uniform, DTYPE[out.type])
        self.homes[out] = self._by_recipe(node, found) if found else self._by_numpy(node)

    def _of_first_lane(self, node: Node) -> bool:
        """A scalar that primitives compute faster for all lanes than numpy does for one."""
        out = node.outs[0]
        types = tuple(DTYPE[value.type] for value in node.srcs)
        found = recipe(node.lanes, types, (False,) * len(types), DTYPE[out.type])
        if found is None or out.type not in ("f32", "f64") or self.cells > _MANY_CELLS:
            return False
        before, self.borrows = self.borrows, True
        lane = self._lent(self._by_recipe(node, found), DTYPE[out.type])
        self.borrows = before
        out.expr = self._assign(f"item_f32({lane})" if out.type == "f32" else f"{lane}.item(0)")
        node.emitted = True
        return True

    def _by_recipe(self, node: Node, found: Recipe) -> Home:
        results: list[Home] = []

        def home_of(ref: Ref) -> Home:
            if ref.kind == "source":
                return self._home(node.srcs[ref.number], ref.dtype)
            return results[ref.number] if ref.kind == "step" else self._constant(*ref[1:3])

        for number, ((name, types), refs) in enumerate(found.steps):
            operands = [home_of(ref) for ref in refs]
            last = found.result.kind == "step" and found.result.number == number
            results.append(self._new(TABLE[name, types].result, node.outs[0] if last else None))
            self._operate(name, types, results[-1], *operands)
        return home_of(found.result)

    def _by_numpy(self, node: Node) -> Home:
        before, self.borrows = self.borrows, True
        named = [(j, v) for j, v in enumerate(node.srcs) if f"{{t{j}}}" in node.text]
        typed = {f"t{j}": self.typed(value) for j, value in named}
        text = node.text.format(*(self.expr(value) for value in node.srcs), **typed)
        self.borrows = before
        dtype = DTYPE[node.outs[0].type]
        return self._written(self._new(dtype, node.outs[0]), dtype, text)

    def _active(self) -> Home:
        """The active lanes."""
        if not self.partial:
            return self._constant(True, "BOOL")
        if self.mask is None:
            self.mask = self._written(self._new("BOOL"), "BOOL", "m")
        return self.mask

    # -- the end ----------------------------------------------------------------------------

    def condition(self, guard: Value) -> str:
        if guard.uniform:
            return self.expr(guard)
        cell = self._cell()
        self._operate("ballot", ("BOOL",), cell, self._home(guard, "BOOL"))
        return f"Q_cells[{self.cells - 1}]"

    def stored(self, stores: Sequence[Store], partial: int) -> list[tuple[Store, str]]:
        assert self.frame is not None
        offsets = self.frame.offsets
        rest = [(store, self.expr(store[2])) for store in stores if store[1] not in offsets]
        inside = [
            (DTYPE[value.type], Home(None, offsets[slot]), self._home(value, DTYPE[value.type]))
            for _, slot, value in stores
            if slot in offsets
        ]
        self._write_registers(inside, partial)
        self.flush()
        return rest

    def _write_registers(self, moves: list[tuple[str, Home, Home]], partial: int) -> None:
        """moves: type, register, source. Under a partial mask lanes that are not active stay."""
        written = {target.place for _, target, _ in moves}
        ready = []
        for dtype, target, source in moves:
            if source.spot is None and source.offset in written:  # read before it is overwritten
                if source.offset == target.offset:
                    continue
                copy = self._new(dtype)
                self._operate("move", (dtype,), copy, source)
                source = copy
            ready.append((dtype, target, source))
        mask = self._active() if partial == 2 and ready else None
        for dtype, target, source in ready:
            if mask is None:
                self._operate("move", (dtype,), target, source)
            else:
                types = ("BOOL", dtype, dtype)
                self._operate("choose", types, target, mask, source, target)

    def plan(self) -> Plan | None:
        """Everything has its place then."""
        if self.frame is None:
            return None
        self._allocate(self.frame)
        segments = [
            [(key, [home.place for home in homes]) for key, homes in segment]
            for segment in self.segments
        ]
        views = {name: (home.place, dtype, n) for name, (home, dtype, n) in self.views.items()}
        return self.frame.plan(segments, views)

    def _allocate(self, frame: Frame) -> None:
        """Places for all spots; those that no longer live leave theirs to others of their size."""
        free: dict[int, list[int]] = {}
        living: list[tuple[int, int, int]] = []  # last event, bytes, place
        top = 0
        for spot in sorted((s for s in self.spots if s.first >= 0), key=lambda spot: spot.first):
            while living and living[0][0] < spot.first:
                _, size, place = heapq.heappop(living)
                free.setdefault(size, []).append(place)
            size = row_bytes(spot.dtype) * max(spot.rows, 1)
            if free.get(size):
                spot.place = free[size].pop()
            else:
                spot.place, top = frame.room(top, size), top + size
            heapq.heappush(living, (spot.last, size, spot.place))


def row_of(spot: Spot, row: int) -> Home:
    return Home(spot, row * row_bytes(spot.dtype))


def _bits(value: Any, dtype: str) -> int:
    if dtype == "F32":
        return bits_of_float(float(value))
    if dtype == "F64":
        return bits_of_double(float(value))
    return int(value) & (1 << BITS[dtype]) - 1


# The steps of a block that primitives do, and what the others get of the values in the scratch.
#
# A load or store is the last operation of its segment, and its line has the step in Python, too,
# for when the primitive refuses. What lanes do together is no line at all, or one that takes its
# result.

# steps that keep no array of their operands, and so may see the scratch itself; those of the second
# line tell listeners of arrays, which may keep them
_BORROWERS = ("tmem_load", "tmem_store(", "load_vector(w, 'shared'", "store_vector(w, 'shared'")
_TELLERS = ("load_vector(", "store_vector(")
_VECTOR = re.compile(
    r"(load|store)_vector\(w, '(shared|global)', \{0\}, (\d+), (\d+|\{rows\}), <m>"
)
_TENSOR = re.compile(r"tmem_(load|store)\(w, \{0\}, \('32x32b', (\d+), False, 0\)")
_REDUCED = re.compile(r"reduce_lanes\(\{0\}, '(\w+)', \{1\}, <mb>, (True|False), (True|False),")
_KEYS = {operation.key for operation in OPERATIONS}
_ALL = 0xFFFFFFFF
_VOTES = {
    "ballot": "{0} & <mb>",
    "all": "{0} & <mb> == <mb>",
    "any": "{0} & <mb> != 0",
    "uni": "{0} & <mb> in (0, <mb>)",
}


@dataclass(eq=False)
class StepWriter(NativeWriter):
    """Writer for blocks with steps.

    tells: whether steps report their operands to listeners. Primitives then only access shared
        memory, and only if `Warp.told` returns that no listener needs the access.
    """

    tells: bool = False
    pending: list[Node] = field(default_factory=list)  # tcgen05.ld whose results come later

    def _wants_rows(self, node: Node) -> bool:
        return super()._wants_rows(node) or self._access_of(node) is not None

    def _access_of(self, node: Node) -> Access | TensorAccess | None:
        access = access_of(node)
        quiet = not self.tells or (isinstance(access, Access) and access.space == "shared")
        return access if quiet else None

    def _step(self, node: Node) -> None:
        access = self._access_of(node)
        if access:
            self._access(node, access)
        elif not (node.repeatable and self._together(node)):
            self._in_python(node)

    def _in_python(self, node: Node) -> None:
        borrowers = _BORROWERS if self.tells else _BORROWERS + _TELLERS
        self.step, self.borrows = node, node.text.startswith(borrowers)
        super()._step(node)
        self.step, self.borrows = None, False
        if node.matrix and node.outs[0].late is not None:
            self.pending.append(node)
        elif node.matrix:
            self._take_matrix(node)
        elif node.text.startswith("settle_"):
            self._settled(node)

    def _settled(self, node: Node) -> None:
        """A step that completes all tcgen05.ld of the block, or that behind its operand."""
        lates = {value.late for value in node.srcs}
        for load in [p for p in self.pending if not lates or p.outs[0].late in lates]:
            self.pending.remove(load)
            self._take_matrix(load)

    def _take_matrix(self, node: Node) -> None:
        """The results of a step that Python has as one array."""
        matrix, _ = self.home[node.outs[0]]
        dtype = DTYPE[node.outs[0].type]
        spot = self._spot(dtype, len(node.outs))
        self.line(f"{self._view(Home(spot), dtype, len(node.outs))}[...] = {matrix}")
        for row, out in enumerate(node.outs):
            del self.home[out]
            self.homes[out] = row_of(spot, row)

    # -- memory -----------------------------------------------------------------------------

    def _access(self, node: Node, access: Access | TensorAccess) -> None:
        """A load or store as the last operation of a segment, and its line of Python, for when that
        one refuses."""
        self.instr = node.instr
        if self.tells:
            self._name_site(node)
        dtype = DTYPE[node.srcs[0].type]
        address = self._in_scratch(self._home(node.srcs[0], dtype), dtype)
        others = (self._active(),) if isinstance(access, Access) else ()
        if isinstance(access, Access) and access.store:
            self.line("w.stored = True")
        if access.store:
            spot = self.matrices[node]
            self._stacked(spot, node.rows)
        else:
            spot = self._spot(access.dtype, access.count)
            self.homes |= {out: row_of(spot, row) for row, out in enumerate(node.outs)}
        told, number = "", -1
        if isinstance(access, Access) and self.tells:
            self.flush()
            what = f"{access.size * access.count}, {access.store}"
            told = f"not w.told(w, {self._view(address, dtype)}, <mb>, {what}) or "
            number, self.steps = self.steps, self.steps + 1
        self._operate(*access.key, Home(spot), address, *others)
        data = self._view(Home(spot), spot.dtype, access.count)
        text = node.text.format(self._view(address, dtype), rows=data)
        text = text if access.store else f"{data}[...] = {text}"
        self.line(f"if {told}{self._call()}: {text}", number)
        if told and not access.store:  # the second form may go on behind it
            self.line(f"s{number}_0 = {data}.copy()")

    # -- what lanes do together -------------------------------------------------------------

    def _together(self, node: Node) -> bool:
        """Whether primitives do it."""
        self.instr = node.instr
        how = {
            "shuffle_lanes": self._shuffle,
            "reduce_lanes": self._reduce,
            "vote_lanes": self._vote,
            "elect_lane": self._elect,
        }.get(node.text.partition("(")[0])
        done = how is not None and how(node)
        self.steps += done
        return done

    def _shuffle(self, node: Node) -> bool:
        out, valid = node.outs
        operands = [self._home(value, "U32") for value in node.srcs]
        self.homes[out], self.homes[valid] = self._new("U32", out), self._new("BOOL")
        key = Shuffle(node.text.split("'")[1]).key
        self._operate(*key, self.homes[out], *operands, self.homes[valid])
        return True

    def _reduce(self, node: Node) -> bool:
        (value, members), found = node.srcs, _REDUCED.match(node.text)
        assert found, "the text is that of ops.warp"
        dtype = DTYPE[value.type]
        reduction = Reduction(found[1], dtype, found[2] == "True", found[3] == "True")
        if value.uniform or not _everyone(members) or reduction.key not in _KEYS:
            return False
        cell, source = self._cell(), self._home(value, dtype)
        self._operate(*reduction.key, cell, source, self._active())
        code = {"F32": "d", "I32": "q", "U32": "Q"}[dtype]
        self._named(node, f"{code}_cells[{self.cells - 1}]")
        return True

    def _vote(self, node: Node) -> bool:
        predicate, members = node.srcs
        if predicate.uniform or not _everyone(members):
            return False
        cell, source = self._cell(), self._home(predicate, "BOOL")
        self._operate(*Ballot().key, cell, source)
        self._named(node, _VOTES[node.text.split("'")[1]].format(f"Q_cells[{self.cells - 1}]"))
        return True

    def _elect(self, node: Node) -> bool:
        (members,), (leader, elected) = node.srcs, node.outs
        if not _everyone(members):
            return False
        cell = self._cell()
        self.line(f"Q_cells[{self.cells - 1}] = {'<mb> & -<mb>' if self.partial else 1}")
        self.homes[elected] = self._new("BOOL")
        self._operate(*Lanes().key, self.homes[elected], cell)
        leader.expr = f"s{self.steps}_0"
        self.line(f"{leader.expr} = {'(<mb> & -<mb>).bit_length() - 1' if self.partial else 0}")
        return True

    def _named(self, node: Node, text: str) -> None:
        """The only result of a step, after the segment."""
        self.flush()
        node.outs[0].expr = f"s{self.steps}_0"
        self.line(f"{node.outs[0].expr} = {text}")


def _everyone(members: Value) -> bool:
    return members.const is not None and members.const & _ALL == _ALL


def access_of(node: Node) -> Access | TensorAccess | None:
    """Return the access of a step that a primitive executes; None if none does."""
    found = _VECTOR.match(node.text)
    if found:
        verb, space, size, count = found.groups()
        number = len(node.rows) if count == "{rows}" else int(count)
        return ACCESSES.get(Access(verb == "store", space, int(size), number).key)
    found = _TENSOR.match(node.text)
    return found and ACCESSES.get(TensorAccess(found[1] == "store", int(found[2])).key)
