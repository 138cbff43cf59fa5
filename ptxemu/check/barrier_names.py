"""Names of mbarriers in reports.

A name comes from the options, else from the Python code that initialises the barrier, else from its
symbol.

    cute.arch.mbarrier_init(storage.full.data_ptr() + stage, 1)              -> full[1]
    PipelineTmaUmma.create(barrier_storage=storage.ab.data_ptr(), ...)       -> ab[1] empty

Sources are read only when there is something to report.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from ptxemu.codegen.program import Layout
from ptxemu.findings import Access, Finding
from ptxemu.syntax.tree import Instr

Given = Mapping[int | str, str]  # `Options.names`
_STORAGE = "barrier_storage"  # the argument of the DSL's pipelines: full barriers, then empty ones
_INITIALISERS = ("mbarrier_init", "MbarrierArray")
_ACCESSORS = {"data_ptr", "iterator", "ptr", "get_tensor", "align", "toint", "ir_value"}
_DYNAMIC = "__dynamic_shmem"  # all that the DSL allocates: the name says nothing
_MBARRIER = re.compile(r"\bmbarrier (0x[0-9a-f]+)")


class BarrierNames:
    """inits: shared address of each mbarrier -> its mbarrier.init."""

    def __init__(self, given: Given | None, layout: Layout, inits: Mapping[int, Instr]) -> None:
        self._given = given or {}
        self._symbols = sorted(
            (offset, name)
            for name, (space, offset) in layout.symbols.items()
            if space == "shared" and not name.startswith(_DYNAMIC)
        )
        self._of_source = dict(_from_source(inits))

    def of(self, offset: int) -> str:
        """Return a name such as "mbarrier full[1] (0x408)", or "mbarrier 0x408" if it has none."""
        symbol = ""
        for start, text in self._symbols:
            if start <= offset:
                symbol = text if start == offset else f"{text}+{offset - start}"
        given = self._given.get(offset) or self._given.get(symbol)
        told = given or self._of_source.get(offset) or symbol
        return f"mbarrier {told} ({offset:#x})" if told else f"mbarrier {offset:#x}"

    def within(self, finding: Finding) -> Finding:
        """The finding with these names in place of addresses."""
        accesses = tuple(
            access if "mbarrier" not in access.agent else self._access(access)
            for access in finding.accesses
        )
        message, why = self.text(finding.message), self.text(finding.why)
        return replace(finding, message=message, why=why, accesses=accesses)

    def _access(self, access: Access) -> Access:
        return replace(access, agent=self.text(access.agent))

    def text(self, text: str) -> str:
        return _MBARRIER.sub(lambda found: self.of(int(found[1], 16)), text)


def _from_source(inits: Mapping[int, Instr]) -> Iterator[tuple[int, str]]:
    """(address, name) of each that the source names; an index where a name has several."""
    same: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for offset, instr in inits.items():
        named = _name_of(instr)
        if named:
            same[named].append(offset)
    for (name, is_pair), offsets in same.items():
        stages = len(offsets) // 2
        for place, offset in enumerate(sorted(offsets)):
            if is_pair and stages and len(offsets) % 2 == 0:
                index = f"[{place % stages}]" * (stages > 1)
                yield offset, f"{name}{index} {'empty' if place >= stages else 'full'}"
            else:
                yield offset, name + f"[{place}]" * (len(offsets) > 1)


def _name_of(instr: Instr) -> tuple[str, bool] | None:
    """Return the name from the innermost Python line that calls something with a barrier.

    The second value tells whether that call makes full and empty barriers.
    """
    for frame in instr.location.frames() if instr.location else ():
        path, _, line = frame.rpartition(":")
        for call in _calls(path).get(int(line), ()):
            function = ast.unparse(call.func)
            storage = next((k.value for k in call.keywords if k.arg == _STORAGE), None)
            if storage is None and function.endswith(_INITIALISERS):
                storage = call.args[0] if call.args else call.keywords[0].value
            if storage is not None and _word(storage):
                return _word(storage), function.endswith(".create") and "Order" not in function
    return None


@lru_cache(maxsize=64)
def _calls(path: str) -> dict[int, list[ast.Call]]:
    """The calls of a file by each line of theirs, the innermost first; {} of what cannot be
    read."""
    found: dict[int, list[ast.Call]] = defaultdict(list)
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return found
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda c: (c.end_lineno or c.lineno) - c.lineno):
        for line in range(call.lineno, (call.end_lineno or call.lineno) + 1):
            found[line].append(call)
    return found


def _word(node: ast.expr) -> str:
    """Return the name in a pointer expression.

    It is `full` for `storage.full.data_ptr() + stage`, and `bars+EMPTY` for `bars + EMPTY + stage`,
    where a constant shows the barrier's purpose.
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return _word(node.value) if node.attr in _ACCESSORS else node.attr
    if isinstance(node, ast.Call):
        return _word(node.func)
    if isinstance(node, ast.Subscript):
        return _word(node.value)
    if not isinstance(node, ast.BinOp):
        return ""
    base, more = _word(node.left), node.right
    is_place = isinstance(more, ast.Attribute) or (isinstance(more, ast.Name) and more.id.isupper())
    return f"{base}+{_word(more)}" if base and is_place else base
