"""Rules of import: who may import whom, and what must stay importable without the DSL.

ptxemu      imports nothing of ours, and only numpy from elsewhere (host/: also the DSL, lazily;
            the pytest plugin: pytest)
kernelkit <- kvcache <- gqa_lowlatency <- fmha      kernelkit <- moe, q8_0
all families <- blackwell_engines
only kernelkit/call/launch.py imports ptxemu, lazily
config.py, plan.py, choose.py and reference.py never reach cutlass
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

from lab.house.source import PACKAGES, ROOT, Finding, Source, inner_statements

MAY_IMPORT = {
    "ptxemu": set(),
    "cycle_model": {"ptxemu"},
    "kernelkit": set(),
    "kvcache": {"kernelkit"},
    "gqa_lowlatency": {"kernelkit"},
    "fmha": {"kernelkit"},
    "mla": {"kernelkit", "kvcache", "fmha"},
    "moe": {"kernelkit"},
    "q8_0": {"kernelkit"},
    "blackwell_engines": {
        *("kernelkit", "kvcache", "gqa_lowlatency", "fmha", "mla", "moe", "q8_0"),
    },
    "lab": {*PACKAGES},
}
LAUNCHER = PurePosixPath("kernelkit/call/launch.py")
PYTEST_PLUGIN = PurePosixPath("ptxemu/pytest_plugin.py")  # it is pytest that imports it
WITHOUT_DSL = {
    *("config.py", "layout.py", "plan.py", "choose.py", "params.py"),
    *("reference.py", "reference_routing.py"),
    *("formats.py", "quantized.py", "packing.py", "checkpoint.py", "tiles.py"),
    *("records.py", "models.py", "presets.py", "capacity.py", "manager.py", "slot_pool.py"),
}
DSL = {"cutlass", "cuda", "tvm_ffi"}


@dataclass(frozen=True)
class Import:
    """An imported module by its absolute dotted name.

    lazy: whether the import is inside a function.
    typed: whether it is for type checkers only."""

    module: str
    node: ast.stmt
    lazy: bool
    typed: bool = False

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@cache
def imports(source: Source) -> tuple[Import, ...]:
    """Return what a file imports when it runs; `from a import b` counts as `a.b`, which may be a
    module or a name."""
    return tuple(item for item in all_imports(source) if not item.typed)


@cache
def all_imports(source: Source) -> tuple[Import, ...]:
    """Return all imports, including those for type checkers only."""
    return tuple(_walk(source.tree, source.path, lazy=False))


def _walk(
    node: ast.AST, path: PurePosixPath, *, lazy: bool, typed: bool = False
) -> Iterator[Import]:
    for child in inner_statements(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child, lazy, typed) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, path)
            yield from (Import(f"{base}.{alias.name}", child, lazy, typed) for alias in child.names)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            of_types = typed or _is_type_checking(child)
            yield from _walk(child, path, lazy=lazy or inside, typed=of_types)


def _absolute(node: ast.ImportFrom, path: PurePosixPath) -> str:
    """`from ..x import y` in a/b/c.py is about a.x."""
    if not node.level:
        return node.module or ""
    package = path.parts[:-1][: len(path.parts) - node.level]
    return ".".join((*package, *((node.module,) if node.module else ())))


def _is_type_checking(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:` and what stands below it."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def direction(source: Source) -> Iterator[Finding]:
    """Our packages import each other in one direction; tests and scripts may import all."""
    if source.package not in MAY_IMPORT:
        return
    for item in all_imports(source):
        if item.top in {"tests", "scripts"}:
            yield source.finding(f"a package imports {item.module}", item.node)
        if item.top not in PACKAGES or item.top == source.package:
            continue
        if item.top == "ptxemu" and source.path == LAUNCHER:
            if not (item.lazy or item.typed):
                yield source.finding("ptxemu imported outside a function", item.node)
        elif item.top not in MAY_IMPORT[source.package]:
            yield source.finding(f"{source.package} may not import {item.top}", item.node)


def emulator_is_alone(source: Source) -> Iterator[Finding]:
    """ptxemu runs anywhere numpy runs; the DSL and torch enter in ptxemu/host, llvmlite in
    ptxemu/native, inside functions."""
    if source.package != "ptxemu":
        return
    folder = source.path.parts[1]
    for item in imports(source):
        known = item.top in sys.stdlib_module_names or item.top in {"numpy", "ptxemu"}
        known = known or (item.top == "pytest" and source.path == PYTEST_PLUGIN)
        allowed = folder == "host" or (folder == "native" and item.top == "llvmlite")
        if not known and not (allowed and item.lazy):
            yield source.finding(f"ptxemu imports {item.top}", item.node)


def plans_without_dsl(source: Source) -> Iterator[Finding]:
    """A plan is data: it imports without the DSL, directly and through our own modules."""
    if source.path.name in WITHOUT_DSL and source.package in PACKAGES:
        for item in imports(source):
            trail = _trail_to_dsl(item.module)
            if trail:
                yield source.finding("reaches the DSL: " + " -> ".join(trail), item.node)


def _trail_to_dsl(module: str) -> tuple[str, ...]:
    """The chain of import-time imports from `module` to the DSL, empty where there is none.

    The `__init__` of a package on the way does not count: it exports the API, which needs the DSL.
    """
    trails, seen = [(module,)], set()
    while trails:
        trail = trails.pop()
        if trail[-1].partition(".")[0] in DSL:
            return trail
        source = own_source(trail[-1])
        if source and source.path not in seen:
            seen.add(source.path)
            trails += [(*trail, item.module) for item in imports(source) if not item.lazy]
    return ()


@cache
def own_source(module: str) -> Source | None:
    """The file of `a.b` or, where `b` is a name in it, of `a`; None for what is not ours."""
    parts = module.split(".")
    if parts[0] not in MAY_IMPORT:
        return None
    for name in (parts, parts[:-1]):
        path = PurePosixPath(*name).with_suffix(".py") if name else None
        if path and (ROOT / path).is_file():
            return Source(path, (ROOT / path).read_text(encoding="utf-8"))
    return None
