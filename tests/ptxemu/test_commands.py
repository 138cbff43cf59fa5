"""`python -m ptxemu dump` and `mutate`: their files, their verdicts, their continuation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from ptxemu.commands import check, compare, dump, machine_code, mutate
from ptxemu.commands.mutate import Row
from ptxemu.mutation import rerun
from tests.ptxemu.kernels import kernel, launch
from tests.ptxemu.test_watch import HANG, NOTHING, RACE

ORDERED = kernel(  # warp 1 reads what warp 0 writes, after a barrier
    """mov.u32 %r0, %tid.x;
    setp.lt.u32 %p0, %r0, 32;
    @%p0 st.shared.u32 [cell], %r0;
    bar.sync 0;
    bar.sync 1, 64;
    @!%p0 ld.shared.u32 %r1, [cell];""",
    before=".shared .align 4 .b8 cell[4];\n",
)
FIRST, SECOND = (n for n, text in enumerate(ORDERED.split("\n"), 1) if "bar.sync" in text)
CHECKED = {"round-robin-0": {"check": True, "limit": 20}}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr("ptxemu.host.gpu_machine.machine_with_gpu", lambda *_: nullcontext())

    def write(body):
        path = tmp_path / "script.py"
        path.write_text(f"from tests.ptxemu.test_commands import *\n{body}\n")
        return str(path)

    return write


# ---- compare

STORE = kernel(  # thread k writes k + *v to x[k]
    """ld.param.u64 %rd1, [x]; ld.param.u64 %rd3, [v]; ld.global.u32 %r1, [%rd3];
    mov.u32 %r0, %tid.x; mad.wide.u32 %rd2, %r0, 4, %rd1;
    add.u32 %r1, %r1, %r0;
    st.global.u32 [%rd2], %r1;""",
    ".param .u64 x, .param .u64 v",
)
COMPARED = """import sys
import numpy as np
if __name__ == "__main__":
    x, v = np.zeros((4, 8), np.uint32), np.zeros(1, np.uint32)
    launch(STORE, x, v)
    v[0] = int(sys.argv[1])
    launch(STORE, x, v)
