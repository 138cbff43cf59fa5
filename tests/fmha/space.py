"""The space of attention problems: its factors, which values combine, and rows as Cases.

QUICK, MATRIX and SWEPT together have every allowed pair of values of two factors (`pairwise`).
QUICK has every value at least once, SWEPT the remaining pairs with pages of 16 and 64 keys. PLAIN
and EDGES are many problems for few kernels: shapes, and masks that meet. The random problems of
`scripts/soak.py` are in `lab.soak.attention`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from lab.problems.attention import Case
from tests.support.pairwise import Rule, Space, covering

# (queries, keys) of each batch entry; a layout with one length for all uses the first.
SIZES = {
    "one": ((1, 300), (1, 128), (1, 1)),
    "few": ((3, 200), (4, 129), (2, 7)),
    "tail": ((127, 129), (100, 60)),
    "exact": ((128, 128), (128, 256)),
    "ragged": ((200, 333), (200, 70)),
    "long": ((256, 512), (130, 700)),
    "empty": ((64, 64), (5, 0), (0, 5)),
}
LEFT, RIGHT, FIRST = 100, 30, 4  # window and sink tokens
BEFORE_END = 20  # how far q_offset keeps the last query from the last key
SURPLUS = 37  # keys stored after a length
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal offset": {"causal": True},
    "block": {},
    "left": {"window": (LEFT, None)},
    "sliding": {"window": (LEFT, None), "causal": True},
    "band": {"window": (LEFT, RIGHT)},
    "sink tokens": {"window": (LEFT, None), "causal": True, "sink_tokens": FIRST},
}
WITH_OFFSET = ("causal offset", "block")
OUTPUTS = {  # name -> (normalize, out_dtype by dtype)
    "same": (True, {"bf16": "", "fp16": ""}),
    "fp32": (True, {"bf16": "fp32", "fp16": "fp32"}),
    "other": (True, {"bf16": "fp16", "fp16": "bf16"}),
    "raw": (False, {"bf16": "", "fp16": ""}),
    "raw, 16 bits": (False, {"bf16": "bf16", "fp16": "fp16"}),
}
KEYS = ("dense", "lens", "packed", "packed, lens", 8, 16, 32, 64, 128, 256)  # numbers: page sizes

FACTORS = {
    "dims": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)),
    "tile_n": (0, 64, 80, 112),
    "schedule": ("base", "pingpong"),
    "polynomial": (-1, 0, 7),
    "mask": tuple(MASKS),
    "sinks": (False, True),
    "softcap": (0.0, 15.0),
    "heads": ((1, 1), (4, 2), (8, 1), (6, 2)),
    "pack_heads": (None, False, True),
    "size": tuple(SIZES),
    "queries": ("dense", "packed"),
    "keys": KEYS,
    "dtype": ("bf16", "fp16"),
    "output": tuple(OUTPUTS),
    "rope_dim": (0, 64),
    "amplitude": (1.0, 4.0),
}
# MASKS has the fields of a mask; the field `mask` is a recipe of functions, see test_masks.py.
FIELDS = [name for name in FACTORS if name in Case.__dataclass_fields__ and name != "mask"]


def lengths(size: str, queries: str, keys: str | int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(queries, keys) of each entry."""
    n_q, n_k = zip(*SIZES[size], strict=True)
    return (
        n_q if queries == "packed" else (n_q[0],) * len(n_q),
        (n_k[0],) * len(n_k) if keys == "dense" else n_k,
    )


def _positions_exist(mask: str, size: str, queries: str, keys: str | int, rope_dim: int) -> bool:
    """Whether every query has a position: a rope table has no row for one before the first key."""
    if not rope_dim or mask in WITH_OFFSET:
        return True
    return all(n_q <= n_k for n_q, n_k in zip(*lengths(size, queries, keys), strict=True) if n_q)


RULES = (  # of the kernels of all architectures
    # These take a minute or more, and smaller ones test as much.
    Rule(
        ("dims", "heads", "size"),
        lambda dims, heads, size: dims[0] < 192 or heads != (8, 1) or size != "long",
    ),
    Rule(("sinks", "output"), lambda sinks, output: not (sinks and "raw" in output)),
    Rule(("mask", "size", "queries", "keys", "rope_dim"), _positions_exist),
)
SPACE = Space(
    FACTORS,
    (
        Rule(("dims", "tile_n"), lambda dims, keys: not keys or dims[0] < 256),
        Rule(("dims", "schedule"), lambda dims, name: name == "base" or dims[0] <= 128),
        *RULES,
    ),
)


