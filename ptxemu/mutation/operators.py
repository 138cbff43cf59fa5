"""Mutations of the text: builders of functions that yield every `Change` of a kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ptxemu.mutation.text import Statement, Text
from ptxemu.syntax.tree import Instr, Not, Reg

Stop = Callable[[Instr], bool]
Known = Mapping[Reg, bool]  # predicates whose values do not change on the way


def successors(text: Text, place: int, known: Known = MappingProxyType({})) -> list[int]:
    """Return places that can follow, given known predicates; none at the end."""
    item = text.body[place]
    if isinstance(item, str):
        return [place + 1]
    target = text.target(item)
    if target is None and item.root not in ("ret", "exit"):
        return [place + 1]
    goes = None if item.guard is None else _holds(item.guard, known)
    falls = [place + 1] if item.guard is not None and goes is not True else []
    return falls if target is None or goes is False else [*falls, target]


def _holds(guard: Reg | Not, known: Known) -> bool | None:
    """Whether an instruction with this guard is executed; None if unknown."""
    if isinstance(guard, Not):
        return None if guard.reg not in known else not known[guard.reg]
    return known.get(guard)


def known_guards(text: Text, place: int) -> dict[Reg, bool]:
    """Values of predicates at `place`: of the forward branches that were not taken, since nothing
    else leads there."""
    found: dict[Reg, bool] = {}
    for k, target, branch in text.branches:
        if branch.guard is None or not k < place < target:
            continue
        inside = range(k, target)
        if any(k < to <= place and source not in inside for source, to, _ in text.branches):
            continue
        if isinstance(branch.guard, Not):
            found[branch.guard.reg] = True
        else:
            found[branch.guard] = False
    return found


def before(
    text: Text, place: int, stop: Stop, known: Known = MappingProxyType({})
) -> Iterator[Instr]:
    """Yield instructions on any path to `place`, back to those that `stop`, which are excluded."""
    comes_from: dict[int, list[int]] = {}
    for k in range(len(text.body)):
        for follower in successors(text, k, known):
            comes_from.setdefault(follower, []).append(k)
    return _reached(text, place, lambda k: comes_from.get(k, []), stop)


def after(text: Text, place: int, stop: Stop) -> Iterator[Instr]:
    """Yield instructions on any path from `place` on, up to those that `stop`, which are
    excluded."""
    return _reached(text, place, lambda k: successors(text, k), stop)


def _reached(
    text: Text, place: int, neighbours: Callable[[int], list[int]], stop: Stop
) -> Iterator[Instr]:
    waiting, seen = [place], set()
    while waiting:
        for k in neighbours(waiting.pop()):
            if k in seen or k >= len(text.body):
                continue
            seen.add(k)
            item = text.body[k]
            if isinstance(item, Instr):
                if stop(item):
                    continue
                yield item
            waiting.append(k)


@dataclass(frozen=True)
class Change:
    """New text for some lines; `instr` is the instruction that is changed."""

    instr: Instr
    lines: Mapping[int, str]


Operator = Callable[[Text], Iterator[Change]]
Rewrite = Callable[[Statement], Statement | str | None]


def rewrite(pattern: str, new: Rewrite) -> Operator:
    """Replace each instruction that `pattern` finds by the result of `new`; None: no mutant."""

    def changes(text: Text) -> Iterator[Change]:
        for instr in text.find(pattern):
            after = new(text.statement(instr))
            if after is not None and str(after) != str(text.statement(instr)):
                yield Change(instr, {instr.line: str(after)})

    return changes


def remove(pattern: str) -> Operator:
    """Remove each instruction that `pattern` finds."""
    return rewrite(pattern, lambda _: "")


def repeat(pattern: str) -> Operator:
    """Execute each instruction that `pattern` finds twice."""
    return rewrite(pattern, lambda old: f"{old} {old}")


def always_true(pattern: str) -> Operator:
    """Make a test that writes a predicate succeed at once."""

    def new(old: Statement) -> Statement:
        return Statement(old.guard, "setp.eq.u32", (old.operands[0], "0", "0"))

    return rewrite(pattern, new)


def count(
    pattern: str,
    index: int,
    by: int,
    *,
    least: int = 0,
    nothing_at_0: bool = False,
    operands: int = 0,
) -> Operator:
    """Change an operand that is a count by a fixed amount.

    There is no mutant if the count would fall below `least`, if it is known to be 0 and thus
    counts nothing, or if there are fewer operands.
    """

    def changes(text: Text) -> Iterator[Change]:
        for instr in text.find(pattern):
            old = text.statement(instr)
            there = -len(old.operands) <= index < len(old.operands) >= operands
            if not there or "[" in old.operands[index]:
                continue  # it counts one
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
    """Halve an operand that is a count, if it is at least `least`."""

    def changes(text: Text) -> Iterator[Change]:
        for instr in text.find(pattern):
            value = text.constant(text.places[instr.line], instr.operands[index])
            if value is not None and value // 2 >= least:
                new = text.statement(instr).with_operand(index, str(value // 2))
                yield Change(instr, {instr.line: str(new)})

    return changes


def other_barrier(pattern: str) -> Operator:
    """Use another named barrier.

    There is no mutant if only one instruction uses the barrier, or if all threads of the CTA
    synchronise there (no count): that only changes a name.
    """

    def changes(text: Text) -> Iterator[Change]:
        users = [(i, _named(i)) for i in text.find(pattern)]
        for instr, index in users:
            barrier = instr.operands[index]
            alike = sum(i.operands[at] == barrier for i, at in users)
            counted = len(instr.operands) > 1 + 2 * index
            if counted and alike > 1:
                yield Change(instr, {instr.line: text.statement(instr).computed(index, "add", 1)})

    return changes


def _named(instr: Instr) -> int:
    """Return the index of the barrier among bar.*'s operands; bar.red has its result before it."""
    return int("red" in instr.parts)


