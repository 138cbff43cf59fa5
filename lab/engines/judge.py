"""`Reference`: a model of transformers in float32, which judges the tokens of an engine.

Tokens are teacher-forced: the engine's own tokens go through the reference, and at each place the
token has to be the best one, or behind it by no more than rounding to bfloat16 explains. The scale
of that rounding is the error of the same model of transformers in bfloat16, at all places of the
same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

FP8_ATTENTION = "eager_over_e4m3"
LEAST = 0.02  # of a log-probability: what a bfloat16 logit near 4 is rounded by
MOST = 0.6  # allowed at all: where an expert of the bfloat16 model flips, its error says nothing
Scales = Mapping[int, tuple[float, float]]  # (K, V) by layer


@dataclass(frozen=True)
class Verdict:
    """Errors of log-probabilities, in nats.

    engine: of the engine, beside float32
    own: of transformers in bfloat16, at all places of the same tokens
    behind: how far the engine's worst token is behind the best one, in float32
    """

    engine: float
    own: float
    behind: float

    @property
    def ok(self) -> bool:
        bound = min(2 * max(self.own, LEAST), MOST)
        return self.engine <= bound and self.behind <= bound

    def __str__(self) -> str:
        return (
            f"log-probabilities off by {self.engine:.3f} (transformers in bf16: {self.own:.3f}), "
            f"tokens behind the best by {self.behind:.3f}"
        )


@dataclass(frozen=True)
class Reference:
    """Judge of a model.

    folder: weights in bfloat16, as transformers reads them
    scales: K and V are rounded to e4m3 after division by these
    """

    folder: Path
    scales: Scales | None = None

    @cached_property
    def models(self) -> tuple[Any, Any]:
        """The model in float32 and in bfloat16, with eager attention."""
        return self._load(torch.float32), self._load(torch.bfloat16)

    def _load(self, dtype: torch.dtype) -> Any:
        kind = "eager"
        if self.scales is not None:
            AttentionInterface.register(FP8_ATTENTION, _attention_over_e4m3)
            # An implementation without a registered mask function gets no mask, in silence.
            AttentionMaskInterface.register(FP8_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
            kind = FP8_ATTENTION
        config = AutoConfig.from_pretrained(self.folder)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, config=config, dtype=dtype, attn_implementation="eager"
        ).eval()
        model.config._attn_implementation = kind
        for layer, scales in (self.scales or {}).items():
            model.model.layers[layer].self_attn.e4m3_scales = scales
        return model

    def judge(self, prompt: Sequence[int], answers: Sequence[dict[str, Any]]) -> Verdict:
        """Judge answers to one prompt, the errors at their worst.

        Args:
            answers: {"tokens": [..], "logprobs": [{token: value}, ..]}; without logprobs only the
                tokens are judged.
        """
        worst = [0.0, 0.0, 0.0]
        for answer in answers:
            tokens = answer["tokens"]
            exact, own = (_logprobs(model, [*prompt, *tokens]) for model in self.models)
            best = exact.topk(2).indices
            worst[1] = max(worst[1], (own - exact).gather(1, best).abs().max().item())
            for place, token in enumerate(tokens):
                row = exact[len(prompt) - 1 + place]
                given = (answer.get("logprobs") or {place: {}})[place]
                errors = [abs(value - row[int(t)].item()) for t, value in given.items()]
                worst[0] = max([worst[0], *errors])
                worst[2] = max(worst[2], (row.max() - row[token]).item())
        return Verdict(*worst)


def _logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def _attention_over_e4m3(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention over K and V as an FP8 cache holds them. Below float32 the exponentials are rounded
    to e4m3, too, as kernels over such a cache do."""
    k, v = (
        ((x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
        .to(q.dtype)
        .repeat_interleave(q.shape[1] // x.shape[1], dim=1)
        for x, scale in zip((k, v), module.e4m3_scales, strict=True)
    )
    scores = (q @ k.mT).float() * scaling + mask.float()
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    total = p.sum(-1, keepdim=True)
    if q.dtype != torch.float32:
        p = p.to(torch.float8_e4m3fn).float()
    return ((p @ v.float()) / total).to(q.dtype).transpose(1, 2).contiguous(), None


transformers.utils.logging.disable_progress_bar()
