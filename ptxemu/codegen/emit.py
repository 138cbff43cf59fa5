"""Nodes -> Python source of one basic block.

Machine steps keep their order. Elementwise nodes are delayed until something needs them, and then
equal operations of the same depth run as one numpy operation on a matrix [operation, lane]: a
softmax over 128 registers costs a few calls instead of hundreds. Operands that already are
consecutive rows of one matrix are taken as a slice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ptxemu.codegen.lower import Store
from ptxemu.codegen.values import DTYPE, Node, Value, literal
from ptxemu.native.frame import Plan

_MIN_GATHER = 4  # below this many rows, gathering operands costs more than it saves


@dataclass(eq=False)
class BlockWriter:
    """The lines of one function, as its nodes are emitted. A value gets a local name once it is
    used alone; until then a result of a group is identified by its matrix and row (`home`).
    """

    sites: dict[int, int]  # id of an instruction -> its number
    names_all: bool = False  # every step names its instruction, not only those with effects
    resumes: bool = False  # steps below `start` were done before; `saved` has their results
    site: int = -1
    steps: int = 0
    lines: list[str] = field(default_factory=list)
    instrs: list[Any] = field(default_factory=list[Any])  # the instruction behind each line
    step_of: list[int] = field(default_factory=list)  # the step of each line, -1 for none
    instr: object = None
    count: int = 0
    filed: dict[int, int] = field(default_factory=dict)  # registers in the warp's file
    home: dict[Value, tuple[str, int]] = field(default_factory=dict)  # value -> (matrix, row)
    by_depth: dict[tuple[Any, ...], list[Node]] = field(default_factory=lambda: defaultdict(list))
    depth: dict[Node, int] = field(default_factory=dict)

    # -- preparation ------------------------------------------------------------------------

    def load(self, nodes: list[Node]) -> None:
        """Sort the pure nodes by depth and operation, ready to be grouped."""
        for node in nodes:
            if node.pure:
                below = [self.depth.get(v.node, 0) for v in node.srcs if v.node is not None]
                self.depth[node] = 1 + max(below, default=0)
                if node.wide:
                    self.by_depth[self._key(node)].append(node)

    def _key(self, node: Node) -> tuple[Any, ...]:
        shape = tuple((value.type, value.uniform) for value in node.srcs)
        return self.depth[node], node.text, shape

    def run(self, nodes: list[Node]) -> None:
        """Emit every step, and what it needs before it."""
        for node in nodes:
            if not node.pure:
                self.require((*node.srcs, *node.rows))
                self._step(node)

    # -- expressions ------------------------------------------------------------------------

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def expr(self, value: Value) -> str:
        """A cheap expression for an available value."""
        if value.const is not None:
            return literal(value)
        if value in self.home and value.expr is None:
            matrix, row = self.home[value]
            value.expr = self._assign(f"{matrix}[{row}]")
        assert value.expr is not None, "the value is available"
        if value.expr.startswith("R["):
            slot = int(value.expr[2:-1])
            text = value.expr
            if slot in self.filed:
                text = f"get(w.file_bytes, {self.filed[slot]}, {DTYPE[value.type]})"
            value.expr = self._assign(text)
        return value.expr

    def typed(self, value: Value) -> str:
        """Return the expression of a value; a uniform value becomes a numpy scalar of its type."""
        text = self.expr(value)
        return f"{DTYPE[value.type]}({text})" if value.uniform else text

    def _assign(self, text: str) -> str:
        name = self.name()
        self.line(f"{name} = {text}")
        return name

    def line(self, text: str, step: int = -1) -> None:
        self.lines.append(text)
        self.instrs.append(self.instr)
        self.step_of.append(step)

    def _available(self, value: Value) -> bool:
        return value.const is not None or value.expr is not None or value in self.home

    # -- the end ----------------------------------------------------------------------------

    def condition(self, guard: Value) -> str:
        """The terminator's predicate: a bool, or the bits of the lanes where it holds."""
        return self.expr(guard) if guard.uniform else f"mask_bits({self.expr(guard)})"

    def stored(self, stores: Sequence[Store], partial: int) -> list[tuple[Store, str]]:
        """Live-out registers that lines of Python are to store, with their values, all read before
        the first is written."""
        return [(store, self.expr(store[2])) for store in stores]

    def plan(self) -> Plan | None:
        """Return what the source refers to in addition to the names that every block knows."""
        return None

    # -- emission ---------------------------------------------------------------------------

    def require(self, values: tuple[Value, ...]) -> None:
        """Emit the pure nodes that `values` need, shallow ones first, in groups."""
        needed: list[Node] = []
        seen: set[Node] = set()
        stack = self._behind(values)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            needed.append(node)
            stack += self._behind(node.srcs)
        needed.sort(key=self.depth.__getitem__)
        for node in needed:
            if not node.emitted:
                self._pure(node)

    def _behind(self, values: tuple[Value, ...]) -> list[Node]:
        """Return the producers of the values that are not available."""
        return [v.node for v in values if v.node is not None and not self._available(v)]

    def _pure(self, node: Node) -> None:
        self.instr = node.instr
        group = [node]
        if node.wide:
            group = [
                other
                for other in self.by_depth[self._key(node)]
                if not other.emitted and all(self._available(v) for v in other.srcs)
            ]
        if node.view:
            group = self._views(node, group)
        if len(group) > 1 and self._worth(group):
            self._group(group)
        else:
            self._single(node)

    def _views(self, node: Node, group: list[Node]) -> list[Node]:
        """The part of the group that is a slice of one matrix, so that nothing gets copied."""
        matrices = [self.home.get(other.srcs[0], ("", 0))[0] for other in (node, *group)]
        near = [o for o, matrix in zip(group, matrices[1:], strict=True) if matrix == matrices[0]]
        return near if self._slice([other.srcs[0] for other in near]) else [node]

    def _single(self, node: Node) -> None:
        operands = (
            {f"t{j}": self.typed(v) for j, v in enumerate(node.srcs)} if "{t" in node.text else {}
        )
        text = node.text.format(*(self.expr(v) for v in node.srcs), **operands)
        node.outs[0].expr = self._assign(text)
        node.emitted = True

    def _worth(self, group: list[Node]) -> bool:
        if len(group) >= _MIN_GATHER:
            return True
        return all(
            group[0].srcs[j].uniform or self._slice([n.srcs[j] for n in group])
            for j in range(len(group[0].srcs))
        )

    def _group(self, group: list[Node]) -> None:
        first = group[0]
        if all(_same([node.srcs[j] for node in group]) for j in range(len(first.srcs))):
            self._single(first)  # one operation, written several times
            for node in group[1:]:
                node.outs[0].expr, node.emitted = first.outs[0].expr, True
            return
        columns, typed = [], {}
        for j in range(len(group[0].srcs)):
            text, typed_text = self._column([node.srcs[j] for node in group])
            columns.append(text)
            typed[f"t{j}"] = typed_text
        matrix = self._assign(group[0].text.format(*columns, **typed))
        for row, node in enumerate(group):
            self.home[node.outs[0]] = (matrix, row)
            node.emitted = True

    def _column(self, values: list[Value]) -> tuple[str, str]:
        """Return one operand of a group: (expression, expression typed as numpy)."""
        first = values[0]
        same = _same(values)
        if same and (first.uniform or first.const is not None):
            return self.expr(first), self.typed(first)
        if first.uniform:
            items = ", ".join(self.expr(v) for v in values)
            text = f"np.array(({items},), {DTYPE[first.type]})[:, None]"
            return text, text
        if same:
            return self.expr(first), self.expr(first)
        text = self.stack(values)
        return text, text

    def stack(self, values: list[Value]) -> str:
        """The values as rows of one array: a slice where they already are, else gathered."""
        sliced = self._slice(values)
        if sliced:
            return sliced
        if all(not v.uniform for v in values):
            return f"np.array(({', '.join(self.expr(v) for v in values)},))"
        return f"stack(({', '.join(self.expr(v) for v in values)},), {DTYPE[values[0].type]})"

    def _slice(self, values: list[Value]) -> str:
        """`M[a:b:s]` if the values are evenly spaced rows of one matrix, else ''."""
        homes = [self.home[v] for v in values if v in self.home]
        if len(homes) < len(values) or any(h[0] != homes[0][0] for h in homes):
            return ""
        rows = [h[1] for h in homes]
        step = rows[1] - rows[0] if len(rows) > 1 else 1
        if step <= 0 or any(b - a != step for a, b in pairwise(rows)):
            return ""
        stride = "" if step == 1 else f":{step}"
        return f"{homes[0][0]}[{rows[0]}:{rows[-1] + 1}{stride}]"

    def _name_site(self, node: Node) -> None:
        """Tell the warp which instruction it is at, once for all steps of one."""
        if node.repeatable and not self.names_all:
            return
        site = self.sites.get(id(node.instr), -1)
        if site not in (-1, self.site):
            self.site = site
            self.line(f"w.at = {site}")

    def _step(self, node: Node) -> None:
        fields: dict[str, str] = {}
        if node.rows:
            fields["rows"] = self.stack(list(node.rows))
        self.instr = node.instr
        text = node.text.format(*(self.expr(v) for v in node.srcs), **fields)
        self._name_site(node)
        if node.flow:
            self.line(text)
            return
        number = self.steps
        self.steps += 1
        if not node.outs:
            self._once(f"if {text} is None: return PARKED" if node.parks else text, number)
            return
        names = [f"s{number}_{k}" for k in range(1 if node.matrix else len(node.outs))]
        if node.repeatable:
            self.line(f"{', '.join(names)} = {text}", number)
        else:
            self._once(f"{', '.join(names)} = {text}", number, names)
        if node.matrix:
            for row, out in enumerate(node.outs):
                self.home[out] = (names[0], row)
            return
        for name, out in zip(names, node.outs, strict=True):
            out.expr = name
        if node.parks:
            self.line(f"if {names[0]} is None: return PARKED")

    def _once(self, text: str, number: int, names: Sequence[str] = ()) -> None:
        """Emit a step and its results; in a form that resumes, only if the step is still to be
        done."""
        if not self.resumes:
            self.line(text, number)
            return
        if names:
            self.line(f"if start > {number}:")
            restored = ", ".join(f"saved[{name!r}]" for name in names)
            self.line(f"    {', '.join(names)} = {restored}")
            self.line("else:")
        else:
            self.line(f"if start <= {number}:")
        self.line(f"    {text}", number)


def _same(values: list[Value]) -> bool:
    """Whether all are one value, or constants of equal bits (0.0 and -0.0 differ)."""
    first = values[0]
    if first.const is None:
        return all(value is first for value in values)
    return all(v.const is not None and literal(v) == literal(first) for v in values)
