"""Second form of a block, for warps of a checked launch whose registers hold undefined data.

It computes the same results, and reports to the warp's follower what each instruction does to such
data. A block starts in this form if a register that it reads is undefined. If the ordinary form
reads the first undefined data in the middle, it is stopped there. The second form then goes on with
the results of the steps so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ptxemu.codegen.blocks import BRANCHES, EXITS, Block, Step
from ptxemu.codegen.flow import MEMORY, Flow, UndefinedRead, flow_of, names, values_of
from ptxemu.codegen.lower import Lower
from ptxemu.codegen.values import Node, Value
from ptxemu.syntax.tree import Instr

ALL = 0xFFFFFFFF
PARKED = -1


class Program(Protocol):
    """Interface of `ptxemu.codegen.program.Program` that this module needs; Program makes its
    functions."""

    blocks: list[Block]
    defs: Any
    steps: Any

    def tainted(self, key: tuple[Any, ...]) -> Callable[..., Any]: ...


class Follower(Protocol):
    """Tracker of the undefined data in the registers of one warp.

    masks: see `check.taint`; mostly empty.
    following: whether the running block is of the second form.

    `mb` is the mask of active lanes in each method.
    """

    masks: dict[str, int]
    following: bool

    def flow(self, sites: tuple[int, ...], mb: int, *values: object) -> None:
        """Instructions on registers alone; values: what the rule of the only one needs."""

    def flow_in(self, site: int, mb: int) -> None:
        """An instruction that reaches memory or other agents is about to run."""

    def flow_out(self, site: int, mb: int) -> None:
        """Called when this instruction has run."""

    def flow_guard(self, site: int, name: str, mb: int) -> None:
        """A block ends with a branch, or with the decision whether `site` is executed."""

    def keep(self, names: frozenset[str], mb: int) -> None:
        """No other register will be read again."""


@dataclass(eq=False)
class Narrator:
    """Adds calls of the follower to the nodes of a block, instruction by instruction."""

    lower: Lower
    site_of: dict[int, int]
    flows: dict[int, Flow]
    waiting: list[int] = field(default_factory=list)  # register instructions still to be told of

    def tell(self, step: Step) -> None:
        """Emit an instruction. The values that its rule needs are read before it changes them."""
        lower, site = self.lower, self.site_of[id(step.instr)]
        values = [lower.src(*value) for value in values_of(step.instr)]
        start = len(lower.nodes)
        before, lower.defs = lower.defs, set()
        try:
            step.emit(lower)
        finally:
            written, lower.defs = lower.defs, before | lower.defs
        if site not in self.flows:
            self.flows[site] = flow_of(site, step.instr, written, lower.registers.wide)
        flow = self.flows[site]
        if flow.kind in MEMORY:
            lower.nodes[start:start] = [*self._told(), self._node(f"flow_in({site}, <mb>)")]
            lower.nodes.append(self._node(f"flow_out({site}, <mb>)"))
        elif values or flow.watched:
            fields = ", ".join(f"{{{k}}}" for k in range(len(values)))
            node = self._node(f"flow(({site},), <mb>, {fields})", *values)
            lower.nodes[start:start] = [*self._told(), node]
        elif flow.targets:
            self.waiting.append(site)

    def finish(self, following: Block) -> None:
        """The end of the block; `following`: the block after it in the text."""
        guard = self.lower.block.guard
        self.lower.nodes += self._told()
        if guard is not None:
            site = self.site_of[id(_guarded(self.lower.block, following))]
            self.lower.nodes.append(self._node(f"flow_guard({site}, {names(guard)[0]!r}, <mb>)"))

    def _told(self) -> list[Node]:
        sites, self.waiting = tuple(self.waiting), []
        return [self._node(f"flow({sites}, <mb>)")] if sites else []

    def _node(self, text: str, *values: Value) -> Node:
        return Node(f"w.follower.{text}", values, (), instr=self.lower.instr, flow=True)


def _guarded(block: Block, following: Block) -> Instr:
    """The branch at the end of a block, or the instruction that runs only if it is not taken."""
    last = block.steps[-1].instr if block.steps else None
    return last if last and last.root in BRANCHES + EXITS else following.steps[0].instr


def switching(
    program: Program, key: tuple[Any, ...], ordinary: Callable[..., Any]
) -> Callable[..., Any]:
    """A block's function that runs the form which the state of the warp asks for."""
    block = program.blocks[key[0]]
    live_in = frozenset(block.live_in)
    live_out = frozenset(block.live_out)
    passing = live_out - program.defs[block.index]  # registers that it leaves as they are

    def follow(stop: UndefinedRead | None, w: Any, R: list[Any], *lanes: Any) -> int:
        """Execute the second form, from where the ordinary one was stopped."""
        saved, start = (None, 0) if stop is None else _stopped(program, stop)
        follower: Follower = w.follower
        follower.following = True
        try:
            after: int = program.tainted(key)(w, R, *lanes, saved, start)
        finally:
            follower.following = False
        if after != PARKED:
            follower.keep(live_out, lanes[1] if lanes else ALL)
        return after

    # Most blocks come this way, so that no argument is packed, and nothing is done twice.

    def whole(w: Any, R: list[Any]) -> int:
        masks = w.follower.masks
        if masks and not live_in.isdisjoint(masks):
            return follow(None, w, R)
        try:
            after: int = ordinary(w, R)
        except UndefinedRead as stop:
            return follow(stop, w, R)
        if masks and after != PARKED:
            w.follower.keep(passing, ALL)
        return after

    def part(w: Any, R: list[Any], lanes: Any, mb: int) -> int:
        masks = w.follower.masks
        if masks and not live_in.isdisjoint(masks):
            return follow(None, w, R, lanes, mb)
        try:
            after: int = ordinary(w, R, lanes, mb)
        except UndefinedRead as stop:
            return follow(stop, w, R, lanes, mb)
        if masks and after != PARKED:
            w.follower.keep(passing, mb)
        return after

    return part if key[1] else whole


def _stopped(program: Program, stop: UndefinedRead) -> tuple[dict[str, Any], int]:
    """Return (local names, number of the step that was not done) of the stopped function."""
    raised = stop.__traceback__
    traceback = raised and raised.tb_next
    assert traceback is not None, "generated code was running"
    code = traceback.tb_frame.f_code
    return dict(traceback.tb_frame.f_locals), program.steps[code.co_filename][
        traceback.tb_lineno - 2
    ]
