"""`bench.py emulator`: the part of ptxemu that a sample belongs to, the table, and one of its
kernels.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

import ptxemu
from lab.bench.emulator import (
    ARITHMETIC,
    AROUND,
    ASKED,
    CHECKER,
    HOST,
    MEMORY,
    MMA,
    PARTS,
    SCHEDULING,
    part_of,
    sampled,
)
from lab.house.source import ROOT
from lab.tools.common import save_rows

RESULTS = "results/emulator_speed.json"
SHARES = dict(zip(PARTS, (0.5, 0.25, 0.125, 0.0625, 0.0, 0.0625), strict=True))
ROWS = [
    {"kind": "setting", "processor": "abacus", "cores": 2, "versions": {"python": "3.11"},
     "llvmlite": "not used", "date": "2026-11-24", "repeat": 3},
    {"kind": "emulator", "kernel": "fmha", "problem": "small", "mode": "plain",
     "instructions": 60_000, "cpu_ms": 40.0, "wall_ms": 44.0, "per_second": 1.5e6,
     "shares": SHARES},
]  # fmt: skip


def part_below(*calls: str) -> str:
    """Return the part for a stack of functions in these files, from outside to inside:
    'path:function'."""
    inner = lambda: part_of(sys._getframe())  # noqa: E731
    for call in reversed(calls):
        path, _, function = call.partition(":")
        file = path if path.startswith("<") else f"/anywhere/ptxemu/{path}"
        names = {"inner": inner}
        exec(compile(f"def {function}(): return inner()", file, "exec"), names)
        inner = names[function]
    return inner()


RUN = ("module.py:launch", "machine/machine.py:run", "machine/scheduler.py:run")
BLOCK = (*RUN, "machine/state.py:run", "<ptxemu kernel>:b3")


@pytest.mark.parametrize(("stack", "part"), [
    ((), HOST),
    (("host/emulator.py:call",), HOST),
    (("module.py:launch", "machine/memory.py:allow"), HOST),  # before the launch
    (("module.py:launch", "check/checker.py:unused_data"), CHECKER),
    (RUN, SCHEDULING),
    (BLOCK, ARITHMETIC),
    ((*BLOCK, "native/frame.py:execute"), ARITHMETIC),
    ((*BLOCK, "machine/state.py:branch"), SCHEDULING),
    ((*BLOCK, "ops/mbarrier.py:wait", "machine/memory.py:read"), SCHEDULING),
    ((*BLOCK, "ops/load_store.py:load"), MEMORY),
    ((*BLOCK, "ops/load_store.py:load", "check/races.py:global_"), CHECKER),
    ((*RUN, "machine/async_ops.py:advance", "machine/mma.py:mma", "machine/memory.py:read"), MMA),
    ((*BLOCK, "codegen/tainted.py:run"), CHECKER),
    ((*BLOCK, "codegen/tainted.py:run", "ops/atomics.py:add"), MEMORY),
])  # fmt: skip
def test_a_stack_belongs_to_a_part(stack, part):
    assert part_below(*stack) == part


def test_every_path_of_the_table_is_there():
    folder = Path(ptxemu.__path__[0])
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]
    for table in (ASKED, AROUND):
        for beginning in sum(table.values(), ()):
            assert any(file.startswith(beginning) for file in files), beginning


def test_shares_are_of_the_time_of_the_calls():
    def call() -> None:
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass

    shares = sampled(call, 0.02)
    assert [*shares] == [*PARTS]
    assert shares[HOST] == pytest.approx(1.0)


def test_a_file_is_shown(run, tmp_path):
    path = tmp_path / "rows.json"
    save_rows(path, ROWS)
    shown = run("bench.py emulator --show", path)
    assert shown.returncode == 0
    assert "abacus, 2 cores, Python 3.11, llvmlite not used, 2026-11-24; best of 3" in shown.stdout
    assert "60,000" in shown.stdout
    table = run("bench.py emulator --markdown --show", path).stdout.splitlines()
    wanted = "| fmha | small | plain | 60,000 | 40.0 | 44.0 | 1.50 | 50 | 25 | 12 | 6 | 0 | 6 |"
    assert table[-1] == wanted


def test_the_page_has_the_table_of_the_results(printed):
    page = (ROOT / "docs/ptxemu/internals.md").read_text(encoding="utf-8")
    _, table = page.split("<!-- speed -->\n")
    shown = printed("bench.py emulator --markdown --show", ROOT / RESULTS)
    assert table.partition("<!--")[0] == shown


def test_the_readme_has_the_speed_of_the_results():
    rows = json.loads((ROOT / RESULTS).read_text(encoding="utf-8"))[1:]
    (speed,) = (r["per_second"] for r in rows if (r["kernel"], r["mode"]) == ("fmha", "plain"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"It executes about {speed / 1e6:.1f} million warp-instructions" in readme


@pytest.mark.parametrize("flag", ["--repeat 0", "--head-dim 7"])
def test_what_cannot_be_measured_is_refused(run, flag):
    refused = run(f"bench.py emulator {flag}")
    assert refused.returncode == 2
    assert flag.strip("-").replace("-", "_") in refused.stderr


def test_a_kernel_is_measured(run, tmp_path):
    path = tmp_path / "rows.json"
    assert run("bench.py emulator --kernel append --repeat 1 --json", path).returncode == 0
    setting, plain, checked = json.loads(path.read_text())
    assert setting["processor"]
    assert setting["date"]
    assert (plain["mode"], checked["mode"]) == ("plain", "checked")
    assert plain["instructions"] == checked["instructions"] > 10_000
    assert plain["shares"][CHECKER] == 0.0 < checked["shares"][CHECKER]
    for row in (plain, checked):
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        assert row["per_second"] == pytest.approx(row["instructions"] / row["cpu_ms"] * 1e3)
