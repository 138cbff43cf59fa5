"""The space of decode problems: its factors, which values combine, and rows as Cases.

MATRIX covers every allowed pair of values of two factors (`tests.support.pairwise`). SECOND has
another problem for each of its kernels; QUICK are cheap ones from the beginning of the array.
GROUPS, BORDERS and EDGES are many problems for few kernels: rows of a KV head, lengths around tile
boundaries, and masks that meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lab.problems.decode import Case
from tests.support.pairwise import Rule, Space, covering

SIZES = {  # keys of each entry; a layout with one length for all uses the first
    "one": (1,),
    "few": (5, 3, 0),
    "borders": (128, 127, 129),
    "tail": (300, 77),
    "exact": (256, 512),
    "empty": (200, 0),
    "long": (650, 515),
}
QUICK_ROWS = 3
MAX_ROWS = 96  # query rows of a KV head
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"causal": False, "window": 100},
    "sliding": {"window": 100},
    "sink tokens": {"window": 70, "sink_tokens": 9},
}
OUTPUTS = {  # name -> out_dtype by dtype
    "same": {"bf16": "", "fp16": ""},
    "fp32": {"bf16": "fp32", "fp16": "fp32"},
    "other": {"bf16": "fp16", "fp16": "bf16"},
}
KV = {  # name -> (kv_dtype, scales)
    "same": ("", "one"),
    "e4m3": ("e4m3", "one"),
    "e4m3, heads": ("e4m3", "heads"),
    "e4m3, none": ("e4m3", "none"),
}

FACTORS = {
    "head_dim": (64, 128, 256),
    "group": (1, 3, 5, 8, 16, 40),
    "tokens": (1, 2, 3, 5, 8),
    "kv_heads": (1, 2),
    "dtype": ("bf16", "fp16"),
    "kv": tuple(KV),
    "output": tuple(OUTPUTS),
    "mask": tuple(MASKS),
    "softcap": (0.0, 15.0),
    "sinks": (False, True),
    "keys": ("dense", "lens", 8, 16, 64, 128),
    "size": tuple(SIZES),
    "cluster": (0, 1, 2, 4, 8, 16),
    "parts": (0, 3),
    "pdl": ("", "pdl", "ready"),
    "batch_invariant": (False, True),
    "amplitude": (1.0, 4.0),
}

SPACE = Space(
    FACTORS,
    (
        Rule(("group", "tokens"), lambda group, tokens: group * tokens <= MAX_ROWS),
        # A chosen cluster is an argument of its own.
        Rule(("cluster", "batch_invariant"), lambda cluster, fixed: not (cluster and fixed)),
    ),
)


def case_of(row: Mapping[str, Any]) -> Case:
    """Return the problem of a row of the space."""
    kv_dtype, scales = KV[row["kv"]]
    return Case(
        SIZES[row["size"]],
        (row["group"] * row["kv_heads"], row["kv_heads"]),
        row["tokens"],
        row["head_dim"],
        row["dtype"],
        kv_dtype,
        scales,
        OUTPUTS[row["output"]][row["dtype"]],
        softcap=row["softcap"],
        sinks=row["sinks"],
        keys=row["keys"],
        amplitude=row["amplitude"],
        pdl=row["pdl"],
        batch_invariant=row["batch_invariant"],
        parts=row["parts"],
        cluster=row["cluster"],
        **MASKS[row["mask"]],
    )


ROWS = covering(SPACE)


def work_of(case: Case) -> int:
    """Approximate work for the emulator."""
    return sum(case.lengths) * case.heads[0] * case.tokens * case.head_dim


def _second_problem(number: int) -> dict[str, Any]:
    """Row `number` with the runtime values of another row: a second problem for the same kernel."""
    other = ROWS[(number + len(ROWS) // 2) % len(ROWS)]
    return ROWS[number] | {name: other[name] for name in ("size", "kv_heads", "amplitude")}


MATRIX = tuple(map(case_of, ROWS))
QUICK = sorted(MATRIX[: 3 * QUICK_ROWS], key=work_of)[:QUICK_ROWS]
SECOND = tuple(case_of(_second_problem(number)) for number in range(len(ROWS)))

# Rows of a KV head: fewer than a tile's columns, equal, and more than a CTA holds.
GROUPS = (
    *(Case((150, 20), (group * 2, 2), cluster=2) for group in (1, 3, 8)),
    *(Case((150, 20), (group, 1), cluster=2) for group in (5, 16, 24)),
    *(Case((150, 20), (3, 1), tokens, head_dim=64, cluster=2) for tokens in (2, 4, 7, 8)),
    Case((150, 20), (33, 1), head_dim=256, cluster=2),
    Case((150, 20), (16, 1), 5, head_dim=64, cluster=4),
    Case((150, 20), (4, 4), flat=True, cluster=1),
)
_BORDER = Case((1,), (4, 1), head_dim=64, causal=True, keys="lens", cluster=4)
BORDERS = tuple(
    replace(
        _BORDER,
        lens=tuple(max(border + step, 0) for step in (-1, 0, 1)),
        # Weights relative to a number other than their maximum would overflow.
        amplitude=64.0 if border == 128 else 1.0,
    )
    for border in (0, 16, 64, 128, 256, 512, 1024)
)
# One kernel with every mask, for windows, sink tokens, lengths and positions that meet or do not.
_EVERY_MASK = Case((900, 130, 0), (6, 2), 3, head_dim=64, sinks=True, cluster=4)
EDGES = tuple(
    replace(_EVERY_MASK, window=window, sink_tokens=first, lens=lens)
    for window, first, lens in (
        (0, 1, (900, 130, 0)),  # the own key, and the first
        (5, 130, (640, 65, 1)),  # two tiles of sink tokens
        (300, 1000, (500, 129, 7)),  # more sink tokens than keys
        (1 << 40, 3, (300, 4, 2)),  # a window wider than everything
        (128, 128, (387, 259, 131)),  # edges on borders of tiles
        (127, 129, (386, 258, 130)),
        (20, 100, (123, 122, 124)),  # sink tokens run into the window
        (1, 4, (1, 2, 3)),  # tokens before the first key
        (64, 16, (1030, 1024, 1025)),  # few tiles for many CTAs
    )
)
