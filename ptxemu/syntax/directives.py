"""The directives between the parameters and the body of an entry: PTX ISA, "Performance-Tuning
Directives", "Cluster Dimension Directives". What they mean for a launch is in
`ptxemu.machine.shape`.
"""

from __future__ import annotations

import re

from ptxemu.errors import PtxEmuError, PtxSyntaxError, UnsupportedPtx
from ptxemu.syntax.tree import Entry

_CLUSTERS = {".explicitcluster", ".reqnctapercluster", ".maxclusterrank", ".blocksareclusters"}
TUNING = {".maxntid", ".reqntid", ".minnctapersm", ".maxnreg", ".noreturn", *_CLUSTERS}
_WITHOUT_CLUSTERS = re.compile(r"sm_[1-8]\d(?!\d)")
_CONFLICTS = (("maxntid", "reqntid"), ("maxclusterrank", "reqnctapercluster"))


def added(entry: Entry, word: str, values: tuple[int, ...]) -> PtxEmuError | None:
    """Add a directive to an entry, or return why ptxas would not assemble it, or it is not
    emulated."""
    if word in _CLUSTERS and _WITHOUT_CLUSTERS.match(entry.target):
        return UnsupportedPtx(f"{word} needs sm_90, and the module is of .target {entry.target}")
    if word == ".blocksareclusters":
        return UnsupportedPtx(
            f"{word}: the grid of a launch counts clusters, which is not emulated; take the "
            "directive out, and launch clusters times CTAs of a cluster"
        )
    if word in (".reqntid", ".reqnctapercluster", ".maxclusterrank") and min(values, default=0) < 1:
        return PtxSyntaxError(f"{word} {', '.join(map(str, values))}: every value must be >= 1")
    entry.directives[word.lstrip(".")] = values
    for one, other in _CONFLICTS:
        if {one, other} <= entry.directives.keys():
            return PtxSyntaxError(f".{one} and .{other} cannot both be given")
    return None
