"""Models with a name: what of their config.json decides the layout of the cache.

`preset("deepseek-v4-pro", draft=3)`, or `from_config("path/config.json", Options(draft=3))` for any
other. Options:

    record        V4: fp8 (584-byte entries, MXFP4 indexer), fp8-index8 (132-byte indexer), bf16;
                  V4.1: fp4, fp8, bf16; V3.2 and V3: fp8, bf16; plain keys and values: bf16, fp8
    block_tokens  of a block, a multiple of every ratio (128 with HCA layers)
    draft         the most tokens of a step that may be taken back
    mtp           draft layers whose cache is here, too; in V4 and V4.1 they have the window alone
    online_hca    V4: tails of HCA layers hold [maximum, sum, value] instead of 128 rows

V4.1-Flash: layer map and sources are those of its config.json as public code quotes it; the 890
bytes of its paper follow from them. Not known from there: whether the served caches hold the
window's entries in 528 bytes in every layer (taken so here: the model quantises them to FP8 in
groups of 32), and how many rows its compressor keeps (here: the `ratio` that it averages over,
without overlap).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from kvcache.checks import require
from kvcache.layouts.hf_config import from_config
from kvcache.layouts.layout import Layout
from kvcache.layouts.models import CSA, HCA, ConfigError, Options, gqa

__all__ = ["CONFIGS", "PRESETS", "ConfigError", "Options", "from_config", "gqa", "preset"]

_DEEPSEEK = {
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
}

# Keys as in the models' config.json files; what the cache does not depend on is left out.
CONFIGS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "deepseek-v4-pro": {
            **_DEEPSEEK,
            "model_type": "deepseek_v4",
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "compress_ratios": [HCA, *[HCA, CSA] * 30, 0],
        },
        "deepseek-v4-flash": {
            **_DEEPSEEK,
            "model_type": "deepseek_v4",
            "num_hidden_layers": 43,
            "num_nextn_predict_layers": 1,
            "compress_ratios": [0, 0, CSA, *[HCA, CSA] * 20, 0],
        },
        "deepseek-v4.1-flash": {
            **_DEEPSEEK,
            "model_type": "deepseek_v41_text",
            "num_hidden_layers": 40,
            "num_nextn_predict_layers": 3,
            "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
            "kv_source_layer_ids": [2, 8, 14, 20],
        },
        "deepseek-v3.2": {
            "model_type": "deepseek_v32",
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
        },
        "llama-3.1-70b": {
            "model_type": "llama",
            "num_hidden_layers": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        "gpt-oss-120b": {
            "model_type": "gpt_oss",
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
    }
)


def preset(name: str, **options: Any) -> Layout:
    """The layout of a model by its name; options: the fields of `Options`.

    Raises:
        ValueError: for another name, with those that there are, or an option that it does not have.
    """
    require("name", name, str)
    if name not in CONFIGS:
        raise ValueError(f"{name!r}: presets are {', '.join(CONFIGS)}")
    return from_config(CONFIGS[name], Options(**options), name=name)


PRESETS: MappingProxyType[str, Callable[..., Layout]] = MappingProxyType(
    {name: partial(preset, name) for name in CONFIGS}
)
deepseek_v4_pro = PRESETS["deepseek-v4-pro"]
deepseek_v4_flash = PRESETS["deepseek-v4-flash"]
deepseek_v41_flash = PRESETS["deepseek-v4.1-flash"]
deepseek_v32 = PRESETS["deepseek-v3.2"]
