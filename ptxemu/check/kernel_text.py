"""What the text of a kernel alone shows to be wrong, before anything runs."""

from __future__ import annotations

from ptxemu.check.findings import Findings
from ptxemu.findings import Finding, place_of
from ptxemu.syntax.tree import Instr

_GROUPS = ("cta_group::1", "cta_group::2")


def check_text(findings: Findings) -> None:
    """All rules on the instructions of a kernel."""
    _one_cta_group(findings)


def _one_cta_group(findings: Findings) -> None:
    """PTX ISA, tcgen05, "CTA Pair": all tcgen05 instructions of a kernel name the same .cta_group.
    ptxas refuses others, those that never run included."""
    first: dict[str, Instr] = {}
    for instr in findings.sites:
        for group in _GROUPS:
            if instr.root == "tcgen05" and group in instr.parts:
                first.setdefault(group, instr)
    if len(first) == len(_GROUPS):
        one, other = sorted(first.values(), key=lambda instr: instr.line)
        findings.report(
            Finding(
                "cta_group",
                f"tcgen05 instructions of a kernel name different CTA groups, line {one.line} the"
                " other one",
                missing="the same .cta_group in all tcgen05 instructions",
                rule="tcgen05, CTA pair",
                **place_of(other),
            )
        )
