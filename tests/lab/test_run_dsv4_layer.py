"""run.py dsv4: layers of every kind over the cache, compared with the model that recomputes all;
wrong models are noticed; its output, files and exit codes.
"""

from __future__ import annotations

import pytest
from PIL import Image

from lab.commands import RUN
from lab.dsv4 import perform as _run_dsv4_layer
from lab.dsv4.judge import Judge
from lab.dsv4.model import Recompute
from lab.flags.dsv4 import MUTATIONS
from lab.tools.place import choose_place, emulated

CSA, HCA = (pytest.mark.xdist_group(f"dsv4 {kind}") for kind in ("csa", "hca"))  # share kernels
SMALL = "--hidden 128 --heads 2 --index-heads 16 --select 24 --experts 2 --intermediate 64"


def run_of(flags: str) -> _run_dsv4_layer.Run:
    """Return the run that the flags describe, before it begins."""
    options = RUN["dsv4"].parser("").parse_args([*SMALL.split(), *flags.split()])
    _run_dsv4_layer.check(options)
    return _run_dsv4_layer.Run(options, choose_place(options))


def lived(run: _run_dsv4_layer.Run) -> list[_run_dsv4_layer.Row]:
    """Run all steps, without a time limit per launch."""
    with emulated(run.options):
        return list(run.rows())


class Judges:
    """The right judge, and judges with a wrong model: records what each notices."""

    def __init__(self, run: _run_dsv4_layer.Run) -> None:
        right = run.judge
        weights, records = run.layer.weights, right.model.records
        self.right = right
        self.wrong = {
            name: Judge(run.layer, Recompute(weights, records, definition))
            for name, definition in MUTATIONS.items()
        }
        self.noticed: dict[str, set[str]] = {name: set() for name in MUTATIONS}

    def step(self, *given):
        for name, judge in self.wrong.items():
            findings = judge.step(*given).findings.items()
            self.noticed[name] |= {part for part, finding in findings if finding.share > 1.0}
        return self.right.step(*given)


@CSA
def test_a_csa_layer_and_wrong_models():
    """A prompt in one piece, then decoding; each wrong model is noticed in the expected
    component."""
    run = run_of("--kind csa --prefix 133 --chunk 133 --steps 2")
    judges = run.judge = Judges(run)
    rows = lived(run)
    assert [row.lengths for row in rows] == [[133], [134], [135]]
    assert all(row.verdict.ok for row in rows), [row.document() for row in rows]
    assert judges.noticed["window"] == {"attention", "end to end"}
    assert judges.noticed["sink"] == {"attention", "end to end"}
    assert judges.noticed["phase"] == judges.noticed["rope"] == {"entries", "keys"}


@pytest.mark.parametrize("flags", [
    pytest.param("hca --prefix 254 --chunk 77 --steps 3", marks=HCA),
    pytest.param("hca --online-hca --record bf16 --prefix 122 --steps 8 --requests 2", marks=HCA),
    pytest.param("csa --record fp8-index8 --prefix 100 --requests 3 --steps 3", marks=CSA),
    pytest.param("csa --record bf16 --draft 3 --prefix 120 --chunk 50 --steps 6", marks=CSA),
    pytest.param("hca --online-hca --draft 4 --prefix 120 --steps 6", marks=HCA),
    pytest.param("swa --draft 2 --prefix 200 --steps 6 --requests 2", marks=HCA),
])  # fmt: skip
def test_layers(flags):
    """Every step is within its limits."""
    for row in lived(run_of(f"--kind {flags}")):
        assert row.verdict.ok, row.document()


def test_a_layer_under_the_checker(monkeypatch, written, tmp_path):
    """No finding in any kernel of a step; output and files."""
    monkeypatch.setenv("COLUMNS", "80")
    flags = f"{SMALL} --kind csa --prefix 60 --chunk 40 --steps 2 --every 2 --check"
    out, found = written(f"run.py dsv4 {flags}", "--plot", tmp_path / "layer.png")
    assert "every component is within its limit" in out
    assert "bytes of the cache" in out
    assert "…" not in out  # no column of the table is truncated at 80 characters
    assert found["ok"]
    assert found["checks"]["errors"] == 0
    assert [step["lengths"] for step in found["steps"]] == [[40], [60], [61], [62]]
    last = found["steps"][-1]
    # Its window, 15 keys, 15 entries; the rows of the tails for a complete window.
    assert last["read"] == 62 * 584 + 15 * 68 + 15 * 584
    assert last["written"] == 584 + 2 * 4 * 2 * (512 + 128)
    assert Image.open(tmp_path / "layer.png").size[0] > 500


def test_a_wrong_model_is_an_exit_code(run):
    result = run(f"run.py dsv4 {SMALL} --kind swa --prefix 20 --steps 1 --mutate sink")
    assert result.returncode == 1
    assert "OUT OF ITS LIMIT" in result.stdout
