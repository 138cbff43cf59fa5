"""bench.py gqa without a GPU: problems, the reference, the check before every time, peers on the
CPU, tables and files. Tests that need a GPU are marked `hw`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernelkit.tune import stopwatch
from lab.bench import gqa, gqa_peers
from lab.bench import perform as bench
from lab.bench.gqa import latency_table
from lab.bench.gqa_peers import CALLS, DTYPES, OURS, PEERS, Problem
from lab.measure import timing
from lab.tools.common import read_rows, save_rows
from lab.tools.tables import show


@pytest.fixture
def problem():
    return Problem(batch=2, kv_len=192, q_heads=6, kv_heads=2, head_dim=64, dtype="bf16")


@pytest.fixture
def sets(problem):
    return [problem.inputs("cpu", seed) for seed in (0, 1)]


def exact(inputs):
    """O [B, Hq, D] by torch, in fp64."""
    q, k, v = (x.double() for x in inputs)
    heads = (q[:, :, None], k.transpose(1, 2), v.transpose(1, 2))
    return scaled_dot_product_attention(*heads, enable_gqa=True)[:, :, 0]


# -- problems -------------------------------------------------------------------------------------


def test_bytes_and_sets_of_a_rotation():
    problem = Problem(8, 8192, 64, 8, 128, "bf16")
    assert problem.nbytes == 2 * 8 * 8192 * 8 * 128 * 2 + 2 * 8 * 64 * 128 * 2
    eight = Problem(8, 8192, 64, 8, 128, "e4m3")
    assert eight.nbytes == 2 * 8 * 8192 * 8 * 128 + 2 * 8 * 64 * 128 * 2
    cache = 50 << 20
    for length in (1024, 8192, 65536):
        small = Problem(1, length, 64, 8, 128, "bf16")
        assert small.sets(cache) >= 2
        assert (small.sets(cache) - 1) * small.nbytes > 2 * cache  # read between two uses of a set


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
def test_inputs_differ_between_sets_and_have_their_dtypes(dtype, problem):
    same = Problem(1, 64, 2, 1, 64, dtype)
    q, k, v = same.inputs("cpu", 3)
    assert (q.dtype, k.dtype) == DTYPES[dtype]
    assert k.shape == v.shape == (1, 64, 1, 64)
    assert 0.9 < k.float().std() < 1.1
    assert not torch.equal(k.float(), v.float())
    assert not torch.equal(q, same.inputs("cpu", 4)[0])
    assert torch.equal(q, same.inputs("cpu", 3)[0])


@pytest.mark.parametrize("chunk", [1, 50, 64, 8192])
def test_reference_is_attention_for_any_chunk(chunk, sets, monkeypatch):
    monkeypatch.setattr(gqa_peers, "CHUNK", chunk)
    torch.testing.assert_close(
        gqa_peers.reference(sets[0]).double(), exact(sets[0]), rtol=1e-4, atol=1e-5
    )


def test_what_does_not_fit_is_refused(problem):
    with pytest.raises(ValueError, match="buffer sets are"):
        gqa.allocate(problem, 1 << 20, 1 << 20, "cpu")
    assert len(gqa.allocate(problem, 1 << 16, 1 << 30, "cpu")) == problem.sets(1 << 16)


# -- the gate -------------------------------------------------------------------------------------


def rows(problem, sets, **peers):
    """Rows of peers, which take as many microseconds as there are launches."""
    return gqa.rows_of(problem, peers, lambda launches: {"n": lambda: len(launches)}, sets=sets)


def answers(change=lambda k, o: o):
    """A peer that is right, except for `change` (number of the set, O)."""

    def make(problem, sets):
        made = [exact(inputs).to(torch.bfloat16) for inputs in sets]
        return [lambda k=k, o=o: change(k, o) for k, o in enumerate(made)]

    return make


def one_row(k, o):
    out = o.clone()
    out[1, 3] *= 1.1
    return out


def test_only_right_results_are_measured(problem, sets):
    found = rows(
        problem,
        sets,
        right=answers(),
        with_a_dimension=answers(lambda k, o: o[:, :, None]),
        one_row=answers(one_row),
        nothing=answers(lambda k, o: torch.full_like(o, math.nan)),
        another_set=answers(lambda k, o: o if k == 0 else -o),
    )
    measured = {row["peer"]: row.get("n_us") for row in found}
    assert measured == {
        "right": 2,
        "with_a_dimension": 2,
        "one_row": None,
        "nothing": None,
        "another_set": None,
    }
    assert all("off the reference" in row["refused"] for row in found[2:])
    assert 0 < found[0]["error"] < 0.01
    assert all(row["inputs"] and row["sets"] == 2 for row in found)


def test_a_peer_that_is_not_there_leaves_its_reason(problem, sets, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    (row,) = rows(problem, sets, fa2=PEERS["flashinfer fa2"])
    assert row["refused"].startswith("ModuleNotFoundError: ")


# -- peers on the CPU -----------------------------------------------------------------------------


def test_torch_is_right_on_the_cpu(problem, sets):
    (row,) = rows(problem, sets, torch=PEERS["torch flash"])
    assert row["n_us"] == 2


def test_decode_is_right_in_the_emulator():
    small = Problem(1, 200, 8, 1, 64, "bf16")
    peers = {"plan": OURS["decode pdl kv-ready"], "call": CALLS["decode()"]}
    found = rows(small, [small.inputs("cpu")], **peers)
    assert [row.get("n_us") for row in found] == [1, 1], found


def paged(q, pages_k, pages_v, table):
    """O of keys addressed by page numbers."""
    k, v = (x[table].flatten(1, 2) for x in (pages_k, pages_v))
    return exact((q, k, v)).to(q.dtype)


class Wrapper:
    """The part of FlashInfer that flashinfer_fa2 uses, on any device."""

    def __init__(self, workspace, layout, **buffers):
        assert layout == "NHD"
        assert buffers["use_cuda_graph"]

    def plan(self, starts, numbers, last, *heads, q_data_type, kv_data_type):
        assert heads == (6, 2, 64, 64)
        self.table = numbers.view(len(last), -1)
        assert starts.tolist() == [0, 3, 6]
        assert (last == 64).all()

    def run(self, q, pair):
        return paged(q, *pair, self.table)


def tables(q, pair, workspace, table, lens, longest, *, bmm1_scale, bmm2_scale, **options):
    assert options["kv_layout"] == "NHD"
    assert options["backend"] == "xqa"
    assert (bmm1_scale, bmm2_scale) == (64**-0.5, 1.0)
    assert longest == 192
    assert (lens == longest).all()
    assert not workspace.any()
    return options["out"].copy_(paged(q, *pair, table))


def test_flashinfer_gets_pages_of_the_same_memory(problem, sets, monkeypatch):
    library, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    library.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    decode.trtllm_batch_decode_with_kv_cache = tables
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    found = rows(problem, sets, fa2=PEERS["flashinfer fa2"], xqa=PEERS["flashinfer xqa"])
    assert [row.get("n_us") for row in found] == [2, 2], found
    ragged = SimpleNamespace(**{**vars(problem), "kv_len": 100})
    with pytest.raises(NotImplementedError, match="pages of 64"):
        PEERS["flashinfer xqa"](ragged, sets)[0]()


# -- tables and files -----------------------------------------------------------------------------


def latencies(problem):
    """Rows as from a GPU."""
    out = []
    for batch in (1, 8):
        for length in (1024, 8192):
            base = dataclasses.asdict(dataclasses.replace(problem, batch=batch, kv_len=length))
            for k, name in enumerate(("decode", "torch cudnn")):
                us = batch * length / 1000 * (k + 1)
                found = {"cold_us": us, "warm_us": us / 2, "floor_us": us / 3, "error": 0.001}
                found |= {"cold_tbs": 1.0, "warm_tbs": 2.0, "cold_spread": 0.01, "warm_spread": 0.0}
                out.append({**base, "peer": name, **found})
            out.append({**base, "peer": "flex", "refused": "RuntimeError: [no] such thing"})
    return out


def test_the_table_marks_the_fastest_and_gives_reasons(problem, capsys):
    found = latencies(problem)[:3]
    title, heads, cells = latency_table(found)
    assert "floor 0.34 us" in title
    assert [line[0] for line in cells] == ["decode *", "torch cudnn", "flex"]
    assert cells[0][heads.index("x floor")] == "3.00"
    show(title, heads, cells)
    shown = capsys.readouterr().out
    assert "RuntimeError: [no] such thing" in shown
    assert "decode *" in shown


def test_the_table_needs_no_rich(problem, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    show(*latency_table(latencies(problem)[:3]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert len({len(line) for line in lines[1:]}) == 1


def test_samples_take_turns():
    order = []

    def sample(name, clock):
        return lambda: order.append(name) or next(clock)

    # The simulated clock slows down all the time, for both alike.
    slow = iter(range(1, 1000))
    found = timing.spreads([sample("a", slow), sample("b", slow)])
    assert order == ["a", "b"] * (timing.REPEATS + 1)
    assert found[1].median - found[0].median == 1
    assert found[0].median == timing.REPEATS + 2  # the first round is a warm-up


def test_a_file_is_shown_again(problem, printed, tmp_path):
    rows = [{"kind": "latency", **row} for row in latencies(problem)]
    head = {"kind": "setting", "date": "2026-11-21", "gpu": {"name": "a GPU"}}
    for name in ("gqa.json", "gqa.jsonl"):
        save_rows(tmp_path / name, [head, *rows])
        assert read_rows(tmp_path / name) == [head, *rows]
        again = ("--show", tmp_path / name, "--plot", tmp_path / "a.png")
        shown = printed("bench.py gqa", *again)
        assert "torch cudnn" in shown
        assert "a GPU, 2026-11-21" in shown
        assert (tmp_path / "a.png").exists()
    json.loads((tmp_path / "gqa.json").read_text())
    flags = "bench.py gqa --markdown --peers decode flex --show"
    heads, _, first, *others = printed(flags, tmp_path / "gqa.json").splitlines()
    assert heads == "| batch x keys | floor | decode | flex |"
    assert first == "| 1 x 1k | 0.34 | 1.02 / 0.51 | - |"
    assert len(others) == 3


def test_a_turn_takes_every_set_equally_often(monkeypatch):
    """`replay` with a simulated clock instead of a GPU."""
    calls, graphs = [0, 0, 0], []
    nothing = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    cuda = SimpleNamespace(
        Stream=lambda: nothing,
        current_stream=lambda: nothing,
        stream=contextlib.nullcontext,
    )
    monkeypatch.setattr(stopwatch, "torch", SimpleNamespace(cuda=cuda))

    def capture(turn, times):
        before = list(calls)
        for _ in range(times):
            next(turn)()
        graphs.append(times)
        assert len({now - was for now, was in zip(calls, before, strict=True)}) == 1
        return times

    def launch(k):
        calls[k] += 1

    monkeypatch.setattr(stopwatch, "_capture", capture)
    monkeypatch.setattr(stopwatch, "_seconds", lambda graph: graph * 10e-6)
    sample = timing.replay([lambda k=k: launch(k) for k in range(3)])
    (found,) = timing.spreads([sample])
    assert found.median == pytest.approx(10.0)
    assert found.spread == pytest.approx(0.0)
    assert graphs[-1] * 10e-6 > 0.9 * stopwatch.LEAST_SECONDS


@pytest.fixture
def pretended(monkeypatch):
    """The benchmark on a simulated GPU with 64 KB of L2 and the host's memory; launches take
    4 us."""
    inputs = Problem.inputs
    monkeypatch.setattr(Problem, "inputs", lambda self, device, seed=0: inputs(self, "cpu", seed))
    monkeypatch.setattr(gqa, "read_bandwidth", lambda: 2e12)
    monkeypatch.setattr(gqa, "CALLS", {"torch flash": PEERS["torch flash"]})
    monkeypatch.setattr(bench, "setting", lambda: {"gpu": {"name": "pretended"}})
    head = {"kind": "setting", "date": "2026-11-29"}
    monkeypatch.setattr(bench, "heading", lambda **more: {**head, **more})
    monkeypatch.setattr(timing, "replay", lambda launches: lambda: 4.0)
    monkeypatch.setattr(timing, "HOST_CALLS", 2)
    for name, fake in {
        "is_available": lambda: True,
        "get_device_name": lambda: "pretended",
        "get_device_properties": lambda: SimpleNamespace(L2_cache_size=1 << 16),
        "mem_get_info": lambda: (1 << 24, 1 << 24),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)


SMALL = "bench.py gqa --batch 1 --q-heads 4 --kv-heads 2 --head-dim 64"


@pytest.mark.usefixtures("pretended")
def test_a_run_from_end_to_end(written, tmp_path):
    picture = tmp_path / "gqa.png"
    flags = f"{SMALL} --kv-len 128 64k --peers 'torch flash' --plot"
    shown, (head, first, large, after) = written(flags, picture)
    assert (head["read_tbs"], head["l2_bytes"]) == (2.0, 1 << 16)
    assert first["floor_us"] == pytest.approx(first["nbytes"] / 2e6)
    assert first["cold_us"] == first["warm_us"] == 4.0
    assert first["cold_tbs"] == pytest.approx(first["nbytes"] / 4e6)
    assert first["sets"] == 2 * (1 << 16) // first["nbytes"] + 2
    assert "buffer sets are" in large["refused"]
    assert after == {"kind": "after", "gpu": {"name": "pretended"}}
    assert picture.exists()
    assert "2.00 TB/s" in shown
    assert "torch flash *" in shown


@pytest.mark.usefixtures("pretended")
def test_the_cost_of_calls_alone(written):
    shown, (_, row, _) = written(f"{SMALL} --kv-len 128 --host")
    assert (row["kind"], row["peer"]) == ("host", "torch flash")
    assert 0 < row["host_us"] < 1e6
    assert "torch flash" in shown


# -- from outside ---------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_prints_static_figures(written, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown, (head, *lines) = written("bench.py gqa --batch 1 --kv-len 8k 100")
    assert "No CUDA GPU here" in shown
    assert head["kind"] == "setting"
    assert {"date", "inputs", "versions"} <= set(head)
    assert [(row["kv_len"], row["arch"]) for row in lines] == [
        (length, arch) for length in (8192, 100) for arch in ("sm_90a", "sm_100a")
    ]
    for row in lines:
        assert row["kind"] == "static"
        assert row["ctas"] == 8 * row["cluster"]
        assert 16 << 10 < row["smem_bytes"] <= 227 << 10
        assert f"{row['floor_us']:.2f}" in shown
    assert lines[0]["floor_us"] == pytest.approx(lines[0]["nbytes"] / 3.08e6)


@pytest.mark.hw
def test_peers_are_timed_on_a_gpu(written, printed, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    picture = tmp_path / "gqa.png"
    peers = "--peers decode 'decode pdl kv-ready' 'torch cudnn' 'torch flash'"
    flags = f"bench.py gqa --batch 1 --kv-len 1k {peers} --plot"
    _, (head, *lines) = written(flags, picture)
    assert head["read_tbs"] > 0.1
    assert lines[-1]["kind"] == "after"
    timed = {row["peer"]: row for row in lines[:-1] if "cold_us" in row}
    assert "torch flash" in timed
    for row in timed.values():
        assert row["warm_us"] < 1.2 * row["cold_us"]
        assert row["cold_us"] > row["floor_us"]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert "decode_plan" in printed("bench.py gqa --host --batch 1 --kv-len 1k")
