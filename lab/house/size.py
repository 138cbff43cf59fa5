"""Rules of size and shape: how long a file or function may be and how many parameters it takes."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from lab.house.source import Finding, Function, Source

FILE_LINES = 800
FUNCTION_LINES = 60
KERNEL_LINES = 120  # `run` of a role and `kernel` own all state, so they hold the whole loop
PARAMETERS = 8
MEMBERS = 2  # of a tuple that a device function takes; more are a struct without names
PACKAGE_README_LINES = 160
MARKDOWN_COLUMNS = 120


def file_length(source: Source) -> Iterator[Finding]:
    """A file has one duty; past this length it has two."""
    if source.lines > FILE_LINES:
        yield source.finding(f"{source.lines} lines, the limit is {FILE_LINES}")


def function_length(source: Source) -> Iterator[Finding]:
    """Counted from `def` to the last line, docstring included."""
    for function in source.functions:
        whole = function.is_device and function.name in {"run", "kernel"}
        limit = KERNEL_LINES if whole else FUNCTION_LINES
        if function.lines > limit:
            yield source.finding(f"{function.lines} lines, the limit is {limit}", function)


def parameter_count(source: Source) -> Iterator[Finding]:
    """At most eight positional parameters; a private or a device function has no others by
    keyword."""
    for function in source.functions:
        arguments = function.node.args
        positional = len(arguments.posonlyargs) + len(arguments.args) - _takes_self(function)
        private = function.name.startswith("_") and not function.name.startswith("__")
        counted = positional + len(arguments.kwonlyargs) * (private or function.is_device)
        if counted > PARAMETERS:
            yield source.finding(f"{counted} parameters, the limit is {PARAMETERS}", function)


def jit_signature(source: Source) -> Iterator[Finding]:
    """A device function takes bundles of parameters by name: no bare `tuple`, none of more than two
    members; `tuple[X, ...]` is a list of one kind."""
    for function in source.functions:
        if not function.is_device:
            continue
        arguments = function.node.args
        for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if any(size > MEMBERS for size in _tuple_sizes(parameter.annotation)):
                text = f"{parameter.arg}: {ast.unparse(parameter.annotation)}"
                yield source.finding(f"{text}: take a frozen dataclass, or each alone", function)
        if math.inf in _tuple_sizes(function.node.returns):
            yield source.finding("returns a bare tuple: say of what", function)


def module_docstring(source: Source) -> Iterator[Finding]:
    """The first line of a file says its one duty."""
    if not ast.get_docstring(source.tree):
        yield source.finding("no module docstring")


def _takes_self(function: Function) -> bool:
    return function.is_method and "staticmethod" not in function.decorators


def _tuple_sizes(annotation: ast.expr | None) -> Iterator[float]:
    """Members of the tuples in an annotation: 1 of `tuple[X, ...]`, infinity of a bare one."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "tuple":
        inner = annotation.slice
        members = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        is_list = ast.unparse(members[-1]) == "..."
        yield 1 if is_list else len(members)
        for member in members:
            yield from _tuple_sizes(member)
    elif isinstance(annotation, ast.Name):
        if annotation.id == "tuple":
            yield math.inf
    elif annotation is not None:
        for child in ast.iter_child_nodes(annotation):
            yield from _tuple_sizes(child)
