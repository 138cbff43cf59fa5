"""Contents for a row that must not change what other rows get."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

HUGE, SUBNORMAL = 1e30, 1e-40  # in bf16 and fp32; fp16 has an infinity and a zero instead

Change = Callable[[torch.Tensor], torch.Tensor]


def _fill(value: float) -> Change:
    return lambda row: torch.full_like(row, value)


def _one(value: float) -> Change:
    """The last element."""

    def change(row: torch.Tensor) -> torch.Tensor:
        changed = row.clone()
        changed.view(-1)[-1] = value
        return changed

    return change


def _factor(value: float) -> Change:
    return lambda row: (row.float() * value).to(row.dtype)


CONTENTS: dict[str, Change] = {
    "NaN": _fill(math.nan),
    "a NaN": _one(math.nan),
    "inf": _fill(math.inf),
    "an inf": _one(math.inf),
    "a -inf": _one(-math.inf),
    "huge": _factor(HUGE),
    "a huge one": _one(HUGE),
    "1,000 times as large": _factor(1000.0),
    "subnormal": _fill(SUBNORMAL),
    "zeros": _fill(0.0),
    "negated": _factor(-1.0),
}


def draw(pick: random.Random) -> str:
    """A name of `CONTENTS`."""
    return pick.choice([*CONTENTS])


def spoil(row: torch.Tensor, contents: str) -> None:
    """Replace the numbers of a row in place; of bytes and integers all bits are inverted."""
    if not row.dtype.is_floating_point:
        row.copy_(row.bitwise_not())
    elif row.dtype.itemsize == 1:  # torch has no arithmetic on these
        row.copy_(CONTENTS[contents](row.float()).to(row.dtype))
    else:
        row.copy_(CONTENTS[contents](row))
