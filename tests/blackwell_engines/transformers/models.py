"""Tiny models of transformers with random weights, and what a model says of a batch."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "initializer_range": 0.15, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WINDOW = 8
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# name -> (classes of a config and a model, what its config has besides)
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
    """A model of random weights, the same for each dtype but for rounding to bf16; sinks and norms
    that models begin with as constants are random as well."""
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
    """int64 [batch, tokens], 0 for pads: entry b has 3 b of them on the side, None for none."""
    if not side:
        return None
    places = torch.arange(tokens).expand(batch, tokens)
    pads = 3 * torch.arange(batch)[:, None]
    return (places >= pads if side == "left" else places < tokens - pads).long()
