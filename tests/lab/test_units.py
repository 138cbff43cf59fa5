"""bench.py units: its kernels run and end in the emulator, and rows are made from their records."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cycle_model.sass.tools import disassemble, find_tool, tools_found
from lab.house.source import ROOT
from lab.silicon.units import perform, worker
from lab.silicon.units.benchmark import (
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
from lab.silicon.units.benchmarks import benchmarks_of
from lab.silicon.units.flags import ARCHS, GROUPS
from lab.silicon.units.ptx import BLACKWELL, RECORD, Kernel, Role

MOST = 5  # kernels of a name; one of each instruction


def _by_name() -> dict[str, list[Benchmark]]:
    """Benchmarks that run here, by name: evenly chosen if there are many; one kernel per
    instruction."""
    found = defaultdict(list)
    for one in benchmarks_of(GROUPS):
        if not worker.can(one):
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
    """Every measuring CTA records clocks; in the emulator they are no times."""
    for one in KERNELS[name]:
        records = worker.run(one.points[0].kernel, 2).records
        assert records[..., :2].max(axis=(1, 2)).any(), one.variant


def test_names_differ():
    """No point is measured twice, and any two points differ in something."""
    groups = set()
    for arch in ARCHS:
        found = list(benchmarks_of(GROUPS, arch))
        seen = [(one.group, one.name, str(one.variant)) for one in found]
        assert len(seen) == len(set(seen))
        groups |= {group for group, *_ in seen}
        for one in found:
            if isinstance(one, Benchmark) and len(one.points) > 1:
                assert len({point.operations for point in one.points}) == 2, one.variant
    assert groups == set(GROUPS)


# -- Blackwell ------------------------------------------------------------------------------------


def _of_blackwell(name: str, **variant: object) -> Benchmark:
    (found,) = [
        one
        for one in benchmarks_of(["tcgen05", "tmem", "launch", "issue", "latency"], BLACKWELL)
        if one.name == name and variant.items() <= one.variant.items()
    ]
    return found


MULTIPLIED = [
    {"kind": "f16", "ctas": 1, "m": 64, "n": 64},
    {"kind": "f16", "ctas": 2, "m": 256, "n": 64},
    {"kind": "f16", "ctas": 2, "m": 128, "n": 128},
    {"kind": "f8f6f4", "ctas": 1, "n": 64, "a": "tensor memory"},
    *({"kind": kind, "ctas": 1, "n": 64} for kind in ("mxf8f6f4", "mxf4")),
    {"kind": "mxf4nvf4", "ctas": 2, "n": 128},
]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *(("tcgen05_mma", {"a": "shared memory", **each}) for each in MULTIPLIED),
        ("tcgen05_until_wait", {"ctas": 1, "n": 64, "a": "tensor memory", "per_commit": 4}),
        ("tcgen05_switch", {"n": 64}),
        ("tcgen05_cp", {"shape": "64x128b.warpx2::02_13"}),
        ("tcgen05_cp", {"shape": "4x256b"}),
        ("tmem_load", {"shape": "16x256b", "repeat": 2, "warps": 8}),
        ("tmem_store", {"shape": "32x32b", "repeat": 8, "warps": 8}),
        ("tmem_store_wait", {"shape": "16x64b", "repeat": 16}),
        ("tensor_allocation", {}),
        ("cancel", {}),
        ("issue", {"instruction": "fma.f32x2", "warps": 1}),
    ],
)
def test_kernels_of_blackwell_are_right(name, variant):
    """The kernels end, the checker reports nothing, and D is the product of ones."""
    assert worker.wrong(_of_blackwell(name, **variant), BLACKWELL) is None


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "tensor"])
def test_every_kernel_of_blackwell_is_right(group):
    for one in filter(worker.can, benchmarks_of([group], BLACKWELL)):
        assert worker.wrong(one, BLACKWELL) is None, one.variant


def test_a_wrong_kernel_is_noticed():
    """The answer, the checker or the end of the run shows it."""
    point = _of_blackwell("tcgen05_mma", kind="f16", ctas=1, n=64, a="tensor memory").points[0]

    def said(**changes: object) -> str | None:
        changed = replace(point, kernel=replace(point.kernel, **changes))
        return worker.wrong(_benchmark_of(changed), BLACKWELL)

    assert said() is None
    assert said(answer=1.0) == "128 where 1 should be"
    assert "nothing wrote" in said(filled="")
    (role,) = point.kernel.roles
    early = replace(role, body=role.body.replace("tcgen05.commit", "//"))
    assert said(roles=(early,)).startswith("Deadlock")
    assert said(roles=(replace(role, inside=True),)) == "no CTA has looked at its clock"


def _benchmark_of(point: Point) -> Benchmark:
    return Benchmark("tcgen05", "tcgen05_mma", {}, CYCLES, (point,))


def test_what_a_gpu_does_not_have_is_refused_by_name(monkeypatch):
    class Child(_Children):
        def __iter__(self):
            yield {"gpu": {"name": "Blackwell", "capability": "10.0"}}

    monkeypatch.setattr(perform, "Child", lambda *_: Child((0, 0)))
    with pytest.raises(OSError, match="--groups tensor: there is nothing of it for sm_100a"):
        list(perform.rows_of(["branch", "tensor"], 1))
    assert "tensor" not in {each.group for each in perform.wanted_of([*GROUPS], BLACKWELL)}
    assert perform.wanted_of(["tensor"], "sm_90a")


def test_emulating_says_how_many(printed):
    text = printed("bench.py units --groups tmem --emulate sm_100a --every 40")
    assert "kernels for sm_100a in the emulator, 0 not as they should be" in text


def test_nothing_heavy_is_imported():
    """The GPU's machine has no DSL, and need not have torch."""
    lines = (
        "import sys, lab.commands, lab.silicon.units.perform, lab.silicon.units.worker\n"
        "assert not {'cutlass', 'torch', 'rich', 'cuda'} & set(sys.modules), sorted(sys.modules)"
    )
    environment = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", lines], check=True, env=environment)


