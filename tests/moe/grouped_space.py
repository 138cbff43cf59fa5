"""Which grouped GEMMs are tried: a few for every run, and every pair of values of two factors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tests.fmha.pairwise import Rule, Space, covering
from tests.moe.grouped_cases import Case

FORMS = {
    "plain": None,
    "swiglu": (1.0, 0.0, None),
    "deepseek": (1.0, 0.0, 10.0),
    "gpt-oss": (1.702, 1.0, 7.0),
    "tight": (1.0, 0.0, 0.25),
}
_DRAW = random.Random(6)
COUNTS = {
    "one": (77,),
    "edges": (0, 1, 127, 128, 129, 0),
    "one expert": (0, 0, 300, 0),
    "many": tuple(_DRAW.choice((0, 0, 1, 2, 5, 17)) for _ in range(64)),
    "beyond a warp": (*(0 for _ in range(31)), 3, 0, 130, 1),
    "none": (0, 0, 0),
}

QUICK = (
    Case(COUNTS["edges"], 256, 160, "nvfp4", 8, FORMS["deepseek"], "nvfp4", amax=True),
    Case((5, 0, 3), 2880, 64, "nvfp4", 32, FORMS["gpt-oss"], "bf16", per_token=True),
    Case((130,), 320, 96, "mxfp4", 16, FORMS["tight"], "mxfp4"),
    Case((2, 129), 352, 64, "mxfp8", 64, FORMS["swiglu"], "mxfp8", amax=True),
    Case((9, 1), 64, 200, "nvfp4", 0, None, "fp32", amplitude=100.0),
    Case(COUNTS["beyond a warp"], 128, 64, "mxfp8", 8, FORMS["swiglu"], "fp16"),
    Case(COUNTS["none"], 128, 64),
)

SPACE = Space(
    {
        "fmt": ("nvfp4", "mxfp4", "mxfp8"),
        "counts": tuple(COUNTS),
        "k": (64, 128, 256, 320, 2880),
        "columns": (64, 192, 448),
        "granularity": (8, 16, 32, 64),
        "form": tuple(FORMS),
        "out": ("bf16", "fp16", "fp32", "nvfp4", "mxfp4", "mxfp8"),
        "per_token": (False, True),
        "amax": (False, True),
        "amplitude": (1.0, 64.0),
    },
    (Rule(("fmt", "per_token"), lambda fmt, per_token: fmt == "nvfp4" or not per_token),),
)


def case_of(row: Mapping[str, Any]) -> Case:
    """The problem that a row of the space names."""
    named = {"counts": COUNTS[row["counts"]], "form": FORMS[row["form"]]}
    granularity = row["granularity"] if named["form"] else 0
    return Case(**{**row, **named, "granularity": granularity})


MATRIX = tuple(dict.fromkeys(case_of(row) for row in covering(SPACE)))
