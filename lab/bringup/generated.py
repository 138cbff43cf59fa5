"""Programs for forms that no file has: written from the line of the form, one or a few each.

Products of the tensor core are of small numbers, whose sums are exact in any order: what differs is
where an element is or what it means. Shared memory is filled with such elements wherever a
descriptor may point, so that any layout can be asked about, and the emulator says what should come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lab.bringup import products, transfers
from lab.silicon.conformance.case import Case

MAKERS = (transfers.cases, products.cases)


def cases(wanted: Collection[str]) -> Iterator[Case]:
    """Cases of the forms that these files know."""
    for make in MAKERS:
        yield from make(sorted(wanted))
