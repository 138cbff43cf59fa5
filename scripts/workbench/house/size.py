"""Rules of size and shape: how long a file or function may be and how many parameters it takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from workbench.house.source import Finding, Function, Source

FILE_LINES = 500
FUNCTION_LINES = 60
KERNEL_LINES = 120  # `run` of a role and `kernel` own all state, so they hold the whole loop
PARAMETERS = 6
PACKAGE_README_LINES = 100


def file_length(source: Source) -> Iterator[Finding]:
    """A file has one duty; past this length it has two."""
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        yield source.finding(f"{lines} lines, the limit is {FILE_LINES}")


def function_length(source: Source) -> Iterator[Finding]:
    """Counted from `def` to the last line, docstring included."""
    for function in source.functions:
        limit = KERNEL_LINES if function.name in {"run", "kernel"} else FUNCTION_LINES
        lines = function.node.end_lineno - function.node.lineno + 1
        if lines > limit:
            yield source.finding(f"{lines} lines, the limit is {limit}", function)


def parameter_count(source: Source) -> Iterator[Finding]:
    """At most six positional parameters; a private function has no excuse for keyword-only ones."""
    for function in source.functions:
        arguments = function.node.args
        positional = len(arguments.posonlyargs) + len(arguments.args) - _takes_self(function)
        private = function.name.startswith("_") and not function.name.startswith("__")
        counted = positional + (len(arguments.kwonlyargs) if private else 0)
        if counted > PARAMETERS:
            yield source.finding(f"{counted} parameters, the limit is {PARAMETERS}", function)


def module_docstring(source: Source) -> Iterator[Finding]:
    """The first line of a file says its one duty."""
    if not ast.get_docstring(source.tree):
        yield source.finding("no module docstring")


def _takes_self(function: Function) -> bool:
    return function.is_method and "staticmethod" not in function.decorators
