"""The steps of a block that primitives do, and what the others get of the values in the scratch.

A load or store is the last operation of its segment, and its line has the step in Python, too, for
when the primitive refuses. What lanes do together is no line at all, or one that takes its result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ptxemu.codegen.native_writer import Home, NativeWriter, row_of
from ptxemu.codegen.values import DTYPE, Node, Value
from ptxemu.native.lanes import OPERATIONS, Ballot, Lanes, Reduction, Shuffle
from ptxemu.native.memory import ACCESSES, Access, TensorAccess

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
    """tells: steps tell listeners of their operands. Of memory only accesses of shared memory are a
    primitive's then, where `Warp.told` says that nobody else has to hear of them."""

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
    """What a primitive does of a step."""
    found = _VECTOR.match(node.text)
    if found:
        verb, space, size, count = found.groups()
        number = len(node.rows) if count == "{rows}" else int(count)
        return ACCESSES.get(Access(verb == "store", space, int(size), number).key)
    found = _TENSOR.match(node.text)
    return found and ACCESSES.get(TensorAccess(found[1] == "store", int(found[2])).key)
