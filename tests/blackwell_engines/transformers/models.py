"""Tiny models of transformers with random weights, their logits of a batch, and greedy tokens."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CompileConfig

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "initializer_range": 0.15, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WINDOW = 8
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# name -> (class of config and model, additional options of its config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3", {**HYBRID, "use_sliding_window": True}),
    "gemma2": ("Gemma2", {**HYBRID, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64}),
    "gemma3": ("Gemma3", {**HYBRID, "query_pre_attn_scalar": 48}),
    "gpt-oss": ("GptOss", {**HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": MODELS["gpt-oss"],
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def tiny(name: str, dtype: torch.dtype, **sizes: Any) -> Any:
    """Make a model of random weights, equal in all dtypes up to rounding to bf16. Sinks and norms,
    which models initialise with constants, are random as well.
    """
    family, own = (MODELS | MIXTURES)[name]
    kind = f"{family}Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **own, **sizes})
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.3
    return model.bfloat16().to(dtype).eval()


def prompt(batch: int, tokens: int) -> torch.Tensor:
    """int64 [batch, tokens], without the pad."""
    numbers = torch.Generator().manual_seed(tokens)
    return torch.randint(1, SIZES["vocab_size"], (batch, tokens), generator=numbers)


def padding(batch: int, tokens: int, side: str) -> torch.Tensor | None:
    """int64 [batch, tokens], 0 for pads: entry b has 3 b pads on `side`; None if there is no
    side.
    """
    if not side:
        return None
    places = torch.arange(tokens).expand(batch, tokens)
    pads = 3 * torch.arange(batch)[:, None]
    return (places >= pads if side == "left" else places < tokens - pads).long()


NEW = 4  # tokens
TRIES = 24
Given = tuple[torch.Tensor, torch.Tensor | None]  # token ids and padding


def decisive(exact: Any, sizes: tuple[int, int], side: str = "") -> Given:
    """Choose prompts [batch, tokens] whose next token does not depend on rounding: of many, those
    for which the two largest logits of a model in fp32 are furthest apart.
    """
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
    """Return the greedy result of `generate`, by default with a static cache."""
    ids, mask = given
    how = {"cache_implementation": "static", "max_new_tokens": NEW, "do_sample": False} | how
    return model.generate(ids, attention_mask=mask, **how)


def on_any_device() -> CompileConfig:
    """Config with which `generate` compiles decoding without a GPU as well, as one graph."""
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    return config
