"""Measured kernels compared with the cycle model."""

from __future__ import annotations

import argparse
import json

import pytest

from cycle_model.edits import edits_of, rewritten
from cycle_model.gpus import GPUS
from cycle_model.grid import LaunchModel
from cycle_model.launch import bind
from lab import commands
from lab.cycles import beside, measured, sample
from lab.cycles.beside import summary
from lab.cycles.headline import RESULTS
from lab.cycles.measured import measured_in
from lab.cycles.peers import launched
from lab.flags import steps
from lab.tools.command import main_of

HOPPER = RESULTS / "model_h200" / "fmha.json"
SETTING = {"kind": "setting", "hidden": 256, "gpu": {"name": "NVIDIA H100 80GB HBM3"}}
ROW = {
    "step": "merge",
    "name": "2 parts of head_dim 64, list",
    "tokens": 1,
    "nbytes": 384,
    "peer": "merge",
    "us": 1.6,
    "cold": False,
}


def saved(path, *rows):
    path.write_text(json.dumps([SETTING, *rows]), encoding="utf-8")
    return path


def test_a_measured_kernel_is_modelled(tmp_path, capsys, whole_ptxas):
    file, out = saved(tmp_path / "rows.json", ROW), tmp_path / "out.json"
    words = ["beside", str(file), "--perturbed", "2", "--json", str(out)]
    assert main_of(commands.CYCLES, "", words) == 0
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert row["launches"] == 1
    assert row["low_us"] <= row["modelled_us"] <= row["high_us"]
    assert abs(row["error"]) < 0.5
    assert "in all" in capsys.readouterr().out


def test_of_a_file_only_our_kernels_are_taken(tmp_path):
    others = [{**ROW, "peer": "copy"}, {**ROW, "peer": "torch"}, {**ROW, "refused": "no"}]
    del others[2]["us"]
    (found,) = measured_in(saved(tmp_path / "rows.json", *others, ROW))
    assert (found.group, found.gpu, found.memory, found.us) == ("merge", "H100", "warm", 1.6)


def latent(entries, **changes):
    row = {"problem": f"v3.2: {entries} x 2k", "rows": "v3.2", "entries": entries, "heads": 16}
    row |= {"keys": 2048, "record": "fp8_656", "window": 0, "window_record": "", "peer": "mla"}
    return row | {"nbytes": entries << 20, "cold_us": 9.0, "warm_us": 8.0} | changes


def test_of_latent_attention_what_does_not_fit_in_l2_is_cold(tmp_path):
    others = [latent(1, peer="flashmla"), latent(1, refused="no")]
    del others[1]["cold_us"], others[1]["warm_us"]
    rows = [*others, latent(2, peer="mla warp"), latent(64)]
    found = [*measured_in(saved(tmp_path / "rows.json", *rows))]
    assert [(each.name, each.memory, each.us) for each in found] == [
        ("2 x 2k warp", "cold", 9.0), ("2 x 2k warp", "warm", 8.0), ("64 x 2k", "cold", 9.0),
    ]  # fmt: skip
    assert {each.group for each in found} == {"mla v3.2"}


@pytest.mark.parametrize("rows", ["v4.1", "dense"])
def test_latent_attention_is_modelled_from_its_row(rows):
    """One launch, with keys that nobody has written."""
    given = {"v4.1": {"record": "fp4_288", "window": 8, "window_record": "fp8_528"},
             "dense": {"record": "bf16_576"}}[rows]  # fmt: skip
    row = latent(1, rows=rows, keys=64, **given)
    (bound,) = beside._bound(next(measured._latent(row, "H100")).make, 60, 1)
    assert bound.recording.arch == "sm_90a"


def test_a_file_without_times_or_with_another_gpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no times of kernels"):
        list(measured_in(saved(tmp_path / "rows.json", {**ROW, "peer": "copy"})))
    unknown = [{**SETTING, "gpu": {"name": "NVIDIA A100"}}, ROW]
    (tmp_path / "rows.json").write_text(json.dumps(unknown), encoding="utf-8")
    with pytest.raises(ValueError, match="A100"):
        list(measured_in(tmp_path / "rows.json"))


def test_pairs_are_of_one_group_and_far_enough_apart():
    def row(group, real, modelled, memory="cold"):
        error = modelled / real - 1
        kept = {"group": group, "memory": memory, "error": error}
        return {**kept, "real_us": real, "modelled_us": modelled}

    rows = [row("a", 1, 1), row("a", 2, 3), row("a", 2.1, 0.5), row("b", 9, 9)]
    first, second, whole = summary([*rows, row("a", 5, 0.1, "warm")])
    assert (first["pairs"], second["pairs"], whole["pairs"]) == (2, 0, 2)
    assert first["ordered"] == 0.5


def test_attention_on_hopper_lies_in_its_stored_range(whole_ptxas):
    """The grid has a CTA per SM of a Hopper GPU. The model gives the stored time for the first one.
    It takes longer if exponentials take three times as long, and less without products."""
    rows = json.loads(HOPPER.read_text(encoding="utf-8"))
    (small,) = (row for row in rows if row["kind"] == "small")
    place = argparse.Namespace(arch="sm_90a", memory="warm", given=())
    case = sample.case_options(small["flags"], place)
    with sample.ours(case) as call:
        (report,) = launched(call, (0, 1))
    assert report.grid == (GPUS["H200"].sms, 1, 1)
    bound = bind(report.recording)

    def cycles(gpu):
        return LaunchModel(bound, gpu, memory="warm").predict().durations[0]

    low, high = small["cycles"]
    assert low <= cycles(GPUS["H200"]) <= high
    assert cycles(GPUS["H200"].changed(issue_special=24)) > high
    bound = rewritten(bound, edits_of("drop HGMMA"))
    assert cycles(GPUS["H200"]) < low


def test_measured_cycles_are_microseconds_at_the_clock_of_the_model():
    found = {each.name: each for each in measured_in(HOPPER) if "causal" not in each.group}
    clock = GPUS["H200"].value("clock") * 1e3
    assert found["head dim 256, 4 x 4k"].us * clock == pytest.approx(1_148_107)
    assert {each.group for each in measured_in(HOPPER)} == {
        "attention, full",
        "attention, full, pairs",
        "attention, causal",
    }


def test_every_step_that_is_timed_on_a_gpu_can_be_modelled():
    """The exceptions are copies to the host's memory."""
    assert {*steps.ABOUT} - {*measured._FAMILIES} == {"host"}


def test_a_launch_that_goes_where_another_has_counted_is_run_whole(tmp_path, monkeypatch):
    """A few clusters of the permutation would leave the remaining counts unchanged."""
    seen = []
    monkeypatch.setattr(beside, "_bound", lambda make, limit, clusters: seen.append(clusters) or ())
    permutation = {**ROW, "step": "permutation", "name": "256 experts, 8", "peer": "moe"}
    file = saved(tmp_path / "rows.json", ROW, permutation)
    assert main_of(commands.CYCLES, "", ["beside", str(file), "--clusters", "3"]) == 0
    assert seen == [3, None]


def test_what_is_partly_torchs_is_not_modelled(tmp_path):
    """Above 64 tokens torch computes the router's product, which no model of our launch has."""
    row = {**ROW, "step": "route_tokens", "name": "32 experts, 4", "peer": "moe"}
    rows = [{**row, "tokens": tokens} for tokens in (64, 65)]
    ours, partly = measured_in(saved(tmp_path / "rows.json", *rows))
    ours.make()
    with pytest.raises(ValueError, match="the linear layer is torch's"):
        partly.make()
