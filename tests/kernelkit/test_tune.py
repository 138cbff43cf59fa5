"""The tuner finds the fastest choice, trusts no wrong result, keeps what it found, and reports what
it cannot do; the clock is a function here.
"""

from __future__ import annotations

import json
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from kernelkit import __main__ as command_line
from kernelkit.compile import store
from kernelkit.tune import files as tuned_files
from kernelkit.tune import halving
from kernelkit.tune import tuner as tune
from kernelkit.tune.files import Machine
from kernelkit.tune.halving import Time, race
from kernelkit.tune.stopwatch import Bench, require_agreement
from lab.house.source import ROOT

MACHINE = Machine("Test GPU", 132, "sm_90a", "570.1")
NOISE = 0.02


def cost_of(choice: dict, seed: int) -> float:
    """Microseconds without noise: a landscape with a slope for each option; some choices are
    close."""
    if not choice:
        return 14.0
    mixed = random.Random(zlib.crc32(json.dumps([choice, seed], sort_keys=True).encode()))
    return 10.0 * (1 + mixed.random() ** 2)


class Clock:
    """Noisy samplers of a shape, which count their samples."""

    def __init__(self, seed: int, refuse: tuple = (), noise: float = NOISE) -> None:
        self.seed, self.refuse, self.noise, self.samples = seed, refuse, noise, 0
        self.random = random.Random(seed)

    def __call__(self, about, shape, device):
        return self.bench

    def bench(self, choice):
        if any(choice.get(name) == value for name, value in self.refuse):
            raise RuntimeError("ptxas has no registers left")
        cost = cost_of(choice, self.seed)

        def sample() -> float:
            self.samples += 1
            return cost * (1 + self.random.gauss(0, self.noise))

        return sample


def tuned_by(clock: Clock, **options):
    about = tune.subject("decode")
    shape = about.draw(random.Random(clock.seed))
    (found,) = tune.tune(
        "decode", [shape], device="meta", machine=MACHINE, bench_of=clock, **options
    )
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    return tmp_path / tuned_files.FOLDER


@pytest.mark.parametrize("noise", [NOISE, 2 * NOISE])
def test_the_race_is_within_3_percent_at_20_random_shapes(noise):
    for seed in range(20):
        found = tuned_by(Clock(seed, noise=noise), keep=False)
        costs = [cost_of(choice, seed) for choice, _ in found.times]
        assert cost_of(found.best, seed) <= 1.03 * min(costs), seed


def test_a_race_takes_a_part_of_the_samples_of_an_exhaustive_search():
    names = range(100)
    counts = dict.fromkeys(names, 0)

    def sampler(name):
        def sample():
            counts[name] += 1
            return 10 + name / 10

        return sample

    times = race({name: sampler(name) for name in names}, [99])
    assert min(times, key=lambda name: times[name].us) == 0
    assert sum(counts.values()) < 100 * halving.LAST / 2
    assert counts[0] == counts[99] >= halving.LAST
    assert min(counts.values()) == halving.FIRST
    race({name: sampler(name) for name in names}, [99], exhaustive=True)
    assert min(counts.values()) == halving.FIRST + halving.LAST


def test_who_may_be_first_is_sampled_until_the_noise_is_small():
    order = random.Random(0)
    costs = {"first": 10.0, "close": 10.1, "far": 11.0, "rules": 12.0}
    for noise, most in ((1e-4, halving.LAST), (0.02, halving.MOST - 1), (0.2, halving.MOST)):
        samplers = {
            name: lambda us=us, noise=noise: us * order.gauss(1, noise)
            for name, us in costs.items()
        }
        times = race(samplers, ["rules"])
        assert times["first"].samples == times["rules"].samples <= most, noise
        if noise == 0.02:
            assert times["first"].samples > times["far"].samples == halving.LAST
            assert times["first"].error < halving.PRECISE
        elif noise > 0.02:
            assert times["rules"].samples == most


