"""The attention kernels whose mutants are judged, each with a problem that uses all its edges: more
tiles than ring stages, maxima that move, boundary tiles, NaN past the lengths."""

from __future__ import annotations

from functools import partial
from typing import Any

from fmha.api import attention
from workbench.mutation.subject import Results, Subject
from workbench.problems.attention import Case

MOVING = {"causal": True, "amplitude": 4.0}  # maxima move from tile to tile
TAIL = {"kv_lens": (650,), **MOVING}


def _problem(queries: int, keys: int, **options: Any) -> Subject:
    case = Case(queries, keys, **options)
    return Subject(lambda: attention(*case.inputs(), **case.arguments()))


def _dependent() -> Results:
    """A launch that reads what the one before it writes."""
    case = Case(130, 130, schedule="base", pdl=True)
    before, _ = attention(*case.inputs(), **case.arguments())
    return attention(before, before, before, **case.arguments())


def _of_head_dim(dim: int) -> dict[str, Subject]:
    """Both schedules on both P paths."""
    base = partial(_problem, 130, 700, dims=(dim, dim), schedule="base", **TAIL)
    pingpong = partial(_problem, 260, 700, dims=(dim, dim), schedule="pingpong", **TAIL)
    return {
        f"{dim} {schedule} {path}": make(p_path=path)
        for schedule, make in (("base", base), ("pingpong", pingpong))
        for path in ("tmem", "smem")
    }


SUBJECTS: dict[str, Subject] = {
    **_of_head_dim(64),
    **_of_head_dim(128),
    "512 pair": _problem(130, 520, dims=(512, 512), kv_lens=(500,), **MOVING),
    # No lengths: the fence of zeroed V rows would stand in for that of the gathered Q. A window,
    # for more than one masked tile.
    "64 packed heads": _problem(
        50, 1000, heads=(6, 2), window=(700, None), pack_heads=True, schedule="base", **MOVING
    ),
    "64 dependent launch": Subject(_dependent, "depend"),
}
