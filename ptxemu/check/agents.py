"""Agents that access memory: warps, and the asynchronous operations that they issue."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ptxemu.check import frame
from ptxemu.check.clocks import (
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    EXECUTED,
    FENCED,
    INITIALISED,
    ORDERED,
    ROWS,
    Components,
    Met,
    fresh,
    join,
)
from ptxemu.machine.state import Warp
from ptxemu.machine.tmem import PendingLoad
from ptxemu.native.shadow import (
    AFTER_READS,
    AFTER_WRITES,
    AGENT_WORDS,
    COPIED,
    COPIES_MET,
    KNOWN,
    MASKS,
    OWN,
    SYNCED,
)

_PROXY = {"shared": ASYNC_SHARED, "global": ASYNC_GLOBAL}
_POLLED = 8  # a poll repeats knowledge: compared with this many latest entries
STEP_BYTES = 4  # of a clock's elements
_TENSOR = ("tensor core", "tcgen05.ld", "tcgen05.st", "tcgen05.alloc")
_NEVER = 0, 0  # completed phases, lanes
_GENERIC = ("cp.async", "st.async")  # asynchronous operations that are not of the async proxy


@dataclass(eq=False, slots=True)
class OpenLoad:
    """A tcgen05.ld that is not known to be complete.

    Attributes:
        step: Number among the loads of its warp.
        site: Site of its instruction.
        signal: First signal after it.
        used: Whether a register was used before a wait.
    """

    step: int
    site: int
    signal: int | None = None
    used: bool = False


class GroupWait(NamedTuple):
    """A wait for groups of one kind, at `site`: how many operations of the kind its warp had issued
    then, and up to which the wait was for."""

    site: int
    issued: int
    covered: int


class WarpClock:
    """Vector clock of a warp: what is ordered before its next access.

    Attributes:
        own: Component of the warp.
        now: Current step there. A step ends where others may learn of what came before.
        synced: Step in which its lanes last synchronised.
        streams: Components of its asynchronous operations by kind, with the number issued.
    """

    asynchronous = False
    in_order = 0, 0  # it is of no stream of operations

    def __init__(self, components: Components, warp: Warp) -> None:
        self.components = components
        self.warp = warp
        self.agent = warp.label
        self.cta = warp.cta
        self.own = components.add("warp", self.agent, asynchronous=False)
        self.rows = fresh(components)
        self._kept: Knowledge | None = None  # a copy of what it knows, until that changes
        self._placed: np.ndarray | None = None  # the rows whose address is among `_words`
        self._words, self._at = _words(self)
        self._stale = True  # `_words` lack the latest `synced`, `copied` or `copies_met`
        self.now = 0
        self.streams: dict[str, int] = {}
        self.issued: dict[str, int] = {}
        self.issued_at: dict[str, int] = {}  # the site of the latest
        self.begun: dict[str, list[int]] = {}  # in which step each was issued
        self.groups: dict[str, list[int]] = {}
        # What it has executed, to explain a race: by kind the latest wait for groups; by component
        # of an mbarrier the latest wait, (site, parity, phases known then), and a wait whose result
        # it does not use; by step the site of each signal.
        self.group_waits: dict[str, GroupWait] = {}
        self.phase_waits: dict[int, tuple[int, int, int]] = {}
        self.unheeded: dict[int, int] = {}
        # By component of an mbarrier: completed phases at the latest successful wait, its lanes. Of
        # the first wait that was not for the next phase: (component, site, phases before, now).
        self.looked: dict[int, tuple[int, int]] = {}
        self.slipped: tuple[int, int, int, int] | None = None
        self.signals: dict[int, int] = {}
        self.waited: set[int] = set()  # mbarriers that it has used,
        self.signalled: set[int] = set()  # and those that its asynchronous operations have
        self.commits: set[int] = set()  # those steps of its tensor core that commit to a peer
        self.tensor_at: int | None = None  # for notes by the manual: a tcgen05 operation, a wait
        self.woken_at: int | None = None
        # Lanes that have accessed, and written, memory since they met others or arrived.
        self.touched = self.stored = 0
        self.open_loads: dict[PendingLoad, OpenLoad] = {}  # tcgen05.ld not known to be complete
        # tcgen05.ld whose columns are lost, by step: reported if a register is used all the same
        self.given_up: list[tuple[int, Callable[[], None]]] = []
        self.heard: np.ndarray | None = None  # by relaxed waits, since the last fence
        self.heard_foreign: dict[int, np.ndarray] = {}
        self.fenced_near: np.ndarray | None = None  # as row FENCED, by a fence of any scope
        self.advance()
        self.synced = self.now
        self.met: Met | None = None  # where some of its lanes have met since then
        # cp.async: its component, and the step up to which every lane knows of those of the others
        self.copied = self.copies_met = 0

    def seen(self, write: bool, space: str) -> np.ndarray:
        return self.rows[ORDERED]

    def at(self, space: str) -> int:
        """Address of the words that describe the warp to the routines of `native.shadow`."""
        words = self._words
        if self._placed is not self.rows:
            self._placed, known = self.rows, self.rows.shape[1]
            ordered = frame.address_of(self.rows) + ORDERED * known * STEP_BYTES
            words[AFTER_WRITES], words[AFTER_READS], words[KNOWN] = ordered, ordered, known
        if self._stale:
            words[SYNCED], words[COPIED] = self.synced, self.copied
            words[COPIES_MET] = self.copies_met
            self._stale = False
        return self._at

    def knowledge(self) -> Knowledge:
        """Snapshot of the warp's clock."""
        if self._kept is None:
            self._kept = Knowledge(self)
        return self._kept

    def advance(self) -> None:
        """A new step."""
        self._kept = None
        self.now += 1
        if self.rows.shape[1] <= self.own:
            self.rows = join(self.rows, fresh(self.components))
        self.rows[EXECUTED, self.own] = self.rows[ORDERED, self.own] = self.now

    def together(self) -> None:
        """Record that the lanes of the warp synchronised, with memory ordered between them."""
        self.advance()
        self.synced, self.met, self._stale = self.now, None, True
        self.touched = self.stored = 0
        self._share_copies(self.rows)

    def together_some(self, members: int) -> None:
        """Synchronise some of the lanes, as `together` does for all."""
        self.advance()
        self.met = Met.behind(self.met, self.synced, members, self.now)
        self.touched &= ~members
        self.stored &= ~members
        self._share_copies(self.rows)

    def _share_copies(self, told: np.ndarray) -> None:
        """Share the lanes' knowledge of complete cp.async operations.

        A wait_group informs a thread only of its own copies ("cp.async.wait_group").
        """
        if 0 < self.copied < told.shape[1]:
            self.copies_met = max(self.copies_met, int(told[ORDERED, self.copied]))
            self._stale = True

    def learn(self, other: np.ndarray, *, whole: bool = False, relaxed: bool = False) -> None:
        """Merge the knowledge that a wait gains.

        Args:
            whole: All lanes wait, and learn of one another what the warp had released before.
            relaxed: The wait orders memory only at the next fence.
        """
        self._kept = None
        if relaxed:
            self.heard = other.copy() if self.heard is None else join(self.heard, other)
            other = np.zeros_like(other)
            other[EXECUTED] = self.heard[EXECUTED]
        self.rows = join(self.rows, other)
        if whole:
            told = other.item(ORDERED, self.own) if self.own < other.shape[1] else 0
            self.synced, self._stale = max(self.synced, told + 1), True
            if self.copied:
                self._share_copies(other)

    def learn_foreign(self, cluster: int, rows: np.ndarray, *, relaxed: bool) -> None:
        """Merge knowledge about another cluster, gained through global memory.

        An agent in this cluster that learns of the current step learns this as well.
        """
        if relaxed:
            have = self.heard_foreign.get(cluster)
            self.heard_foreign[cluster] = rows if have is None else join(have.copy(), rows)
            return
        known = self.components.foreign.setdefault(cluster, [])
        if not any(by == self.own and told is rows for by, _, told in known[-_POLLED:]):
            known.append((self.own, self.now, rows))

    def unfenced(self, cluster: int) -> dict[int, np.ndarray]:
        """Return what relaxed waits and accesses have told since the last fence, by cluster;
        cluster: the warp's own."""
        own = {} if self.heard is None else {cluster: self.heard.copy()}
        return self.heard_foreign | own

    def release(
        self, *, relaxed: bool = False, near: bool = False, fences: bool = False
    ) -> np.ndarray:
        """Return the clock that an arrival publishes; `near`: the arrival is on its own CTA.

        fences: also publish what a later relaxed arrival of others may release in its place.
        """
        told = self.rows.copy()
        if relaxed:
            known = self.components.executed[: told.shape[1]]
            fenced = told[FENCED]
            if near and self.fenced_near is not None:
                fenced[: len(self.fenced_near)] = self.fenced_near
            told[ORDERED] = np.where(known, told[ORDERED], fenced)
            for row in (ASYNC_SHARED, ASYNC_GLOBAL):
                np.minimum(told[row], fenced, out=told[row])
        if not fences:
            told[FENCED] = 0
        self.signals[self.now] = self.warp.at
        self.advance()
        return told

    def fence(self, *, near: bool = False) -> None:
        """Execute fence.acq_rel or stronger: later relaxed arrivals release what came before.

        near: the fence is of scope .cta and covers only arrivals at the CTA's own barriers.
        """
        if self.heard is not None:
            self.learn(self.heard)
            self.heard = None
        for cluster, rows in self.heard_foreign.items():
            self.learn_foreign(cluster, rows, relaxed=False)
        self.heard_foreign = {}
        self.fenced_near = self.rows[ORDERED].copy()
        if not near:
            self.rows[FENCED] = self.fenced_near
        self.advance()

    def fence_tensor(self) -> None:
        """Execute tcgen05.fence::after_thread_sync.

        tcgen05 operations are then ordered after what a relaxed wait has learned. CUTLASS's
        cute_ext/blackwell/dense_gemm_2sm.py waits for its accumulators in this way.
        """
        if self.heard is None:
            return
        self._kept = None
        kinds = [each.kind in _TENSOR for each in self.components.known]
        heard = np.zeros_like(self.heard)
        of_tensor = np.flatnonzero(kinds[: heard.shape[1]])
        heard[ORDERED, of_tensor] = self.heard[ORDERED, of_tensor]
        self.rows = join(self.rows, heard)

    def fence_proxy(self, spaces: tuple[str, ...]) -> None:
        for space in spaces:
            row = self.rows[_PROXY[space]]
            np.maximum(row, self.rows[ORDERED], out=row)
        self.advance()

    def fence_init(self) -> None:
        """fence.mbarrier_init: of the inits that it executed itself."""
        self.rows[INITIALISED, self.own] = self.now
        self.advance()

    # -- streams of asynchronous operations ---------------------------------------------------

    def stream(self, kind: str) -> int:
        """The component of the operations of `kind`, made on first use."""
        if kind not in self.streams:
            self.streams[kind] = self.components.add(kind, self.agent, owner=self)
            self.issued[kind] = 0
            self.begun[kind] = []
            self.groups[kind] = []
            if kind == "cp.async":
                self._kept = None
                self.copied, self._stale = self.streams[kind], True
        return self.streams[kind]

    def issue(self, kind: str) -> tuple[int, int]:
        """(component, step) of one more operation."""
        component = self.streams.get(kind) or self.stream(kind)
        self.issued[kind] = step = self.issued[kind] + 1
        self.issued_at[kind] = self.warp.at
        self.begun[kind].append(self.now)
        return component, step

    def commit(self, *kinds: str) -> None:
        """A group ends."""
        for kind in kinds:
            self.stream(kind)
            self.groups[kind].append(self.issued[kind])

    def wait_groups(self, kind: str, allowed: int) -> None:
        """Complete all groups but the newest `allowed`."""
        groups = self.groups.get(kind, [])
        done = len(groups) - allowed
        covered = groups[done - 1] if done > 0 else 0
        self.group_waits[kind] = GroupWait(self.warp.at, self.issued.get(kind, 0), covered)
        if done > 0:
            self.complete(kind, covered)

    def complete(self, kind: str, step: int | None = None) -> None:
        """Record that operations up to `step` (None: all) have completed and the warp knows it."""
        component = self.streams.get(kind)
        if component is None:
            return
        step = self.issued[kind] if step is None else step
        self.know(component, step)
        if kind == "tcgen05.ld":
            self.load_matters(step)

    def load_matters(self, step: int) -> None:
        """Report abandoned tcgen05.ld up to `step`, since their registers are used."""
        used = [report for load, report in self.given_up if load <= step]
        self.given_up = [each for each in self.given_up if each[0] > step]
        for report in used:
            report()

    def looks(self, component: int, phases: int) -> None:
        """Record a successful wait for an mbarrier of which so many phases are complete."""
        mask = self.warp.frag.mask
        before, lanes = self.looked.get(component, _NEVER)
        if phases == before + 1 and self.slipped is None:  # nearly always
            self.looked[component] = phases, mask
            return
        again = phases == before and lanes & mask
        self.looked[component] = phases, (lanes | mask if phases == before else mask)
        if self.slipped is None and (again or phases > before + 1):
            self.slipped = component, self.warp.at, before, phases

    def knows(self, component: int, step: int) -> bool:
        """Whether step `step` of `component` has been waited for."""
        return component < self.rows.shape[1] and self.rows[EXECUTED, component] >= step

    def know(self, component: int, step: int) -> None:
        """Everything of `component` up to `step` has happened."""
        self._kept = None
        if component >= self.rows.shape[1]:
            self.rows = join(self.rows, fresh(self.components))
        rows = self.rows
        for row in (EXECUTED, ORDERED):
            if rows.item(row, component) < step:
                rows[row, component] = step


