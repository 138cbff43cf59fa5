"""examples/gpt_oss on its kernels, in the emulator, as Hopper would run them.

Logits are compared with those of the same weights in fp32. Their error may be twice that of
transformers' model in bf16, plus an ulp.
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
SEED = 5  # of weights for which rounding changes no chosen expert in transformers' model
CALM = 0.03  # an error of its logits in bf16, norm over norm, below which that is so


@pytest.fixture(autouse=True)
def on_hopper():
    with emulation(arch=ARCH):
        yield


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_logits(kind, poisoned_outputs):
    """Prompts in pieces and every new token; the experts' weights are MXFP4 numbers."""
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
    """The page names no architecture, so it gets Blackwell's kernels."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    with emulation():
        exec(program, names)
    assert [len(names[name].found) for name in ("first", "second")] == [3, 3]
    assert names["second"].hit == 16
