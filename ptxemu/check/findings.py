"""What a checker has to say, each thing once however many CTAs, warps and turns show it."""

from __future__ import annotations

from typing import Any

from ptxemu.report import Finding, place_of
from ptxemu.syntax.tree import Instr


class Findings:
    """Of one launch. sites: its instructions, by the numbers that `Warp.at` has."""

    def __init__(self, sites: list[Instr], found: list[Finding]) -> None:
        self.sites = sites
        self._found = found
        self._known: set[tuple[object, ...]] = set()

    def new(self, *key: object) -> bool:
        """Whether this is the first time."""
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def report(self, finding: Finding) -> None:
        """Add a finding, but for one that says the same."""
        if finding not in self._found:
            self._found.append(finding)

    def at(self, check: str, message: str, site: int, **more: Any) -> None:
        """Report something of an instruction; of site 0, which stands for none, by its words."""
        if self.new(check, site, message if not site else ""):
            self.report(Finding(check, message, **place_of(self.sites[site]), **more))