def right(v): return {"x": np.arange(32, dtype=np.uint32).reshape(4, 8) + v}
def wrong(v): return {"x": np.roll(right(v)["x"], -1, 0)}
def strange(w): return {}
def small(x): return {"x": x[0]}
def broken(x): return x / None
"""


def compared(*words):
    """Return the exit code."""
    return compare.main([*words, "8"])


def test_two_runs_differ_in_the_launch_that_has_other_arguments(script, tmp_path, capsys):
    path, json_path = script(COMPARED), tmp_path / "d.json"
    assert compared("--json", str(json_path), "--against-arguments", "9", path) == 1
    out = capsys.readouterr().out
    assert "launch 1 (from 0), kernel test" in out
    assert "x[0, 0] is 8 by round-robin, and 9 by round-robin 9" in out
    assert "32 of 32 elements of x (4, 8) differ, all of them in x[0:4, 0:8]" in out
    assert "different before this launch already: v" in out
    found = json.loads(json_path.read_text())
    assert (found["name"], found["index"], found["different"]) == ("x", [0, 0], 32)
    assert all("warp 0" in writes[-1] for writes in found["writes"].values())
    assert compared("--against", "random-3", path) == 0


def test_a_run_differs_from_its_reference_where_a_tile_is_elsewhere(script, capsys):
    path = script(COMPARED)
    assert compared("--reference", f"{path}:right", path) == 0
    assert "nothing differs between the run and the reference in 2 of 2 launches" in (
        capsys.readouterr().out
    )
    assert compared("--reference", f"{path}:wrong", path) == 1
    out = capsys.readouterr().out
    assert "launch 0" in out
    assert "by the reference the same values are x[3, :]" in out
    assert "the run: last written by warp 0 of cta(0,0,0), lane 0" in out
    wrong = {
        "strange": "there are: x, v",
        "small": "it gives 'x' of shape (8,), and the tensor has shape (4, 8)",
        "broken": "broken: TypeError: unsupported operand",
    }
    for name, words in wrong.items():
        with pytest.raises(SystemExit):
            compared("--reference", f"{path}:{name}", path)
        assert words in capsys.readouterr().err


# ---- dump


def test_a_dump_has_every_kernel_once_and_every_launch(script, tmp_path, capsys):
    body = "launch(NOTHING); launch(RACE, block=(64,), grid=(2, 3)); launch(NOTHING)"
    out = tmp_path / "new" / "folder"
    assert dump.main(["--out", str(out), script(body)]) == 0
    found = json.loads((out / "launches.json").read_text())
    assert [each["launches"] for each in found["kernels"]] == [2, 1]
    assert [each["grid"] for each in found["launches"]] == [[1, 1, 1], [2, 3, 1], [1, 1, 1]]
    assert found["launches"][1]["block"] == [64, 1, 1]
    assert [(out / each["files"][0]).read_text() for each in found["kernels"]] == [NOTHING, RACE]
    assert "launched 2 times" in capsys.readouterr().out


def test_machine_code_is_made_where_the_tools_are(script, tmp_path, monkeypatch):
    for tool, text in (("ptxas", 'for last; do :; done; cp "$2" "$last"'), ("nvdisasm", "echo S")):
        path = tmp_path / tool
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setattr(machine_code, "tool_of_cuda", lambda name: str(tmp_path / name))
    assert dump.main(["--out", str(tmp_path), script("launch(NOTHING)")]) == 0
    assert (tmp_path / "00_test.cubin").read_text() == NOTHING
    assert (tmp_path / "00_test.sass").read_text() == "S\n"
    monkeypatch.setattr(machine_code, "tool_of_cuda", lambda name: None)
    assert dump.main(["--out", str(tmp_path / "none"), script("launch(NOTHING)")]) == 0
    assert sorted(p.name for p in (tmp_path / "none").iterdir()) == ["00_test.ptx", "launches.json"]


def test_what_fails_is_kept_with_its_machine_code(script, tmp_path, monkeypatch, capsys):
    made = tmp_path / "ptxas"
    made.write_text('#!/bin/sh\nfor last; do :; done; cp "$2" "$last"\n')
    made.chmod(0o755)
    tools = {"ptxas": str(made)}
    monkeypatch.setattr(machine_code, "tool_of_cuda", tools.get)
    monkeypatch.setenv("PTXEMU_KEEP", str(tmp_path / "kept"))
    assert check.main([script("launch(NOTHING)\nlaunch(HANG, block=(64,))")]) == 1
    ptx, cubin = sorted((tmp_path / "kept").iterdir(), reverse=True)
    assert (ptx.read_text(), cubin.read_text()) == (HANG, HANG)
    assert (ptx.suffix, cubin.name) == (".ptx", f"{ptx.stem}.cubin")
    assert f"kept in {tmp_path / 'kept'}: {ptx.name}, .cubin" in capsys.readouterr().err


def test_a_kernel_that_hangs_is_on_disk(script, tmp_path, capsys):
    assert dump.main(["--out", str(tmp_path), script("launch(HANG, block=(64,))")]) == 1
    assert (tmp_path / "00_test.ptx").read_text() == HANG
    assert "failed: Deadlock" in capsys.readouterr().err


def test_nothing_is_executed_where_that_is_asked_for(script, tmp_path):
    path = script("launch(HANG, block=(64,)); 1 / 0")
    assert dump.main(["--no-run", "--out", str(tmp_path), path]) == 0
    assert (tmp_path / "00_test.ptx").is_file()


def test_nothing_to_dump_is_refused(script, tmp_path):
    assert dump.main(["--out", str(tmp_path), script("")]) == 2


# ---- mutants


def run_ordered(ptx=ORDERED):
    launch(ptx, block=(64,))
    return ""


def test_the_first_run_tells_kernels_and_findings():
    first = rerun.baseline(run_ordered, [*CHECKED.values()])
    (found,) = first.kernels.values()
    assert (found.ptx, found.entry) == (ORDERED, "test")
    assert not first.known
    assert not first.failure
    racy = rerun.baseline(lambda: run_ordered(RACE), [*CHECKED.values()])
    assert len(racy.known) == 1


def test_a_failing_script_and_a_stopped_launch_are_failures():
    assert rerun.baseline(lambda: "ValueError: no", [*CHECKED.values()]).failure
    hangs = rerun.baseline(lambda: _swallowed(HANG), [*CHECKED.values()])
    assert hangs.failure.startswith("Deadlock")


def _swallowed(ptx):
    with pytest.raises(Exception, match="no warp can go on"):
        launch(ptx, block=(64,))
    return ""


@pytest.mark.parametrize(
    ("lines", "by"),
    [
        ({FIRST: ""}, rerun.UNNOTICED),  # the other barrier replaces it
        ({SECOND: ""}, rerun.UNNOTICED),
        ({FIRST: "", SECOND: ""}, rerun.CHECKER),
        ({FIRST: "@%p0 bar.sync 1, 64;"}, rerun.DEADLOCK),
        ({SECOND: "bar.sync 1, 33;"}, rerun.REFUSED),
        ({SECOND: "no.such.thing;"}, rerun.BROKEN),
    ],
)
def test_what_notices_a_mutant(lines, by):
    def run():
        try:
            return run_ordered()
        except Exception as error:  # noqa: BLE001  (as a command tells it)
            return f"{type(error).__name__}: {error}"

    found = rerun.verdict(run, rerun.digest(ORDERED), lines, CHECKED, set())
    assert found.by == by, found.how


def test_a_complaint_of_the_script_notices():
    found = rerun.verdict(
        lambda: run_ordered() or "AssertionError: wrong", rerun.digest(ORDERED), {}, CHECKED, set()
    )
    assert (found.by, found.how) == (rerun.SCRIPT, "AssertionError: wrong")


def test_another_kernel_is_left_alone_and_a_lost_one_is_told():
    found = rerun.verdict(run_ordered, "elsewhere", {FIRST: "", SECOND: ""}, CHECKED, set())
    assert (found.by, found.how) == (rerun.BROKEN, "not launched")


def test_known_findings_notice_nothing():
    first = rerun.baseline(lambda: run_ordered(RACE), [*CHECKED.values()])
    found = rerun.verdict(lambda: run_ordered(RACE), rerun.digest(RACE), {}, CHECKED, first.known)
    assert found.by == rerun.UNNOTICED


def test_a_digest_knows_a_kernel_by_another_name():
    renamed = ORDERED.replace("entry test(", "entry other(")
    assert rerun.digest(renamed) == rerun.digest(ORDERED) != rerun.digest(RACE)


def row(kind="remove commit", by="checker", line=1, **fields):
    told = {"how": "", "schedule": "random-0", "seconds": 1.0, "same": "", "ptx": "d", "rules": "r"}
    return Row("k", kind, line, "tcgen05.commit;", "a.py:3", by, **{**told, **fields})


def test_the_table_counts_and_names_what_went_unnoticed():
    rows = [row(), row(by="deadlock"), row("remove arrival", ""), row(by="", same="because")]
    lines = mutate.table(rows).split("\n")
    assert lines[0].split() == ["mutants", "checker", "deadlock", "equivalent", "unnoticed"]
    assert lines[1].split()[2:] == ["3", "1", "1", "1"]
    assert lines[2].split()[2:] == ["1", "1"]
    assert "noticed: 2 of 3 (66.7%)" in lines
    unnoticed = lines[lines.index("Unnoticed:") + 2]
    assert unnoticed.strip() == "remove arrival @1  tcgen05.commit; at a.py:3"
    assert "because" in lines[-1]


def test_a_campaign_goes_on_where_it_was(monkeypatch, tmp_path):
    """Verdicts in the file for the same text and rules are not repeated."""
    asked = []

    def judged(options, rules, tasks, *_):
        for item in tasks:
            asked.append(item[1].instr.line)
            yield item, rerun.Verdict(rerun.CHECKER, "race", "round-robin-0", 0.1)

    monkeypatch.setattr("ptxemu.commands.workers.judged", judged)
    first = rerun.baseline(run_ordered, [*CHECKED.values()])
    options = mutate.arguments_of("x").parse_args(["--json", str(tmp_path / "m.json"), "script"])
    mutants = mutate._chosen(first, options)
    assert [mutant.instr.line for _, mutant in mutants] == [FIRST, SECOND]
    assert len(mutate._judge(mutants[:1], first, options, CHECKED)) == 1
    assert len(mutate._judge(mutants, first, options, CHECKED)) == 2
    assert asked == [FIRST, SECOND]
    mutate._judge(mutants, first, options, {"random-1": {}})
    assert asked == [FIRST, SECOND, FIRST, SECOND]


def test_mutants_of_a_script_end_to_end(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "from tests.ptxemu.test_commands import *\n"
        "launch(ORDERED.replace('bar.sync 1, 64;', 'nanosleep.u32 0;'), block=(64,))\n"
    )
    written = tmp_path / "m.json"
    command = [sys.executable, "-m", "ptxemu", "mutate", "--json", str(written), str(path)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "noticed: 1 of 1 (100.0%)" in done.stdout
    (found,) = json.loads(written.read_text())["mutants"]
    assert (found["by"], found["kind"]) == ("checker", "remove named barrier")
