"""The table of headline shapes: rows, figures, and its text for kernels that are missing."""

from __future__ import annotations

import argparse
from contextlib import contextmanager

import numpy as np
import pytest

from cycle_model.grid import Lengths
from lab.cycles import headline, peers, perform, sample
from lab.cycles.peers import Shape, spread
from lab.problems.fmha import case_of, plan_of

NOTHING = argparse.Namespace()
SMALL = headline._flags("64", "300", 1, 2, 1, "--causal")
LONG = "of a kernel that nobody has installed, and of which there is a lot to be said, at length"


def options_of(row):
    return sample.case_options(headline.HEADLINES[row], NOTHING)


@pytest.mark.parametrize("row", headline.HEADLINES)
def test_a_row_is_a_case_that_attention_takes(row):
    case = case_of(options_of(row))
    assert plan_of(case).config.head_dim == case.dims[0]
    assert (case.window == (127, None)) == ("window" in row)
    assert case.causal == ("full" not in row)
    assert case.sinks == ("gpt-oss" in row)


def test_what_is_published_is_of_a_row_and_has_a_source():
    names = [line.split(",")[0] for line in headline.RIVALS.read_text("utf-8").splitlines()]
    assert {each for each in names if each[0] != "#" and each != "row"} <= {*headline.HEADLINES}
    for row in headline.HEADLINES:
        found = headline.rivals_of(row, options_of(row))
        assert all(each.us > 0 and each.source for each in found)
        assert found == sorted(found, key=lambda each: each.us)


def test_flash_attentions_tables_are_found_by_the_shape():
    def of(row):
        found = headline.rivals_of(row, options_of(row))
        return {each.rival: round(each.us) for each in found}

    assert of("hd64-full")["FlashAttention-4 C"] == 2901
    assert of("gqa-causal-8k")["FlashAttention-4 cudnn-frontend"] == 1395
    assert of("gpt-oss-window-8k")["cuDNN"] == 113  # on a B200, after that of a GB200
    assert "FlashAttention-4 C" not in of("hd192x128-full")


def test_flops_are_those_that_benchmarks_count():
    shape = Shape(64, True, 4, 8192, 32, 32)
    assert headline.flops_of(options_of("hd64-causal")) == shape.flops
    seen = 127 * 128 / 2 + (8192 - 127) * 128
    assert headline.flops_of(options_of("gpt-oss-window-8k")) == 4 * 64 * 64 * seen
    assert headline.flops_of(options_of("hd192x128-full")) == 2 * 320 * 8192**2 * 64 * 2


def test_speeds_are_compared_with_the_same_parameters():
    """The ratio would be 8 / 10 .. 12 / 4 from the ranges alone."""
    found = headline.figures([10, 12, 8], 4e7, ours=[5, 10, 4])
    assert (found["us"], found["low_us"], found["high_us"]) == (10, 8, 12)
    assert (found["ratio"], found["low_ratio"], found["high_ratio"]) == (2, 1.2, 2)
    assert found["tflops"] == 4
    assert "ratio" not in headline.figures([5, 10, 4], 4e7, None)


def rows():
    ours = headline.figures([50, 100, 40], 1e10, None)
    theirs = headline.figures([100, 120, 80], 1e10, [50, 100, 40])
    refused = {"refused": LONG}
    best = {"rival": "cuDNN", "gpu": "GB200", "us": 106.5, "source": "a benchmark"}
    found = [({"ours": ours, "Flash": theirs, "Rare": refused}, [best]),
             ({"ours": ours, "Flash": {"refused": "no sinks"}, "Rare": refused}, []),
             ({"ours": refused, "Flash": theirs | {"us": 97.7}, "Rare": refused}, [])]  # fmt: skip
    flags = headline.HEADLINES["hd64-full"]
    return [
        {"row": f"row-{number}", "flags": flags, "kernels": kernels, "published": published}
        for number, (kernels, published) in enumerate(found)
    ]


def test_reasons_stand_below_the_table_each_once(capsys):
    headline.told(rows())
    text = capsys.readouterr().out
    lines = text.splitlines()
    first, second, third = (next(line for line in lines if f"row-{k}" in line) for k in range(3))
    assert "50 (40 .. 100)" in first
    assert "2.00 (1.20 .. 2.00)" in first
    assert "106.5 cuDNN, GB200" in first
    assert "refused [2]" in second
    assert "97.7 (80 .. 120)" in third
    assert lines[-3:] == [f"[1] Rare: {LONG}", "[2] Flash: no sinks", f"[3] ours: {LONG}"]
    assert LONG not in "".join(lines[:-3])


def test_a_peer_that_refuses_a_case_leaves_the_table_as_it_is(capsys):
    ours = {"kernel": "ours", "us": 1.5, "cycles": 12345}
    perform.shown([ours, {"kernel": "Rare", "refused": LONG}])
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == f"Rare is not modelled: {LONG}"
    assert text.count("Rare") == 1
    assert "12,345" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--peers --row nothing", "--row nothing: one of hd64-full, "),
        ("--peers --what-if launch=3", "--what-if is for one case: give one"),
        ("--peers --clusters 0,3", "--clusters: the table needs a count"),
        ("--peers --launch 0", "--launch is for one case: give one"),
        ("--peers --row hd64-full --head-dim 64", "--row selects rows of the table"),
        ("--row hd64-full", "--row selects rows of the table"),
    ],
)
def test_what_is_no_table_is_refused(run, words, reason):
    result = run(f"cycles.py fmha {words}")
    assert result.returncode == 2
    assert result.stderr.startswith(f"refused: {reason}")