class Knowledge:
    """Snapshot of a warp's clock.

    It is never changed, so all operations that the warp issues before it learns more share it.
    """

    __slots__ = (
        *("rows", "synced", "met", "copied", "copies_met", "_of", "_asynchronous", "_address"),
        *("_told", "_seen", "_words", "tables"),
    )

    def __init__(self, of: WarpClock) -> None:
        self.rows = of.rows.copy()
        self.synced = of.synced
        self.met = of.met
        self.copied, self.copies_met = of.copied, of.copies_met
        self._of = of
        self._asynchronous = of.components.asynchronous
        self._address = frame.address_of(self.rows)
        self._told: np.ndarray | None = None
        self._seen: dict[str, np.ndarray] = {}
        self._words: list[array[int]] = []
        self.tables: dict[str, int] = {}  # results of `at`

    def fenced(self, space: str) -> np.ndarray:
        """Return what the async proxy sees of `space`."""
        row = _PROXY.get(space)
        if row is None:
            return self.rows[ORDERED]
        if space not in self._seen:
            asynchronous = self._asynchronous[: self.rows.shape[1]]
            self._seen[space] = np.where(asynchronous, self.rows[ORDERED], self.rows[row])
        return self._seen[space]

    def told(self) -> np.ndarray:
        """Return what the completion of an operation publishes, see `PhaseClock.arrive_with`."""
        if self._told is None:
            self._told = np.zeros_like(self.rows)
            for row in (EXECUTED, ORDERED, ASYNC_SHARED, INITIALISED):
                self._told[row] = self.rows[row]
        return self._told

    def at(self, space: str) -> int:
        """Address of words as `WarpClock.at`, for the async proxy; for the generic proxy if ""."""
        found = self.tables.get(space)
        if found is None:
            known = self.rows.shape[1]
            ordered = self._address + ORDERED * known * STEP_BYTES
            fenced = frame.address_of(self.fenced(space)) if space in _PROXY else ordered
            words, found = _words(self._of)
            words[AFTER_WRITES], words[AFTER_READS], words[KNOWN] = fenced, ordered, known
            words[SYNCED], words[COPIED] = self.synced, self.copied
            words[COPIES_MET] = self.copies_met
            self.tables[space] = found
            self._words.append(words)
        return found


