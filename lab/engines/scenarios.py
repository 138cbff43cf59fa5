"""Runs of engines as data: a model, requests, options of the engine, and what has to be seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lab.engines.models import SCALES, WINDOW

Seen = Mapping[str, Any]  # a line of `harness.observe`


@dataclass(frozen=True)
class Scenario:
    """A run of one engine.

    name: also of its log
    model: of `lab.engines.models`
    weights: those that transformers reads, where they differ
    lengths: tokens of each prompt
    tokens: new tokens of each prompt
    rounds: how often the same prompts are sent
    repeating: whether prompts repeat five tokens, which n-gram drafts are found in
    options: of the engine, beside those of all runs
    variables: of the engine's process
    scales: of an FP8 cache, as `judge.Reference` takes them
    seen: names of `SEEN` that the calls of our attention must show
    counted: metrics of the engine that must be above 0
    """

    name: str
    model: str = "llama"
    weights: str | None = None
    lengths: Sequence[int] = (5, 33)
    tokens: int = 5
    rounds: int = 1
    repeating: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[int, tuple[float, float]] | None = None
    seen: Sequence[str] = ("decode", "prompt")
    counted: Sequence[str] = ()

    def prompts(self) -> list[list[int]]:
        """The prompts' tokens; they differ from their first token on."""
        drawn = torch.Generator().manual_seed(1)
        if self.repeating:
            pattern = torch.randint(3, 500, (5,), generator=drawn).tolist()
            return [(pattern * length)[:length] for length in self.lengths]
        return [torch.randint(3, 500, (n,), generator=drawn).tolist() for n in self.lengths]


SEEN: dict[str, Callable[[Seen], bool]] = {
    "decode": lambda call: call["requests"] > 0 and call["tokens"] == 1,
    "drafts": lambda call: call["requests"] > 0 and call["tokens"] > 1,
    "prompt": lambda call: call["rest"] > 1,
    "both": lambda call: call["requests"] > 0 and call["rest"] > 0,
    "window": lambda call: call["window"] == WINDOW - 1 and max(call["keys"]) > WINDOW,
    "softcap": lambda call: call["softcap"] == 5.0,
    "sinks": lambda call: call["sinks"],
    "fp8": lambda call: "e4m3" in call["dtype"],
    "half the heads": lambda call: call["q_heads"] == 2,
    "gathered": lambda call: call["gathered"],
    "not causal": lambda call: not call["causal"],
}

ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine in the worker's own process
TRITON = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0", **ALONE}  # launches no kernel of Triton but for drafts
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", **TRITON, **ALONE}
SPAWNED = V2 | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
RANKS = SPAWNED | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # several processes on a core each
EXPERTS = {"quantization": "blackwell_kernels"}
WIDE, BOTH = (5, 40), ("decode", "prompt", "window")  # prompts beyond the window
DRAFTS = {"speculative_config": {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}}  # fmt: skip
VLLM = (
    Scenario("llama", variables=V2),
    Scenario("llama-v1", variables=V1),
    Scenario("llama-hopper", variables={**V2, "BLACKWELL_CAPABILITY": "9.0"}),
    Scenario("qwen3", "qwen3", variables=V2),
    Scenario("mistral", "mistral", lengths=WIDE, variables=V2, seen=BOTH),
    Scenario("gemma2", "gemma2", lengths=WIDE, variables=V2, seen=(*BOTH, "softcap")),
    Scenario("gemma3", "gemma3", lengths=WIDE, variables=V2, seen=BOTH),
    Scenario("gpt_oss", "gpt_oss", lengths=WIDE, variables=V2, seen=(*BOTH, "sinks")),
    Scenario("qwen3_moe", "qwen3_moe", variables=V2),
    Scenario("phi3", "phi3", variables=V2, seen=("prompt",)),
    Scenario("llama4", "llama4", lengths=WIDE, variables=V2, seen=("decode",)),
    Scenario("prefix", lengths=(40, 67), rounds=2, variables=V2,
             counted=("vllm:prefix_cache_hits",)),
    Scenario("chunks", lengths=(5, 90, 33), variables=V2, seen=("decode", "prompt", "both"),
             options={"max_num_batched_tokens": 32}),
    Scenario("preemption", lengths=(30, 30, 30), tokens=24, variables=V2,
             options={"num_gpu_blocks_override": 8, "max_model_len": 96},
             counted=("vllm:num_preemptions",)),
    Scenario("asynchronous", lengths=(5, 33, 9),
             variables={**SPAWNED, "BLACKWELL_ASYNCHRONOUS": "1"}),
    Scenario("drafts", lengths=(20, 23), tokens=24, repeating=True, variables=V1 | TRITON,
             options=DRAFTS | {"async_scheduling": False}, seen=("prompt", "drafts"),
             counted=("vllm:spec_decode_num_accepted_tokens",)),
    Scenario("fp8", "llama_fp8_kv", weights="llama", scales=SCALES, variables=V2,
             options={"kv_cache_dtype": "fp8"}, seen=("decode", "prompt", "fp8")),
    Scenario("two-ranks", variables=RANKS, options={"tensor_parallel_size": 2},
             seen=("decode", "prompt", "half the heads")),
    # Its second runner fails in Triton's interpreter.
    Scenario("shared-keys", "llama_one_head", lengths=(5, 40, 70),
             variables=RANKS | {"VLLM_USE_V2_MODEL_RUNNER": "0"}, seen=("half the heads",),
             options={"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    *(Scenario(name, name, weights=f"{name}_plain", variables=V2, options=EXPERTS)
      for name in ("gpt_oss_mxfp4", "qwen3_moe_nvfp4", "qwen3_moe_ct")),
    Scenario("experts-by-rank", "gpt_oss_mxfp4", weights="gpt_oss_mxfp4_plain", variables=RANKS,
             options={**EXPERTS, "tensor_parallel_size": 2, "enable_expert_parallel": True}),
    # At the last place of 33 tokens the second and third expert of a layer are nearly equal.
    Scenario("rows-by-rank", "gpt_oss_shares", weights="gpt_oss_shares_plain", variables=RANKS,
             lengths=(5, 17),
             options={**EXPERTS, "tensor_parallel_size": 2}),
)  # fmt: skip
# fault of `harness.observe` -> a run that has to notice it
PLANTED = {"slot": "llama", "window": "mistral", "scale": "fp8"}