def test_a_flag_of_a_case_asks_for_that_case(run, monkeypatch):
    """A flag that repeats a default counts, too."""
    asked = []
    monkeypatch.setattr(headline, "perform", lambda options: asked.append("table") or 0)
    monkeypatch.setattr(perform, "recorded", lambda options: asked.append("case") or [])
    for words in ("", "--perturbed 2", "--gpu B200", "--head-dim 64", "--no-causal", "--seqlen 9"):
        run(f"cycles.py fmha --peers {words}")
    run("cycles.py fmha --batch 1")
    assert asked == ["table", "table", "table", "case", "case", "case"]


LPT = 8, 64  # parallel heads, blocks of each, the longest first; sections of both


def test_a_period_is_found_in_few_clusters():
    took = {number: 900 - 13 * sample.place_of(number, LPT) for number in spread(4096, 9)}
    assert sample.period_of(4096, took) == LPT
    took = {number: 400 + 7 * (number % 32) for number in spread(4096, 9)}
    assert sample.period_of(4096, took) == (1, 32)


def test_lengths_without_a_period_are_left_as_they_are():
    random = np.random.default_rng(0)
    numbers = spread(4096, 9)
    took = dict(zip(numbers, random.integers(100, 900, len(numbers)).tolist(), strict=True))
    assert sample.period_of(4096, took) is None
    assert sample.period_of(4096, {number: 500 + number % 5 for number in numbers}) is None
    window = {number: 120 if number % 32 == 0 else 500 for number in numbers}
    assert sample.period_of(4096, window) is None
    assert sample.period_of(3, {0: 3, 1: 6, 2: 9}) is None  # all of them are known


@pytest.mark.parametrize(
    ("tiles", "places"), [(32, 148), (16, 74), (147, 148), (128, 74), (512, 74), (1024, 148)]
)
def test_some_ctas_of_a_persistent_kernel_have_a_tile_more_than_others(tiles, places):
    heads, queries = sample._few(tiles, places, 8192)
    assert 2 < heads * tiles * queries / 8192 / places < 3
    assert queries % 512 == 0


class _Persistent:
    """A model of a launch with at most as many CTAs as places; the launch is its number of
    tiles."""

    places = 148

    def __init__(self, launch, gpu, memory):
        self.launch, self.clusters = launch, min(launch, self.places)


@pytest.mark.parametrize("of_head", [32, 128, 512])
def test_tiles_of_a_persistent_kernel_that_are_not_recorded_are_counted(monkeypatch, of_head):
    """A single KV head may have more tiles than there are places."""
    monkeypatch.setattr(sample, "bind", lambda recording: recording)

    def record(batch, kv_heads, queries, clusters):
        return [batch * kv_heads * of_head * queries // 8192]

    found = sample.timed_of(record, (2, 8, 8192), None, 9, kind=_Persistent)
    (some,) = found.launches
    assert -(-some // 148) == sample.TILES
    assert found.more == -(-16 * of_head // 148) - sample.TILES
    masked = sample.timed_of(record, (2, 8, 8192), None, 9, kind=_Persistent, even=False)
    assert (masked.launches, masked.more) == ([16 * of_head], 0)


def test_those_that_were_not_recorded_have_the_length_of_their_place(monkeypatch):
    def length(number):
        took = 900 - 13 * sample.place_of(number, LPT)
        return Lengths(took, took, took, took + 1)

    recorded = {number: length(number) for number in spread(4096, 9)}
    monkeypatch.setattr(sample.LaunchModel, "lengths", property(lambda self: recorded))
    monkeypatch.setattr(sample.LaunchModel, "clusters", 4096)
    found = sample.Periodic(None, None).lengths
    assert found == {number: length(number) for number in range(4096)}


@contextmanager
def _refuses(options):
    raise RuntimeError(LONG)
    yield


def test_a_row_from_the_kernel_to_the_picture(written, tmp_path, monkeypatch, whole_ptxas):
    monkeypatch.setattr(headline, "HEADLINES", {"small": SMALL})
    monkeypatch.setitem(peers.PEERS, "fmha", {"same": sample.ours, "Rare": _refuses})
    picture = tmp_path / "bars.png"
    text, document = written(f"cycles.py fmha --peers --perturbed 2 --plot {picture}")
    (row,) = document["rows"]
    ours, same = row["kernels"]["ours"], row["kernels"]["same"]
    assert len(ours["sets"]) == 3
    assert len({*ours["sets"]}) > 1
    assert ours["low_us"] <= ours["us"] <= ours["high_us"]
    assert same["sets"] == ours["sets"]
    assert same["low_ratio"] == same["ratio"] == same["high_ratio"] == 1
    assert f"{ours['us']:.4g}" in text
    assert text.splitlines()[-1] == f"[1] Rare: RuntimeError: {LONG}"
    assert picture.stat().st_size > 0
