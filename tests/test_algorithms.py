"""The pages of docs/algorithms name code that exists: files, functions, calls, edges, barriers."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from lab.house.source import ROOT

PAGES = sorted((ROOT / "docs/algorithms").glob("*.md"))
FILE = re.compile(r"`([\w/]+/\w+\.py)`")  # a page lists the files that it names
REFERENCE = re.compile(r"([\w/]+\.py)::([A-Za-z_][\w.]*\w)")
BLOCK = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
CALL = re.compile(r"([A-Za-z_]\w*)\(")
EDGE = re.compile(r"(?<![:.\w])([A-Za-z_]\w*)\.(?:wait|wait_free|acquire|signal|release|meet)\b")
# A row of a table of edges: name, producer -> consumer, payload.
ROW = re.compile(r"^(\w+) +(\w+) +-> (\w+)  ", re.MULTILINE)
QUOTED = re.compile(r'"(\w+)"')
# In pseudo-code: arithmetic, and rounding to a format.
OURS = {"range", "max", "min", "sum", "exp2", "exp", "log2", "ceil", "round", "e4m3", "fp16"}


@cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def names_of(path: str) -> set[str]:
    """Qualified names that a file defines, such as Softmax.run."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
                collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = (name for target in targets for name in ast.walk(target))
                found.update(prefix + n.id for n in names if isinstance(n, ast.Name))

    collect(tree_of(path).body, "")
    return found


@cache
def words_of(path: str) -> tuple[set[str], set[str]]:
    """Identifiers and string constants of a file."""
    words: set[str] = set()
    strings: set[str] = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                words.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                words.add(name)
            case ast.Constant(value=str(text)):
                strings.add(text)
    return words, strings


def mistakes(text: str) -> list[str]:
    """Names on a page that no file of its list has, each with its line."""
    files, found = FILE.findall(text), []
    missing = [path for path in files if not (ROOT / path).is_file()]
    if missing:
        return [f"no file {path}" for path in missing]
    words, strings = (set().union(*(words_of(path)[k] for path in files)) for k in range(2))

    def say(offset: int, what: str) -> None:
        found.append(f"line {text.count(chr(10), 0, offset) + 1}: {what}")

    for match in REFERENCE.finditer(text):
        short, name = match.groups()
        ends = PurePosixPath(short).parts
        paths = {p for p in files if PurePosixPath(p).parts[-len(ends) :] == ends}
        if len(paths) != 1:
            say(match.start(), f"{short} is {len(paths)} of the files that the page lists")
        elif name not in names_of(*paths):
            say(match.start(), f"{short} has no {name}")
    for block in BLOCK.finditer(text):
        for pattern, known, kind in (
            (CALL, words | OURS, "function"),
            (EDGE, strings, "edge or barrier"),
            (ROW, strings, "edge or role"),
            (QUOTED, strings, "name in quotes"),
        ):
            for match in pattern.finditer(block.group(1)):
                for name in match.groups():
                    if name not in known:
                        say(block.start(1) + match.start(), f"no {kind} {name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert REFERENCE.search(text)
    assert not [f"{page.name} {mistake}" for mistake in mistakes(text)]


def test_the_architecture_page_links_every_page() -> None:
    links = re.findall(r"\(algorithms/(\w+\.md)\)", (ROOT / "docs/architecture.md").read_text())
    assert sorted(links) == [page.name for page in PAGES]


def test_a_wrong_name_is_found() -> None:
    code = 'softmacks("s")  plan.py::_edge\nzz.wait\ns    mma -> softmax  S\nk  loader -> mma  K\n'
    text = f"`fmha/sm100/plan.py`\n\n```text\n{code}```\n"
    assert mistakes(text) == [
        "line 4: plan.py has no _edge",
        "line 4: no function softmacks",
        "line 5: no edge or barrier zz",
        "line 7: no edge or role loader",
    ]
