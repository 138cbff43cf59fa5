"""One run of vLLM's `LLM`: `python -m lab.engines.vllm_worker JOB RESULT`, both files of JSON.

JOB: {"llm": arguments of LLM, "rounds": [{"prompts": [[token, ...], ...], "tokens": n}, ...]};
RESULT: {"rounds": [[{"tokens", "logprobs", "cached"}, ...], ...], "metrics": {name: value}}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def perform(job: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily, round after round, in one engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(**job["llm"])
    rounds = []
    for part in job["rounds"]:
        sampling = SamplingParams(
            temperature=0, max_tokens=part["tokens"], ignore_eos=True, detokenize=False, logprobs=2
        )
        prompts = [{"prompt_token_ids": ids} for ids in part["prompts"]]
        rounds.append([_answer(made) for made in llm.generate(prompts, sampling, use_tqdm=False)])
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {"rounds": rounds, "metrics": metrics}


def _answer(made: Any) -> dict[str, Any]:
    """Tokens of a request, and at each place the log-probabilities that the engine computed."""
    output = made.outputs[0]
    logprobs = [
        {str(token): entry.logprob for token, entry in place.items()} for place in output.logprobs
    ]
    return {
        "tokens": list(output.token_ids), "logprobs": logprobs, "cached": made.num_cached_tokens,
    }  # fmt: skip


if __name__ == "__main__":  # a spawned process of the engine imports this file again
    job_file, result_file = map(Path, sys.argv[1:])
    result = perform(json.loads(job_file.read_text(encoding="utf-8")))
    result_file.write_text(json.dumps(result), encoding="utf-8")
