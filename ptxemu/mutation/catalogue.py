"""All classes of mutation: the change, and the changed instructions. Sections are of the PTX
ISA."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ptxemu.mutation import equivalence as same
from ptxemu.mutation.equivalence import NEVER, Equivalence
from ptxemu.mutation.operators import (
    Change,
    Operator,
    always_true,
    astray,
    count,
    flipped,
    halve,
    immediate,
    masked,
    nothing,
    other_barrier,
    other_space,
    own_vote,
    relaxed,
    relaxed_wait,
    remove,
    repeat,
    replaced,
    swapped,
    unless,
    word_replaced,
)
from ptxemu.mutation.text import Statement, Text, used, written
from ptxemu.syntax.tree import Instr, Sym


@dataclass(frozen=True)
class MutationClass:
    """A kind of mutation.

    Attributes:
        does: Change of the instructions.
        section: Section of the manual that describes these instructions.
        same: Condition and reason for a mutant to be equivalent to its kernel.
    """

    name: str
    does: str
    section: str
    operator: Operator
    same: Equivalence = NEVER


@dataclass(frozen=True)
class Mutant:
    """A changed place. `name` stays the same as long as the PTX does."""

    kind: MutationClass
    text: Text
    change: Change

    @property
    def name(self) -> str:
        return f"{self.kind.name} @{self.instr.line}"

    @property
    def instr(self) -> Instr:
        return self.change.instr

    @property
    def instruction(self) -> str:
        """Text of the instruction in the kernel."""
        return " ".join(self.instr.text.split())

    @property
    def ptx(self) -> str:
        return self.text.changed(self.change.lines)

    @property
    def equivalent(self) -> str:
        """Reason why the mutant is equivalent to the kernel; '' if it is not."""
        return self.kind.same.reason if self.kind.same.rule(self.text, self.change) else ""

    @property
    def executed(self) -> bool:
        """Whether the kernel reaches the instruction, as far as a run has shown."""
        lines = self.text.observed.executed
        return lines is None or self.instr.line in lines


def mutants(text: Text, kinds: Iterable[MutationClass]) -> list[Mutant]:
    """Return all mutants of a module, class by class, in the order of the text."""
    return [Mutant(kind, text, change) for kind in kinds for change in kind.operator(text)]


T = TypeVar("T")


def sampled(found: Sequence[T], count: int, seed: int) -> list[T]:
    """Draw `count` items, kept in order and reproducible by `seed`."""
    numbers = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[number] for number in sorted(numbers)]


def late(earlier: str, release: str, *, early: bool = False) -> Operator:
    """Move the last `earlier` instruction before each `release` to a place after it.

    There must be no other release in between. early: the release moves up instead, if the
    instruction has registers of its scope.
    """

    def changes(text: Text) -> Iterator[Change]:
        candidates = [text.places[i.line] for i in text.find(earlier)]
        last_release = -1
        for instr in text.find(release):
            end = text.places[instr.line]
            start = max((place for place in candidates if last_release < place < end), default=None)
            last_release = end
            if start is not None and can_sink(text, start, end):
                moved = text.body[start]
                both = f"{text.statement(instr)} {text.statement(moved)}"
                first, last = (both, "") if early else ("", both)
                yield Change(instr, {moved.line: first, instr.line: last})

    return changes


def late_wait(wait: str, accesses: str) -> Operator:
    """Move a wait after the first access that follows it, unless another wait is between them.

    The wait in its former place succeeds at once.
    """

    def changes(text: Text) -> Iterator[Change]:
        waits = [text.places[i.line] for i in text.find(wait)]
        candidates = [text.places[i.line] for i in text.find(accesses)]
        for place in waits:
            access = min((k for k in candidates if k > place), default=None)
            if access is None or any(place < k < access for k in waits):
                continue
            instr, moved_behind = text.body[place], text.body[access]
            test = text.statement(instr)
            between = [i for i in text.body[place + 1 : access] if isinstance(i, Instr)]
            if any(written(i) & used(instr) for i in between):
                continue
            again = test.with_operand(0, "late")
            loop = f"{{ .reg .pred late; WAIT: {again} @late bra.uni GO; bra.uni WAIT; GO: }}"
            at_once = Statement(test.guard, "setp.eq.u32", (test.operands[0], "0", "0"))
            lines = {
                instr.line: str(at_once),
                moved_behind.line: f"{text.statement(moved_behind)} {loop}",
            }
            yield Change(instr, lines)

    return changes


def can_sink(text: Text, start: int, end: int) -> bool:
    """Whether the instruction at `start` can be executed after the one at `end`.

    The same lanes must reach both equally often. The registers and memory that it reads and writes
    must be unchanged between them.
    """
    moved = text.body[start]
    first, last = _region(text, start), _region(text, end)
    if (first is None) != (last is None):
        return False
    begin, stop = start, end
    if first and last and first != last:  # two regions of the elected lane
        if not (_elected(text, first[0]) and _elected(text, last[0])):
            return False
        begin, stop = first[0], last[1]
    if not _balanced(text, begin, stop):
        return False
    between = [i for i in text.body[start + 1 : end + 1] if isinstance(i, Instr)]
    reads, writes = used(moved), written(moved)
    return not any(written(i) & (reads | writes) or used(i) & writes for i in between)


def _region(text: Text, place: int) -> tuple[int, int] | None:
    """(branch, label) of the innermost forward branch that can skip `place`."""
    found = None
    for k, item in enumerate(text.body[:place]):
        target = text.target(item) if isinstance(item, Instr) else None
        if target is not None and item.guard is not None and k < place < target:
            if found is None or target <= found[1]:
                found = (k, target)
    return found


def _elected(text: Text, branch: int) -> bool:
    """The branch is taken by all lanes but the one that `elect.sync` chose."""
    before = text.body[max(branch - 2, 0) : branch]
    return [i.root for i in before if isinstance(i, Instr)] == ["elect", "not"]


def _balanced(text: Text, begin: int, stop: int) -> bool:
    """Whether no branch leads into the stretch from `begin` to `stop`, out of it, or backwards."""
    inside = range(begin, stop + 1)
    labels = {item for item in text.body[begin : stop + 1] if isinstance(item, str)}
    for k, item in enumerate(text.body):
        if not isinstance(item, Instr) or item.root not in ("bra", "ret", "exit"):
            continue
        if k in inside:
            target = text.target(item)
            wait_loop = target is not None and "LAB_WAIT" in item.operands[0].name
            if target is None or target not in inside or (target < k and not wait_loop):
                return False
        elif item.root == "bra" and isinstance(item.operands[0], Sym):
            if item.operands[0].name in labels and text.target(item) != stop:
                return False
    return True


WAIT = r"mbarrier\.(?:try|test)_wait"
ARRIVE = r"mbarrier\.arrive(?:_drop)?(?!\.expect_tx)"
EXPECT = r"mbarrier\.arrive\.expect_tx"
INIT = r"mbarrier\.init"
BAR = r"(?:bar|barrier)(?:\.cta)?\.sync"
BAR_RED = r"(?:bar|barrier)(?:\.cta)?\.red"
MEETING = rf"{BAR}|{BAR_RED}"
BAR_ARRIVE = r"(?:bar|barrier)(?:\.cta)?\.arrive"
CLUSTER_ARRIVE = r"barrier\.cluster\.arrive"
PROXY_FENCE = r"fence\.proxy\.async"
MAP_FENCE = r"fence\.proxy\.tensormap(?:::generic)?"
INIT_FENCE = r"fence\.mbarrier_init"
FENCE = r"fence\.(?:acq_rel|sc|acquire|release)"
COMMIT = r"tcgen05\.commit"
WAIT_LOADS, WAIT_STORES = r"tcgen05\.wait::ld", r"tcgen05\.wait::st"
TMA_LOAD = r"cp\.async\.bulk\.tensor\.\dd\.shared::c\w+\.global"
BULK_LOAD = r"cp\.async\.bulk\.shared::c\w+\.global"
BULK_STORE = r"cp\.(?:reduce\.)?async\.bulk(?:\.tensor\.\dd)?\.global"
STORE_ASYNC = r"(?:st|red)\.async"
BULK_COMMIT = r"cp\.async\.bulk\.commit_group"
BULK_WAIT = r"cp\.async\.bulk\.wait_group"
COPY = r"cp\.async\.c[ag]"
COPY_COMMIT = r"cp\.async\.commit_group"
COPY_WAIT = r"cp\.async\.wait_group"
WGMMA = r"wgmma\.mma_async"
WGMMA_COMMIT = r"wgmma\.commit_group"
WGMMA_WAIT = r"wgmma\.wait_group"
ATOMIC = r"(?:atom|red|ld|st)(?!\.async)"
STORE = r"st\.shared|stmatrix"
ACCESS = rf"tcgen05\.(?:ld|st|mma)|ld\.shared|{STORE}|cp\.async\.bulk\.tensor|{WGMMA}"

_REMOVED = (
    ("mbarrier wait", "goes on at once", "mbarrier.try_wait", always_true(WAIT),
     same.WAITED_BEFORE),
    ("arrival", "a thread does not arrive", "mbarrier.arrive", remove(ARRIVE), same.UNHEARD),
    ("arrival with bytes", "neither arrives nor announces", "mbarrier.arrive", remove(EXPECT)),
    ("mbarrier.init", "the barrier is no barrier", "mbarrier.init", remove(INIT)),
    ("named barrier", "threads do not wait for each other", "bar.sync", remove(BAR)),
    ("named arrival", "a thread does not arrive", "bar.arrive", remove(BAR_ARRIVE)),
    ("barrier vote", "threads neither wait for each other nor hear of each other", "bar.red",
     own_vote(BAR_RED)),
    ("warp barrier", "lanes do not wait for each other", "bar.warp.sync",
     remove(r"bar\.warp\.sync"), same.ORDERS_ONLY_WRITES),
    ("cluster arrival", "a thread does not arrive", "barrier.cluster", remove(CLUSTER_ARRIVE)),
    ("cluster wait", "nobody waits for the cluster", "barrier.cluster",
     remove(r"barrier\.cluster\.wait")),
    ("proxy fence", "stores stay in the generic proxy", "fence.proxy", remove(PROXY_FENCE),
     same.FENCED_AGAIN),
    ("mbarrier_init fence", "inits stay unseen", "fence.mbarrier_init", remove(INIT_FENCE)),
    ("memory fence", "orders nothing", "membar, fence", remove(rf"{FENCE}|membar")),
    ("tensormap fence", "a changed tensor map stays unseen", "fence.proxy", remove(MAP_FENCE)),
    ("alias fence", "other addresses of the memory stay unseen", "fence.proxy",
     remove(r"fence\.proxy\.alias")),
    ("expect_tx", "bytes are not announced", "mbarrier.expect_tx", remove(r"mbarrier\.expect_tx")),
    ("remote store", "it and its bytes never come", "st.async, red.async", remove(STORE_ASYNC)),
    ("commit", "the end of MMAs is not signalled", "tcgen05.commit", remove(COMMIT),
     same.UNHEARD),
    ("wait::st", "TMEM stores are not waited for", "tcgen05.wait", remove(WAIT_STORES),
     same.NO_STORE_WAITS),
    ("wait::ld", "TMEM loads are not waited for", "tcgen05.wait", remove(WAIT_LOADS)),
    ("tcgen05.fence", "orders nothing", "tcgen05.fence", remove(r"tcgen05\.fence"),
     same.ORDERED_ANYWAY),
    ("alloc", "no tensor memory", "tcgen05.alloc", remove(r"tcgen05\.alloc")),
    ("relinquish", "keeps the right to allocate", "tcgen05.relinquish_alloc_permit",
     remove(r"tcgen05\.relinquish_alloc_permit"), same.ALLOCATES_ONCE),
    ("dealloc", "tensor memory is never freed", "tcgen05.dealloc", remove(r"tcgen05\.dealloc")),
    ("bulk commit_group", "copies belong to no group", "cp.async.bulk.commit_group",
     remove(BULK_COMMIT), same.NOTHING_OVERWRITTEN),
    ("bulk wait_group", "bulk copies are not waited for", "cp.async.bulk.wait_group",
     remove(BULK_WAIT), same.NOTHING_OVERWRITTEN),
    ("cp.async commit_group", "copies belong to the next group", "cp.async.commit_group",
     remove(COPY_COMMIT)),
    ("cp.async wait", "copies are not waited for", "cp.async.wait_group",
     remove(r"cp\.async\.wait_(?:group|all)"), same.COPIES_KNOWN),
    ("wgmma fence", "registers and memory are not ordered before MMAs", "wgmma.fence",
     remove(r"wgmma\.fence"), same.REGISTERS_FENCED),
    ("wgmma commit_group", "MMAs belong to the next group", "wgmma.commit_group",
     remove(WGMMA_COMMIT)),
    ("wgmma wait", "MMAs are not waited for", "wgmma.wait_group", remove(WGMMA_WAIT)),
    ("cp.async arrival", "the end of copies is not signalled", "cp.async.mbarrier.arrive",
     remove(r"cp\.async\.mbarrier\.arrive")),
    ("dependency wait", "the grid before is not waited for", "griddepcontrol",
     remove(r"griddepcontrol\.wait")),
    ("launch_dependents", "dependents start at the end", "griddepcontrol",
     remove(r"griddepcontrol\.launch_dependents"), same.IMPLIED_AT_EXIT),
)  # fmt: skip

_WEAKENED = (
    ("wait: relaxed", "acquires nothing", "mbarrier.try_wait",
     relaxed_wait(WAIT, "mbarrier.try_wait.parity"), same.WAITED_BEFORE),
    ("arrival: relaxed", "releases nothing", "mbarrier.arrive",
     relaxed(ARRIVE, "mbarrier.arrive"), same.UNHEARD),
    # Where the thread wrote nothing it publishes nothing: the bytes have their own complete_tx.
    ("arrival with bytes: relaxed", "releases nothing", "mbarrier.arrive",
     unless(same.nothing_written_before, relaxed(EXPECT, "mbarrier.arrive.expect_tx"))),
    ("named barrier: arrival alone", "does not wait", "bar.sync",
     replaced(BAR, "sync", "arrive", operands=2)),
    ("barrier vote: arrival alone", "does not wait", "bar.red", own_vote(BAR_RED, "bar.arrive")),
    ("barrier vote: own vote", "waits, and does not hear of others", "bar.red",
     own_vote(BAR_RED, "bar.sync")),
    ("cluster arrival: relaxed", "releases nothing", "barrier.cluster",
     replaced(CLUSTER_ARRIVE, ".arrive", ".arrive.relaxed", but=".relaxed")),
    ("scope: cluster to cta", "orders threads of the own CTA alone", "Scope",
     replaced(rf"(?:{FENCE}|mbarrier\.\w+)\S*\.cluster\b", ".cluster", ".cta"),
     same.SCOPE_OF_PEERS),
    ("proxy fence: other space", "fences global memory instead of shared", "fence.proxy",
     other_space(PROXY_FENCE), same.FENCED_AGAIN),
    ("wait::st to wait::ld", "waits for loads", "tcgen05.wait",
     replaced(WAIT_STORES, "::st", "::ld"), same.NO_STORE_WAITS),
    ("bulk wait_group: one more", "one group stays open", "cp.async.bulk.wait_group",
     count(BULK_WAIT, 0, 1), same.NOTHING_OVERWRITTEN),
    ("bulk wait_group: .read", "waits for reads alone", "cp.async.bulk.wait_group",
     replaced(BULK_WAIT, "wait_group", "wait_group.read", but=".read")),
    ("cp.async wait: one more", "one group stays open", "cp.async.wait_group",
     count(COPY_WAIT, 0, 1), same.COPIES_KNOWN),
    ("cp.async arrival: counted", "is an arrival more than is expected",
     "cp.async.mbarrier.arrive", replaced(r"cp\.async\.mbarrier\.arrive", ".noinc", "")),
    ("wgmma wait: one more", "one group stays open", "wgmma.wait_group", count(WGMMA_WAIT, 0, 1)),
    ("memory order: relaxed", "neither acquires nor releases", "Memory consistency model",
     word_replaced(ATOMIC, "acq_rel|acquire|release", "relaxed")),
)  # fmt: skip

_CHANGED = (
    ("parity", "waits for the other phase", "mbarrier.try_wait", flipped(rf"{WAIT}\.parity", 2)),
    ("init count +1", "one arrival too many is expected", "mbarrier.init", count(INIT, 1, 1),
     same.UNHEARD),
    ("init count -1", "completes one arrival early", "mbarrier.init", count(INIT, 1, -1, least=1),
     same.UNHEARD),
    ("arrival count +1", "arrives once more than it may", "mbarrier.arrive", count(ARRIVE, -1, 1),
     same.UNHEARD),
    ("expected bytes +16", "more than will come", "mbarrier.expect_tx",
     count(EXPECT, -1, 16, nothing_at_0=True)),
    ("expected bytes -16", "less than will come", "mbarrier.expect_tx",
     count(EXPECT, -1, -16, least=1)),
    ("expected bytes to 0", "announces nothing", "mbarrier.expect_tx", nothing(EXPECT, -1)),
    ("barrier threads -32", "completes without one warp", "bar.sync", count(BAR, 1, -32, least=32)),
    ("barrier threads +32", "waits for a warp that never comes", "bar.sync", count(BAR, 1, 32)),
    ("vote threads -32", "completes without one warp", "bar.red",
     count(BAR_RED, 2, -32, least=32, operands=4)),
    ("vote threads +32", "waits for a warp that never comes", "bar.red",
     count(BAR_RED, 2, 32, operands=4)),
    ("vote: and", "all have to say so", "bar.red", word_replaced(BAR_RED, "or", "and")),
    ("vote: or", "one may say so for all", "bar.red", word_replaced(BAR_RED, "and", "or")),
    ("barrier id", "meets other threads", "bar.sync", other_barrier(MEETING)),
    ("multicast mask to 1", "the second CTA gets nothing", "cp.async.bulk.tensor",
     masked(TMA_LOAD, 3, 1)),
    ("multicast mask to 2", "the first CTA gets nothing", "cp.async.bulk.tensor",
     masked(TMA_LOAD, 3, 2)),
    ("peer", "the other CTA is reached", "mapa", flipped(r"mapa", 2)),
    ("commit mask to 1", "the second CTA is not told", "tcgen05.commit", masked(COMMIT, 1, 1)),
    ("commit mask to 2", "the first CTA is not told", "tcgen05.commit", masked(COMMIT, 1, 2)),
    ("alloc columns", "half the tensor memory", "tcgen05.alloc", halve(r"tcgen05\.alloc", 1, 32)),
    ("dealloc columns", "half is freed", "tcgen05.dealloc", halve(r"tcgen05\.dealloc", 1, 32)),
)  # fmt: skip

_REPEATED = (
    ("arrival", "a thread arrives twice", "mbarrier.arrive", repeat(ARRIVE), same.UNHEARD),
    ("arrival with bytes", "arrives and announces twice", "mbarrier.arrive", repeat(EXPECT)),
    ("commit", "signals twice", "tcgen05.commit", repeat(COMMIT)),
    ("named arrival", "arrives twice", "bar.arrive", repeat(BAR_ARRIVE)),
)

_MISDIRECTED = (
    ("wait", "waits for the mbarrier before", "mbarrier.try_wait", astray(WAIT, 1, -8)),
    ("wait forth", "waits for the next mbarrier", "mbarrier.try_wait", astray(WAIT, 1, 8)),
    *(
        (f"{name}{way}", f"the {other} gets {what}", section, astray(pattern, index, nbytes))
        for name, what, section, pattern, index in (
            ("arrival", "it", "mbarrier.arrive", ARRIVE, 1),
            ("arrival with bytes", "it", "mbarrier.arrive", EXPECT, -2),
            ("commit", "it", "tcgen05.commit", COMMIT, 0),
            ("TMA load", "its bytes", "cp.async.bulk.tensor", TMA_LOAD, 2),
            ("bulk load", "its bytes", "cp.async.bulk", BULK_LOAD, 3),
            ("remote store", "its bytes", "st.async, red.async", STORE_ASYNC, -1),
        )
        for way, other, nbytes in (("", "next mbarrier", 8), (" back", "mbarrier before", -8))
    ),
)

_ORDER = "Causality order"
_MOVED = (
    ("wait behind access", "the first access that it guards comes first", "mbarrier.try_wait",
     late_wait(WAIT, ACCESS), same.WAITED_BEFORE),
    ("wgmma behind commit_group", "it belongs to the next group", _ORDER,
     late(WGMMA, WGMMA_COMMIT, early=True)),
    ("bulk store behind commit_group", "it belongs to no group", _ORDER,
     late(BULK_STORE, BULK_COMMIT), same.NOTHING_OVERWRITTEN),
    *(
        (name, "is executed behind what publishes it", _ORDER, late(earlier, release), same.UNHEARD)
        for name, earlier, release in (
            ("st.shared behind arrival", STORE, ARRIVE),
            ("st.shared behind barrier", STORE, MEETING),
            ("st.shared behind proxy fence", STORE, PROXY_FENCE),
            ("ld.shared behind arrival", r"ld\.shared", ARRIVE),
            ("proxy fence behind arrival", PROXY_FENCE, ARRIVE),
            ("ldmatrix behind arrival", r"ldmatrix", ARRIVE),
            ("ldmatrix behind barrier", r"ldmatrix", MEETING),
            ("wait::ld behind arrival", WAIT_LOADS, ARRIVE),
            ("wait::ld behind barrier", WAIT_LOADS, MEETING),
            ("wait::st behind arrival", WAIT_STORES, ARRIVE),
            ("wgmma wait behind arrival", WGMMA_WAIT, ARRIVE),
            ("cp.async wait behind barrier", COPY_WAIT, MEETING),
            ("tcgen05.st behind wait::st", r"tcgen05\.st", WAIT_STORES),
            ("tcgen05.ld behind arrival", r"tcgen05\.ld", ARRIVE),
            ("mma behind commit", r"tcgen05\.mma", COMMIT),
            ("cp.async behind commit_group", COPY, COPY_COMMIT),
            ("init fence behind barrier", INIT_FENCE, BAR),
        )
    ),
)  # fmt: skip

# What no order of events shows, and no checker: it takes a comparison of results.
_VALUES = (
    *(
        (f"{old} to {new}", "the edge belongs to the other side", "setp",
         replaced(rf"setp\.{old}", f".{old}", f".{new}"))
        for old, new in (("lt", "le"), ("le", "lt"), ("gt", "ge"), ("ge", "gt"))
    ),
    ("min to max", "the larger one", "min, max", replaced("min", "min", "max")),
    ("max to min", "the smaller one", "min, max", replaced("max", "max", "min")),
    ("rounding", "to zero instead of nearest", "cvt",
     replaced(r"cvt\.rn\.(?:bf16|f16)(?:x2)?\.f32", ".rn", ".rz")),
    ("number +1", "one more is added", "add", immediate(r"add\.[su]\d\d", 2, 1)),
    ("shift -1", "one bit less", "shl, shr", immediate(r"sh[lr]\.\w\d\d", 2, -1)),
    ("mask -1", "without the lowest bit", "and", immediate(r"and\.b\d\d", 2, -1)),
    ("selection", "the other one", "selp", swapped("selp", 1, 2)),
    ("lane", "of another neighbour", "shfl",
     immediate(r"shfl\.sync\.bfly", 2, 1)),
)  # fmt: skip

_VERBS: tuple[tuple[str, tuple[tuple[Any, ...], ...]], ...] = (
    ("remove", _REMOVED),
    ("weaken", _WEAKENED),
    ("change", _CHANGED),
    ("repeat", _REPEATED),
    ("misdirect", _MISDIRECTED),
    ("move", _MOVED),
    ("value", _VALUES),
)

CLASSES: tuple[MutationClass, ...] = tuple(
    MutationClass(f"{verb} {name}", *rest) for verb, found in _VERBS for name, *rest in found
)
SYNCHRONISATION: tuple[MutationClass, ...] = tuple(
    kind for kind in CLASSES if not kind.name.startswith("value ")
)