def _words(clock: WarpClock) -> tuple[array[int], int]:
    """Words of an agent for the routines of `native.shadow`, and their address; the first ones are
    to be filled in."""
    table, at = frame.words(*[0] * AGENT_WORDS)
    table[OWN], table[MASKS] = clock.own, clock.components.lane_sets.address
    return table, at


class Ticket:
    """An asynchronous operation, with what its warp knew when it was issued.

    If `asynchronous`, it runs in the async proxy: it is ordered only after those ordinary accesses
    that a proxy fence made visible. On an in-order unit, it is also ordered after earlier
    operations of its `stream`. `in_order` is the component of the stream, and the step up to which
    it is ordered.
    """

    __slots__ = (
        "known", "own", "lane", "site", "component", "step", "in_order", "_rows", "agent",
        "asynchronous", "undefined", "released",
    )  # fmt: skip

    def __init__(self, by: WarpClock, lane: int, site: int, kind: str = "") -> None:
        self.known = by.knowledge()
        self.own = by.own
        self.lane = lane
        self.site = site
        self.agent = by
        self.asynchronous = kind not in _GENERIC
        self.component, self.step = by.issue(kind) if kind else (0, 0)
        # Of cp.async the manual orders none by itself.
        ordered = kind and kind != "cp.async"
        self.in_order = (self.component, self.step - 1) if ordered else (0, 0)
        self.undefined = 0  # the code of the data that it takes along, see `taint_memory`
        # What its warp released with it (cp.async.mbarrier.arrive).
        self.released: np.ndarray | None = None
        self._rows: np.ndarray | None = None

    @property
    def components(self) -> Components:
        return self.agent.components

    @property
    def synced(self) -> int:
        return self.known.synced

    @property
    def met(self) -> Met | None:
        return self.known.met

    @property
    def copied(self) -> int:
        return self.known.copied

    @property
    def copies_met(self) -> int:
        return self.known.copies_met

    @property
    def position(self) -> tuple[int, int]:
        """Component and step of the operation."""
        return self.component, self.step

    @property
    def rows(self) -> np.ndarray:
        """A clock: what its warp knew, and the earlier operations of its stream."""
        component, step = self.in_order
        if not step:
            return self.known.rows
        if self._rows is None:
            self._rows = self.known.rows.copy()
            if component >= self._rows.shape[1]:
                self._rows = join(self._rows, fresh(self.components))
            self._rows[ORDERED, component] = step
        return self._rows

    def seen(self, write: bool, space: str) -> np.ndarray:
        if not (write and self.asynchronous):
            return self.rows[ORDERED]
        seen, (component, step) = self.known.fenced(space), self.in_order
        if step:
            more = max(component + 1 - len(seen), 0)
            seen = np.concatenate([seen, np.zeros(more, np.int32)])
            seen[component] = step
        return seen

    def at(self, space: str) -> int:
        """Address of words as `WarpClock.at`, except for the operation's own stream."""
        proxy = space if self.asynchronous else ""
        return self.known.tables.get(proxy) or self.known.at(proxy)


