"""Rules that show a mutant to be equivalent to its kernel, by the text or by a run of the kernel.

The arguments for them are below. Sections are those of the PTX ISA manual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ptxemu.mutation.operators import Change, after, before, known_guards
from ptxemu.mutation.text import Text, used, written
from ptxemu.syntax.tree import Imm, Instr, Reg, Vec

Rule = Callable[[Text, Change], bool]

# Where another thread, or the tensor core, may learn that this one is done with a TMEM range.
_RELEASES = ("mbarrier.arrive", "bar", "tcgen05.commit", "tcgen05.dealloc", "ret", "exit")


_WRITES = ("st", "red", "atom", "tcgen05.st", "tcgen05.mma", "mbarrier.init")
_BARRIERS = (
    *(f"{bar}.{does}" for bar in ("bar", "bar.cta", "barrier", "barrier.cta")
      for does in ("sync", "red")),
    "barrier.cluster.wait",
)  # fmt: skip


def nothing_written_before(text: Text, change: Change) -> bool:
    """On no path from the last barrier to the instruction does the thread write memory."""
    place = text.places[change.instr.line]
    came_by = before(text, place, lambda item: item.opcode.startswith(_BARRIERS))
    return not any(item.opcode.startswith(_WRITES) for item in came_by)


# Where others may act on what the thread has done so far, and where the async proxy acts.
_TENSOR_CORE = ("tcgen05.mma", "tcgen05.cp", "tcgen05.shift", "wgmma.mma_async")
_CONSEQUENCES = (*_RELEASES, *_TENSOR_CORE, "cp.async.bulk", "st.async", "red.async")


def done_again(text: Text, change: Change) -> bool:
    """On every path the thread executes the same instruction once more before it signals anybody
    or lets the async proxy act."""
    place, opcode = text.places[change.instr.line], change.instr.opcode
    to_come = after(text, place, lambda item: item.opcode == opcode and item.guard is None)
    return not any(item.opcode.startswith(_CONSEQUENCES) for item in to_come)


_WAITS = ("mbarrier.try_wait", "mbarrier.test_wait", *_BARRIERS)
_LOADS = ("ld", "ldmatrix", "atom", "red", "wgmma")


def waited_before(text: Text, change: Change) -> bool:
    """Whether a wait gives the thread no new knowledge.

    Either a run has shown this, or the thread has waited on every path for the same phase of the
    same mbarrier before, with the current address and parity.
    """
    if change.instr.line in text.observed.implied:
        return True
    place = text.places[change.instr.line]
    _, address, parity, *_ = change.instr.operands
    base, offset = _origin(text, address.base, address.offset)
    known = known_guards(text, place)
    fixed = {base, parity, *known}

    def same(item: Instr) -> bool:
        if not item.opcode.startswith("mbarrier.try_wait") or item.guard is not None:
            return False
        _, other, other_parity, *_ = item.operands
        at = _origin(text, other.base, other.offset)
        return item is not change.instr and at == (base, offset) and other_parity == parity

    return not any(
        item is text.first or written(item) & fixed for item in before(text, place, same, known)
    )


def _origin(text: Text, base: object, offset: int) -> tuple[object, int]:
    """An address as (register that is set more than once or not by an addition, offset)."""
    while isinstance(base, Reg):
        settings = text.settings.get(base, ())
        if len(settings) != 1 or settings[0].root not in ("add", "mov") or settings[0].guard:
            break
        first, *second = settings[0].operands[1:]
        if first == base or not isinstance(first, Reg):
            break
        if second and not isinstance(second[0], Imm):
            break
        base, offset = first, offset + (second[0].value if second else 0)
    return base, offset


def orders_only_writes(text: Text, change: Change) -> bool:
    """Whether the thread reads no memory between the surrounding waits and barriers.

    The instruction then orders only writes, and each lane has separate ones.
    """
    place = text.places[change.instr.line]

    def stop(item: Instr) -> bool:
        return item.opcode.startswith(_WAITS)

    around = [*before(text, place, stop), *after(text, place, stop)]
    return not any(
        item.root in _LOADS and not item.opcode.startswith("ld.param") for item in around
    )


def registers_fenced(text: Text, change: Change) -> bool:
    """On every path the thread has fenced before, and touched since then no accumulator and no
    registers of A of the products that come up to its next fence."""
    place = text.places[change.instr.line]

    def stop(item: Instr) -> bool:
        return item.opcode.startswith("wgmma.fence")

    of_products = {reg for item in after(text, place, stop) for reg in _fragments(item)}
    return not any(
        item is text.first or (item.root != "wgmma" and (written(item) | used(item)) & of_products)
        for item in before(text, place, stop)
    )


def _fragments(item: Instr) -> set[Reg]:
    """Return the registers of D and A of a wgmma; none for another instruction."""
    product = item.opcode.startswith("wgmma.mma_async")
    vectors = [each for each in item.operands[:2] * product if isinstance(each, Vec)]
    return {reg for vector in vectors for reg in vector.items if isinstance(reg, Reg)}


def no_store_waits(text: Text, change: Change) -> bool:
    """Whether no tcgen05.st of the thread can be in progress, or `done_again` applies."""
    place, opcode = text.places[change.instr.line], change.instr.opcode
    since = before(text, place, lambda item: item.opcode == opcode)
    return done_again(text, change) or not any(i.opcode.startswith("tcgen05.st") for i in since)


def unheard(text: Text, change: Change) -> bool:
    """Whether a run has shown that nothing waits for the signal."""
    return change.instr.line in text.observed.unheard


_SHARED_WRITES = ("st", "red", "atom", "cp", "stmatrix", "mbarrier.arrive", "tcgen05.mma")


def nothing_overwritten(text: Text, change: Change) -> bool:
    """Whether nothing is written later that a copy may still read.

    This holds on all paths, or everywhere in a run; or no copy is in progress in a run.
    """
    if change.instr.line in text.observed.last | text.observed.implied:
        return True
    place = text.places[change.instr.line]
    to_come = after(text, place, lambda item: item.opcode.startswith("cp.async.bulk.wait_group"))
    return not any(
        item.opcode.startswith(_SHARED_WRITES) and not item.opcode.startswith("st.global")
        for item in to_come
    )


@dataclass(frozen=True)
class Equivalence:
    """`reason` holds for the changes that `rule` finds."""

    rule: Rule
    reason: str


NEVER = Equivalence(lambda text, change: False, "")
WAITED_BEFORE = Equivalence(
    waited_before,
    "the thread has waited for this phase of this mbarrier before (mbarrier.try_wait: what has "
    "completed stays so until the next phase completes, and that one needs this thread), or for "
    "others that follow from all its arrivals (causality order: base causality is transitive)",
)
UNHEARD = Equivalence(
    unheard,
    "nobody waits for the phase that it is part of, nor for a later one (mbarrier: a phase shows "
    "in test_wait and try_wait alone)",
)
NOTHING_OVERWRITTEN = Equivalence(
    nothing_overwritten,
    "nothing writes shared memory behind it, and copies under way when a CTA exits are completed: "
    "NVIDIA's tutorial_tma waits for none (cp.async.bulk.wait_group); or in a run the waits before "
    "have told of every copy",
)
ORDERS_ONLY_WRITES = Equivalence(
    orders_only_writes,
    "the thread reads no memory between the waits before and behind it, so it orders only writes, "
    "of which each lane has its own (bar.warp.sync: ordering among its lanes)",
)
FENCED_AGAIN = Equivalence(
    done_again,
    "the thread fences once more before it signals anybody, and the async proxy does nothing for "
    "it in between (fence.proxy: all prior accesses of the thread)",
)
REGISTERS_FENCED = Equivalence(
    registers_fenced,
    "the thread has fenced before, and touched no register of these products since (wgmma.fence: "
    "before the first wgmma.mma_async, and between other accesses of its registers and it)",
)
NO_STORE_WAITS = Equivalence(
    no_store_waits,
    "the thread has stored nothing to TMEM, or waits once more before it signals anybody "
    "(tcgen05.wait: all prior tcgen05.st of the thread)",
)
ORDERED_ANYWAY = Equivalence(
    lambda text, change: True,
    "on hardware an mbarrier's arrive and wait order tcgen05 operations by themselves (tcgen05 "
    "memory consistency model; the strict rules note what its text asks for)",
)
ALLOCATES_ONCE = Equivalence(
    lambda text, change: True,
    "it lets other CTAs allocate sooner, and this one allocates no more "
    "(tcgen05.relinquish_alloc_permit)",
)
IMPLIED_AT_EXIT = Equivalence(
    lambda text, change: True, "completion of the grid implies it (griddepcontrol)"
)
COPIES_KNOWN = Equivalence(
    lambda text, change: change.instr.line in text.observed.implied,
    "in a run the waits before have told of every copy (cp.async.wait_group: groups without copies "
    "are complete)",
)
SCOPE_OF_PEERS = Equivalence(
    lambda text, change: change.instr.opcode.startswith("mbarrier."),
    "CUTLASS's pipelines signal and await peers with the scope of the CTA, and are right on "
    "hardware (mbarrier.try_wait; the strict rules note it)",
)
