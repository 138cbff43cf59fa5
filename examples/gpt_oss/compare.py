"""Compare transformers' gpt-oss, with the same weights, to ours: logits, greedy tokens, speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from examples.gpt_oss.config import Config
from examples.gpt_oss.engine import Job
from examples.gpt_oss.experts import Bf16Experts, PlainExperts, packed_of, plain_of
from examples.gpt_oss.model import Model
from examples.gpt_oss.weights import Source, Weights

PREFIX = "model.layers"


@dataclass(frozen=True)
class Difference:
    """Difference of two sets of logits [N, V].

    Attributes:
        largest: Largest absolute difference.
        relative: Norm of the difference over the norm of the reference.
        agree: Number of rows in which the largest logit is the same.
        rows: Number of rows.
    """

    largest: float
    relative: float
    agree: int
    rows: int

    @classmethod
    def of(cls, ours: torch.Tensor, theirs: torch.Tensor) -> Difference:
        """Relative to theirs."""
        ours, theirs = ours.float(), theirs.float()
        apart = ours - theirs
        same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        relative = float(apart.norm() / theirs.norm())
        return cls(float(apart.abs().max()), relative, same, len(ours))

    def __str__(self) -> str:
        return (
            f"at most {self.largest:.4f}, {self.relative:.2%} in the norm, the same token first "
            f"in {self.agree} of {self.rows}"
        )


@dataclass(frozen=True)
class Comparison:
    """Our results compared with transformers'.

    Attributes:
        logits: Difference over every new token, given the same tokens before it.
        rounding: Error of MXFP4 quantisation alone: transformers' model with rounded experts,
            compared with the original ones. None if the experts are exact in MXFP4.
        greedy: For each prompt, the number of equal tokens before the first different one.
        margin: How much likelier the first different token was for transformers.
        rates: Tokens per second of prefill and of decoding.
    """

    logits: Difference
    rounding: Difference | None
    greedy: tuple[int, ...]
    margin: float | None
    rates: tuple[float, float]


def state_dict(config: Config, weights: Weights, plain: Sequence[PlainExperts]) -> dict[str, Any]:
    """The weights by the names that transformers has for them; views, nothing is copied. plain:
    the experts of each layer."""
    sizes = [heads * config.head_dim for heads in (config.q_heads, *[config.kv_heads] * 2)]
    found = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    for number, (layer, experts) in enumerate(zip(weights.layers, plain, strict=True)):
        names = {
            "input_layernorm.weight": layer.attention_norm,
            "post_attention_layernorm.weight": layer.experts_norm,
            "self_attn.sinks": layer.sinks.to(weights.head.dtype),
            "self_attn.o_proj.weight": layer.out,
            "self_attn.o_proj.bias": layer.out_bias,
            "mlp.router.weight": layer.router,
            "mlp.router.bias": layer.router_bias,
            "mlp.experts.gate_up_proj": experts.gate_up,
            "mlp.experts.gate_up_proj_bias": experts.gate_up_bias,
            "mlp.experts.down_proj": experts.down,
            "mlp.experts.down_proj_bias": experts.down_bias,
        }
        for end, whole in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            parts = zip("qkv", whole.split(sizes), strict=True)
            names |= {f"self_attn.{x}_proj.{end}": part for x, part in parts}
        found |= {f"{PREFIX}.{number}.{name}": tensor for name, tensor in names.items()}
    return found


def experts_of(weights: Weights, source: Source) -> list[PlainExperts]:
    """Return the experts in 16 bits, as transformers computes with them.

    Ours are returned directly if they are stored in 16 bits.
    """
    found = []
    for number, layer in enumerate(weights.layers):
        if isinstance(layer.experts, Bf16Experts):
            found.append(layer.experts.plain)
            continue
        plain, packed = source.plain(number), source.packed(number)
        if plain is None:
            assert packed is not None
            plain = plain_of(packed, weights.head.dtype)
        found.append(plain)
    return found


def transformers_model(model: Model, source: Source, attention: str = "eager") -> Any:
    """Return a GptOssForCausalLM with the same weights, which shares memory of 16-bit tensors."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    values = {k: v for k, v in model.config.values.items() if k not in ("model_type", "dtype")}
    values = {k: v for k, v in values.items() if k not in ("quantization_config", "torch_dtype")}
    config = GptOssConfig(**values, pad_token_id=0)
    with torch.device("meta"):
        theirs = GptOssForCausalLM(config)
    plain = experts_of(model.weights, source)
    theirs.load_state_dict(state_dict(model.config, model.weights, plain), assign=True)
    with torch.device(model.device):  # its tables are in no state dict
        theirs.model.rotary_emb = GptOssRotaryEmbedding(config)
    theirs.set_attn_implementation(attention)
    theirs.generation_config.eos_token_id = None  # as many tokens as are asked for
    return theirs.eval()


