"""Runs of SGLang as data, and how they are performed."""

from __future__ import annotations

from lab.engines.environment import Environment
from lab.engines.models import SCALES
from lab.engines.run import Run, run
from lab.engines.scenarios import BOTH, EXPERTS, WIDE, Scenario
from lab.engines.sglang_harness import FP8_POOL
from lab.engines.sglang_options import ENGINE

RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # cores of two ranks
DRAFTS = {"speculative_num_draft_tokens": 4, "disable_overlap_schedule": True}
SGLANG = (
    Scenario("llama"),
    Scenario("qwen3", "qwen3"),
    # SGLang's Mistral has no window: prompts and answers are shorter than that.
    Scenario("mistral", "mistral", lengths=(5, 17)),
    Scenario("gemma2", "gemma2", lengths=WIDE, seen=(*BOTH, "softcap")),
    Scenario("gemma3", "gemma3", lengths=WIDE, seen=BOTH),
    Scenario("gpt_oss", "gpt_oss", lengths=WIDE, seen=(*BOTH, "sinks")),
    Scenario("qwen3_moe", "qwen3_moe"),
    Scenario("phi3", "phi3", seen=("prompt",)),
    Scenario("slots", lengths=(5, 40, 100), rounds=2, options={"page_size": 1},
             seen=("decode", "prompt", "gathered"), counted=("cached",)),
    Scenario("prefix", lengths=(40, 67), rounds=2, counted=("cached",)),
    Scenario("mixed", "qwen3", lengths=(5, 90, 33), tokens=8,
             options={"chunked_prefill_size": 32, "enable_mixed_chunk": True}),
    # SGLang's own way to test it; requests that ignore the end are admitted only if they fit.
    Scenario("retraction", lengths=(20, 30, 25), tokens=12, counted=("retractions",),
             variables={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"}),
    Scenario("ngram", lengths=(20, 60), tokens=24, repeating=True, counted=("verified",),
             options={**DRAFTS, "speculative_algorithm": "NGRAM", "page_size": 1}),
    Scenario("draft-model", lengths=(5, 40), tokens=12, counted=("accepted",),
             seen=("decode", "drafts", "prompt"), options={
                 **DRAFTS, "speculative_algorithm": "STANDALONE", "speculative_num_steps": 3,
                 "speculative_eagle_topk": 1, "speculative_draft_model_path": "llama",
             }),
    Scenario("fp8", "llama_fp8_kv", weights="llama", scales=SCALES, variables={FP8_POOL: "1"},
             seen=("decode", "prompt", "fp8")),
    Scenario("two-ranks", variables=RANKS, options={"tp_size": 2},
             seen=("decode", "prompt", "half the heads")),
    *(Scenario(name, name, weights=f"{name}_plain", options=EXPERTS)
      for name in ("gpt_oss_mxfp4", "qwen3_moe_nvfp4")),
    Scenario("two-engines", lengths=(5, 33, 9, 21), variables=RANKS, options={"dp_size": 2}),
)  # fmt: skip
# fault of `harness.observe` -> a run that has to notice it
PLANTED = {"slot": "llama", "window": "gemma3", "scale": "fp8"}


def run_sglang(environment: Environment, scenario: Scenario, fault: str = "") -> Run:
    """Run a scenario of SGLang. fault: of `harness.observe.FAULTS`, planted into the adapter.

    Raises:
        EngineError: as `lab.engines.run.run`.
    """
    options = dict(scenario.options)
    if "speculative_draft_model_path" in options:
        name = options["speculative_draft_model_path"]
        options["speculative_draft_model_path"] = str(environment.models / name)
    job = {
        "engine": {**ENGINE, "model_path": str(environment.models / scenario.model), **options},
        "rounds": [{"prompts": scenario.prompts(), "tokens": scenario.tokens}] * scenario.rounds,
    }
    return run(environment, scenario, "lab.engines.sglang_worker", job, fault)
