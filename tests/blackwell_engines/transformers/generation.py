"""Greedy tokens of a model, after prompts that it is sure of."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CompileConfig

from tests.blackwell_engines.transformers.models import padding, prompt

NEW = 4  # tokens
TRIES = 24
Given = tuple[torch.Tensor, torch.Tensor | None]  # token ids and padding


def decisive(exact: Any, sizes: tuple[int, int], side: str = "") -> Given:
    """Prompts [batch, tokens] after which no two largest logits of a model in fp32 are close: of
    many, those where they are furthest apart. Roundings then do not decide which token is next."""
    (batch, tokens), mask = sizes, padding(*sizes, side)
    ids, masks = prompt(batch * TRIES, tokens), None
    if mask is not None:
        masks = mask.repeat(TRIES, 1)
        ids = ids * masks
    exact.set_attn_implementation("eager")
    told = generated(exact, (ids, masks), output_logits=True, return_dict_in_generate=True)
    largest = torch.stack(told.logits).topk(2).values
    margins = (largest[..., 0] - largest[..., 1]).amin(0).view(TRIES, batch)
    return ids.view(TRIES, batch, tokens)[margins.argmax(0), torch.arange(batch)], mask


def generated(model: Any, given: Given, **how: Any) -> Any:
    """What `generate` returns, greedily, with a static cache unless told otherwise."""
    ids, mask = given
    how = {"cache_implementation": "static", "max_new_tokens": NEW, "do_sample": False} | how
    return model.generate(ids, attention_mask=mask, **how)


def on_any_device() -> CompileConfig:
    """`generate` then compiles decoding without a GPU as well, as one graph."""
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    return config
