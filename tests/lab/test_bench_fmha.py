"""bench.py fmha without a GPU: rows and their FLOP, peers, the check before every time, turns on a
simulated GPU, tables and files. Tests that need a GPU are marked `hw`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from fmha.launch import ARCHS
from lab.bench import fmha, fmha_peers
from lab.bench import perform as bench
from lab.bench.fmha_peers import OURS, PEERS, ROWS, Problem, compared, inputs_of
from lab.bench.fmha_tables import ranked, summary
from lab.commands import BENCH
from lab.flags.bench import FMHA_PEERS
from lab.measure import turns
from lab.measure.turns import HEAD_START, Contestant, Turn, take_turns
from lab.tools.common import save_rows
from lab.tools.place import why_not_here
from lab.tools.style import LOOKS

SMALL = Problem(2, 6, 6, 4, 2, 64, 64, causal=True)
WINDOW = dataclasses.replace(SMALL, window=2, sinks=True)


def options_of(flags: str):
    return BENCH["fmha"].parser("").parse_args(flags.split())


def asked(flags: str) -> list[tuple[str, Problem]]:
    return list(fmha.problems_of(options_of(flags)))


# -- rows -----------------------------------------------------------------------------------------


def test_the_first_set_is_asked_for_by_default():
    found = [problem for _, problem in asked("")]
    assert len(set(found)) == 24
    assert all(each.batch * each.sq == 16384 == each.batch * each.skv for each in found)
    assert all(each.q_heads * each.head_dim == 2048 for each in found)
    assert Counter((each.head_dim, each.mask) for each in found) == {
        (dim, mask): 4 for dim in (64, 128, 256) for mask in ("full", "causal")
    }


@pytest.mark.parametrize(("flags", "words"), [
    ("--rows gpt-oss", ["64/8 of 64, bf16, window 128, sinks"] * 2 + ["bf16, causal, sinks"]),
    ("--rows gqa mla", ["64/8 of 128", "16/16 of 192,128, bf16, full", "bf16, causal"]),
    ("--rows hd512 --dtype fp16", ["64/1 of 512, fp16, causal", "fp16, causal, K is V"]),
    ("--head-dim 256 --mask causal", ["of 256, bf16, causal"] * 4),
    ("--shape 1,8k,8k,4,2 --head-dim 192", ["1 x 8k, heads 4/2 of 192,128, bf16, full", "causal"]),
    ("--shape 3,1,100,4,2 --rows gqa", ["of 128", "3 x 1x100, heads 4/2 of 64", "4/2 of 128"]),
])  # fmt: skip
def test_rows_by_flags(flags, words):
    found = [str(problem) for _, problem in asked(flags)]
    assert len(found) == len(words)
    assert all(part in text for part, text in zip(words, found, strict=True)), found


def test_flops_of_visible_pairs():
    full = Problem(2, 3, 5, 4, 2, 192, 128, causal=False)
    assert full.flop == 2 * 4 * 15 * 2 * (192 + 128)
    causal = dataclasses.replace(full, causal=True)
    assert causal.flop == 2 * 4 * (3 + 4 + 5) * 2 * (192 + 128)
    assert Problem(1, 5, 3, 1, 1, 64, 64, causal=True).flop == (1 + 2 + 3) * 2 * 128
    assert Problem(1, 5, 5, 1, 1, 64, 64, causal=True).flop == 25 * 128  # a square counts as half
    window = Problem(1, 5, 5, 1, 1, 64, 64, causal=True, window=1)
    assert window.flop == (1 + 2 + 2 + 2 + 2) * 2 * 128
    assert dataclasses.replace(window, causal=False).flop == (5 + 5 + 4 + 3 + 2) * 2 * 128


def test_a_window_of_gpt_oss_is_128_keys():
    first = ROWS["gpt-oss"][0]
    assert [first._seen(row) for row in (0, 1, 127, 128, 8191)] == [1, 2, 128, 128, 128]


# -- peers ----------------------------------------------------------------------------------------


def exact(problem, inputs):
    """O from fp64 scores and a mask."""
    q, k, v = (x.double().transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    group = problem.q_heads // problem.kv_heads
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * problem.head_dim**-0.5
    row = torch.arange(problem.sq)[:, None] + problem.skv - problem.sq
    key = torch.arange(problem.skv)
    seen = (key <= row) if problem.causal else torch.ones_like(key <= row)
    if problem.window is not None:
        seen &= key >= row - problem.window
    scores = scores.masked_fill(~seen, -math.inf)
    if problem.sinks:
        sink = inputs.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : problem.skv]
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)


def test_names_of_flags_are_those_of_peers():
    assert (*PEERS,) == FMHA_PEERS
    assert {*PEERS} <= LOOKS.keys()


def peer_rows(problem, *names):
    """Return the rows that `launches_of` leaves, and the launches."""
    rows = [{"peer": name} for name in names]
    return {row["peer"]: row for row in rows}, fmha.launches_of(problem, rows)


@pytest.fixture
def on_cpu(monkeypatch):
    """The benchmark's inputs are on the CPU."""
    monkeypatch.setattr(fmha, "inputs_of", lambda problem: inputs_of(problem, "cpu"))


