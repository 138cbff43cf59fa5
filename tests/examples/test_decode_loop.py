"""examples/decode_loop: its model is transformers', and its tokens are those of plain torch."""

from __future__ import annotations

import json
import re

import pytest
import torch

from examples.decode_loop import __main__ as command_line
from examples.decode_loop.cache import generate
from examples.decode_loop.model import Config, drawn, stored
from examples.decode_loop.reference import compare, logits_of
from lab.house.source import ROOT

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "llama": {},
    "llama-scaled": {"rope_parameters": LLAMA3},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}


def saved(folder, name: str, **more):
    """transformers' model of random weights, saved to the folder."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model(name, **SIZES, **more)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms among them
            parameter.add_(torch.randn_like(parameter) / 10)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_checkpoint_are_those_of_transformers(name, tmp_path):
    theirs = saved(tmp_path, name.partition("-")[0], **MODELS[name])
    model = stored(tmp_path, dtype=torch.float32)
    tokens = torch.randint(50, (40,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0, :-1]
    found = logits_of(model, tokens[:1], tokens[1:])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_another_model_is_refused(tmp_path):
    saved(tmp_path, "mixtral", num_local_experts=2)
    with pytest.raises(ValueError, match="is a mixtral; allowed are llama, qwen2, qwen3"):
        stored(tmp_path)


def test_sliding_windows_are_refused(tmp_path):
    saved(tmp_path, "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding windows"):
        stored(tmp_path)


@pytest.mark.parametrize("parts", [0, 2])
def test_every_token_is_that_of_plain_torch(parts, poisoned_outputs):
    """Prompts of several lengths, one of them a token; pages fill up on the way."""
    model = drawn(Config(), seed=1)
    prompts = [[*range(14)], [5], [*range(40, 80)]]
    steps = [*generate(model, prompts, 4, parts)]
    for number, prompt in enumerate(prompts):
        found = [chosen[number] for chosen, _ in steps]
        logits = torch.stack([rows[number] for _, rows in steps])
        same, report = compare(model, prompt, found, logits)
        assert report.ok, str(report)
        assert same == len(found)


def test_the_command_line(tmp_path):
    path = tmp_path / "found.json"
    flags = ["--seed", "1", "--check", "--device", "cpu", "--json", str(path)]
    assert command_line.main(flags) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [check["same"] for check in written["checks"]] == [4, 4]
    assert [len(tokens) for tokens in written["found"]] == [4, 4]


@pytest.mark.parametrize("flags", [["--text", "x"], ["--batch", "0"]])
def test_refused_flags(flags, capsys):
    assert command_line.main(flags) == 2
    assert capsys.readouterr().err.startswith("refused: --")


def test_the_example_of_the_page():
    page = (ROOT / "examples/decode_loop/README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(program, names)
    assert [len(step) for step in names["tokens"]] == [2, 2, 2]
