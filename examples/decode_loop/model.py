"""A Llama, Qwen2 or Qwen3: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

`Model` is everything but attention over the keys, which an `Attend` computes: over a paged cache
(`cache.py`), or in plain torch (`reference.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

MODELS = ("llama", "qwen2", "qwen3")
# (layer, q [T, Hq, D], k and v [T, Hkv, D] of the new tokens) -> O like q
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of a model; the default is a tiny one."""

    layers: int = 2
    hidden: int = 128
    intermediate: int = 256
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 96
    eps: float = 1e-6


@dataclass(frozen=True)
class Model:
    """A model with its weights, by the names of checkpoints without "model." in front.

    speed: fp32 [D / 2], radians per position of each pair of columns of a head.
    angle_scale: factor of cosines and sines, 1 for most models.
    """

    config: Config
    weights: Mapping[str, torch.Tensor]
    speed: torch.Tensor
    angle_scale: float = 1.0

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, last: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [N, V] of the tokens in `last`, of all tokens [T] of a step."""
        x = self.weights["embed_tokens.weight"][tokens]
        angle = positions[:, None] * self.speed
        angles = angle.cos() * self.angle_scale, angle.sin() * self.angle_scale
        for layer in range(self.config.layers):
            normed = self._norm(x, f"layers.{layer}.input_layernorm")
            x = x + self._attention(layer, normed, angles, attend)
            normed = self._norm(x, f"layers.{layer}.post_attention_layernorm")
            gate, up = (
                self._linear(normed, f"layers.{layer}.mlp.{n}_proj") for n in ("gate", "up")
            )
            x = x + self._linear(silu(gate) * up, f"layers.{layer}.mlp.down_proj")
        tied = "lm_head.weight" not in self.weights
        return self._linear(self._norm(x[last], "norm"), "embed_tokens" if tied else "lm_head")

    def _attention(
        self, layer: int, normed: torch.Tensor, angles: tuple[torch.Tensor, ...], attend: Attend
    ) -> torch.Tensor:
        name, dim = f"layers.{layer}.self_attn.", self.config.head_dim
        rows = (self._linear(normed, f"{name}{which}_proj") for which in "qkv")
        q, k, v = (x.unflatten(-1, (-1, dim)) for x in rows)
        if f"{name}q_norm.weight" in self.weights:  # Qwen3
            q, k = self._norm(q, f"{name}q_norm"), self._norm(k, f"{name}k_norm")
        o = attend(layer, rotated(q, *angles), rotated(k, *angles), v)
        return self._linear(o.flatten(1), f"{name}o_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.eps)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, D] by the angles [T, D / 2]; columns i and i + D / 2 are a pair."""
    x, y = heads.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x * cos - y * sin, y * cos + x * sin), -1).to(heads.dtype)


def drawn(config: Config, seed: int = 0, device: str = "cpu") -> Model:
    """Return a model of random weights in bf16."""
    norms = "input_layernorm", "post_attention_layernorm"
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (config.hidden,))
    for name, heads in {"q": config.q_heads, "k": config.kv_heads, "v": config.kv_heads}.items():
        layer[f"self_attn.{name}_proj"] = (heads * config.head_dim, config.hidden)
    layer["self_attn.o_proj"] = (config.hidden, config.q_heads * config.head_dim)
    for name in ("gate", "up"):
        layer[f"mlp.{name}_proj"] = (config.intermediate, config.hidden)
    layer["mlp.down_proj"] = (config.hidden, config.intermediate)
    shapes = {f"layers.{n}.{name}": layer[name] for n in range(config.layers) for name in layer}
    shapes |= {"norm": (config.hidden,), "embed_tokens": (config.vocabulary, config.hidden)}
    numbers, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=numbers)
        values = values * shape[-1] ** -0.5 if len(shape) > 1 else 1 + values / 8
        weights[f"{name}.weight"] = values.to(device, torch.bfloat16)
    return Model(config, weights, speeds(10000.0, config.head_dim, device))


def stored(folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Model:
    """Load a checkpoint of Hugging Face; ValueError for another model, or one with windows."""
    from safetensors.torch import load_file
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found: Any = AutoConfig.from_pretrained(folder)
    if found.model_type not in MODELS:
        raise ValueError(f"{folder} is a {found.model_type}; allowed are {', '.join(MODELS)}")
    if "sliding_attention" in (getattr(found, "layer_types", None) or ()):
        raise ValueError(f"{folder} has sliding windows; allowed is full attention")
    q_heads = found.num_attention_heads
    head_dim = getattr(found, "head_dim", None) or found.hidden_size // q_heads
    config = Config(
        found.num_hidden_layers, found.hidden_size, found.intermediate_size, q_heads,
        found.num_key_value_heads, head_dim, found.vocab_size, found.rms_norm_eps,
    )  # fmt: skip
    files = [load_file(path, device=device) for path in sorted(Path(folder).glob("*.safetensors"))]
    weights = {n.removeprefix("model."): t.to(dtype) for file in files for n, t in file.items()}
    rope = found.rope_parameters
    if rope["rope_type"] == "default":
        return Model(config, weights, speeds(rope["rope_theta"], head_dim, device))
    return Model(config, weights, *ROPE_INIT_FUNCTIONS[rope["rope_type"]](found, device))


def speeds(theta: float, head_dim: int, device: str) -> torch.Tensor:
    """Return the radians per position of each pair of columns, without any scaling."""
    return theta ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