@pytest.mark.parametrize("problem", [
    SMALL,
    dataclasses.replace(SMALL, sq=4),
    dataclasses.replace(SMALL, causal=False, kv_heads=4),
], ids=str)  # fmt: skip
def test_torch_is_right_on_the_cpu(problem):
    inputs = inputs_of(problem, "cpu")
    o = PEERS["fa2"](problem, inputs)()
    assert compared(o, exact(problem, inputs), "bf16", "fp64")["error"] < 0.01


@pytest.mark.usefixtures("on_cpu")
def test_who_cannot_leaves_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    rows, launches = peer_rows(WINDOW, *PEERS)
    assert not launches
    assert "backend 'cuda'" in rows["fmha"]["refused"]
    assert rows["fa4"]["refused"].startswith("not installed: ")
    assert rows["flashinfer"]["refused"].startswith("not installed: ")
    assert rows["cudnn"]["refused"] == "NotImplementedError: it takes no window"
    sinks = dataclasses.replace(SMALL, sinks=True)
    assert peer_rows(sinks, "fa2")[0]["fa2"]["refused"].endswith("it takes no sinks")


def test_torch_says_why_it_has_no_kernel(monkeypatch):
    def warned():
        fmha_peers.warnings.warn("Head dim 512 (Triggered internally at a.cpp:1)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    with pytest.raises(RuntimeError, match=r"^Head dim 512; No available kernel"):
        fmha_peers._asked(warned)


def fake_flash(q, k, v, **given):
    """The part of FlashAttention-4's interface that is used."""
    flags = {"causal": given["causal"]}
    if "window_size" in given:
        left, right = given["window_size"]
        assert (right, given["causal"]) == (0, False)
        flags = {"causal": True, "window": left}
    sinks = given.get("learnable_sink")
    assert sinks is None or sinks.dtype == torch.bfloat16
    problem = Problem(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3],
                      sinks=sinks is not None, **flags)  # fmt: skip
    o = exact(problem, fmha_peers.Inputs(q, k, v, sinks)).to(q.dtype)
    return o, None


class FakeRagged:
    """The part of FlashInfer that is used."""

    def __init__(self, workspace, layout):
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")

    def plan(self, q_starts, k_starts, *sizes, head_dim_vo, causal, window_left, **dtypes):
        assert set(dtypes.values()) == {torch.bfloat16}
        batch, window = len(q_starts) - 1, None if window_left < 0 else window_left
        lengths = (int(q_starts[1]), int(k_starts[1]))
        assert q_starts.tolist() == [entry * lengths[0] for entry in range(batch + 1)]
        self.problem = Problem(batch, *lengths, *sizes, head_dim_vo, causal=causal, window=window)

    def run(self, q, k, v):
        q, k, v = (x.unflatten(0, (self.problem.batch, -1)) for x in (q, k, v))
        o = exact(self.problem, fmha_peers.Inputs(q, k, v, None)).to(q.dtype)
        return o.flatten(0, 1)


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins for packages that the tests' machines lack."""
    package, cute, ragged = ModuleType("flash_attn"), ModuleType("cute"), ModuleType("flashinfer")
    cute.flash_attn_func = fake_flash
    ragged.BatchPrefillWithRaggedKVCacheWrapper = FakeRagged
    for name, module in {"": package, ".cute": cute}.items():
        monkeypatch.setitem(sys.modules, f"flash_attn{name}", module)
    monkeypatch.setitem(sys.modules, "flashinfer", ragged)


