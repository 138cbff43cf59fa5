"""One run of SGLang's `Engine`: `python -m lab.engines.sglang_worker JOB RESULT`, files of JSON.

JOB: {"engine": arguments of Engine, "rounds": [{"prompts": [[token, ..], ..], "tokens": n}, ..]};
RESULT: as `vllm_worker` writes it, with metrics `METRICS`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from lab.engines.sglang_harness import install

install()  # in the processes of the engine, too: each imports this file again

# Metric -> name in what the engine says of a request
METRICS = {
    "cached": "cached_tokens", "retractions": "num_retractions",
    "accepted": "spec_num_correct_drafts", "verified": "spec_verify_ct",
}  # fmt: skip


def perform(job: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily, round after round, in one engine."""
    import sglang

    _fork()
    engine = sglang.Engine(**job["engine"])
    try:
        rounds, metrics = [], dict.fromkeys(METRICS, 0)
        for part in job["rounds"]:
            made = engine.generate(
                input_ids=part["prompts"], return_logprob=True, top_logprobs_num=2,
                sampling_params={
                    "temperature": 0, "max_new_tokens": part["tokens"], "ignore_eos": True,
                },
            )  # fmt: skip
            rounds.append([_answer(answer) for answer in made])
            for metric, name in METRICS.items():
                metrics[metric] += sum(answer["meta_info"].get(name) or 0 for answer in made)
    finally:
        engine.shutdown()
    return {"rounds": rounds, "metrics": metrics}


def _fork() -> None:
    """Let the engine fork its processes once everything is imported, which takes half as long.
    The servers of the tests start theirs afresh."""
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    chosen = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: chosen("fork", force=True)


def _answer(made: dict[str, Any]) -> dict[str, Any]:
    """Tokens of a request, and at each place the log-probabilities that the engine computed."""
    about = made["meta_info"]
    places = zip(about["output_token_logprobs"], about["output_top_logprobs"], strict=True)
    logprobs = [
        {str(token): value for value, token, _ in (chosen, *(best or ()))}
        for chosen, best in places
    ]  # fmt: skip
    return {
        "tokens": list(made["output_ids"]), "logprobs": logprobs, "cached": about["cached_tokens"],
    }  # fmt: skip


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result = perform(json.loads(job_file.read_text(encoding="utf-8")))
    result_file.write_text(json.dumps(result), encoding="utf-8")