def test_turns_are_drawn_anew_so_that_drift_befalls_all():
    seen = []
    race({name: lambda name=name: seen.append(name) or 1.0 for name in range(5)}, [])
    rounds = [tuple(seen[place : place + 5]) for place in range(0, len(seen), 5)]
    assert all(sorted(each) == [*range(5)] for each in rounds)
    assert len({*rounds}) > 3


def test_within_the_noise_nobody_is_faster():
    slow = Time.of([10.0, 10.2, 9.8] * 7)
    assert not Time.of([9.95, 10.1, 9.8] * 7).beats(slow)
    assert Time.of([9.0, 9.1, 8.9] * 7).beats(slow)
    assert Time.of([5.0]) == Time(5.0, 0.0, 1)


def test_what_beats_the_rules_is_kept_and_found_again(folder):
    found = tuned_by(Clock(1))
    assert found.kept
    assert found.us < found.rules_us
    (path,) = folder.glob("*.json")
    header, (entry,) = tuned_files.read(path)
    assert header["driver"] == MACHINE.driver
    assert (entry.problem, entry.choice) == (found.problem, found.best)
    assert entry.default_us == pytest.approx(14.0, rel=0.03)
    assert entry.candidates[0][1] <= entry.candidates[-1][1]


@pytest.mark.parametrize("why", ["dry", "the rules are best"])
def test_else_nothing_is_kept(folder, monkeypatch, why):
    if why == "the rules are best":
        monkeypatch.setitem(globals(), "cost_of", lambda choice, seed: 10.0 + bool(choice))
    found = tuned_by(Clock(1), keep=why != "dry")
    assert found.kept == (why == "dry")
    assert (found.best == {}) == (why != "dry")
    assert not folder.exists()


def test_candidates_that_cannot_run_are_refused_with_their_reason():
    found = tuned_by(Clock(3, refuse=(("cluster", 1),)), keep=False)
    reasons = {why for choice, why in found.refused if choice.get("cluster") == 1}
    assert "RuntimeError: ptxas has no registers left" in reasons
    assert not [choice for choice, _ in found.times if choice.get("cluster") == 1]


@pytest.mark.parametrize("broken", [False, True])
def test_kernels_that_cannot_be_compiled_end_no_search(monkeypatch, broken):
    """Parallel compilers only save time: the error appears when a kernel is launched."""
    asked = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *words):
            asked.append(words)
            if broken:
                raise BrokenProcessPool
            return super().submit(*words)

    def fails(_):
        raise RuntimeError("ptxas has no registers left")

    monkeypatch.setattr(tune, "ProcessPoolExecutor", lambda workers, _: Pool(workers))
    monkeypatch.setattr(tune, "_compile", fails)
    found = tuned_by(Clock(1), keep=False, workers=2)
    assert asked
    assert found.us < found.rules_us


def test_an_exhaustive_search_says_how_far_the_answer_is(capsys):
    found = tuned_by(Clock(2), keep=False, exhaustive=True)
    assert {time.samples for choice, time in found.times if choice} >= {halving.LAST}
    assert 0 <= found.excess < 0.06
    assert json.loads(json.dumps(found.as_json()))["excess"] == found.excess


def test_wrong_results_are_no_candidates():
    right = torch.randn(64, 64).bfloat16()
    require_agreement([right], [right.clone()])
    require_agreement([right + right.abs().max() * 2**-7], [right])
    with pytest.raises(ValueError, match="from that of the default"):
        require_agreement([right + right.abs().max() * 2**-5], [right])
    hole = right.clone()
    hole[0, 0] = float("nan")
    for pair in ([hole], [right]), ([right], [hole]):
        with pytest.raises(ValueError, match="from that of"):
            require_agreement(*pair)
    with pytest.raises(ValueError, match="differs from that of"):
        require_agreement([torch.ones(2, dtype=torch.uint8)], [torch.zeros(2, dtype=torch.uint8)])


