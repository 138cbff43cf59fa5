"""Problems of the grouped GEMM: a few for every run, every pair of values of two factors, and
random ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lab.problems import hostile
from lab.problems.grouped_gemm import DTYPES, Case
from moe.choose import FEW
from moe.config import CARRIED, TILE_ROWS, WINDOW, WINDOW_STEP
from moe.formats import format_of
from tests.support.pairwise import Rule, Space, covering, random_row

FORMS = {
    "plain": None,
    "swiglu": (1.0, 0.0, None),
    "deepseek": (1.0, 0.0, 10.0),
    "gpt-oss": (1.702, 1.0, 7.0),
    "tight": (1.0, 0.0, 0.25),
}


WORK = 4_000_000  # approximate number of weights of all experts with rows


def random_counts(seed: int, sizes: tuple[int, ...], experts: int = 0) -> tuple[int, ...]:
    """Random rows of 1 to 64 experts."""
    draw = random.Random(seed)
    experts = experts or draw.choice((1, 2, 3, 7, 16, 33, 64))
    return tuple(draw.choice(sizes) for _ in range(experts))


COUNTS = {
    "one": (77,),
    "edges": (0, 1, 127, 128, 129, 0),
    "one expert": (0, 0, 300, 0),
    "many": random_counts(6, (0, 0, 1, 2, 5, 17), 64),
    "few": random_counts(7, (0, 1, 2, 7, 8), 64),
    "up to 16": (16, 0, 15, 1, 9, 8, 0, 2),
    "up to 32": (32, 0, 31, 17, 1, 9),
    "edges of 64": (32, 0, 63, 64, 65),
    "beyond a warp": (*(0 for _ in range(31)), 3, 0, 130, 1),
    "pairs": (255, 257, 0, 256, 1),
    "none": (0, 0, 0),
}

# Covers the group of experts that a warp reads together, and the lane that reads its last one.
BEYOND_A_CHUNK = (*(0 for _ in range(126)), 3, 0, 0, 9, 0, 5, *(0 for _ in range(200)), 1)
EDGES = Case(
    COUNTS["edges"], 256, 160, "nvfp4", 8, FORMS["deepseek"], "nvfp4", amax=True, bias=True
)
QUICK = (
    replace(EDGES, tile_rows=128),
    replace(
        EDGES, fmt="mxfp4", out="bf16", x_like="far apart", tile_rows=256, tile_n=256, carry=True
    ),
    replace(  # beyond the limit of SwiGLU on both sides
        Case((5, 0, 3), 2880, 64, "nvfp4", 32, FORMS["gpt-oss"], "bf16", per_token=True),
        tile_rows=8,
        amplitude=8.0,
        bias=True,
    ),
    Case((130,), 320, 96, "mxfp4", 16, FORMS["tight"], "mxfp4"),
    Case((2, 129), 352, 64, "mxfp8", 64, FORMS["swiglu"], "mxfp8", amax=True, tile_rows=64),
    Case((9, 1), 64, 200, "nvfp4", 0, None, "fp32", amplitude=100.0, tile_rows=16),
    Case(  # an odd number of steps of K
        (3, 0, 9),
        2880,
        96,
        "mxfp4",
        16,
        FORMS["gpt-oss"],
        "mxfp8",
        bias=True,
        x_fmt="mxfp8",
        tile_rows=16,
    ),
    Case((130,), 192, 160, "mxfp4", 0, None, "bf16", bias=True, x_fmt="mxfp8", tile_rows=128),
    Case(COUNTS["beyond a warp"], 128, 64, "mxfp8", 8, FORMS["swiglu"], "fp16"),
    Case(BEYOND_A_CHUNK, 64, 32, "mxfp8", 8, FORMS["swiglu"], "fp16"),
    Case(COUNTS["none"], 128, 64),
)

TILES = {  # fields of the config that are not chosen
    "chosen": {},
    **{f"{rows}": {"tile_rows": rows} for rows in TILE_ROWS},
    "128 x 256": {"tile_rows": 128, "tile_n": 256},
    "256 x 256, carry": {"tile_rows": 256, "tile_n": 256, "carry": True},
}
NO_TILE = {"tile_rows": None, "tile_n": None, "carry": False}


def most_rows(tile: str) -> float:
    """Most rows of an expert with this tile."""
    rows = TILES[tile].get("tile_rows")
    return rows if rows in FEW else math.inf


def used(counts: str) -> int:
    """Number of experts with rows."""
    return sum(count > 0 for count in COUNTS[counts])


def carries(tile: str) -> bool:
    return TILES[tile].get("carry", False)


FACTORS = {
    "tile": tuple(TILES),
    "fmt": ("nvfp4", "mxfp4", "mxfp8"),
    "counts": tuple(COUNTS),
    "k": (64, 128, 256, 320, 2880),
    "columns": (64, 192, 448),
    "granularity": (8, 16, 32, 64),
    "form": tuple(FORMS),
    "out": ("bf16", "fp16", "fp32", "nvfp4", "mxfp4", "mxfp8"),
    "per_token": (False, True),
    "amax": (False, True),
    "bias": (False, True),
    "x_fmt": ("", "mxfp8"),
    "amplitude": (1.0, 64.0),
    "x_like": tuple(hostile.KINDS),
    "w_like": tuple(hostile.KINDS),
}
RULES = (
    Rule(("fmt", "per_token"), lambda fmt, per_token: fmt == "nvfp4" or not per_token),
    Rule(("counts", "tile"), lambda counts, tile: max(COUNTS[counts]) <= most_rows(tile)),
    Rule(("fmt", "x_fmt"), lambda fmt, x_fmt: fmt == "mxfp4" or not x_fmt),
    Rule(("k", "x_fmt"), lambda k, x_fmt: k >= WINDOW or not x_fmt),
    # Limits the emulator's work: experts with rows, times K or N.
    Rule(("counts", "k"), lambda counts, k: used(counts) * k <= 6 * 2880),
    Rule(("counts", "columns"), lambda counts, columns: used(counts) * columns <= 40 * 192),
    Rule(("tile", "granularity"), lambda tile, size: size == CARRIED or not carries(tile)),
    Rule(("tile", "form"), lambda tile, form: form != "plain" or not carries(tile)),
)
SPACE = Space(FACTORS, RULES)


def case_of(row: Mapping[str, Any]) -> Case:
    """Return the problem of a row of the space."""
    named = {"counts": COUNTS[row["counts"]], "form": FORMS[row["form"]]}
    named["granularity"] = row["granularity"] if named["form"] else 0
    fields = {name: value for name, value in row.items() if name != "tile"}
    return Case(**fields | named | TILES[row["tile"]])


def rows_of(case: Case) -> list[dict[str, Any]]:
    """Return the case's values of factors, without those outside the space. A plain product, which
    ignores granularity, has a row for each."""
    tiles = (name for name, tile in TILES.items() if replace(case, **NO_TILE | tile) == case)
    counts = (name for name, counts in COUNTS.items() if counts == case.counts)
    forms = (name for name, form in FORMS.items() if form == case.form)
    named = {"tile": next(tiles, None), "counts": next(counts, None), "form": next(forms, None)}
    values = {**vars(case), **named}
    row = {name: values[name] for name in FACTORS if values[name] in FACTORS[name]}
    sizes = FACTORS["granularity"] if case.form is None else ()
    return [row | {"granularity": size} for size in sizes] or [row]


MATRIX = tuple(dict.fromkeys(case_of(row) for row in covering(SPACE)))


def random_case(seed: int) -> Case:
    """A random problem of the space, with other counts and sizes."""
    draw = random.Random(seed)
    case = case_of(random_row(SPACE, draw))
    sizes = (0, 0, 1, 2, 3, 5, 7, 8)
    if case.tile_rows not in FEW:
        tile = case.tile_rows or 128
        sizes += tuple(draw.sample((15, 17, 31, 33, 63, 65, 127, 128, 129), 3))
        sizes += (tile - 1, tile, tile + 1)[: draw.randrange(3)]
    counts = random_counts(seed, sizes)
    k = 32 * draw.randrange(1, 24)
    if case.x_fmt:
        k = max(WINDOW, k - k % WINDOW_STEP)
    # Rows are also packed as the K of a second product: whole blocks, and rows of 16 bytes.
    form = format_of(case.fmt)
    unit = max(case.granularity, form.block, 16 * form.per_byte, 8 if case.out in DTYPES else 32)
    most = WORK // (k * max(1, sum(count > 0 for count in counts)))
    columns = unit * draw.randrange(1, 2 + min(most, 500) // unit)
    return replace(case, counts=counts, k=k, columns=columns)