@pytest.mark.usefixtures("installed", "on_cpu")
@pytest.mark.parametrize(("problem", "names"), [
    (SMALL, ("fa2", "fa4", "flashinfer")),
    (dataclasses.replace(SMALL, window=2), ("fa4", "flashinfer")),
    (dataclasses.replace(SMALL, sq=3), ("fa2", "fa4", "flashinfer")),
    (WINDOW, ("fa4",)),
], ids=str)  # fmt: skip
def test_peers_get_what_they_ask_for(problem, names):
    rows, launches = peer_rows(problem, "fa4", "fa2", "flashinfer")
    assert set(launches) == set(names), rows
    expected = exact(problem, inputs_of(problem, "cpu"))
    for launch in launches.values():
        assert compared(launch(), expected, "bf16", "fp64")["error"] < 0.01
    assert {rows[name]["compared_with"] for name in names} == {"fa4"}


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_one_is_marked_and_not_timed(monkeypatch):
    def one_row(problem, inputs):
        o = exact(problem, inputs)
        o[1, 3] *= 1.1
        return lambda: o

    def nan(problem, inputs):
        return lambda: torch.full_like(exact(problem, inputs), math.nan)

    def right(problem, inputs):
        return lambda: exact(problem, inputs)

    fakes = {"fmha": right, "row": one_row, "nan": nan, "also": right}
    monkeypatch.setattr(fmha, "PEERS", fakes)
    rows, launches = peer_rows(SMALL, *fakes)
    assert set(launches) == {"fmha", "also"}
    assert "wrong: a row is 10.0% off fmha's, limit 2.0%" in rows["row"]["refused"]
    assert "off fmha's" in rows["nan"]["refused"]
    assert rows["also"]["max_difference"] == 0
    nothing_seen = torch.zeros(3, 64)
    assert compared(nothing_seen, nothing_seen, "bf16", "fmha")["error"] == 0


# -- turns ----------------------------------------------------------------------------------------


def test_nobody_follows_the_same_one_in_every_round():
    order: list[str] = []
    names = "abc"
    found = take_turns(
        {name: lambda name=name: order.append(name) or len(order) for name in names}, 8
    )
    rounds = ["".join(order[first : first + 3]) for first in range(0, 24, 3)]
    assert all(sorted(each) == [*names] for each in rounds)
    assert len(set(rounds)) > 3
    assert [len(found[name]) for name in names] == [8, 8, 8]
    assert take_turns({}, 3) == {}


class Simulated:
    """torch.cuda with a host and a stream, both in microseconds; a cycle is half a nanosecond."""

    def __init__(self):
        self.host = self.stream = 0.0
        self.flushes = 0

    def enqueue(self, host_us, gpu_us):
        self.host += host_us
        self.stream = max(self.stream, self.host) + gpu_us

    def synchronize(self):
        self.host = max(self.host, self.stream)

    def _sleep(self, cycles):
        self.enqueue(5, cycles / 2000)

    def zero_(self):
        self.flushes += 1
        self.enqueue(5, 60)

    def Event(self, enable_timing):
        assert enable_timing
        return SimulatedEvent(self)


