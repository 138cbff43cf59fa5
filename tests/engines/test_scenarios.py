"""What judges the engines, without an engine: the plan of runs, the judge, records of calls."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lab.engines.harness import observe
from lab.engines.judge import Reference
from lab.engines.models import COMMON, DECODERS, OTHERS
from lab.engines.quantised import QUANTISED
from lab.engines.registry import PLANTED, SCENARIOS
from lab.engines.run import Run
from lab.engines.scenarios import SEEN, Scenario


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Reference, LlamaForCausalLM]:
    """A judge, and its model in bfloat16."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**COMMON, head_dim=64)).bfloat16().eval()
    made.save_pretrained(folder)
    return Reference(folder), made


def answer_of(made: LlamaForCausalLM, prompt: list[int], count: int = 4) -> dict:
    """Greedy tokens of a model, as a worker writes them."""
    ids, places = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            values, order = made(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1).topk(2)
        places.append({str(t): v for t, v in zip(order.tolist(), values.tolist(), strict=True)})
        ids.append(int(order[0]))
    return {"tokens": ids[len(prompt) :], "logprobs": places}


def test_the_models_own_tokens_pass(model):
    reference, made = model
    verdict = reference.judge([7, 8, 9], [answer_of(made, [7, 8, 9])])
    assert verdict.ok, verdict
    assert verdict.engine > 0


@pytest.mark.parametrize("place", [0, 3])
def test_a_wrong_token_is_noticed(place, model):
    reference, made = model
    answer = answer_of(made, [7, 8, 9])
    answer["tokens"][place] = (answer["tokens"][place] + 1) % 512
    del answer["logprobs"]
    assert not reference.judge([7, 8, 9], [answer]).ok


def test_tokens_of_another_prompt_are_noticed(model):
    reference, made = model
    assert not reference.judge([7, 8, 10], [answer_of(made, [7, 8, 9])]).ok


def test_scales_change_what_is_right(model):
    reference, _ = model
    rough = Reference(reference.folder, {0: (0.5, 0.01), 1: (0.5, 0.01)})
    answer = answer_of(rough.models[0], [*range(3, 30)])
    assert rough.judge([*range(3, 30)], [answer]).ok
    assert not reference.judge([*range(3, 30)], [answer]).ok


def test_every_run_has_its_model_and_what_it_looks_for():
    folders = {*DECODERS, *OTHERS, *(f"{name}_plain" for name in QUANTISED)}
    for engine, scenarios in SCENARIOS.items():
        for scenario in scenarios:
            assert {scenario.model, scenario.weights or scenario.model} <= folders
            assert {*scenario.seen} <= {*SEEN}
            assert len({tuple(p[:3]) for p in scenario.prompts()}) == len(scenario.lengths) or (
                scenario.repeating
            )
        assert len({scenario.name for scenario in scenarios}) == len(scenarios)
        assert {*PLANTED[engine]} == {*observe.FAULTS}
        assert {*PLANTED[engine].values()} <= {scenario.name for scenario in scenarios}


def test_what_was_not_seen_is_missing():
    call = {
        "what": "attend", "requests": 2, "tokens": 1, "rest": 0, "keys": [30, 40], "window": 23,
        "dtype": "torch.bfloat16", "softcap": None, "sinks": False, "q_heads": 4,
        "gathered": False, "causal": True,
    }  # fmt: skip
    scenario = Scenario("x", seen=("decode", "prompt", "window"), counted=("drafts",))
    assert Run(scenario, [], {}, [call]).missing() == ["prompt", "drafts"]
    assert Run(scenario, [], {"drafts": 3}, [call, call | {"rest": 9}]).missing() == []
    compiled = [{"what": "compile", "kernel": "K"}]
    assert Run(scenario, [], {}, compiled).compiled() == ["K"]


def test_lines_of_processes_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv(observe.FOLDER, str(tmp_path))
    observe.say(what="attend", keys=[1])
    (tmp_path / "1.jsonl").write_text(json.dumps({"time": 0, "what": "compile"}) + "\n")
    assert [line["what"] for line in observe.read(tmp_path)] == ["compile", "attend"]
