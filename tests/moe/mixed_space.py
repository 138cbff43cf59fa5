"""Problems of the grouped GEMM with 4-bit weights and bf16 activations, on Hopper and on Blackwell:
a few for every run, every pair of values of two factors, and random ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lab.problems.mixed_gemm import Case
from moe.formats import format_of
from moe.mixed.config import (
    ARCHS,
    NUMBERS,
    PARTS,
    SPLIT_ROWS,
    SPLITS,
    TEAMS,
    TILE_ROWS,
    WEIGHTS,
    fits,
)
from tests.moe.grouped_space import FORMS, random_counts
from tests.support.pairwise import Rule, Space, covering, random_row

CTAS = 2  # in the emulator: each has several tiles, of several experts
WORK = 1_500_000  # approximate number of products in a random problem

COUNTS = {
    "one": (77,),
    "edges": (0, 1, 15, 16, 17, 0, 33),
    "edges of 64": (63, 0, 65, 64),
    "edges of 256": (0, 255, 0, 257),
    "a row": (0, 0, 1),
    "beyond a warp": (*(0 for _ in range(31)), 3, 0, 19, 1),
    "beyond two warps": random_counts(3, (0, 0, 0, 1, 2, 9), 70),
    "beyond the queue": (9, 9, 9, 1, 2, 1, 7, 33),
    "none": (0, 0, 0),
}


TILES_OF = {
    arch: [
        {"tile_rows": rows, "teams": teams, "parts": parts}
        for rows in TILE_ROWS
        for teams in TEAMS
        for parts in PARTS
        if fits(arch, rows, teams, parts)
    ]
    for arch in ARCHS
}
TILES = TILES_OF["sm_90a"]

FACTORS = {
    "tile_rows": TILE_ROWS,
    "teams": TEAMS,
    "parts": PARTS,
    "split": SPLITS,
    "fmt": WEIGHTS,
    "counts": tuple(COUNTS),
    # A unit of K is 64 and a stage has two: no whole unit, one, odd numbers, tails, many.
    "k": (32, 64, 96, 128, 192, 320, 416, 1440),
    "columns": (8, 40, 96, 136, 200),
    "form": tuple(FORMS),
    "bias": (False, True),
    "slots": (0, 1, 3),
    "room": (0, 5),
    "out": NUMBERS,
    "amplitude": (1.0, 16.0),
    "w_like": ("normal", "zero blocks", "one hot", "far apart", "saturated", "subnormal"),
    "pdl": (False, True),
}
SPLIT = Rule(("tile_rows", "split"), lambda rows, split: split == 1 or rows <= SPLIT_ROWS)
# Limits the emulator's work.
QUICKLY = Rule(("counts", "k"), lambda counts, k: k < 1440 or sum(COUNTS[counts]) < 100)
# On Hopper this tile has two stages, too few for gathered rows.
STAGES = Rule(("tile_rows", "teams", "slots"), lambda *tile: tile[:2] != (256, 2) or not tile[2])
TILE = "tile_rows", "teams", "parts"
SPACE = Space(FACTORS, (Rule(TILE, partial(fits, "sm_90a")), STAGES, SPLIT, QUICKLY))
ON_BLACKWELL = {
    **FACTORS,
    **{name: tuple(dict.fromkeys(tile[name] for tile in TILES_OF["sm_100a"])) for name in TILE},
    "split": (1,),
}
BLACKWELL = Space(ON_BLACKWELL, (Rule(TILE, partial(fits, "sm_100a")), QUICKLY))


def case_of(row: Mapping[str, Any], arch: str = "sm_90a") -> Case:
    """Return the problem of a row of the space."""
    values = {**row, "counts": COUNTS[row["counts"]], "form": FORMS[row["form"]], "arch": arch}
    return Case(**values)


def rows_of(case: Case) -> list[dict[str, Any]]:
    """Return a Hopper case's values of factors, without those outside the space."""
    if case.arch != "sm_90a":
        return []
    counts = (name for name, counts in COUNTS.items() if counts == case.counts)
    forms = (name for name, form in FORMS.items() if form == case.form)
    values = {**vars(case), "counts": next(counts, None), "form": next(forms, None)}
    return [{name: values[name] for name in FACTORS if values[name] in FACTORS[name]}]


# Two kernels, and problems that reach the limits of each.
FIRST = Case(
    COUNTS["beyond a warp"], 288, 72, "nvfp4", FORMS["gpt-oss"], bias=True, slots=3, room=5,
    amplitude=4.0, tile_rows=16, teams=3, parts=2,
)  # fmt: skip
SECOND = Case(
    (0, 1, 33, 0, 8), 224, 200, "mxfp4", None, room=5, out="fp16", w_like="far apart", tile_rows=32,
    teams=3, parts=1,
)  # fmt: skip
# Two accumulators of 128 weight rows, with more tiles and steps than stages; different widths of
# products, and a tile of 64 rows whose expert has fewer.
THIRD = replace(FIRST, tile_rows=16, teams=2, parts=2, arch="sm_100a")
FOURTH = replace(SECOND, tile_rows=64, teams=2, parts=1, arch="sm_100a")
QUICK = (
    FIRST,
    replace(FIRST, counts=COUNTS["beyond the queue"], k=32, slots=1),
    replace(FIRST, counts=COUNTS["none"]),
    SECOND,
    replace(SECOND, counts=COUNTS["a row"], k=64, columns=8, room=0, w_like="zero blocks"),
    replace(SECOND, counts=COUNTS["beyond two warps"], k=96, columns=40, w_like="one hot"),
)
QUICK_ON_BLACKWELL = (
    THIRD,
    replace(THIRD, counts=COUNTS["beyond the queue"], k=32, slots=1),
    replace(THIRD, counts=COUNTS["none"]),
    replace(THIRD, counts=(3, 0, 17), k=1440, columns=136),
    FOURTH,
    replace(FOURTH, counts=COUNTS["a row"], k=64, columns=8, room=0, w_like="zero blocks"),
    replace(FOURTH, counts=COUNTS["beyond two warps"], k=96, columns=40, w_like="one hot"),
    replace(FOURTH, counts=(70, 0, 33), k=1120, columns=136),
)
MATRIX = tuple(dict.fromkeys(case_of(row) for row in covering(SPACE)))
MATRIX_ON_BLACKWELL = tuple(dict.fromkeys(case_of(row, "sm_100a") for row in covering(BLACKWELL)))


def random_case(seed: int, arch: str = "sm_90a") -> Case:
    """A random problem of the space, with other counts and sizes."""
    draw = random.Random(seed)
    case = case_of(random_row(SPACE if arch == "sm_90a" else BLACKWELL, draw), arch)
    sizes = (0, 0, 1, 2, 7, 8, 9, draw.randint(1, 70), case.tile_rows - 1, case.tile_rows + 1)
    counts = random_counts(seed, sizes)
    k = format_of(case.fmt).block * draw.randint(1, 40)
    most = WORK // (max(sum(counts), 1) * k)
    columns = 8 * draw.randint(1, max(min(most // 8, 50), 1))
    return replace(case, counts=counts, k=k, columns=columns)