class SimulatedEvent:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.gpu.enqueue(2, 0)
        self.at = self.gpu.stream

    def query(self):
        return self.at <= self.gpu.host

    def synchronize(self):
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) / 1000


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU whose clock falls from reading to reading; each reading takes 1 ms."""
    made = Simulated()
    monkeypatch.setattr(turns, "torch", SimpleNamespace(cuda=made))

    def state():
        made.host += 1000
        return {"sm_mhz": 2e6 / made.host}

    monkeypatch.setattr(turns, "gpu_state", state)
    return made


@pytest.mark.parametrize("host_us", [10, 90, 400])
@pytest.mark.parametrize("flushed", [True, False])
def test_a_time_has_no_part_of_the_host(gpu, host_us, flushed):
    contestant = Contestant(lambda: gpu.enqueue(host_us, 50), gpu if flushed else None)
    turn = contestant()
    assert turn.us == pytest.approx(50)
    assert turn.state["sm_mhz"] > 0
    assert contestant.calls == 100
    assert (gpu.flushes > 0) == flushed
    assert (contestant.head_start > HEAD_START) == (host_us > 90 or (host_us == 90 and not flushed))


def test_a_turn_is_as_long_as_the_clock_needs(gpu):
    assert Contestant(lambda: gpu.enqueue(10, 4000), gpu).calls == 25
    assert Contestant(lambda: gpu.enqueue(10, 1e6), gpu).calls == 5


def test_a_reading_behind_the_turn_is_none(gpu):
    contestant = Contestant(lambda: gpu.enqueue(1, 1), None)
    assert contestant().state == {}


@pytest.mark.parametrize(("host_us", "calls"), [(1000, 50), (5000, 6)])
def test_a_turn_of_a_slow_host_has_fewer_calls(gpu, host_us, calls):
    contestant = Contestant(lambda: gpu.enqueue(host_us, 50), gpu)
    assert contestant().us == pytest.approx(50)
    assert contestant.calls == calls


def test_a_peer_that_waits_for_the_gpu_is_not_timed(gpu):
    with pytest.raises(RuntimeError, match="take the host longer"):
        Contestant(lambda: (gpu.enqueue(10, 50), gpu.synchronize()), gpu)


def test_figures_of_turns():
    made = [Turn(us, {"watts": us} if us > 2 else {}) for us in (1.0, 2.0, 3.0, 4.0, 5.0)]
    found = turns.figures(made)
    assert found["samples_us"] == [1, 2, 3, 4, 5]
    assert (found["us"], found["spread"], found["watts"]) == (3, 1, 4)
    assert turns.figures(made[:1])["spread"] == 0


def test_clock_and_power_by_nvidia_smi(monkeypatch):
    answers = {"clocks.sm": "1410 MHz", "power.draw": "[N/A]"}
    monkeypatch.setattr(turns, "meter", lambda: "nvidia-smi")
    monkeypatch.setattr(turns, "smi", lambda fields: {name: answers[name] for name in fields})
    assert turns.gpu_state() == {"sm_mhz": 1410.0}


# -- tables and files -----------------------------------------------------------------------------


def made_up(problem=SMALL, name="gqa"):
    """Rows as from a GPU: ours is 1.25 times as fast as the best peer."""
    same = {"kind": "time", "rows": name, "problem": str(problem), **dataclasses.asdict(problem)}
    rows = []
    for peer, us in {OURS: 4.0, "fa4": 5.0, "cudnn": 8.0}.items():
        found = {"us": us, "spread": 0.01, "tflops": problem.flop / us * 1e-6, "sm_mhz": 1400.0}
        rows.append({**same, "peer": peer, **found, "max_difference": 0.004})
    rows.append({**same, "peer": "flashinfer", "refused": "not installed: [no] such thing"})
    return ranked(rows)


HEAD = {"kind": "setting", "date": "2026-11-26", "order": "10 rounds", "gpu": {"name": "a GPU"}}


def test_ours_is_compared_with_the_best_peer():
    rows = made_up()
    assert [row.get("of_best") for row in rows] == pytest.approx([1.25, 1.0, 0.625, None])
    big = made_up(ROWS["gqa"][0])
    _, heads, ((problem, *cells),) = summary(big)
    assert heads == ["problem", "fmha", "fa4", "cudnn", "flashinfer", "fmha / best peer"]
    assert problem == "1 x 8k, heads 64/8 of 128, bf16, causal"
    assert cells[0].endswith(" *")
    assert cells[-2:] == ["[1]", "1.25"]
    alone = {name: value for name, value in rows[0].items() if name != "of_best"}
    assert summary(ranked([alone]))[2][0][-1] == "-"


def test_a_file_is_shown_again(printed, run, tmp_path):
    rows = [*made_up(), *made_up(WINDOW, "gpt-oss")]
    file, picture = tmp_path / "fmha.json", tmp_path / "new" / "fmha.png"
    save_rows(file, [HEAD, *rows, {"kind": "after"}])
    shown = printed("bench.py fmha --show", file, "--plot", picture)
    assert "a GPU, 2026-11-26, 10 rounds" in shown
    assert "[1] flashinfer: not installed: [no] such thing" in shown
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    page = printed("bench.py fmha --markdown --peers fmha flashinfer --show", file).splitlines()
    assert page[0] == "| problem | fmha | flashinfer | fmha / best peer |"
    assert page[2].endswith("| **0** | [1] | 1.25 |")
    assert page[-1] == "[1] flashinfer: not installed: [no] such thing"
    assert run("bench.py fmha --peers fa2 --show", file).returncode == 2


@pytest.mark.usefixtures("on_cpu")
def test_a_run_from_end_to_end(written, gpu, monkeypatch, tmp_path):
    """The GPU computes on the CPU, and is timed on the simulated one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(fmha, "flush_buffer", lambda: gpu)
    monkeypatch.setattr(fmha, "meter", lambda: "simulated")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench, "heading", lambda **more: {**HEAD, **more})
    monkeypatch.setattr(bench, "setting", lambda: {"gpu": {"name": "a GPU"}})
    monkeypatch.setattr(fmha, "why_not_here", lambda archs: None)
    monkeypatch.setattr(turns, "CALLS", (2, 3))
    monkeypatch.setitem(sys.modules, "flashinfer", None)

    def fast(problem, inputs):
        found = fake_flash(inputs.q, inputs.k, inputs.v, causal=problem.causal)[0]
        return lambda: gpu.enqueue(1, 1000) or found

    monkeypatch.setattr(fmha, "PEERS", {**PEERS, OURS: fast, "fa4": fast})
    flags = "bench.py fmha --shape 1,6,6,2,1 --head-dim 64 --rounds 2 --peers fmha fa4 flashinfer"
    shown, (head, *rows, after) = written(flags, "--plot", tmp_path / "fmha.png")
    assert (head["clock_and_power"], head["flush"], after["kind"]) == ("simulated", True, "after")
    assert [row["peer"] for row in rows] == ["fmha", "fa4", "flashinfer"] * 2
    assert rows[2]["refused"].startswith("not installed: ")
    assert rows[0]["samples_us"] == pytest.approx([1000, 1000])
    assert rows[0]["of_best"] == rows[1]["of_best"] == pytest.approx(1.0)
    assert rows[0]["tflops"] == pytest.approx(rows[0]["flop"] / 1e9)
    assert "TFLOP/s" in shown
    assert (tmp_path / "fmha.png").exists()


