"""Tiny models of random weights, as files: `python -m lab.engines.models FOLDER [NAME ...]`.

Each has two layers and sizes at which a layer takes milliseconds in the emulator, and the property
of its family that attention must get right: windows of 24 keys, softcap, sinks, head dims, chunks.
It runs in the environment of the engines, whose transformers writes what they can read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from lab.engines.quantised import QUANTISED

WINDOW = 24
MIXED = ["sliding_attention", "full_attention"]
COMMON: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 512, "initializer_range": 0.1,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_experts": 4}
# name -> family of transformers, fields of its config beside COMMON
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 64, "tie_word_embeddings": False}),
    "llama_one_head": ("Llama", {"head_dim": 64, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 128, "layer_types": ["full_attention"] * 2}),
    "mistral": ("Mistral", {"head_dim": 64, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {
        "head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": WINDOW,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0, "layer_types": MIXED,
    }),
    "gemma3": ("Gemma3", {
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": WINDOW,
        "layer_types": MIXED,
    }),
    "phi3": ("Phi3", {"hidden_size": 384}),
    "gpt_oss": ("GptOss", {
        "head_dim": 64, "sliding_window": WINDOW, "num_local_experts": 4,
        "num_experts_per_tok": 2, "layer_types": MIXED,
    }),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 64, **EXPERTS}),
    "llama4": ("Llama4", {
        "head_dim": 64, "intermediate_size_mlp": 512, "num_local_experts": 2,
        "num_experts_per_tok": 1, "attention_chunk_size": 16, "no_rope_layers": [1, 0],
        "moe_layers": [0, 1], "interleave_moe_layer_step": 1,
    }),
}  # fmt: skip
TEXT = {"Gemma3", "Llama4"}  # families whose config for text has a name of its own


def decoder(folder: Path, name: str) -> None:
    """Write a model of DECODERS."""
    family, fields = DECODERS[name]
    config_of = getattr(transformers, f"{family}{'Text' * (family in TEXT)}Config")
    torch.manual_seed(0)
    config = config_of(**(COMMON | fields))
    config.dtype = "bfloat16"
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
            elif "gemma" in name and "norm" in path:
                parameter.copy_(0.2 * torch.randn_like(parameter))
            elif "gemma" in name and "embed_tokens" in path:
                parameter.mul_(0.1)
    model.save_pretrained(folder / name)


# K and V of a layer divided by these are what an FP8 cache of `fp8_kv` holds: far from each other.
SCALES = {0: (0.05, 0.015), 1: (0.02, 0.06)}


def fp8_kv(folder: Path, name: str) -> None:
    """Write llama with a calibrated scale for K and one for V in each layer, in the layout of
    compressed-tensors; its weights are those of llama."""
    source, target = folder / "llama", folder / name
    target.mkdir(parents=True)
    weights = load_file(source / "model.safetensors")
    for layer, scales in SCALES.items():
        for word, scale in zip("kv", scales, strict=True):
            key = f"model.layers.{layer}.self_attn.{word}_scale"
            weights[key] = torch.tensor([scale])
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
        "quantization_status": "frozen", "ignore": ["lm_head"],
        "kv_cache_scheme": {
            "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True,
            "dynamic": False,
        },
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


OTHERS: dict[str, Callable[[Path, str], None]] = {"llama_fp8_kv": fp8_kv, **QUANTISED}


def main(words: list[str]) -> None:
    """Write the models that are named, or all."""
    folder, *names = words
    for name in names or [*DECODERS, *OTHERS]:
        OTHERS.get(name, decoder)(Path(folder), name)
        print(name, flush=True)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    main(sys.argv[1:])
