"""On a Hopper GPU: the tiny gpt-oss, launch by launch and in CUDA graphs.

`python -m pytest --hw -m hw tests/examples/test_gpt_oss_hw.py`
"""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from examples.gpt_oss import __main__ as command_line
from examples.gpt_oss.compare import logits_of
from examples.gpt_oss.engine import PromptStep, TokenStep
from examples.gpt_oss.model import Model
from kernelkit.numerics.tolerance import compare_output
from tests.examples import gpt_oss_models as models
from tests.examples.test_gpt_oss_kernels import SEED

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("gpt-oss-hw")]
GPU = "cuda"


@pytest.mark.parametrize("how", ["launches", "padded", "unfused", "graphs", "compiled"])
@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_logits(kind, how):
    (_, exact), (_, rounded) = (
        models.tiny("bf16", dtype, GPU, seed=SEED) for dtype in (torch.float32, torch.bfloat16)
    )
    model, _ = models.tiny(kind, torch.bfloat16, GPU, seed=SEED)
    if how in ("compiled", "unfused"):
        changes = {"compiled": how == "compiled", "fuses": how != "unfused"}
        model = Model(model.config, model.weights, models.ROOM, **changes)
    options = {"requests": 4, "chunk": 24, "keep_logits": True}
    options["graph"] = how in ("graphs", "compiled")
    options["padded"] = 64 if how == "padded" else None
    jobs = models.served(model, models.prompts((21, 5, 40)), **options)
    ours = torch.cat([torch.stack(job.logits) for job in jobs])
    truth, theirs = (
        torch.cat([logits_of(other, job) for job in jobs]).cpu() for other in (exact, rounded)
    )
    report = compare_output(ours.cpu(), truth, theirs, torch.bfloat16)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_graphs_give_the_tokens_of_launches(kind):
    """Requests come and go, so that there are graphs of several sizes."""
    model, given = models.tiny(kind, torch.bfloat16, GPU)[0], models.prompts((21, 5, 17, 40))
    found = [
        [job.found for job in models.served(model, given, requests=3, graph=graph)]
        for graph in (False, True)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_a_step_does_not_wait(kind, monkeypatch):
    """A step reads nothing from the GPU, nor does a prefill before its tokens: torch would
    raise.
    """
    model, given = models.tiny(kind, torch.bfloat16, GPU)[0], models.prompts((21, 5, 17, 40))
    options = {"requests": 3, "graph": False, "padded": 64}
    models.served(model, given, **options)  # compiles

    def watched(run):
        def call(*arguments):
            torch.cuda.set_sync_debug_mode("error")
            try:
                run(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    for kind_of_step in (TokenStep, PromptStep):
        monkeypatch.setattr(kind_of_step, "run", watched(kind_of_step.run))
    models.served(model, given, **options)


def test_the_command_line(tmp_path):
    path = tmp_path / "found.json"
    flags = ["--batch", "2", "--new-tokens", "6", "--compare", "--profile", "--json", str(path)]
    assert command_line.main(flags) == 0
    kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]["decode"]["kernels"]
    assert {"gqa_lowlatency", "example", "moe", "torch"} <= {each["package"] for each in kernels}
