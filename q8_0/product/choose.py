"""Choose the kernel of a product by its sizes and the GPU: data, no DSL.

On a large GPU the instructions after each mma are the bottleneck. So a warp's tile is as large as
registers allow, 64 x 64, which makes the loads of its fragments rare. Smaller tiles are faster if
such large tiles leave SMs without work, or give one SM a tile more than others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kernelkit.compile.arch import PORTABLE
from kernelkit.plan import hw
from kernelkit.tune.choices import Choice, Tuned
from q8_0.blocks import BLOCK, INTERLEAVED, LAYOUTS, SOA
from q8_0.product.config import (
    ALIGNED_BLOCKS,
    APART,
    NEAR,
    OWN_ROWS,
    PAIRS,
    ProductConfig,
)

if TYPE_CHECKING:
    import torch

WIDE_GROUP = 16  # tiles of tokens that are neighbours in the grid, at most
MOST_STAGES = 4
SMALL_SMEM = 100 << 10  # of an SM that has no room for two CTAs
# Compute capability 10.x adds two fp32 numbers at a time. On the other ones here, ptxas spills with
# APART.
ADDING = {
    **{(layout, arch): PAIRS for layout in LAYOUTS for arch in ("sm_100a", "sm_103a")},
    **{(layout, arch): NEAR for layout in LAYOUTS for arch in ("sm_120a", "sm_121a")},
    **{(INTERLEAVED, arch): NEAR for arch in ("sm_80", "sm_87")},
}
FEWEST_STAGES = {SOA: 2, INTERLEAVED: 3}

OPTIONS = ("warp_tokens", "warp_rows", "warps_of_tokens", "warps_of_rows", "ctas_per_sm")
# The values of these, by how many large CTAs fit an SM; the last one has the fewest tokens.
Shape = tuple[int, int, int, int, int]
TWO_CTAS: tuple[Shape, ...] = (
    (64, 64, 2, 2, 2),
    (32, 64, 2, 2, 2),
    (32, 32, 1, 4, 3),
    (16, 32, 1, 4, 3),
)
ONE_CTA: tuple[Shape, ...] = ((64, 64, 2, 4, 1), *TWO_CTAS[1:])
ONE_CTA_SPLIT: tuple[Shape, ...] = ((32, 64, 4, 2, 1), *TWO_CTAS[1:])
# On compute capability 10.3 an int8 mma takes many cycles, and ptxas uses more registers for the
# code around it; smaller tiles do not spill.
SLOW_MMA = ((32, 64, 4, 2, 1), (32, 32, 2, 2, 2), (32, 32, 1, 4, 2), (16, 32, 1, 4, 3))
# TIME_OF: time of an element of a tile by (warp_tokens, warp_rows). LOST: loss, in CTAs, if an SM
# runs fewer CTAs than fit. H200, 20 random shapes: at most 6 % slower than the fastest of nine, 1 %
# on average.
TIME_OF = {(64, 64): 1.0, (32, 64): 1.05, (32, 32): 1.35, (16, 32): 2.3}
LOST = 0.25


@dataclass(frozen=True)
class Sizes:
    """Sizes of a product."""

    tokens: int
    rows: int
    cols: int


def choose(layout: str, out_dtype: str, sizes: Sizes, arch: str, **places: bool) -> ProductConfig:
    """The kernel for these sizes: of `candidates`, whose arguments these are."""
    return fastest(candidates(layout, out_dtype, sizes, arch, **places), sizes, arch)


def fastest(found: Mapping[Shape, ProductConfig], sizes: Sizes, arch: str) -> ProductConfig:
    """Return the candidate with the least modelled time."""
    return found[min(found, key=lambda shape: time_of(shape, sizes, hw.SMS_OF[arch]))]


def candidates(
    layout: str,
    out_dtype: str,
    sizes: Sizes,
    arch: str,
    *,
    aligned: bool,
    vector: bool,
    bias: bool = False,
) -> dict[Shape, ProductConfig]:
    """Return the kernels that fit these sizes, the largest tiles first.

    Args:
        layout: layout of the weights
        out_dtype: dtype of the result
        sizes: sizes of the product
        arch: architecture of the GPU
        aligned: whether address and stride of the weights are multiples of 16 bytes
        vector: whether address and stride of the result are multiples of 16 bytes
        bias: whether there is a bias
    """
    blocks = sizes.cols // BLOCK
    plain = ProductConfig(
        layout,
        out_dtype,
        adding=ADDING.get((layout, arch), APART),
        even=blocks % 2 == 0,
        aligned=layout == SOA or (aligned and blocks % ALIGNED_BLOCKS == 0),
        vector=vector and sizes.rows % OWN_ROWS == 0,
        bias=bias,
    )
    shapes = _shapes(layout, arch, sizes)
    # A tile of which less than a half is needed is never the fastest.
    filled = [shape for shape in shapes if shape[0] * shape[2] < 2 * sizes.tokens]
    return {shape: with_shape(plain, shape, sizes, arch) for shape in filled or shapes[-1:]}


def time_of(shape: Shape, sizes: Sizes, sms: int) -> float:
    """Modelled time per column, in elements of a tile of the largest warps' tiles."""
    warp_tokens, warp_rows, by_tokens, by_rows, ctas_per_sm = shape
    tokens, rows = warp_tokens * by_tokens, warp_rows * by_rows
    ctas = -(-sizes.tokens // tokens) * -(-sizes.rows // rows)
    of_sm = -(-ctas // sms)
    lost = LOST if of_sm % ctas_per_sm else 0.0
    return tokens * rows * TIME_OF[warp_tokens, warp_rows] * (of_sm + lost)


def with_shape(plain: ProductConfig, shape: Shape, sizes: Sizes, arch: str) -> ProductConfig:
    """A kernel with tiles of this shape, and what follows from it."""
    config = fitting(replace(plain, **dict(zip(OPTIONS, shape, strict=True))), arch)
    small = sizes.tokens < config.tile_tokens or sizes.rows < config.tile_rows
    return replace(config, small=small)


def _shapes(layout: str, arch: str, sizes: Sizes) -> tuple[Shape, ...]:
    if arch == "sm_103a":
        shapes = SLOW_MMA
    elif hw.smem_bytes_per_cta(arch) > SMALL_SMEM:
        shapes = TWO_CTAS
    else:
        shapes = ONE_CTA if layout == SOA else ONE_CTA_SPLIT
    tokens, rows, by_tokens, by_rows, _ = shapes[0]
    small = sizes.tokens < tokens * by_tokens or sizes.rows < rows * by_rows
    # Clamped rows of blocks need more registers than the largest tiles leave, and fewer than 128
    # tokens give more CTAs with tiles of 64.
    return shapes[1:] if small and layout == INTERLEAVED else shapes


def fitting(config: ProductConfig, arch: str) -> ProductConfig:
    """Return `config` with as many stages as fit, up to MOST_STAGES.

    The number of CTAs per SM is reduced if shared memory is too small for the fewest stages of
    each.
    """
    for ctas in range(config.ctas_per_sm, 0, -1):
        room = hw.smem_bytes_per_sm(arch) // ctas - hw.SMEM_RESERVED_BYTES
        for stages in range(MOST_STAGES, FEWEST_STAGES[config.layout] - 1, -1):
            found = replace(config, ctas_per_sm=ctas, stages=stages)
            if found.smem_bytes <= room:
                return found
    raise ValueError(f"{config}: {config.smem_bytes} bytes of shared memory do not fit on {arch}")


def group_of(tokens: int, tile: int) -> tuple[int, int]:
    """(tiles of tokens of a group, groups): neighbours in the grid share rows of the weights."""
    tiles = -(-tokens // tile)
    groups = -(-tiles // WIDE_GROUP)
    return -(-tiles // groups), groups


# ---- what may be measured

KERNELS = dict.fromkeys(("sm_100a", "sm_90a", PORTABLE), ("q8_0.product.kernel",))
TUNED = Tuned("q8_0.product", KERNELS, OPTIONS)


@dataclass(frozen=True)
class Problem:
    """Key of a tuned choice; config: the config for the arguments, with default tile shapes."""

    config: ProductConfig
    sizes: Sizes


def problem_of(config: ProductConfig, sizes: Sizes) -> Problem:
    """Return the problem that the rules' choice for these sizes belongs to."""
    shapeless = (*OPTIONS, "stages", "small")
    plain = ProductConfig(config.layout, config.out_dtype)
    return Problem(replace(config, **{n: getattr(plain, n) for n in shapeless}), sizes)


def choices(problem: Problem, arch: str) -> list[Choice]:
    """List every known shape that fits a problem. None changes the bits."""
    found: list[Choice] = []
    for shape in dict.fromkeys((*TWO_CTAS, *ONE_CTA, *ONE_CTA_SPLIT, *SLOW_MMA)):
        try:
            with_shape(problem.config, shape, problem.sizes, arch)
        except ValueError:
            continue
        found.append(dict(zip(OPTIONS, shape, strict=True)))
    return found


def measured(config: ProductConfig, sizes: Sizes, arch: str, device: torch.device) -> ProductConfig:
    """A config of the rules, or the one that was measured to be the fastest for these sizes."""

    def check(other: ProductConfig) -> None:
        shape = {name: getattr(other, name) for name in OPTIONS}
        if shape not in choices(problem_of(config, sizes), arch):
            raise ValueError(f"{shape} is not among the shapes for its problem")

    def asked(_: ProductConfig) -> Problem:
        return problem_of(config, sizes)

    found = TUNED.applied(config, device, asked, check)
    if found is config:
        return config
    shape: Any = tuple(getattr(found, name) for name in OPTIONS)
    return with_shape(config, shape, sizes, arch)
