"""The same logits in plain torch: without a cache, and without kernels of this repository."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from examples.decode_loop.model import Model
from kernelkit.numerics.tolerance import Report, compare_output


def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`Attend` of one whole sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o[0].transpose(0, 1)


def logits_of(model: Model, prompt: Sequence[int], found: Sequence[int]) -> torch.Tensor:
    """Return logits [N, V] for each of the N tokens in `found`, given all tokens before it."""
    tokens = torch.tensor([*prompt, *found[:-1]], device=model.speed.device)
    positions = torch.arange(len(tokens), device=tokens.device)
    return model(tokens, positions, attend, positions[len(prompt) - 1 :])


def compare(
    model: Model, prompt: Sequence[int], found: Sequence[int], logits: torch.Tensor
) -> tuple[int, Report]:
    """Return how many tokens in `found` are those of the model in fp32, and a report on `logits`.

    Logits are right if they are within twice the error of plain torch in the model's dtype, and an
    ulp.
    """
    weights = {name: tensor.float() for name, tensor in model.weights.items()}
    exact = logits_of(replace(model, weights=weights), prompt, found)
    rounded = logits_of(model, prompt, found)
    same = sum(a == b for a, b in zip(exact.argmax(-1).tolist(), found, strict=True))
    return same, compare_output(logits, exact, rounded, rounded.dtype)
