"""Rules of CuTe DSL 4.8.1: what its compiler accepts and then compiles into something else.

Each was found by compiling: a helper that advances pipeline state which it does not return, and a
context manager that advances on exit, leave the state of the loop around them where it was.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lab.house.imports import imports
from lab.house.source import Finding, Function, Source

OWNERS = {"run", "kernel"}  # the functions whose locals hold the pipeline state
ADVANCING = {"advance", "acquire_and_advance", "wait_and_advance", "reverse"}

TRACED = {"cute.struct", "cute.jit", "cute.kernel"}  # decorators

INSTEAD = {
    "typing.NamedTuple": "a frozen dataclass (the DSL flattens tuples, pipelines in them break)",
    "cutlass.utils.SmemAllocator": "cutlass.memory.SmemAllocator (the old one is deprecated)",
}


def advanced_state_returns(source: Source) -> Iterator[Finding]:
    """A step that advances a parameter must return it, so that its caller can rebind it."""
    if not _imports_dsl(source):
        return
    for function in source.functions:
        if function.name in OWNERS:
            continue
        returned = _returned_names(function)
        for name in sorted(_advanced_parameters(function) - returned):
            yield source.finding(f"advances its parameter `{name}` without returning it", function)


def no_advance_on_exit(source: Source) -> Iterator[Finding]:
    """A `with` block that advances when it ends compiles and never advances."""
    for function in source.functions:
        if function.name == "__exit__" and _advances(function.node):
            yield source.finding("advances pipeline state in __exit__", function)


def no_nested_roles(source: Source) -> Iterator[Finding]:
    """Roles are classes: a function inside a device function cannot close over its state."""
    for function in source.functions:
        outer = function.inside
        if outer is not None and outer.is_device:
            yield source.finding(f"nested inside the device function {outer.name}", function)


def no_future_annotations(source: Source) -> Iterator[Finding]:
    """The DSL reads annotations as objects; postponed ones are strings."""
    if not any(name in source.text for name in TRACED):
        return
    postponed = [
        node
        for node in source.tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    if not postponed:
        return
    decorators = {
        ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for decorator in node.decorator_list
    }
    if decorators & TRACED:
        yield source.finding("postponed annotations in a file that the DSL traces", postponed[0])


def no_traps_imported(source: Source) -> Iterator[Finding]:
    """Names that a device file had better not use, each with what stands in for it."""
    if not _imports_dsl(source):
        return
    for item in imports(source):
        if item.module in INSTEAD:
            yield source.finding(f"{item.module}: use {INSTEAD[item.module]}", item.node)


def _imports_dsl(source: Source) -> bool:
    """Whether the file imports cutlass at all: elsewhere, advance() is some other method."""
    return any(item.top == "cutlass" and not item.lazy for item in imports(source))


def _advances(node: ast.AST) -> list[ast.expr]:
    """The objects on which a method that advances state is called."""
    return [
        call.func.value
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ADVANCING
    ]


def _advanced_parameters(function: Function) -> set[str]:
    """Parameters at the root of an advanced object: `stage` in `stage.kv.advance()`."""
    arguments = function.node.args
    parameters = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    roots = set()
    for target in _advances(function.node):
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            roots.add(target.id)
    return roots & parameters


def _returned_names(function: Function) -> set[str]:
    return {
        name.id
        for node in ast.walk(function.node)
        if isinstance(node, ast.Return) and node.value is not None
        for name in ast.walk(node.value)
        if isinstance(name, ast.Name)
    }
