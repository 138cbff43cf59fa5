"""Paths through the statements of a module: what a thread can have executed, or will execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from ptxemu.mutation.text import Text
from ptxemu.syntax.tree import Instr, Not, Reg

Stop = Callable[[Instr], bool]
Known = Mapping[Reg, bool]  # predicates whose values do not change on the way


def successors(text: Text, place: int, known: Known = MappingProxyType({})) -> list[int]:
    """Places that can follow, where predicates have the values that are known; none at the end."""
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
    """Whether an instruction with this guard is executed; None: not known."""
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
    """Instructions on any path to `place`, back to those that `stop`, which are left out."""
    comes_from: dict[int, list[int]] = {}
    for k in range(len(text.body)):
        for follower in successors(text, k, known):
            comes_from.setdefault(follower, []).append(k)
    return _reached(text, place, lambda k: comes_from.get(k, []), stop)


def after(text: Text, place: int, stop: Stop) -> Iterator[Instr]:
    """Instructions on any path from `place` on, up to those that `stop`, which are left out."""
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
