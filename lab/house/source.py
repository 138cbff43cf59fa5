"""Input and output of a rule: a parsed file, a finding, and the walk over the functions."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("ptxemu", "cycle_model", "kernelkit", "kvcache", "gqa_lowlatency", "fmha", "mla", "moe"),
    *("q8_0", "blackwell_engines"),
)
APART = ("ptxemu",)  # packages that are distributions of their own
OLD_NAMES = ("integrations",)  # installed for one release; they warn, and have no modules

LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")  # of a Markdown page to a file

_GENERATED = re.compile(r"\..*|out|build|__pycache__|.*\.egg-info")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """A broken rule. `subject` is the file or `file::Class.function`; exceptions use it as key."""

    subject: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.subject} (line {self.line}): {self.message}"


@dataclass(frozen=True)
class Function:
    """A function or method with its dotted name in the file and the function around it."""

    node: FunctionNode
    qualname: str
    is_method: bool
    inside: Function | None

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def lines(self) -> int:
        """Number of lines from `def` to the last one, docstring included."""
        return self.node.end_lineno - self.node.lineno + 1

    @property
    def decorators(self) -> set[str]:
        """Dotted names: `@cute.jit` and `@cute.jit(...)` are both 'cute.jit'."""
        nodes = (d.func if isinstance(d, ast.Call) else d for d in self.node.decorator_list)
        return {ast.unparse(node) for node in nodes}

    @property
    def is_device(self) -> bool:
        """Whether the DSL traces it."""
        return bool(self.decorators & {"cute.jit", "cute.kernel"})


@dataclass(frozen=True)
class Source:
    """A Python file: its path relative to the repository and its text."""

    path: PurePosixPath
    text: str

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @property
    def package(self) -> str:
        """The top-level folder, which is the package's name ('' for a file in the root)."""
        return self.path.parts[0] if len(self.path.parts) > 1 else ""

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        return tuple(_functions(self.tree))

    def finding(self, message: str, at: ast.AST | Function | None = None) -> Finding:
        """A finding about the file, a node of it, or a function of it."""
        if isinstance(at, Function):
            return Finding(f"{self.path}::{at.qualname}", at.node.lineno, message)
        return Finding(str(self.path), getattr(at, "lineno", 1), message)


def inner_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Children of a node that may hold a definition or an import: no expression does, and those are
    nine tenths of a tree."""
    return (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def _functions(
    node: ast.AST, prefix: str = "", is_method: bool = False, inside: Function | None = None
) -> Iterator[Function]:
    for child in inner_statements(node):
        if isinstance(child, FunctionNode):
            function = Function(child, prefix + child.name, is_method, inside)
            yield function
            yield from _functions(child, f"{function.qualname}.", inside=function)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", is_method=True, inside=inside)
        else:
            yield from _functions(child, prefix, is_method, inside)


def files(*suffixes: str) -> list[PurePosixPath]:
    """Every file of the repository with one of the suffixes that git does not ignore, sorted.

    Where there is no git (an unpacked archive), every file outside hidden and generated folders
    (.ci, the one hidden folder that is ours, then goes unseen).
    """
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        names = [PurePosixPath(name) for name in listing.stdout.split("\0") if name]
    else:
        names = [PurePosixPath(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
        names = [n for n in names if not any(_GENERATED.fullmatch(part) for part in n.parts)]
    return sorted(n for n in names if n.suffix in suffixes and (ROOT / n).is_file())


def sources() -> list[Source]:
    """Every Python file of the repository."""
    return [Source(path, (ROOT / path).read_text(encoding="utf-8")) for path in files(".py")]
