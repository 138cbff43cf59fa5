"""`scatter`: every token read and quantised once, and written for each of its choices."""

from __future__ import annotations

import torch

from kernelkit.launch import Target, launch
from kernelkit.tensors import with_plain_strides
from moe.formats import row_blocks, scale_atoms, scale_blocks
from moe.quantiser.compile import compile_quantise, compile_spread
from moe.quantiser.config import (
    CODE_WORDS,
    QuantiseConfig,
    SpreadConfig,
    ctas_of_block,
    ctas_that_spread,
)

Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def scatter(
    x: torch.Tensor,
    config: QuantiseConfig,
    given: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor],
    places: Places,
    target: Target,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Writes outputs, int32 elements [R, words] and scale factors [words]; returns the global
    scales and their inverses.

    given: what the scale comes from, see QuantiseConfig.scaling. places: rows, their inverse and
    offsets, of `moe.quantiser.launch.Tokens`. Two launches.
    """
    (data, scales), (rows, row_of_slot, offsets) = outputs, places
    (tokens, k), count = x.shape, len(rows)
    atoms = scale_atoms(config.format.columns(k))
    once = x.new_empty((tokens, -(-atoms // CODE_WORDS) * CODE_WORDS), dtype=torch.int32)
    of_tokens = _scales(x, tokens if config.of_rows else 1) if config.scaling else (None, None)
    scaling = (given, *of_tokens) if config.scaling else None
    grid = (ctas_of_block(config, k, row_blocks(tokens)), row_blocks(tokens))
    inputs = with_plain_strides(x), row_of_slot, None
    arguments = (inputs, (data, once.view(-1)), scaling, grid)
    launch(compile_quantise(config, target.arch), arguments, target, x.device)

    spread = SpreadConfig(config.choices, config.of_rows)
    blocks = scale_blocks(count, len(offsets) - 1)
    grid = (ctas_that_spread(spread, atoms, blocks), blocks, atoms)
    copied = _scales(x, count) if config.of_rows else (None, None)
    inputs = (once, *(of_tokens if config.of_rows else copied))
    arguments = (inputs, (scales, *copied), (rows, offsets), grid)
    launch(compile_spread(spread, target.arch), arguments, target, x.device)
    return copied if config.of_rows else of_tokens


def _scales(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.new_empty(size, dtype=torch.float32) for _ in range(2))