# Whoever accesses memory: up to which step of each component it is ordered after writes and reads
# (`seen`). Accesses of its own warp by another lane are ordered only below step `synced`.
Agent = WarpClock | Ticket


def foreign_seen(by: Agent, cluster: int, write: bool) -> np.ndarray:
    """Return what `by` is ordered after in another cluster, in the format of `seen`.

    `by` is ordered after what an agent of its cluster learned in a step known to `by`.
    """
    seen = np.zeros(1, np.int32)
    for component, step, told in by.components.foreign.get(cluster, ()):
        known = by.rows[:, component] if component < by.rows.shape[1] else np.zeros(ROWS, np.int32)
        if known[ORDERED] < step:
            continue
        fenced = not (write and by.asynchronous) or known[ASYNC_GLOBAL] >= step
        row = told[ORDERED if fenced else ASYNC_GLOBAL]
        wide, slim = (row, seen) if len(row) > len(seen) else (seen, row)
        seen = wide.copy()
        np.maximum(seen[: len(slim)], slim, out=seen[: len(slim)])
    return seen


def foreign_told(by: WarpClock) -> dict[int, np.ndarray]:
    """Return what a release passes on about other clusters."""
    told: dict[int, np.ndarray] = {}
    for cluster, entries in by.components.foreign.items():
        for component, step, rows in entries:
            if component < by.rows.shape[1] and by.rows[ORDERED, component] >= step:
                rows = rows.copy()
                if by.rows[ASYNC_GLOBAL, component] >= step:
                    rows[ASYNC_GLOBAL] = rows[ORDERED]
                told[cluster] = join(told[cluster], rows) if cluster in told else rows
    return told
