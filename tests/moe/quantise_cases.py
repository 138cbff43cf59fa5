"""Inputs for the quantiser that are hostile by default, and comparisons of its bytes with the
reference.

Every input lies in a wider tensor of NaN. The kinds of its blocks alternate: random, far apart in
magnitude, exact ties, zeros of both signs, subnormals, the largest numbers, infinities, NaN.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_map_only

from moe import reference
from moe.formats import SCALE_ROWS, format_of, row_blocks, scale_bytes
from moe.quantiser.api import quantise
from moe.quantiser.launch import Tokens
from moe.quantiser.launch import quantise as run_quantise
from moe.quantized import Quantized
from moe.reference_routing import permutation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BESIDE = 24  # elements of NaN on either side of a row: a multiple of 16 bytes
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0)
KINDS = 12


@dataclass(frozen=True)
class Quantisation:
    """A call of `quantise` with a tensor of tokens x k.

    counts: rows of each expert.
    gathered: whether rows are selected by index, as many as `counts` add up to, or as there are
    tokens.
    scaling: 'tensor', 'token', 'given', 'rows', or '' in a format without a global scale.
    calm: without infinities, NaN and extremes, which make a scale of the tensor useless.
    """

    fmt: str
    tokens: int
    k: int
    dtype: str = "bf16"
    scaling: str = ""
    counts: tuple[int, ...] = ()
    gathered: bool = False
    calm: bool = False

    def __str__(self) -> str:
        parts = [self.fmt, f"{self.tokens}x{self.k}", self.dtype, self.scaling]
        counts = ".".join(map(str, self.counts))
        parts += [re.sub(r"(0\.){3,}", "0...", counts)] + ["gathered"] * self.gathered
        return "-".join(part for part in [*parts, "calm" * self.calm] if part)

    @property
    def rows(self) -> int:
        """Number of rows of the result."""
        return sum(self.counts) if self.counts else self.tokens

    @property
    def used(self) -> int:
        """Bytes of scale factors, up to the last block of the last expert with rows."""
        return used_bytes(self.fmt, self.k, self.counts or (self.tokens,))

    def build(self, device: str = "cpu") -> tuple[torch.Tensor, dict]:
        """Return x and the keyword arguments, which the reference accepts, too."""
        pick = random.Random(str(self))
        generator = torch.Generator().manual_seed(pick.randrange(1 << 30))
        wide = torch.full((self.tokens, self.k + 2 * BESIDE), math.nan, dtype=DTYPES[self.dtype])
        x = wide.to(device)[:, BESIDE : BESIDE + self.k]
        x.copy_(self._values(generator))
        options: dict = {}
        if self.counts:
            ends = torch.tensor([0, *self.counts]).cumsum(0)
            options["offsets"] = ends.to(device, torch.int32)
        if self.gathered:
            rows = [pick.randrange(self.tokens) for _ in range(self.rows)]
            options["rows"] = torch.tensor(rows, dtype=torch.int32, device=device)
        if self.scaling in ("tensor", "token"):
            options["global_scale"] = self.scaling
        elif self.scaling:
            count = self.rows if self.scaling == "rows" else 1
            scales = torch.rand(count, generator=generator) * 30 + 1e-3
            options["global_scale"] = scales.to(device)
        return x, options

    def _values(self, generator: torch.Generator) -> torch.Tensor:
        block = format_of(self.fmt).block
        values = torch.randn(self.tokens, self.k // block, block, generator=generator)
        kinds = torch.randint(KINDS, values.shape[:2], generator=generator)
        info = torch.finfo(DTYPES[self.dtype])
        steps = torch.randint(-8, 8, values.shape, generator=generator)
        values *= torch.where(kinds == 1, 100.0, 1.0)[..., None]
        values[kinds == 2] *= torch.exp2(steps[kinds == 2].float())
        values[kinds == 3] = torch.tensor(TIES).repeat(block // len(TIES)) * 2.0**-3
        values[kinds == 4] = torch.tensor([0.0, -0.0]).repeat(block // 2)
        values[kinds == 5] *= (info.smallest_normal) * 4
        values[kinds == 6] = steps[kinds == 6] * info.tiny * info.eps
        if not self.calm:
            values[kinds == 7] = steps[kinds == 7] * (info.max / 8)
            values[kinds == 8, 3] = -math.inf
            values[kinds == 9, block - 1] = math.nan
        values[kinds == 10, 1:] = 0.0
        return values.flatten(1)


def check(case: Quantisation, device: str = "cpu", **launch_options: str) -> None:
    """Compare `quantise` of a case with the reference, byte for byte."""
    x, options = case.build(device)
    got = quantise(x, case.fmt, **options, **launch_options)
    options = tree_map_only(torch.Tensor, torch.Tensor.cpu, options)
    expected = reference.quantise(x.cpu(), case.fmt, **options)
    assert_equal(got, expected, case.used)


@dataclass(frozen=True)
class Scattered:
    """Rows of tokens x k, `choices` of each, sorted by expert; scaling as in `Quantisation`.
    expert_range: experts with rows."""

    fmt: str
    tokens: int
    choices: int
    k: int
    experts: int
    scaling: str = ""
    expert_range: tuple[int, int] | None = None

    def __str__(self) -> str:
        span = "" if self.expert_range is None else "-{}to{}".format(*self.expert_range)
        sizes = f"{self.tokens}x{self.choices}x{self.k}-{self.experts}"
        return f"{self.fmt}-{sizes}{'-' * bool(self.scaling)}{self.scaling}{span}"


def check_scattered(case: Scattered, device: str = "cpu", **launch_options: str) -> None:
    """Compare byte for byte, with and without the inverse of the rows."""
    generator = torch.Generator().manual_seed(case.tokens)
    plain = Quantisation(case.fmt, case.tokens, case.k)
    x = plain.build(device)[0]
    ids = torch.rand(case.tokens, case.experts, generator=generator).argsort(-1)
    ids = ids[:, : case.choices].to(device).int()
    found = permutation(ids, case.experts, expert_range=case.expert_range)
    rows = case.tokens * case.choices
    given = {"given": torch.full((1,), 3.0), "rows": torch.rand(rows, generator=generator) + 1}
    scale = given[case.scaling].to(device) if case.scaling in given else case.scaling or None
    options = {"global_scale": scale, "rows": found.slot_of_row, "choices": case.choices}
    options |= {"offsets": found.offsets, **launch_options}
    inverse = {"row_of_slot": found.row_of_slot, "partial": case.expert_range is not None}
    got = run_quantise(Tokens(x, case.fmt, **inverse, **options))
    used = used_bytes(case.fmt, case.k, found.offsets.diff().tolist())
    both, written = (got, quantise(x, case.fmt, **options)), int(found.offsets[-1])
    assert_equal(*(cut(each, written) for each in both), used)


def cut(quantized: Quantized, rows: int) -> Quantized:
    """Return its first rows; scale factors are complete."""
    scales = (quantized.encode_scale, quantized.decode_scale)
    scales = (s if s is None or len(s) == 1 else s[:rows] for s in scales)
    return Quantized(quantized.data[:rows], quantized.scales, *scales, quantized.fmt)


def used_bytes(fmt: str, k: int, counts: Iterable[int]) -> int:
    """Bytes of the scale factors for these rows of each expert; nothing is written after them."""
    return scale_bytes(sum(map(row_blocks, counts)), format_of(fmt).columns(k))


def assert_equal(got: Quantized, expected: Quantized, used: int | None = None) -> None:
    """Compare every byte, except those of the scale factors from `used` on."""
    assert got.fmt == expected.fmt
    for name in ("data", "scales", "encode_scale", "decode_scale"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if mine is None:
            continue
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        mine, theirs = _bytes(mine), _bytes(theirs)
        if name == "scales":
            mine, theirs = mine[:used], theirs[:used]
        differ = (mine != theirs).nonzero()
        assert not len(differ), f"{name}: {len(differ)} bytes differ, the first at {differ[0]}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.float32:
        tensor = torch.where(tensor.isnan(), math.nan, tensor)  # any NaN is acceptable
    return tensor.view(torch.uint8).cpu()


def random_case(seed: int, most: int = 1 << 24) -> Quantisation:
    """A random call of `quantise`, with up to `most` elements including padding."""
    pick = random.Random(seed)
    while True:
        case = _draw(pick)
        blocks = sum(map(row_blocks, case.counts or (case.tokens,)))
        if blocks * SCALE_ROWS * case.k <= most:
            return case


def _draw(pick: random.Random) -> Quantisation:
    fmt = pick.choice(("nvfp4", "nvfp4", "mxfp4", "mxfp8"))
    block = format_of(fmt).block
    k = block * pick.choice((1, 2, 3, 4, 5, 7, 9, 16, 90, 128, 448))
    counts: tuple[int, ...] = ()
    if pick.random() < 0.6:
        sizes = (0, 0, 1, 2, 31, 127, 128, 129, 300)
        counts = tuple(pick.choice(sizes) for _ in range(pick.choice((1, 3, 8, 33, 70))))
        counts = counts if any(counts) else (1, *counts)
    gathered = pick.random() < 0.5
    tokens = sum(counts) or pick.choice((1, 2, 8, 127, 128, 129, 500))
    tokens = pick.choice((1, 5, 64, 200)) if gathered else tokens
    scaling = pick.choice(("tensor", "token", "given", "rows")) if fmt == "nvfp4" else ""
    return Quantisation(
        fmt, tokens, k, pick.choice(sorted(DTYPES)), scaling, counts, gathered,
        calm=scaling == "tensor" and pick.random() < 0.8,
    )  # fmt: skip