def own_vote(pattern: str, meets: str = "") -> Operator:
    """Replace the result of a vote by the thread's predicate.

    meets: the bar.* that remains, which needs a count of threads in the vote.
    """

    def new(old: Statement) -> Statement | str | None:
        result, *barrier, vote = old.operands
        if meets and len(barrier) < 2:
            return None
        negated, predicate = vote.startswith("!"), vote.removeprefix("!")
        own = Statement(old.guard, "not.pred" if negated else "mov.pred", (result, predicate))
        if ".popc" in old.opcode:
            chosen = ("0", "1") if negated else ("1", "0")
            own = Statement(old.guard, "selp.u32", (result, *chosen, predicate))
        return f"{Statement(old.guard, meets, tuple(barrier))} {own}" if meets else own

    return rewrite(pattern, new)


def unless(rule: Callable[[Text, Change], bool], operator: Operator) -> Operator:
    """Leave out the changes that `rule` finds to be equivalent."""
    return lambda text: (c for c in operator(text) if not rule(text, c))


def relaxed(pattern: str, form: str) -> Operator:
    """An mbarrier operation that orders no memory any more; with a scope, as the manual asks."""

    def new(old: Statement) -> Statement | None:
        if ".relaxed" in old.opcode:
            return None
        scope = "cluster" if ".cluster" in old.opcode or "::cluster" in old.opcode else "cta"
        plain = old.opcode.replace(".release", "").replace(".acquire", "")
        for word in (".cluster.", ".cta."):
            plain = plain.replace(word, ".")
        return Statement(old.guard, plain.replace(form, f"{form}.relaxed.{scope}", 1), old.operands)

    return rewrite(pattern, new)


def relaxed_wait(pattern: str, form: str) -> Operator:
    """Make a wait relaxed, and remove the tcgen05.fence::after_thread_sync after it.

    The manual's examples use that fence to order tcgen05 operations after relaxed waits.
    """

    def changes(text: Text) -> Iterator[Change]:
        for change in relaxed(pattern, form)(text):
            to_come = after(text, text.places[change.instr.line], _is_tensor_access)
            fences = [i.line for i in to_come if i.opcode == "tcgen05.fence::after_thread_sync"]
            yield Change(change.instr, {**change.lines, **dict.fromkeys(fences, "")})

    return changes


_TENSOR_ACCESSES = ("tcgen05.ld", "tcgen05.st", "tcgen05.mma", "tcgen05.cp", "tcgen05.shift")


def _is_tensor_access(instr: Instr) -> bool:
    return instr.opcode.startswith(_TENSOR_ACCESSES)


def replaced(
    pattern: str, old_text: str, new_text: str, *, but: str = "", operands: int = 0
) -> Operator:
    """Another word in the opcode. No mutant where the opcode has the word `but` already, or the
    instruction fewer operands."""

    def new(old: Statement) -> Statement | None:
        if len(old.operands) < operands or (but and but in old.opcode):
            return None
        return old.with_opcode(old_text, new_text)

    return rewrite(pattern, new)


def masked(pattern: str, index: int, mask: int) -> Operator:
    """The mask of a multicast, an operand, has fewer bits."""

    def new(old: Statement) -> str | None:
        multicast = ".multicast" in old.opcode
        return old.computed(index, "and", mask, bits=16) if multicast else None

    return rewrite(pattern, new)


def other_space(pattern: str) -> Operator:
    """A proxy fence is for global memory instead of shared, or the reverse."""

    def new(old: Statement) -> Statement:
        if ".global" in old.opcode:
            return old.with_opcode(".global", ".shared::cta")
        return Statement(old.guard, "fence.proxy.async.global", ())

    return rewrite(pattern, new)


def word_replaced(pattern: str, words: str, new_word: str) -> Operator:
    """Replace the first of some words of the opcode that the regular expression `pattern` finds."""

    def new(old: Statement) -> Statement:
        return replace(
            old, opcode=re.sub(rf"(?<=\.)(?:{words})(?![\w:])", new_word, old.opcode, count=1)
        )

    return rewrite(pattern, new)


def immediate(pattern: str, index: int, by: int) -> Operator:
    """Change a numeric operand; no mutant if it would become negative."""

    def new(old: Statement) -> Statement | None:
        operand = old.operands[index] if index < len(old.operands) else ""
        known = operand.isdigit() and int(operand) + by >= 0
        return old.with_operand(index, str(int(operand) + by)) if known else None

    return rewrite(pattern, new)


def swapped(pattern: str, first: int, second: int) -> Operator:
    """Swap two operands."""

    def new(old: Statement) -> Statement:
        one, other = old.operands[first], old.operands[second]
        return old.with_operand(first, other).with_operand(second, one)

    return rewrite(pattern, new)


def flipped(pattern: str, index: int) -> Operator:
    """An operand that is 0 or 1 is the other one."""
    return rewrite(pattern, lambda old: old.computed(index, "xor", 1))


def astray(pattern: str, index: int, nbytes: int) -> Operator:
    """The mbarrier is another one, so many bytes further on."""
    return rewrite(pattern, lambda old: old.displaced(index, nbytes))
