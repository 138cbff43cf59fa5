"""The attention kernels whose mutants are judged, each with a problem that uses all its edges: more
tiles than ring stages, maxima that move, boundary tiles, NaN past the lengths."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

from fmha.api import attention
from lab.mutation.subject import Results, Subject
from lab.problems.attention import Case

# CTAs, or pairs: each computes several blocks, of five tiles, which no ring divides: else the wait
# for Q would stand in for others.
PLACES = 2
MOVING = {"causal": True, "amplitude": 4.0}  # maxima move from tile to tile
TAIL = {"kv_lens": (550,), **MOVING}
HOPPER = {"batch": 2, "kv_lens": (270, 20), "causal": True}  # many tiles, and one
SHARED = {"tile_n": 64, "k_stages": 0, "v_stages": 0}  # the only ones that fit


def _problem(
    queries: int, keys: int, arch: str = "sm_100a", places: int = PLACES, **options: Any
) -> Subject:
    """places: CTAs, or pairs, that run at the same time."""
    case = Case(queries, keys, **options)
    inputs = functools.cache(case.inputs)  # not yet

    def launched() -> Results:
        with (
            mock.patch("fmha.launch.sms_of", return_value=places),
            mock.patch("fmha.launch.clusters_at_once", return_value=places),
        ):
            return attention(*inputs(), arch=arch, **case.arguments())

    return Subject(launched)


def _dependent(arch: str) -> Results:
    """A launch that reads what the one before it writes."""
    case = Case(130, 130, schedule="base", pdl=True)
    before, _ = attention(*case.inputs(), arch=arch, **case.arguments())
    return attention(before, before, before, arch=arch, **case.arguments())


def _hopper(queries: int, keys: int, **options: Any) -> Subject:
    """With key tiles as narrow as there are, which have fewest instructions, rings so short that
    they come round, and so many blocks of a CTA that a wrong count of arrivals shows."""
    short = {"tile_n": 32, "k_stages": 2, "v_stages": 2, "amplitude": 4.0, "places": 1}
    return _problem(queries, keys, "sm_90a", **{**short, **options})


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
    "64 dependent launch": Subject(lambda: _dependent("sm_100a"), "depend"),
    # Three query tiles that take turns; O has its own place.
    "sm_90a 64 turns": _hopper(200, 300, heads=(3, 1), schedule="pingpong", **HOPPER),
    # Without turns; the first query tile skips more key tiles than a ring has stages.
    "sm_90a 128 base": _hopper(
        200,
        300,
        heads=(2, 1),
        dims=(128, 128),
        schedule="base",
        tile_m=192,
        pack_heads=False,
        **HOPPER,
    ),
    "sm_90a 128 one warpgroup": _hopper(
        130, 300, heads=(2, 1), dims=(128, 128), tile_m=64, **HOPPER
    ),
    "sm_90a 128 turns, multicast": _hopper(
        260, 300, heads=(3, 1), dims=(128, 128), ctas=2, **HOPPER
    ),
    # O takes the place of Q.
    "sm_90a 256 base": _hopper(140, 300, heads=(3, 1), dims=(256, 256), **HOPPER),
    "sm_90a 256 multicast": _hopper(260, 300, heads=(3, 1), dims=(256, 256), ctas=2, **HOPPER),
    # Two warpgroups share a query tile, and P.
    "sm_90a 512": _hopper(130, 300, heads=(2, 1), dims=(512, 512), **SHARED, **HOPPER),
    "sm_90a 512 latent": _hopper(
        130, 300, heads=(2, 1), dims=(512, 512), k_is_v=True, **SHARED, **HOPPER
    ),
    "sm_90a 512 multicast": _hopper(
        130, 300, heads=(3, 1), dims=(512, 512), ctas=2, **SHARED, **HOPPER
    ),
    # V is turned from one ring to another, Q becomes two terms.
    "sm_90a 64 e4m3": _hopper(
        140, 300, heads=(3, 1), **{**HOPPER, "tile_n": 64, "kv_dtype": "e4m3"}
    ),
    "sm_90a 64 pages": _hopper(
        0,
        300,
        heads=(6, 2),
        batch=3,
        q_lens=(90, 0, 40),
        page_size=16,
        kv_lens=(270, 5, 150),
        causal=True,
        window=(120, None),
        sink_tokens=4,
        pack_heads=True,
    ),
    "sm_90a 64 dependent launch": Subject(lambda: _dependent("sm_90a"), "depend"),
}