def test_there_is_no_time_without_a_gpu(capsys):
    about = tune.subject("decode")
    for device in (None, "cpu") if not torch.cuda.is_available() else ("cpu",):
        with pytest.raises(ValueError, match="needs a CUDA GPU"):
            tune.tune("decode", [about.shape()], device=device)
    with pytest.raises(ValueError, match="CUDA GPU"):
        Bench("decode", lambda device: None, torch.device("cpu"))
    assert command_line.main(["tune", "decode", "--device", "cpu", "--shape"]) == 1
    assert "CUDA GPU" in capsys.readouterr().err


def test_nothing_is_measured_for_a_cache_that_is_off(monkeypatch):
    monkeypatch.setenv(store.VARIABLE, "off")
    with pytest.raises(ValueError, match="off"):
        tuned_by(Clock(1))
    assert tuned_by(Clock(1), keep=False).kept


def test_an_operator_without_a_kernel_for_the_gpu_is_refused():
    with pytest.raises(NotImplementedError, match="sm_100a"):
        tune.tune("grouped_gemm", [], device="meta", machine=MACHINE, bench_of=Clock(1))


# ---- the command


@pytest.mark.parametrize("name", tune.SUBJECTS)
def test_the_command_says_what_a_shape_is(name, capsys):
    assert command_line.main(["tune", name, "--shapes"]) == 0
    shown = capsys.readouterr().out
    kind = tune.subject(name).shape
    assert all(f"{field}=" in shown for field in vars(kind()))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nobody", "--shape"], "decode"),
        (["decode"], "no shape"),
        (["decode", "--shape", "key=1"], "kv_heads"),
        (["decode", "--shape", "keys=many"], "expected int"),
        (["decode", "--shape", "lens=perhaps"], "true or false"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(words, why, capsys):
    assert command_line.main(["tune", *words]) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_what_it_found(monkeypatch, capsys, as_json):
    real, clock = tune.tune, Clock(4)

    def on_a_clock(*given, device, **options):
        return real(*given, device="meta", machine=MACHINE, bench_of=clock, **options)

    monkeypatch.setattr(tune, "tune", on_a_clock)
    words = ["decode", "--shape", "batch=2", "keys=2048", "--random", "1", "--dry", "--exhaustive"]
    assert command_line.main(["tune", *words, *["--json"] * as_json, "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    if as_json:
        first, _ = json.loads(shown)
        assert first["shape"] == {"batch": 2, "keys": 2048}
        assert first["us"] <= first["rules_us"]
    else:
        assert shown.count("slower than the fastest candidate") == 2
        assert "decode batch=2 keys=2048: kept" in shown
        assert "(rules)" in shown


def test_commands_of_the_page_exist():
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    parser = command_line._parser()
    commands = [line.strip() for line in page.splitlines() if line.startswith("    python -m")]
    assert commands
    for command in commands:
        words = command.partition("#")[0].split()[3:]
        parser.parse_args(words)


def test_a_package_and_a_script_name_what_is_tuned():
    assert {tune.operator_of(name) for name in ("attention", "fmha")} == {"attention"}
    assert {tune.operator_of(name) for name in ("decode", "gqa", "gqa_lowlatency")} == {"decode"}
    for name, two in (("moe", "grouped_gemm or mixed_gemm"), ("q8_0", "q8_0.matvec or q8_0.pro")):
        with pytest.raises(ValueError, match=f"'{name}' has several operators: name one, {two}"):
            tune.subject(name)
    with pytest.raises(ValueError, match="'fmah': what can be tuned is attention, decode"):
        tune.subject("fmah")


def test_the_help_names_the_operators_and_explains_itself(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["tune", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ", ".join(tune.SUBJECTS) in shown
    assert "Measure on this GPU which options of a kernel suit your shapes" in shown
