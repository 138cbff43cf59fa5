"""Whether loaded modules still are what their files say, or something was patched at run time.

A cache keyed by files must not serve, nor keep, a kernel that is traced from patched functions or
constants. Compared are functions and methods (by their code), imported names (with
the module that they come from) and constants of modules and classes (with what their expressions
give). What this cannot see: patches of other packages, and of objects that calls have made.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kernelkit.compile.sources import closure, path_of

_PLAIN = (bool, int, float, str, bytes, type(None))
_HARMLESS_CALLS = {"frozenset", "set", "tuple", "dict", "list", "range", "max", "min", "len", "sum"}
_STANDARD_LIBRARY = Path(ast.__file__).parent
_GENERATED = "<string>"  # where the methods that a dataclass makes come from


def patched(module: str) -> list[str]:
    """'module.name' of everything in `closure(module)` that is loaded and is not what its file
    says; empty where a fingerprint of the files can be trusted."""
    loaded = [(name, sys.modules[name]) for name in closure(module) if name in sys.modules]
    return [f"{name}.{found}" for name, live in loaded for found in _Comparison(live).differences()]


class _Comparison:
    """Comparison of a module with its file."""

    def __init__(self, live: ModuleType) -> None:
        self.live = live
        self.path = str(path_of(live.__name__))
        self.tree, self.codes = _parsed(live.__name__)

    def differences(self) -> Iterator[str]:
        """Names of what differs."""
        yield from self._of_body(self.tree.body, vars(self.live), dict(vars(self.live)))

    def _of_body(
        self, body: Iterable[ast.stmt], space: dict[str, Any], known: dict[str, Any]
    ) -> Iterator[str]:
        """Yield names of statements that differ.

        Args:
            body: statements of the file
            space: the live names
            known: the live names, updated with the expected values of constants
        """
        for statement in body:
            if isinstance(statement, ast.FunctionDef):
                if not self._same_function(space.get(statement.name), statement.name):
                    yield statement.name
            elif isinstance(statement, ast.ClassDef):
                yield from self._of_class(statement, space, known)
            elif isinstance(statement, ast.ImportFrom):
                yield from _moved_imports(statement, space)
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                yield from _changed_constants(statement, space, known)

    def _of_class(
        self, statement: ast.ClassDef, space: dict[str, Any], known: dict[str, Any]
    ) -> Iterator[str]:
        live = space.get(statement.name)
        if not isinstance(live, type) or live.__module__ != self.live.__name__:
            if live is None or not statement.decorator_list:  # a decorator may return anything
                yield statement.name
            return
        for found in self._of_body(statement.body, dict(vars(live)), {**known, **vars(live)}):
            yield f"{statement.name}.{found}"
        written = {item.name for item in statement.body if isinstance(item, ast.FunctionDef)}
        for name, value in vars(live).items():
            function = _function_of(value)
            if function is not None and name not in written and not self._generated(function):
                yield f"{statement.name}.{name}"

    def _generated(self, function: FunctionType) -> bool:
        """A method that no one wrote: of a dataclass, a NamedTuple, an Enum."""
        origin = function.__code__.co_filename
        return (
            origin in (_GENERATED, self.path)
            or not origin.endswith(".py")
            or (Path(origin).is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in origin)
        )

    def _same_function(self, value: Any, name: str) -> bool:
        function = _function_of(value)
        if function is None:
            return False
        # The DSL rewrites what it traces in place, and keeps what was there.
        code = getattr(function, "_original_code", function.__code__)
        # A copy of the module has the same code, and calls what else was changed in the copy.
        own = function.__globals__ is vars(self.live)
        return own and code.co_name == name and code in self.codes


def _function_of(value: Any) -> FunctionType | None:
    """The function behind decorators, properties and the like."""
    for name in ("__func__", "fget", "func"):
        value = getattr(value, name, value)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def _moved_imports(statement: ast.ImportFrom, space: dict[str, Any]) -> Iterator[str]:
    origin = sys.modules.get(statement.module or "")
    for alias in statement.names:
        bound = alias.asname or alias.name
        missing = object()
        source = getattr(origin, alias.name, missing)
        if bound in space and source is not missing and space[bound] is not source:
            yield bound


def _changed_constants(
    statement: ast.Assign | ast.AnnAssign, space: dict[str, Any], known: dict[str, Any]
) -> Iterator[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if len(targets) != 1 or not _is_harmless(statement.value):
        return
    (target,) = targets
    names = [item.id for item in ast.walk(target) if isinstance(item, ast.Name)]
    if not all(name in space and _is_plain(space[name]) for name in names):
        return
    code = compile(ast.Expression(statement.value), "<constant>", "eval")
    try:
        value = eval(code, {**known})
    except Exception:  # noqa: BLE001  (an expression that only its own module can evaluate)
        return
    if isinstance(target, ast.Tuple) and len(names) != len(value):
        return
    values = value if isinstance(target, ast.Tuple) else (value,)
    for name, expected in zip(names, values, strict=True):
        known[name] = expected
        if type(space[name]) is not type(expected) or space[name] != expected:
            yield name


def _is_harmless(expression: ast.expr) -> bool:
    """Whether the expression calls only functions that just compute."""
    calls = [item.func for item in ast.walk(expression) if isinstance(item, ast.Call)]
    return all(
        (isinstance(called, ast.Name) and called.id in _HARMLESS_CALLS)
        or (
            isinstance(called, ast.Attribute)
            and isinstance(called.value, ast.Name)
            and called.value.id == "math"
        )
        for called in calls
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return isinstance(value, _PLAIN)


@cache
def _parsed(module: str) -> tuple[ast.Module, frozenset[CodeType]]:
    """(the syntax tree of a module's file, the code of every function in it)."""
    path = path_of(module)
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    code = compile(tree, str(path), "exec", dont_inherit=True)
    return tree, frozenset(_all_codes(code))


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _all_codes(constant)
