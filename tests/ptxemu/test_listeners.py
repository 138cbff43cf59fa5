"""ptxemu.machine.listener: every event that is announced is one that listeners have.

What announces them stands below the class, so no type checker compares the two.
"""

from __future__ import annotations

import ast
import inspect

from lab.house.source import ROOT
from ptxemu.machine.listener import Listener

EVENTS = {n: inspect.signature(f) for n, f in vars(Listener).items() if inspect.isfunction(f)}


def announced() -> list[tuple[str, ast.Call]]:
    """(event, call) of `for each in ...listeners: each.event(...)`."""
    found = []
    for path in sorted((ROOT / "ptxemu").rglob("*.py")):
        for loop in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
                continue
            if not ast.unparse(loop.iter).endswith("listeners"):
                continue
            for call in ast.walk(loop):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    if ast.unparse(call.func.value) == loop.target.id:
                        found.append((call.func.attr, call))
    return found


def test_events_that_are_announced_are_known():
    calls = announced()
    assert len({event for event, _ in calls}) > 20
    for event, call in calls:
        starred = any(isinstance(given, ast.Starred) for given in call.args)
        bind = EVENTS[event].bind_partial if starred else EVENTS[event].bind
        bind(None, *call.args, **{word.arg: None for word in call.keywords})
