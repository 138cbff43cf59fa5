"""The attention kernels whose mutants are judged, each with a problem that uses all its edges: more
tiles than ring stages, maxima that move, boundary tiles, NaN past the lengths."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

from fmha.api import attention
from workbench.mutation.subject import Results, Subject
from workbench.problems.attention import Case

# CTAs, or pairs: each computes several blocks, of five tiles, which no ring divides: else the wait
# for Q would stand in for others.
PLACES = 2
MOVING = {"causal": True, "amplitude": 4.0}  # maxima move from tile to tile
TAIL = {"kv_lens": (550,), **MOVING}


def _problem(queries: int, keys: int, **options: Any) -> Subject:
    case = Case(queries, keys, **options)
    inputs = functools.cache(case.inputs)  # not yet

    def launched() -> Results:
        with (
            mock.patch("fmha.launch.sms_of", return_value=PLACES),
            mock.patch("fmha.launch.clusters_at_once", return_value=PLACES),
        ):
            return attention(*inputs(), **case.arguments())

    return Subject(launched)


def _dependent() -> Results:
    """A launch that reads what the one before it writes."""
    case = Case(130, 130, schedule="base", pdl=True)
    before, _ = attention(*case.inputs(), **case.arguments())
    return attention(before, before, before, **case.arguments())


SUBJECTS: dict[str, Subject] = {
    "64 base": _problem(130, 600, heads=(3, 1), schedule="base", **TAIL),
    "64 pingpong": _problem(260, 600, heads=(3, 1), schedule="pingpong", **TAIL),
    "128 pingpong": _problem(260, 600, heads=(2, 1), dims=(128, 128), schedule="pingpong", **TAIL),
    "256 pair": _problem(260, 600, heads=(2, 1), dims=(256, 256), **TAIL),
    "512 pair": _problem(130, 600, heads=(2, 1), dims=(512, 512), **TAIL),
    # No lengths: the fence of zeroed V rows would stand in for that of the rows of Q that are left
    # over. A window, for more than one masked tile, and a walk that does not begin at key 0.
    "64 shared tiles": _problem(
        90, 600, heads=(6, 2), window=(300, None), pack_heads=True, schedule="base", **MOVING
    ),
    "64 dependent launch": Subject(_dependent, "depend"),
}
