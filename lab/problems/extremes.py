"""Numbers at the ends of what attention accepts, with scores that no rounding can change.

Elements of q and k are few powers of two, so that each product q.k is exact in fp32 in whatever
order it is summed: keys that tie do tie, and rounding never decides which key wins. Results are
judged head by head, since a head with scores of 1e30 says nothing about one with scores of 1.

Of an LSE beyond +-2^64 only the sign is judged, and that it is below +inf: kernels bound the factor
of scores and a sink so that they stay in the range of fp32.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kernelkit.numerics import tolerance
from kernelkit.plan.limits import FLT_MIN

SCALES = (1e-12, 1e-9, 1e-6, 1e-3, 0.1, 1.0, 30.0, 1e3, 1e5, 1e6, 1e8, 1e9, 1e12)
SOFTCAPS = (1e-6, 1e-3, 0.5, 15.0, 50.0, 4096.0)
FACTORS = (0.0, 1.0, 1e-38, 1e-30, 1e-20, 1e-8, 0.3, 7.0, 1e8, 1e20, 1e30, 3e38)
SINKS = (-math.inf, -3e38, -1e9, -90.0, 0.0, 1.0, 90.0, 1e9, 3e38)
FORMS = ("spread", "ties", "climb", "fall", "one", "zeros")
# Powers of two by which q and k of a dtype may be larger, from and to.
POWERS = {
    torch.bfloat16: ((-60, 30), (-60, 30)),
    torch.float16: ((-12, 12), (-12, 12)),
    torch.float8_e4m3fn: ((-6, 6), (-6, 6)),
}
QUERIES, KEYS = (0.0, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0), (0.0, 1.0, -1.0, 2.0, -2.0)
Pair = tuple[torch.Tensor, torch.Tensor]
LARGEST_LSE = 2.0**64
LEVELS = 6  # powers of two by which keys grow


def of_case(case: Any, pick: random.Random) -> Any:
    """Return the attention or decode problem with extreme numbers drawn by a seed."""
    return replace(
        case,
        extreme=pick.randint(1, 1 << 24),
        scale=scale(pick),
        softcap=pick.choice(SOFTCAPS) if case.softcap else 0.0,
        amplitude=1.0,
        climb=0.0,
        depth=0.0,
        sink_value=None,
    )


def scale(pick: random.Random) -> float | None:
    """Scale of softmax; None is the default one."""
    return pick.choice((None, *SCALES, 10.0 ** pick.uniform(-12, 12)))


def factors(pick: random.Random, heads: int) -> torch.Tensor:
    """k_scale, v_scale or q_scale, fp32 [heads], of any sign."""
    one = [pick.choice((1, 1, -1)) * pick.choice(FACTORS) for _ in range(heads)]
    return torch.tensor(one, dtype=torch.float32)


def sinks(pick: random.Random, heads: int) -> torch.Tensor:
    """fp32 [heads]."""
    return torch.tensor([pick.choice(SINKS) for _ in range(heads)], dtype=torch.float32)


def elements(
    pick: random.Random, shape: Sequence[int], dtype: torch.dtype, *, is_query: bool
) -> torch.Tensor:
    """fp32 numbers [.., tokens, heads, columns] of q or k, exact in `dtype`; each head of each
    entry has a form of its own."""
    generator = torch.Generator().manual_seed(pick.getrandbits(32))
    values = torch.tensor(QUERIES if is_query else KEYS)
    rows = values[torch.randint(len(values), tuple(shape), generator=generator)]
    first, last = POWERS[dtype][0 if is_query else 1]
    heads = rows.transpose(-3, -2)  # a view
    for place in itertools.product(*map(range, heads.shape[:-2])):
        part = heads[place]
        power = pick.choice((0, 0, first, last, pick.randint(first, last)))
        _shape(part, pick, is_query=is_query)
        part *= 2.0**power
    return rows


def _shape(part: torch.Tensor, pick: random.Random, *, is_query: bool) -> None:
    """The rows [tokens, columns] of a head in one of the forms."""
    form, tokens = pick.choice(FORMS), len(part)
    if form == "zeros" and is_query:
        part.zero_()
    if is_query or not tokens:
        return
    if form == "ties":
        part.copy_(part[torch.arange(tokens) % min(3, tokens)])
    elif form in ("climb", "fall"):
        level = torch.arange(tokens) * LEVELS // tokens
        level = level if form == "climb" else LEVELS - 1 - level
        part *= torch.exp2(level[:, None] - (LEVELS - 1.0))
    elif form == "one":
        part[torch.arange(tokens) != pick.randrange(tokens)] = 0.0


def judge(
    actual: Pair, exact: Pair, rounded: Pair, grain: torch.dtype, *, packed: bool = False
) -> list[tolerance.Report]:
    """Reports on O, in units of `grain`, and on LSE, each head of each entry by itself.

    A pair is O [B, S, H, D] and LSE [B, H, S], both perhaps without S; packed: O [T, H, D] and LSE
    [H, T].
    """
    outputs, lses = zip(actual, exact, rounded, strict=True)
    of_lse = (1,) if packed else _dims(outputs[0].ndim)[1]
    of_o = judge_output(*outputs, grain, packed=packed)
    return [of_o, tolerance.compare_lse(*_within_range(*lses), dims=of_lse)]


def judge_output(
    actual: torch.Tensor,
    exact: torch.Tensor,
    rounded: torch.Tensor,
    grain: torch.dtype,
    *,
    packed: bool = False,
) -> tolerance.Report:
    """The report on O alone, see `judge`."""
    dims = (0, 2) if packed else _dims(actual.ndim)[0]
    return tolerance.compare_output(*_below_infinity(actual, exact, rounded), grain, dims)


def _dims(of_o: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions of O and LSE that are neither an entry nor a head."""
    return ((1, 3), (2,)) if of_o == 4 else ((2,), ())


def _below_infinity(
    actual: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The three in fp64, with 0 near the least normal number of fp32, below which kernels flush,
    and in rows beyond the range of the dtype of O: there elements near the largest have to be
    infinities of their sign, and the error of the others is in proportion to these."""
    most, size = torch.finfo(actual.dtype).max, exact.abs()
    top = size.amax(dim=-1, keepdim=True)
    large = size > (top / 4).clamp_min(2 * most)
    right = (top > most / 2) & ~actual.isnan() & ~large
    right |= large & (actual == exact.sign() * math.inf)
    right |= (size < 2 * FLT_MIN) & (actual.double().abs() < 2 * FLT_MIN)
    return tuple(each.double().masked_fill(right, 0.0) for each in (actual, exact, rounded))


def _within_range(
    actual: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The three with 0 where the exact LSE is out of range and the actual one is right."""
    right = (exact > LARGEST_LSE) & (actual > 0) & (actual < math.inf)
    right |= (exact < -LARGEST_LSE) & (actual < 0)
    return tuple(each.double().masked_fill(right, 0.0) for each in (actual, exact, rounded))
