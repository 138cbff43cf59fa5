"""A version of a block as it was generated, in data: another process can make its function, too."""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import CodeType, FunctionType
from typing import Any

from ptxemu.codegen.flow import Flow
from ptxemu.native.frame import Plan
from ptxemu.syntax.tree import Instr

Key = tuple[int, int, frozenset[str], bool]  # block, partial, nonuniform, of the second form?


@dataclass
class Written:
    """file: the name of the source in tracebacks. code: the compiled function. sites: the number of
    the instruction behind each line, -1 for none. steps: the step of its block, the same. flows: of
    the instructions in the second form, by site, all fields but the first two."""

    source: str
    file: str
    code: bytes
    sites: list[int]
    steps: list[int]
    plan: Plan | None = None
    flows: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def function(self, scope: dict[str, Any]) -> FunctionType:
        """scope: what its source refers to."""
        return FunctionType(marshal.loads(self.code), scope)

    def lines(self, sites: Sequence[Instr]) -> list[Instr | None]:
        """The instruction behind each line."""
        return [None if site < 0 else sites[site] for site in self.sites]

    def add_flows(self, flows: dict[int, Flow], sites: Sequence[int]) -> None:
        """Those of the instructions with these numbers."""
        names = [item.name for item in fields(Flow)][2:]
        for site in flows.keys() & set(sites):
            self.flows[site] = tuple(getattr(flows[site], name) for name in names)

    def flows_of(self, sites: Sequence[Instr]) -> dict[int, Flow]:
        """Whole."""
        return {site: Flow(site, sites[site], *rest) for site, rest in self.flows.items()}


def file_of(key: Key) -> str:
    """A name that no other version of the program has."""
    index, partial, nonuniform, follows = key
    words = [str(index), str(partial), "follows" * follows, *sorted(nonuniform)]
    return f"<ptxemu {' '.join(word for word in words if word)}>"


def compiled(source: str, file: str) -> bytes:
    """The code of the only function in a source."""
    module = compile(source, file, "exec", dont_inherit=True)
    return marshal.dumps(next(c for c in module.co_consts if isinstance(c, CodeType)))
