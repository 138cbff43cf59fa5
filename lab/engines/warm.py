"""Kernels of a server, made before it starts: `python -m lab.engines.warm ENGINE MODEL [ARCH]`.

It runs in the environment of the engines, and fills BLACKWELL_KERNELS_CACHE there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig

from blackwell_engines.engines.limits import Layer
from blackwell_engines.engines.warm import Sizes, warmup

ENGINES = {  # engine -> how its plugin uses kernels
    "vllm": {"written": True},
    "sglang": {"written": False, "own_keys": True},
}
REQUESTS, TOKENS, KEYS, PAGE = 8, 64, 128, 16  # of `server`


def layers_of(model: Path) -> Iterator[tuple[Layer, Sizes]]:
    """Yield each kind of layer that a model has."""
    config = AutoConfig.from_pretrained(model)
    sizes = Sizes(
        config.num_attention_heads, config.num_key_value_heads,
        requests=REQUESTS, tokens=TOKENS, keys=KEYS,
    )  # fmt: skip
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // sizes.q_heads
    window = getattr(config, "sliding_window", None)
    kinds = {*(getattr(config, "layer_types", None) or ["sliding_attention"])}
    for kind in sorted(kinds):
        seen = window - 1 if window and kind == "sliding_attention" else None
        yield (
            Layer(
                head_dim, torch.bfloat16, torch.bfloat16, PAGE, window=seen,
                sinks=config.model_type == "gpt_oss",
                softcap=bool(getattr(config, "attn_logit_softcapping", None)),
            ),
            sizes,
        )  # fmt: skip


if __name__ == "__main__":
    engine, folder, *arch = sys.argv[1:]
    for layer, sizes in layers_of(Path(folder)):
        print(warmup(layer, sizes, *(arch or ["sm_100a"]), **ENGINES[engine], progress=True))
