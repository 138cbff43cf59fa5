"""examples/gpt_oss over several ranks, which communicate by gloo: heads, experts, or both are
split.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("transformers", reason="transformers is not installed")

from examples.gpt_oss import __main__ as command_line
from examples.gpt_oss.config import named
from examples.gpt_oss.engine import Engine
from examples.gpt_oss.model import Model
from examples.gpt_oss.ranks import Ranks
from examples.gpt_oss.weights import Drawn, load
from kernelkit.call.launch import emulation
from lab.house.source import ROOT
from tests.examples import gpt_oss_models as models

TINY, SEED, WORLD = named("tiny"), 5, 2
CPU = torch.device("cpu")


@pytest.mark.parametrize("rank", range(WORLD))
def test_parts_make_the_whole(rank):
    """Each tensor of a rank is the slice of the model's tensor that the rank claims."""
    ranks = Ranks(rank, WORLD)
    whole, own = (
        load(config, Drawn(TINY, CPU, ranks=of)).layers[1]
        for config, of in ((TINY, None), (ranks.config(TINY), ranks))
    )
    dim, heads, kv_heads = TINY.head_dim, TINY.q_heads, TINY.kv_heads
    q, k, v = whole.qkv.split([heads * dim, kv_heads * dim, kv_heads * dim])
    rows = [part.chunk(WORLD)[rank] for part in (q, k, v)]
    assert torch.equal(own.qkv, torch.cat(rows))
    assert torch.equal(own.out, whole.out.chunk(WORLD, 1)[rank])
    assert torch.equal(own.sinks, whole.sinks.chunk(WORLD)[rank])
    assert torch.equal(own.router, whole.router)
    assert own.out_bias.any() == (rank == 0)
    assert own.experts.own == (rank * 2, rank * 2 + 2)


def test_what_does_not_come_out_even_is_refused():
    with pytest.raises(ValueError, match="2 num_key_value_heads over 4 ranks"):
        Ranks(0, 4).config(named("tiny"))
    for wrong in (Ranks, 0, 1), (Ranks, 0, 2, False, False), (Ranks, 0, 2, True, False, True):
        with pytest.raises(ValueError, match="2 ranks at least, and either context"):
            wrong[0](*wrong[1:])
    model = Model(TINY, load(TINY, Drawn(TINY, CPU)), 8, ranks=Ranks(0, 2, False, False, True))
    with pytest.raises(ValueError, match="share=False"):
        Engine(model, requests=1, tokens=8)
    with pytest.raises(NotImplementedError, match="experts in bf16 over ranks"):
        load(TINY, Drawn(TINY, CPU, ranks=Ranks(0, 2)), experts="bf16")


def test_torchrun_is_asked_for(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert command_line.main(["--tp", "--device", "cpu"]) == 2
    assert "torchrun" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command_line.main(["--ep", "--one-shot", "--device", "cpu"]) == 2
    assert "--one-shot on cpu: it is for GPUs" in capsys.readouterr().err


def served(ranks, folder=None):
    """Return the logits of all new tokens, [jobs x tokens, V], and the tokens."""
    config = TINY if ranks is None else ranks.config(TINY)
    weights = load(config, Drawn(TINY, CPU, seed=SEED, ranks=ranks))
    model = Model(config, weights, models.ROOM, ranks=ranks)
    alone = {"share": ranks is None or not ranks.context, "keep_logits": True}
    with emulation(arch="sm_90a"):
        jobs = models.served(model, models.prompts((21,)), requests=2, **alone)
    found = torch.stack([row for job in jobs for row in job.logits]), [job.found for job in jobs]
    if folder is not None:
        torch.save(found, f"{folder}/{ranks.rank}.pt")
    return found


def on_a_rank(rank, folder, *shared):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD
    )
    served(Ranks(rank, WORLD, *shared), folder)
    dist.destroy_process_group()


@pytest.mark.parametrize("shared", ["heads experts", "experts", "heads", "context"])
def test_ranks_compute_what_one_does(shared, tmp_path):
    """Ranks agree with one process up to the rounding of sums, and bit for bit with each other."""
    flags = [each in shared for each in ("heads", "experts", "context")]
    mp.spawn(on_a_rank, (str(tmp_path), *flags), nprocs=WORLD)
    files = [tmp_path / f"{rank}.pt" for rank in range(WORLD)]
    (first, tokens), (second, others) = (torch.load(file, weights_only=True) for file in files)
    assert torch.equal(first, second)
    assert tokens == others
    alone, _ = served(None)
    # The first new tokens have the same prompts; later ones depend on the chosen tokens.
    rows = torch.arange(0, len(alone), models.NEW)
    error = (first[rows] - alone[rows]).float().norm() / alone[rows].float().norm()
    assert error < 0.03, f"{error:.3f}"


def test_the_command_line(tmp_path):
    path = tmp_path / "found.json"
    flags = ["--tp", "--ep", "--device", "cpu", "--prompt-len", "18", "--new-tokens", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(WORLD), "-m", "examples.gpt_oss", *flags, "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("first tokens") == 1
    assert json.loads(path.read_text(encoding="utf-8"))["options"]["tp"]