def case_of(row: Mapping[str, Any]) -> Case:
    """Return the problem of a row of the space."""
    n_q, n_k = lengths(row["size"], row["queries"], row["keys"])
    keys, (normalize, out_dtypes) = row["keys"], OUTPUTS[row["output"]]
    surplus = SURPLUS if keys in ("lens", "packed, lens") else 0
    stored = tuple(length + surplus for length in n_k)
    offsets = None
    if row["mask"] in WITH_OFFSET:
        offsets = tuple(k - q - BEFORE_END for q, k in zip(n_q, n_k, strict=True))
        if row["rope_dim"]:
            offsets = tuple(max(offset, 0) for offset in offsets)
        if len(set(offsets)) == 1:
            offsets = offsets[0]  # a number will do
    return Case(
        max(n_q),
        max(stored),
        batch=len(n_q),
        kv_lens=None if keys in ("dense", "packed") else n_k,
        normalize=normalize,
        q_offset=offsets,
        q_lens=n_q if row["queries"] == "packed" else None,
        k_lens=stored if keys in ("packed", "packed, lens") else None,
        page_size=keys if isinstance(keys, int) else 0,
        out_dtype=out_dtypes[row["dtype"]],
        **{name: row[name] for name in FIELDS},
        **MASKS[row["mask"]],
    )


ROWS = covering(SPACE)


def _work(row: Mapping[str, Any]) -> int:
    """Approximate work for the emulator."""
    return sum(n_q * n_k for n_q, n_k in SIZES[row["size"]]) * row["heads"][0] * row["dims"][0]


def quick_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose a few cheap rows that have all values, each time the row with most missing values."""
    missing, chosen = {item for row in rows for item in row.items()}, []
    while missing:
        best = max(rows, key=lambda row: (len(missing & row.items()), -_work(row)))
        chosen.append(best)
        missing -= best.items()
    return chosen


QUICK_ROWS = quick_rows(ROWS)
QUICK = tuple(map(case_of, QUICK_ROWS))
_OTHERS = [row for row in ROWS if row not in QUICK_ROWS]
MATRIX = tuple(case_of(row) for row in _OTHERS if row["keys"] not in (16, 64))
SWEPT = tuple(case_of(row) for row in _OTHERS if row["keys"] in (16, 64))

SHAPES = (
    (1, 1), (1, 128), (127, 129), (128, 128), (200, 64), (200, 333), (256, 512), (0, 5), (5, 0),
)  # fmt: skip
PLAIN = (
    *(Case(*shape, causal=causal) for shape, causal in itertools.product(SHAPES, (False, True))),
    Case(200, 700, amplitude=4.0, scale=0.3),
    Case(130, 640, heads=(6, 2), batch=2, amplitude=4.0),
    Case(130, 640, window=(None, 200)),
    Case(130, 640, window=(None, 1 << 40)),
)

# One kernel with every mask (of each schedule), for windows, sink tokens, offsets and lengths that
# meet or do not.
_EVERY_MASK = Case(130, 900, (2, 1), 3, kv_lens=(900, 130, 0), sinks=True)
EDGES = tuple(
    dataclasses.replace(
        _EVERY_MASK, schedule=schedule, window=window, sink_tokens=first, q_offset=offsets
    )
    for schedule in FACTORS["schedule"]
    for window, first, offsets in (
        ((0, 0), 1, (770, 0, 0)),  # one key each, and the first
        ((5, 200), 130, (640, -65, 0)),  # two tiles of sink tokens; rows before the first key
        ((300, 0), 1000, (500, 129, 7)),  # more sink tokens than keys
        ((1 << 40, 1 << 40), 3, (0, 0, 0)),  # windows wider than everything
        ((10, 10), 140, (5000, 2000, 300)),  # no row reaches its window
        ((128, 0), 128, (255, 127, 0)),  # edges on tile boundaries
        ((127, 1), 129, (256, 128, -128)),
        ((20, 0), 100, (100, 110, 0)),  # sink tokens run into the window
        ((400, 300), 4, (-500, -90, 1)),  # all rows before the first key; a few
    )
)