# -- from outside ---------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_names_who_is_missing(written, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fmha_peers, "PACKAGES", {"fa4": "no_such_one", "flashinfer": "nor_this"})
    monkeypatch.setattr(fmha_peers, "ADAPTERS", {})
    shown, document = written("bench.py fmha --rows gpt-oss --no-static")
    capabilities = "9.0 or 10.x or 8.x or 12.x"
    assert f"fmha is not timed: no GPU of compute capability {capabilities} here" in shown
    assert "not installed: fa4, flashinfer" in shown
    assert "1 x 2k, heads 64/8 of 64, bf16, window 128, sinks   0.004" in shown
    assert [row["kind"] for row in document] == ["setting"]
    assert {"date", "inputs", "timing", "versions"} <= set(document[0])


def test_static_figures_are_written(written, tmp_path, whole_ptxas):
    picture = tmp_path / "bench.png"
    flags = "--head-dim 64 --mask causal --no-timing --plot"
    out, (head, *rows) = written(f"bench.py fmha {flags}", picture)
    assert head["versions"]["torch"] == torch.__version__
    if not tools_found():
        assert HOW_TO_GET_TOOLS in out
        return
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    (row,) = rows
    assert (row["kind"], row["config"]["right"]) == ("static", True)
    assert sorted(loop["masked"] for loop in row["loops"]) == [False, True]
    for loop in row["loops"]:
        assert sum(loop["kinds"].values()) == loop["total"]


@pytest.mark.hw
def test_peers_are_timed_on_a_gpu(written, tmp_path):
    if why_not_here(ARCHS):
        pytest.skip(why_not_here(ARCHS))
    picture = tmp_path / "fmha.png"
    flags = "bench.py fmha --shape 1,4k,4k,16,16 --head-dim 128 --rounds 4 --plot"
    _, (head, *rows, _) = written(flags, picture)
    assert head["gpu"]["name"]
    timed = {(row["peer"], row["causal"]): row for row in rows if "us" in row}
    assert {("fmha", False), ("fmha", True)} <= set(timed)
    for row in timed.values():
        assert 20 < row["tflops"] < 3000
        assert len(row["samples_us"]) == 4
        assert row["spread"] < 0.2
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
