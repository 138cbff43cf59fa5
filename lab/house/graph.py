"""Graph of imports between files: cycles, and upward edges.

Every import of a package or of lab/ counts, also one inside a function or for type checkers alone.
A folder imports what its files do, so that a package has an order, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

from lab.house.imports import LAUNCHER, MAY_IMPORT, all_imports, own_source
from lab.house.source import Source, sources

Arrows = Mapping[Hashable, set]


@dataclass(frozen=True)
class House:
    """Files of our packages and of lab/, and what each imports of these."""

    files: dict[PurePosixPath, set[PurePosixPath]]

    @cached_property
    def folders(self) -> dict[PurePosixPath, set[PurePosixPath]]:
        """Return the same graph for folders. Imports from and of an `__init__` do not count, as
        it only re-exports. A file next to folders is a node itself."""
        found: dict[PurePosixPath, set[PurePosixPath]] = {}
        for file, targets in self.files.items():
            if file.name == "__init__.py":
                continue
            for target in targets:
                if target.name == "__init__.py":
                    continue
                here, there = _apart(file, target)
                if {here, there} != {file, target}:  # else `files` has the arrow
                    found.setdefault(here, set()).add(there)
        return found

    @cached_property
    def packages(self) -> dict[str, set[str]]:
        """Arrows between packages."""
        found: dict[str, set[str]] = {package: set() for package in MAY_IMPORT}
        for file, targets in self.files.items():
            for target in targets:
                if target.parts[0] != file.parts[0] and file != LAUNCHER:
                    found[file.parts[0]].add(target.parts[0])
        return found

    def circles(self) -> list[list[str]]:
        """A ring of files and one of folders that import each other, where there are any."""
        return [found for found in (ring(self.files), ring(self.folders)) if found]

    def upwards(self) -> list[tuple[str, str]]:
        """Arrows that MAY_IMPORT does not allow."""
        return [
            (package, target)
            for package, targets in self.packages.items()
            for target in sorted(targets - MAY_IMPORT[package])
        ]


def house(of: Iterable[Source] | None = None) -> House:
    """The graph of this repository, or of given sources."""
    found: dict[PurePosixPath, set[PurePosixPath]] = {}
    for source in sources() if of is None else of:
        if source.package not in MAY_IMPORT:
            continue
        targets = (own_source(item.module) for item in all_imports(source))
        found[source.path] = {target.path for target in targets if target} - {source.path}
    return House(found)


def ring(arrows: Arrows) -> list[str]:
    """Nodes of which each leads to the next, and the last to the first; nothing without one."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return sorted({str(node) for node in error.args[1]})
    return []


def layers(arrows: Arrows) -> list[list]:
    """Nodes by how far they stand above those that import nothing; there are no circles."""
    sorter, rows = TopologicalSorter(arrows), []
    sorter.prepare()
    while sorter.is_active():
        rows.append(sorted(sorter.get_ready(), key=str))
        sorter.done(*rows[-1])
    return rows


def _apart(file: PurePosixPath, target: PurePosixPath) -> tuple[PurePosixPath, PurePosixPath]:
    """The two, cut where they part."""
    depth = 0
    for one, other in zip(file.parts, target.parts, strict=False):
        if one != other:
            break
        depth += 1
    return PurePosixPath(*file.parts[: depth + 1]), PurePosixPath(*target.parts[: depth + 1])
