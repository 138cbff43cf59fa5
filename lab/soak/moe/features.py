"""Of which products and layers of experts a soak keeps count."""

from __future__ import annotations

from lab.problems.mixed_gemm import Case
from lab.problems.mixed_layer import Layer
from lab.soak.campaign.record import Feature
from moe.mixed.config import NUMBERS, PARTS, SPLITS, TEAMS, TILE_ROWS, WEIGHTS

LARGE = 10.0  # amplitude
MANY = 32  # experts, of which a warp looks at so many at a time
Problem = Case | Layer


def _of(kind: type, has: Feature) -> Feature:
    return lambda case: isinstance(case, kind) and has(case)


PRODUCTS: dict[str, Feature] = {
    "a product": lambda case: True,
    **{f"tiles of {n} rows": lambda case, n=n: case.tile_rows == n for n in TILE_ROWS},
    **{f"warpgroups: {n}": lambda case, n=n: case.teams == n for n in TEAMS},
    **{f"times 64 rows of weights: {n}": lambda case, n=n: case.parts == n for n in PARTS},
    **{f"CTAs that share a tile: {n}": lambda case, n=n: case.split == n for n in SPLITS},
    **{f"output in {out}": lambda case, out=out: case.out == out for out in NUMBERS},
    "no activation": lambda case: case.form is None,
    "rows of x in order": lambda case: not case.slots,
    "rows that are gathered": lambda case: case.slots,
    "room behind the rows": lambda case: case.room,
    "no rows": lambda case: not case.rows,
    "experts without rows": lambda case: 0 in case.counts,
    "an odd number of units of K": lambda case: -(-case.k // 64) % 2,
    "a tail of K": lambda case: case.k % 64,
    "K within a unit": lambda case: case.k <= 64,
    "a global scale of up": lambda case: case.pairs,
    "hostile weights": lambda case: case.w_like != "normal",
    "pdl": lambda case: case.pdl,
}
LAYERS: dict[str, Feature] = {
    "a layer": lambda case: True,
    "shared experts": lambda case: case.shared,
    "experts of a rank": lambda case: case.rank,
    "one expert for all tokens": lambda case: case.routing == "one",
    "no expert that is here": lambda case: case.routing == "elsewhere",
    "tiles that are chosen": lambda case: case.tile_rows is None,
}
FEATURES: dict[str, Feature] = {
    **{fmt: lambda case, fmt=fmt: case.fmt == fmt for fmt in WEIGHTS},
    "a limit": lambda case: case.form and case.form[2] is not None,
    "biases": lambda case: case.bias,
    "huge activations": lambda case: case.amplitude >= LARGE,
    "more than 32 experts": lambda case: (
        (len(case.counts) if isinstance(case, Case) else case.total) > MANY
    ),
    **{name: _of(Case, has) for name, has in PRODUCTS.items()},
    **{name: _of(Layer, has) for name, has in LAYERS.items()},
}
