"""What a mutation does to the text: builders of functions that yield every `Change` of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ptxemu.syntax.tree import Instr, Sym
from tests.mutation.text import Statement, Text, used, written


@dataclass(frozen=True)
class Change:
    """New text for some lines; `instr` is the instruction that is changed."""

    instr: Instr
    lines: Mapping[int, str]


Operator = Callable[[Text], Iterator[Change]]
Rewrite = Callable[[Statement], Statement | str | None]


def rewrite(pattern: str, new: Rewrite) -> Operator:
    """Each instruction that `pattern` finds becomes what `new` makes of it; None: no mutant."""

    def changes(text: Text) -> Iterator[Change]:
        for instr in text.find(pattern):
            after = new(text.statement(instr))
            if after is not None and str(after) != str(text.statement(instr)):
                yield Change(instr, {instr.line: str(after)})

    return changes


def remove(pattern: str) -> Operator:
    """Each instruction that `pattern` finds is gone."""
    return rewrite(pattern, lambda _: "")


def repeat(pattern: str) -> Operator:
    """Each instruction that `pattern` finds is executed twice."""
    return rewrite(pattern, lambda old: f"{old} {old}")


def always_true(pattern: str) -> Operator:
    """A test that writes a predicate says yes at once."""

    def new(old: Statement) -> Statement:
        return Statement(old.guard, "setp.eq.u32", (old.operands[0], "0", "0"))

    return rewrite(pattern, new)


def count(
    pattern: str, index: int, by: int, *, least: int = 0, nothing_at_0: bool = False
) -> Operator:
    """An operand that counts is changed by so much. No mutant where it would fall below `least`, or
    is known to be 0 and this says that nothing is counted."""

    def changes(text: Text) -> Iterator[Change]:
        for instr in text.find(pattern):
            old = text.statement(instr)
            if not -len(old.operands) <= index < len(old.operands):
                continue
            value = text.constant(text.places[instr.line], instr.operands[index])
            if value is not None and (value + by < least or (nothing_at_0 and value == 0)):
                continue
            yield Change(instr, {instr.line: old.computed(index, "add", by)})

    return changes


def nothing(pattern: str, index: int) -> Operator:
    """An operand that counts becomes 0."""

    def changes(text: Text) -> Iterator[Change]:
        for instr in text.find(pattern):
            if text.constant(text.places[instr.line], instr.operands[index]) != 0:
                new = text.statement(instr).with_operand(index, "0")
                yield Change(instr, {instr.line: str(new)})

    return changes


def halve(pattern: str, index: int, least: int) -> Operator:
    """An operand that counts becomes half of what it is, where that is at least `least`."""

    def changes(text: Text) -> Iterator[Change]:
        for instr in text.find(pattern):
            value = text.constant(text.places[instr.line], instr.operands[index])
            if value is not None and value // 2 >= least:
                new = text.statement(instr).with_operand(index, str(value // 2))
                yield Change(instr, {instr.line: str(new)})

    return changes


def other_barrier(pattern: str, index: int) -> Operator:
    """The named barrier is another one. No mutant where one instruction alone uses it, or all
    threads of the CTA meet there (no count): that changes a name, and nothing else."""

    def changes(text: Text) -> Iterator[Change]:
        users = [(i, i.operands[index]) for i in text.find(pattern)]
        for instr, barrier in users:
            if len(instr.operands) > 1 and sum(other == barrier for _, other in users) > 1:
                new = text.statement(instr).computed(index, "add", 1)
                yield Change(instr, {instr.line: new})

    return changes


# -- moves ----------------------------------------------------------------------------------


def late(earlier: str, release: str) -> Operator:
    """The last instruction that finds `earlier` before a `release`, with no other release between,
    is executed behind it."""

    def changes(text: Text) -> Iterator[Change]:
        candidates = [text.places[i.line] for i in text.find(earlier)]
        last_release = -1
        for instr in text.find(release):
            end = text.places[instr.line]
            start = max((place for place in candidates if last_release < place < end), default=None)
            last_release = end
            if start is not None and can_sink(text, start, end):
                moved = text.body[start]
                lines = {
                    moved.line: "",
                    instr.line: f"{text.statement(instr)} {text.statement(moved)}",
                }
                yield Change(instr, lines)

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


def unless(rule: Callable[[Text, Change], bool], operator: Operator) -> Operator:
    """Without the changes that `rule` finds to change nothing."""
    return lambda text: (c for c in operator(text) if not rule(text, c))


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
            if target not in inside or (target < k and not wait_loop):
                return False
        elif item.root == "bra" and isinstance(item.operands[0], Sym):
            if item.operands[0].name in labels and text.target(item) != stop:
                return False
    return True
