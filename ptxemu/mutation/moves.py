"""Mutations that move: an access behind the signal that publishes it, or in front of its wait."""

from __future__ import annotations

from collections.abc import Iterator

from ptxemu.mutation.operators import Change, Operator
from ptxemu.mutation.text import Statement, Text, used, written
from ptxemu.syntax.tree import Instr, Sym


def late(earlier: str, release: str, *, early: bool = False) -> Operator:
    """The last instruction that finds `earlier` before a `release`, with no other release between,
    is executed behind it. early: it stays, as it has registers of a scope of its own, and the
    release comes in front of it."""

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
    """The wait comes behind the first access that follows it, unless another wait stands between
    them. A wait in its place says yes at once."""

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
    """The instruction at `start` can be executed behind the one at `end`: the same lanes reach both
    equally often, and what it reads and writes is left alone between them."""
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
    """No branch leads into the stretch from `begin` to `stop`, out of it, or backwards."""
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
