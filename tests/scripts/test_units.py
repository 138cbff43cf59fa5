"""bench.py units: its kernels run and end in the emulator, and rows are made of what they leave."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest

from workbench.house.source import ROOT
from workbench.units import emulated, perform
from workbench.units.benchmark import (
    CYCLES,
    Benchmark,
    Point,
    failed,
    figures,
    gigahertz,
    replacement,
    row,
    span,
)
from workbench.units.benchmarks import benchmarks_of
from workbench.units.flags import GROUPS
from workbench.units.ptx import RECORD, Kernel, Role

MOST = 5  # kernels of a name; of instructions one each
LONG = 10_000  # cycles that a warp spins: too many here


def _by_name() -> dict[str, list[Benchmark]]:
    """What runs here, by name: evenly chosen where there are many; of instructions one kernel."""
    found = defaultdict(list)
    for one in benchmarks_of(GROUPS):
        if not isinstance(one, Benchmark) or one.variant.get("asleep_for", 0) > LONG:
            continue
        if one.name == "issue":
            accesses = any(word in one.variant["instruction"] for word in ("shared", "matrix"))
            if not accesses or one.variant["warps"] > 1 or one.variant["schedulers"] > 1:
                continue
        found[one.name].append(one)
    for name, some in found.items():
        if name not in ("issue", "latency"):
            found[name] = some[:: -(-len(some) // MOST)]
    return found


KERNELS = _by_name()


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_run_and_end(name):
    """Every CTA that measures leaves clocks; what they show here is no time."""
    for one in KERNELS[name]:
        records = emulated.run(one.points[0].kernel, 2)
        assert records[..., :2].max(axis=(1, 2)).any(), one.variant


def test_names_differ():
    """Nothing is measured twice."""
    seen = [(one.group, one.name, str(one.variant)) for one in benchmarks_of(GROUPS)]
    assert len(seen) == len(set(seen))
    assert {group for group, *_ in seen} == set(GROUPS)


def test_nothing_heavy_is_imported():
    """The GPU's machine has no DSL, and need not have torch."""
    lines = (
        "import sys, workbench.commands, workbench.units.perform, workbench.units.worker\n"
        "assert not {'cutlass', 'torch', 'rich', 'cuda'} & set(sys.modules), sorted(sys.modules)"
    )
    environment = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", lines], check=True, env=environment)


# -- figures --------------------------------------------------------------------------------------


def _records(*warps: tuple[int, ...]) -> np.ndarray:
    """Of one CTA."""
    out = np.zeros((1, len(warps), RECORD), np.uint64)
    for place, values in enumerate(warps):
        out[0, place, : len(values)] = values
    return out


def _benchmark(*operations: float, **how: object) -> Benchmark:
    kernel = Kernel((Role(""),))
    points = tuple(Point(kernel, 1, some) for some in operations)
    return Benchmark("branch", "branch", {"taken": True}, CYCLES, points, **how)


def test_a_span_is_that_of_the_slowest_cta():
    one = _records((100, 150), (110, 190), (0, 0))
    other = _records((5000, 5040), (0, 0), (0, 0))
    assert span(np.concatenate([one, other])) == 90
    apart = _records((300, 0), (0, 420))  # one warp knows the begin, the other one the end
    assert span(apart) == 120
    with pytest.raises(ValueError, match="no warp"):
        span(_records((0, 0)))


def test_two_points_are_subtracted():
    assert figures(_benchmark(10), [[50, 60]], 1) == [5, 6]
    assert figures(_benchmark(10, 30), [[50, 60], [90, 140]], 1) == [2, 4]
    assert figures(_benchmark(1, 2, nbytes=64), [[10], [12]], 8) == [32]
    assert figures(_benchmark(1, 2, nbytes=64, whole=True), [[10], [12]], 8) == [256]


def test_clock_and_replacement():
    assert gigahertz(_records((1000, 401_000, 0, 200_000))) == 2
    assert gigahertz(_records((1000, 401_000, 0, 20_000))) is None
    ctas = [_records((0, at, 0, 0, sm)) for sm, at in ((0, 0), (1, 0), (0, 0), (1, 0))]
    for cta, (begin, end) in zip(ctas, ((10, 60), (5, 65), (100, 150), (95, 155)), strict=True):
        cta[0, 0, :2] = begin, end
    assert replacement(np.concatenate(ctas)) == 35


def test_rows_and_their_table(tmp_path, printed):
    good = row(_benchmark(1), [3.0, 1.0, 2.0], 1.98)
    assert (good["value"], good["low"], good["high"], good["n"]) == (2, 1, 3, 3)
    bad = failed(_benchmark(1), "CUDA_ERROR_X")
    path = tmp_path / "units.json"
    setting = {"kind": "setting", "date": "today", "device": {"name": "Hopper"}, "repeats": 3}
    perform.save_rows(path, [setting, good, bad])
    text = printed("bench.py units --show", path)
    assert "Hopper" in text
    assert "taken True" in text
    assert "CUDA_ERROR_X" in text


class _Children:
    """Workers that end within a benchmark, in turn: (at which, exit code)."""

    def __init__(self, *ends: tuple[int, int]) -> None:
        self.ends, self.said = list(ends), "Segmentation fault"

    def __call__(self, groups: list[str], first: int, repeats: int) -> _Children:
        self.first, (self.last, self.code) = first, self.ends.pop(0)
        return self

    def __iter__(self):
        yield {"gpu": {"name": "Hopper"}}
        for index in range(self.first, self.last):
            yield {"index": index, "row": {"group": "branch", "benchmark": index}}

    def end(self) -> int:
        return self.code


def test_a_worker_that_breaks_is_followed_by_another(monkeypatch):
    """It says at which benchmark, and all others are measured."""
    count = len(list(benchmarks_of(["branch"])))
    monkeypatch.setattr(perform, "Child", _Children((2, -11), (5, 3), (count, 0)))
    found = [one for one in perform.rows_of(["branch"], 1) if "gpu" not in one]
    assert len(found) == count
    assert [one.get("error") for one in found[:4]] == [None, None, "Segmentation fault", None]
    assert [place for place, one in enumerate(found) if "error" in one] == [2]
