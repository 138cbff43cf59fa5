"""The classes of mutation: what each does, to which instructions, and why a mutant of it may mean
the same as its kernel. Sections are those of the PTX ISA manual.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxemu.syntax.tree import Instr
from tests.mutation import equivalence
from tests.mutation.operators import (
    Change,
    Operator,
    always_true,
    count,
    halve,
    late,
    late_wait,
    nothing,
    other_barrier,
    remove,
    repeat,
    rewrite,
    unless,
)
from tests.mutation.text import Statement, Text

ARRIVE = r"mbarrier\.arrive(?!\.expect_tx)"
EXPECT = r"mbarrier\.arrive\.expect_tx"
WAIT = r"mbarrier\.(?:try|test)_wait"
BAR = r"(?:bar|barrier)(?:\.cta)?\.sync"
BAR_ARRIVE = r"(?:bar|barrier)(?:\.cta)?\.arrive"
COMMIT = r"tcgen05\.commit"
TMA_LOAD = r"cp\.async\.bulk\.tensor\.\dd\.shared::c\w+\.global"
TMA_STORE = r"cp\.async\.bulk\.tensor\.\dd\.global"
BULK_WAIT = r"cp\.async\.bulk\.wait_group"
ACCESS = r"tcgen05\.(?:ld|st|mma)|ld\.shared|st\.shared|cp\.async\.bulk\.tensor"
PROXY_FENCE = r"fence\.proxy\.async"

MBARRIER = "mbarrier.try_wait"


@dataclass(frozen=True)
class MutationClass:
    """`section` describes the instruction; `reason`, of mutants that `rule` finds equivalent, cites
    its own."""

    name: str
    does: str
    section: str
    operator: Operator
    rule: equivalence.Rule = equivalence.never
    reason: str = ""


@dataclass(frozen=True)
class Mutant:
    """One changed place. `name` stays the same as long as the PTX does."""

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
        """Its text in the kernel."""
        return " ".join(self.instr.text.split())

    @property
    def ptx(self) -> str:
        return self.text.changed(self.change.lines)

    @property
    def equivalent(self) -> str:
        """Why it means the same as the kernel; '' where it does not."""
        return self.kind.reason if self.kind.rule(self.text, self.change) else ""


def mutants(text: Text, kinds: tuple[MutationClass, ...] = ()) -> list[Mutant]:
    """All mutants of a module, class by class, in the order of the text."""
    return [
        Mutant(kind, text, change) for kind in kinds or CLASSES for change in kind.operator(text)
    ]


def _relaxed(pattern: str, form: str) -> Operator:
    """Orders no memory any more: `.relaxed`, with a scope, as the manual asks."""

    def new(old: Statement) -> Statement | None:
        if ".relaxed" in old.opcode:
            return None
        scope = "cluster" if "cluster" in old.opcode.split("mbarrier::")[0] else "cta"
        plain = old.opcode.replace(".release", "").replace(".acquire", "")
        for word in (".cluster.", ".cta."):
            plain = plain.replace(word, ".")
        relaxed = plain.replace(form, f"{form}.relaxed.{scope}", 1)
        return Statement(old.guard, relaxed, old.operands)

    return rewrite(pattern, new)


def _swap(pattern: str, old_text: str, new_text: str) -> Operator:
    return rewrite(pattern, lambda old: old.with_opcode(old_text, new_text))


def _other_space(old: Statement) -> Statement:
    if ".global" in old.opcode:
        return old.with_opcode(".global", ".shared::cta")
    return Statement(old.guard, "fence.proxy.async.global", ())


def _masked(mask: int) -> Operator:
    """A multicast reaches fewer CTAs."""

    def new(old: Statement) -> str | None:
        multicast = ".multicast" in old.opcode
        return old.computed(len(old.operands) - 1, "and", mask, bits=16) if multicast else None

    return rewrite(COMMIT, new)


def _astray(pattern: str, index: int, nbytes: int) -> Operator:
    """The signal, or the wait, is for another mbarrier than the right one."""
    return rewrite(pattern, lambda old: old.displaced(index, nbytes))


_GONE = {
    "named barrier": (BAR, "bar.sync", "threads no longer wait for each other"),
    "named arrival": (BAR_ARRIVE, "bar.arrive", "a thread does not arrive"),
    "cluster arrival": (r"barrier\.cluster\.arrive", "barrier.cluster", "a thread does not arrive"),
    "cluster wait": (r"barrier\.cluster\.wait", "barrier.cluster", "nobody waits for the cluster"),
    "mbarrier_init fence": (r"fence\.mbarrier_init", "fence.mbarrier_init", "inits stay unseen"),
    "memory fence": (r"fence\.(?:acq_rel|sc|acquire|release)|membar", "fence", "no order"),
    "cp.async wait": (r"cp\.async\.wait_(?:group|all)", "cp.async.wait_group",
                      "copies are not waited for"),
    "cp.async arrival": (r"cp\.async\.mbarrier\.arrive", "cp.async.mbarrier.arrive",
                         "the end of copies is not signalled"),
    "arrival with bytes": (EXPECT, "mbarrier.arrive", "neither arrival nor announced bytes"),
    "mbarrier.init": (r"mbarrier\.init", "mbarrier.init", "the barrier is no barrier"),
    "alloc": (r"tcgen05\.alloc", "tcgen05.alloc", "no tensor memory"),
    "dealloc": (r"tcgen05\.dealloc", "tcgen05.dealloc", "tensor memory is never freed"),
    "dependency wait": (r"griddepcontrol\.wait", "griddepcontrol",
                        "the grid before is not waited for"),
}  # fmt: skip

_LATE = {
    "st.shared behind arrival": (r"st\.shared", ARRIVE),
    "st.shared behind barrier": (r"st\.shared", BAR),
    "st.shared behind proxy fence": (r"st\.shared", PROXY_FENCE),
    "ld.shared behind arrival": (r"ld\.shared", ARRIVE),
    "proxy fence behind arrival": (PROXY_FENCE, ARRIVE),
    "wait::st behind arrival": (r"tcgen05\.wait::st", ARRIVE),
    "tcgen05.st behind wait::st": (r"tcgen05\.st", r"tcgen05\.wait::st"),
    "tcgen05.ld behind arrival": (r"tcgen05\.ld", ARRIVE),
    "mma behind commit": (r"tcgen05\.mma", COMMIT),
    "bulk store behind commit_group": (TMA_STORE, r"cp\.async\.bulk\.commit_group"),
    "init behind barrier": (r"fence\.mbarrier_init", BAR),
}

WAITED_BEFORE = (
    "the thread has waited for this phase of this mbarrier before (mbarrier.try_wait: a phase that "
    "has completed stays so until its successor completes, for which this thread is needed)"
)
UNHEARD = (
    "nobody waits for the phase that it is part of, nor for a later one (mbarrier: a phase is seen "
    "by test_wait and try_wait alone)"
)
NO_STORE_WAITS = (
    "the thread has stored nothing to TMEM, or waits once more before it signals anybody "
    "(tcgen05.wait: all prior tcgen05.st of the thread)"
)
NOTHING_OVERWRITTEN = (
    "nothing writes shared memory behind it, and copies under way at the exit of a CTA are "
    "completed: NVIDIA's tutorial_tma waits for none (cp.async.bulk.wait_group)"
)
FENCED_AGAIN = (
    "the thread fences once more before it signals anybody, and the async proxy does nothing for "
    "it in between (fence.proxy: all prior accesses of the thread)"
)
CLASSES: tuple[MutationClass, ...] = (
    MutationClass("remove mbarrier wait", "goes on at once", MBARRIER, always_true(WAIT),
                  equivalence.waited_before, WAITED_BEFORE),
    MutationClass("remove arrival", "a thread does not arrive", "mbarrier.arrive", remove(ARRIVE),
                  equivalence.unheard, UNHEARD),
    MutationClass("remove commit", "the end of MMAs is not signalled", "tcgen05.commit",
                  remove(COMMIT), equivalence.unheard, UNHEARD),
    MutationClass("remove bulk commit_group", "bulk copies belong to no group",
                  "cp.async.bulk.commit_group", remove(r"cp\.async\.bulk\.commit_group"),
                  equivalence.nothing_overwritten, NOTHING_OVERWRITTEN),
    MutationClass("remove bulk wait_group", "bulk copies are not waited for",
                  "cp.async.bulk.wait_group", remove(BULK_WAIT),
                  equivalence.nothing_overwritten, NOTHING_OVERWRITTEN),
    MutationClass(
        "remove warp barrier", "lanes no longer wait for each other", "bar.warp.sync",
        remove(r"bar\.warp\.sync"), equivalence.orders_only_writes,
        "the thread reads no memory between the waits before and behind it, so it orders only "
        "writes, of which each lane has its own (bar.warp.sync: ordering among its lanes)",
    ),
    *(
        MutationClass(f"remove {name}", does, section, remove(pattern))
        for name, (pattern, section, does) in _GONE.items()
    ),
    MutationClass(
        "remove proxy fence", "stores stay in the generic proxy", "fence.proxy",
        remove(PROXY_FENCE), equivalence.done_again, FENCED_AGAIN,
    ),
    MutationClass(
        "remove wait::st", "TMEM stores are not waited for", "tcgen05.wait",
        remove(r"tcgen05\.wait::st"), equivalence.no_store_waits, NO_STORE_WAITS,
    ),
    MutationClass(
        "remove wait::ld", "loads are not waited for", "tcgen05.wait",
        remove(r"tcgen05\.wait::ld"),
        equivalence.registers_used_before_release,
        "every loaded register is used before the next signal, and its use waits for the load "
        "(tcgen05.ld: the registers are written asynchronously; the hardware interlocks them)",
    ),
    MutationClass(
        "remove tcgen05.fence", "no order between tcgen05 and other operations", "tcgen05.fence",
        remove(r"tcgen05\.fence"), equivalence.always,
        "an mbarrier's arrive and wait order tcgen05 operations by themselves on hardware "
        "(tcgen05 memory consistency model; --strict notes what the text asks for)",
    ),
    MutationClass(
        "remove relinquish", "the CTA keeps the right to allocate", "tcgen05.alloc",
        remove(r"tcgen05\.relinquish_alloc_permit"), equivalence.always,
        "it lets other CTAs allocate sooner; this one allocates once (tcgen05.alloc, "
        "tcgen05.relinquish_alloc_permit)",
    ),
    MutationClass(
        "remove launch_dependents", "dependents are launched at the end", "griddepcontrol",
        remove(r"griddepcontrol\.launch_dependents"), equivalence.always,
        "completion of the grid implies it (griddepcontrol)",
    ),
    MutationClass("weaken wait: relaxed", "acquires nothing", MBARRIER,
                  _relaxed(WAIT, "mbarrier.try_wait.parity"), equivalence.waited_before,
                  WAITED_BEFORE),
    MutationClass("weaken arrival: relaxed", "releases nothing", "mbarrier.arrive",
                  _relaxed(ARRIVE, "mbarrier.arrive"), equivalence.unheard, UNHEARD),
    # Elsewhere it publishes nothing: the bytes are published by their own complete_tx.
    MutationClass(
        "weaken arrival with bytes: relaxed", "releases nothing", "mbarrier.arrive",
        unless(
            equivalence.nothing_written_before, _relaxed(EXPECT, "mbarrier.arrive.expect_tx")
        ),
    ),
    MutationClass("weaken cluster arrival: relaxed", "releases nothing", "barrier.cluster",
                  rewrite(r"barrier\.cluster\.arrive", lambda old: None if "relaxed" in old.opcode
                          else old.with_opcode(".arrive", ".arrive.relaxed"))),
    MutationClass("weaken scope: cluster to cta", "orders only threads of the own CTA", "scopes",
                  _swap(r"(?:fence\.(?:acq_rel|sc|acquire|release)|mbarrier\.\w+)\S*\.cluster\b",
                        ".cluster", ".cta")),
    MutationClass("weaken proxy fence: other space", "fences global instead of shared",
                  "fence.proxy", rewrite(PROXY_FENCE, _other_space), equivalence.done_again,
                  FENCED_AGAIN),
    MutationClass("weaken wait::st to wait::ld", "waits for loads", "tcgen05.wait",
                  _swap(r"tcgen05\.wait::st", "::st", "::ld"), equivalence.no_store_waits,
                  NO_STORE_WAITS),
    MutationClass("weaken bulk wait_group: one more", "one group stays open",
                  "cp.async.bulk.wait_group", count(BULK_WAIT, 0, 1),
                  equivalence.nothing_overwritten, NOTHING_OVERWRITTEN),
    MutationClass("weaken bulk wait_group: .read", "waits for reads alone",
                  "cp.async.bulk.wait_group", rewrite(BULK_WAIT,
                  lambda old: None if ".read" in old.opcode else
                  old.with_opcode("wait_group", "wait_group.read"))),
    MutationClass("weaken cp.async wait: one more", "one group stays open", "cp.async.wait_group",
                  count(r"cp\.async\.wait_group", 0, 1)),
    MutationClass("change parity", "waits for the other phase", MBARRIER,
                  rewrite(r"mbarrier\.(?:try|test)_wait\.parity",
                          lambda old: old.computed(2, "xor", 1))),
    MutationClass("change init count +1", "one arrival too many is expected", "mbarrier.init",
                  count(r"mbarrier\.init", 1, 1)),
    MutationClass("change init count -1", "completes one arrival early", "mbarrier.init",
                  count(r"mbarrier\.init", 1, -1, least=1)),
    MutationClass("change expected bytes +16", "more than will come", "mbarrier.expect_tx",
                  count(EXPECT, -1, 16, nothing_at_0=True)),
    MutationClass("change expected bytes -16", "less than will come", "mbarrier.expect_tx",
                  count(EXPECT, -1, -16, least=1)),
    MutationClass("change expected bytes to 0", "nothing is announced", "mbarrier.expect_tx",
                  nothing(EXPECT, -1)),
    MutationClass("change barrier threads -32", "completes without one warp", "bar.sync",
                  count(BAR, 1, -32, least=32)),
    MutationClass("change barrier threads +32", "waits for a warp that never comes", "bar.sync",
                  count(BAR, 1, 32)),
    MutationClass("change barrier id", "meets other threads", "bar.sync", other_barrier(BAR, 0)),
    MutationClass("change commit mask to 1", "the peer is not told", "tcgen05.commit", _masked(1)),
    MutationClass("change commit mask to 2", "the own CTA is not told", "tcgen05.commit",
                  _masked(2)),
    MutationClass("change alloc columns", "half the tensor memory", "tcgen05.alloc",
                  halve(r"tcgen05\.alloc", 1, 32)),
    MutationClass("change dealloc columns", "half is freed", "tcgen05.dealloc",
                  halve(r"tcgen05\.dealloc", 1, 32)),
    MutationClass("repeat arrival", "a thread arrives twice", "mbarrier.arrive", repeat(ARRIVE)),
    MutationClass("repeat arrival with bytes", "arrives and announces twice", "mbarrier.arrive",
                  repeat(EXPECT)),
    MutationClass("repeat commit", "signals twice", "tcgen05.commit", repeat(COMMIT)),
    MutationClass("repeat named arrival", "arrives twice", "bar.arrive", repeat(BAR_ARRIVE)),
    MutationClass("misdirect wait", "waits for the stage before", MBARRIER, _astray(WAIT, 1, -8)),
    MutationClass("misdirect arrival", "another mbarrier gets it", "mbarrier.arrive",
                  _astray(ARRIVE, -2, 8)),
    MutationClass("misdirect arrival with bytes", "another mbarrier gets it", "mbarrier.arrive",
                  _astray(EXPECT, -2, 8)),
    MutationClass("misdirect commit", "another mbarrier gets it", "tcgen05.commit",
                  _astray(COMMIT, 0, 8)),
    MutationClass("misdirect TMA load", "its bytes count elsewhere", "cp.async.bulk.tensor",
                  _astray(TMA_LOAD, 2, 8)),
    MutationClass(
        "move wait behind access", "the first access that it guards comes before it", MBARRIER,
        late_wait(WAIT, ACCESS), equivalence.waited_before, WAITED_BEFORE,
    ),
    *(
        MutationClass(f"move {name}", "executed behind what publishes it", "causality order",
                      late(earlier, release))
        for name, (earlier, release) in _LATE.items()
    ),
)  # fmt: skip