@torch.no_grad()
def logits_of(theirs: Any, job: Job) -> torch.Tensor:
    """Return transformers' logits [N, V] before each new token of a job, given our earlier
    tokens."""
    device = theirs.device
    ids = torch.tensor([job.prompt + job.found[:-1]], device=device)
    return theirs(ids, use_cache=False, logits_to_keep=len(job.found)).logits[0]


def compare(theirs: Any, source: Source, jobs: Sequence[Job], cache: str = "dynamic") -> Comparison:
    """Compare finished jobs of an engine that kept logits with transformers' model.

    cache: its kind of cache.

    If the experts are not exact in MXFP4, they are rounded to MXFP4 values from here on. Our bf16
    experts, which share their memory, are rounded as well.
    """
    ours = torch.cat([torch.stack(job.logits) for job in jobs])
    given = torch.cat([logits_of(theirs, job) for job in jobs])
    tokens, rates = _generated(theirs, jobs, cache)
    greedy = tuple(_alike(job.found, other) for job, other in zip(jobs, tokens, strict=True))
    margin = None
    for job, count in zip(jobs, greedy, strict=True):
        if count < len(job.found):
            row = logits_of(theirs, job)[count].float()
            found = float(row.max() - row[job.found[count]])
            margin = found if margin is None else max(margin, found)
    rounding = None
    if source.packed(0) is None:
        _round_experts(theirs)
        held = torch.cat([logits_of(theirs, job) for job in jobs])
        rounding = Difference.of(held, given)
    return Comparison(Difference.of(ours, given), rounding, greedy, margin, rates)


def _alike(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(ours, theirs, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(ours))


@torch.no_grad()
def _round_experts(theirs: Any) -> None:
    """Round the experts to MXFP4 values, in place."""
    for layer in theirs.model.layers:
        experts = layer.mlp.experts
        names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        plain = PlainExperts(*(getattr(experts, name) for name in names))
        held = plain_of(packed_of(plain), plain.gate_up.dtype)
        experts.gate_up_proj.copy_(held.gate_up)
        experts.down_proj.copy_(held.down)


@torch.no_grad()
def _generated(
    theirs: Any, jobs: Sequence[Job], cache: str
) -> tuple[list[list[int]], tuple[float, float]]:
    """Greedy tokens of transformers' `generate`, all prompts of a length at once, and tokens in a
    second: of the prompts until the first new token, and of the others from there on."""
    found: list[list[int]] = [[] for _ in jobs]
    spent, counts = [0.0, 0.0], [0, 0]
    for length in sorted({len(job.prompt) for job in jobs}):
        mine = [n for n, job in enumerate(jobs) if len(job.prompt) == length]
        ids = torch.tensor([jobs[n].prompt for n in mine], device=theirs.device)
        new = max(len(jobs[n].found) for n in mine)
        how = {"do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
        how["attention_mask"] = torch.ones_like(ids)
        took, out = [], ids
        for count in (new, 1, 1, new):  # the first ones warm up
            _wait(theirs.device)
            began = time.perf_counter()
            out = theirs.generate(ids, max_new_tokens=count, **how)
            _wait(theirs.device)
            took.append(time.perf_counter() - began)
        for n, row in zip(mine, out[:, length:].tolist(), strict=True):
            found[n] = row
        spent = [spent[0] + took[2], spent[1] + max(took[3] - took[2], 0.0)]
        counts = [counts[0] + ids.numel(), counts[1] + len(mine) * (new - 1)]
    rates = [count / max(seconds, 1e-9) for count, seconds in zip(counts, spent, strict=True)]
    return found, (rates[0], rates[1])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