# -- figures --------------------------------------------------------------------------------------


def _records(*warps: tuple[int, ...]) -> np.ndarray:
    """Records of one CTA."""
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
    apart = _records((300, 0), (0, 420))  # one warp recorded the begin, the other the end
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
    """Workers that end during a benchmark, one after another: (at which, exit code)."""

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
    """The failing benchmark is named, and all others are measured."""
    count = len(list(benchmarks_of(["branch"])))
    monkeypatch.setattr(perform, "Child", _Children((2, -11), (5, 3), (count, 0)))
    found = [one for one in perform.rows_of(["branch"], 1) if "gpu" not in one]
    assert len(found) == count
    assert [one.get("error") for one in found[:4]] == [None, None, "Segmentation fault", None]
    assert [place for place, one in enumerate(found) if "error" in one] == [2]


def test_a_gpu_that_multiplies_wrongly_has_no_figure(monkeypatch):
    """Results of a launch are checked on the GPU as well."""
    from lab.silicon.units.worker import Bench

    benchmark = _of_blackwell("tcgen05_mma", kind="f16", ctas=1, m=64, n=64)
    words = np.zeros((4, 32), np.float32)
    words[:, :16] = 128  # of 64 rows, 16 lanes of each warp
    bench = Bench.__new__(Bench)
    bench.buffer, bench.repeats = 0, 1
    bench.gpu = SimpleNamespace(
        download=lambda *_: words.reshape(-1).view(np.uint64), arch=BLACKWELL, sms=1,
        load=lambda text, *_: (text, text), unload=lambda _: None,
    )  # fmt: skip
    monkeypatch.setattr(bench, "records", lambda *_: _records((100, 400)), raising=False)
    bench.answered(benchmark.points[0].kernel)
    words[3, 15] = 127
    with pytest.raises(ValueError, match="a wrong result: 127 where 128 should be"):
        bench.measure(benchmark)


@pytest.mark.skipif(not (find_tool("ptxas") and tools_found()), reason="no ptxas, or no nvdisasm")
@pytest.mark.parametrize(
    ("name", "variant", "opcode", "count"),
    [
        ("tcgen05_mma", {"kind": "f16", "m": 128, "n": 64, "a": "shared memory"}, "UTCHMMA", 8),
        ("tcgen05_cp", {"shape": "128x256b"}, "UTCCP", 8),
        ("tmem_store", {"shape": "32x32b", "repeat": 32, "warps": 8}, "STTM.x32 tmem[", 2),
    ],
)
def test_what_is_timed_is_nothing_else(tmp_path, name, variant, opcode, count):
    """The machine code of the loop has no loop over lanes, and no moves between timed
    instructions."""
    kernel = _of_blackwell(name, **variant).points[0].kernel
    source, cubin = tmp_path / "bench.ptx", tmp_path / "bench.cubin"
    source.write_text(kernel.text(BLACKWELL))
    ptxas = [find_tool("ptxas"), f"-arch={BLACKWELL}", source, "-o", cubin]
    subprocess.run(ptxas, check=True)
    _, _, behind = disassemble(cubin).partition("SR_CLOCKLO")
    loop, _, _ = behind.partition("SR_CLOCKLO")
    assert loop.count(opcode) == count
    assert "BRA.U.ANY" not in loop
    first, last = loop.index(opcode), loop.rindex(opcode)
    assert loop[first:last].count(";") <= count + 1
