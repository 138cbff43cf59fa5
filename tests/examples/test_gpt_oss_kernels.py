"""examples/gpt_oss on its kernels, in the emulator, as Hopper would run them.

Logits may be wrong by twice what transformers' own model in bf16 is wrong by, and an ulp, beside
the same weights in fp32.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from examples.gpt_oss import __main__ as command_line
from examples.gpt_oss.compare import Difference, logits_of
from kernelkit.call.launch import emulation
from kernelkit.numerics.tolerance import compare_output
from lab.house.source import ROOT
from tests.examples import gpt_oss_models as models

PAGE = (ROOT / "examples/gpt_oss/README.md").read_text(encoding="utf-8")
ARCH = "sm_90a"
SEED = 5  # of weights with which no rounding of transformers' model makes another expert the best
CALM = 0.03  # an error of its logits in bf16, norm over norm, that says so


@pytest.fixture(autouse=True)
def on_hopper():
    with emulation(arch=ARCH):
        yield


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_logits(kind, poisoned_outputs):
    """Of prompts in pieces and of every token behind them; the experts are numbers of MXFP4."""
    (_, exact), (_, rounded) = (
        models.tiny("bf16", dtype, seed=SEED) for dtype in (torch.float32, torch.bfloat16)
    )
    model, _ = models.tiny(kind, torch.bfloat16, seed=SEED)
    given = models.prompts((21, 5, 40))
    jobs = models.served(model, given, requests=4, chunk=24, keep_logits=True)
    ours = torch.cat([torch.stack(job.logits) for job in jobs])
    truth, theirs = (
        torch.cat([logits_of(other, job) for job in jobs]) for other in (exact, rounded)
    )
    assert Difference.of(theirs, truth).relative < CALM
    report = compare_output(ours, truth, theirs, torch.bfloat16)
    assert report.ok, str(report)


def test_requests_do_not_mind_each_other(poisoned_outputs):
    model, given = models.tiny("mxfp4", torch.bfloat16)[0], models.prompts((21, 5, 17, 40))
    expected = models.alone(model, given)
    jobs = models.served(model, given, requests=2)
    assert [job.found for job in jobs] == expected
    assert [job.hit for job in jobs] == [0, 0, 0, 0, 32]


def test_the_command_line(tmp_path):
    path = tmp_path / "found.json"
    flags = ["--prompt-len", "18", "--new-tokens", "3", "--compare", "--json", str(path)]
    assert command_line.main([*flags, "--device", "cpu"]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))["comparison"]
    assert found["logits"]["relative"] < CALM
    assert found["rounding"] is None


def test_the_example_of_the_page():
    """On the kernels that a page gets which names no architecture: those of Blackwell."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    with emulation():
        exec(program, names)
    assert [len(names[name].found) for name in ("first", "second")] == [3, 3]
    assert names["second"].hit == 16
