"""A bring-up: a step that hangs, dies or is wrong affects no other step, nothing is lost, and pages
name no machine. Steps here are scripts of one line; the rehearsal runs the real ones.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bringup import gpu, page, perform, planted, runner, steps, watch, where
from lab.bringup.session import Record, Session, identity_of
from lab.bringup.steps import ARCHS, HOPPER, JSON, Step, steps_of
from lab.house.source import ROOT
from lab.report import steps as pictures
from lab.tools.bringup_words import GROUPS, NOT_RUN, SKIPPED

PYTHON = "-c"
HOMES = "/home"
PASSES = Step("doctor.passes", "", (PYTHON, "print('fine')"))
WRONG = Step("kernels.wrong", "", (PYTHON, "print('3 differ'); raise SystemExit(1)"))
REFUSES = Step("kernels.refuses", "", (PYTHON, "raise SystemExit(2)"))
DIES = Step("kernels.dies", "", (PYTHON, "import os; os.abort()"))
HANGS = Step("kernels.hangs", "", (PYTHON, "import time; time.sleep(600)"), seconds=1)
WRITES = Step(
    "speed.writes",
    "",
    (
        PYTHON,
        'import sys, pathlib;pathlib.Path(sys.argv[1]).write_text(\'[{"kind": "a", "us": 1.5}]\')',
        JSON,
    ),
)
ALL = [PASSES, WRONG, REFUSES, DIES, HANGS, WRITES]


def flags(**given: object) -> argparse.Namespace:
    plain = dict.fromkeys(("emulate", "quick", "no_peers", "list", "bundle", "table"), False)
    plain |= {"arch": "sm_90a", "only": [], "plant": [], "jobs": 1, "gpus": []}
    plain |= dict.fromkeys(("again", "folder", "limit"))
    return argparse.Namespace(**plain | given)


NAME = gpu.name


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Simulate a GPU that answers; nvidia-smi is not run."""
    monkeypatch.setattr(gpu, "state", lambda which: {})
    monkeypatch.setattr(gpu, "answers", lambda which: "")
    monkeypatch.setattr(gpu, "name", lambda which: "")


@pytest.fixture
def begin(tmp_path):
    def make(**given: object) -> runner.BringUp:
        options = flags(**given)
        return runner.BringUp(Session(tmp_path / "session"), "sm_90a", options, {})

    return make


def verdicts(made: runner.BringUp, of: list[Step] = ALL) -> dict[str, str]:
    rows = made.session.document(of, made.head())["steps"]
    return {row["name"].partition(".")[2]: row["verdict"] for row in rows}


def test_each_costs_itself_alone(begin):
    made = begin()
    assert made.run(ALL) == 0
    assert verdicts(made) == {"passes": "passed", "wrong": "wrong", "refuses": "refused",
                              "dies": "died", "hangs": "hung", "writes": "passed"}  # fmt: skip
    by_name = {step.name: made.session.known(step.name) for step in ALL}
    assert by_name["kernels.wrong"].about == "3 differ"
    assert by_name["kernels.dies"].about.endswith("ended by SIGABRT")
    assert by_name["kernels.hangs"].about == "no end after 1 s"
    assert by_name["kernels.hangs"].seconds < 10
    assert made.session.figures("speed.writes") == [{"kind": "a", "us": 1.5}]


def test_what_a_step_has_started_ends_with_it(tmp_path):
    """The child even ignores the first signal."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    script = ("import subprocess, sys, time\n"
              f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
              "print(child.pid, flush=True)\ntime.sleep(600)")  # fmt: skip
    log = tmp_path / "log"
    ended = watch.run([sys.executable, "-c", script], log, 1.5)
    assert ended.verdict == "hung"
    pid = int(log.read_text().split()[0])
    watch.PATIENCE, patience = 0.5, watch.PATIENCE
    try:
        for _ in range(50):
            if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text():
                break
            os.killpg(os.getpgid(pid), signal.SIGKILL)
            time.sleep(0.1)
        else:
            raise AssertionError("still there")
    finally:
        watch.PATIENCE = patience


def test_a_run_goes_on_where_it_ended(begin, monkeypatch):
    first = begin()
    assert first.run(ALL[:3]) == 0
    started = []
    real = watch.run
    monkeypatch.setattr(watch, "run", lambda command, *rest, **more: started.append(command[-1])
                        or real(command, *rest, **more))  # fmt: skip
    assert begin().run([PASSES, WRONG, WRITES]) == 0
    assert len(started) == 1
    begin(again="bad").run([PASSES, WRONG])
    assert started[1:] == [WRONG.argv[-1]]
    begin(again="all").run([PASSES])
    assert started[2:] == [PASSES.argv[-1]]
    begin().run([replace(PASSES, argv=(PYTHON, "print('other')"))])
    assert started[3:] == ["print('other')"]


def test_a_folder_that_was_moved_goes_on(begin, monkeypatch, tmp_path):
    """Steps that need only the host may run on another machine."""
    first = begin()
    first.run([WRITES])
    moved = begin()
    moved.session = Session(first.session.folder.rename(tmp_path / "elsewhere"))
    monkeypatch.setattr(watch, "run", None)
    assert moved.run([WRITES]) == 0


def test_other_sources_are_run_again(monkeypatch):
    before = identity_of(["a"])
    assert identity_of(["a"]) == before != identity_of(["b"])
    monkeypatch.setattr("lab.bringup.session.sources", lambda: "changed")
    assert identity_of(["a"]) != before


def test_a_gpu_that_is_gone_ends_the_run(begin, monkeypatch):
    made = begin()
    monkeypatch.setattr(gpu, "answers", lambda which: "no CUDA-capable device")
    assert made.run([PASSES, DIES, WRITES]) == runner.GONE
    assert verdicts(made)["writes"] == NOT_RUN
    models = replace(DIES, name="model.dies")  # needs none of it
    assert begin().run([models]) == 0
    monkeypatch.setattr(gpu, "answers", lambda which: "")
    assert begin().run([PASSES, DIES, WRITES]) == 0
    assert verdicts(made)["writes"] == "passed"


def test_an_interrupt_loses_nothing(begin, monkeypatch):
    made = begin()
    made.run([PASSES])

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(watch, "run", interrupted)
        assert made.run([WRITES]) == runner.INTERRUPTED
    assert verdicts(made)["passes"] == "passed"
    assert verdicts(made)["writes"] == NOT_RUN


def test_a_signal_ends_the_step_as_well(tmp_path):
    """Closing the terminal leaves nothing on the GPU."""
    begin = ("import sys; from lab.bringup import steps, perform, gpu\n"
             "gpu.state = lambda which: {}\n"
             "argv = ('-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)')\n"
             "perform.steps_of = lambda arch: [steps.Step('doctor.x', '', argv)]\n"
             "import bringup; sys.exit(bringup.main(sys.argv[1:]))")  # fmt: skip
    folder = tmp_path / "session"
    process = subprocess.Popen(
        [sys.executable, "-c", begin, "--arch", "sm_90a", "--folder", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])},
    )  # fmt: skip
    log = folder / "doctor.x.log"
    for _ in range(600):
        if log.exists() and log.read_text().strip():
            break
        time.sleep(0.1)
    child = int(log.read_text())
    process.terminate()
    assert process.wait(60) == runner.INTERRUPTED
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize(("given", "step", "words"), [
    ({"quick": True}, PASSES, "not among the quick ones"),
    ({"no_peers": True}, replace(PASSES, peers=True), "no times of other libraries"),
    ({"emulate": True}, replace(PASSES, why_not="too large"), "not emulated: too large"),
    ({}, replace(PASSES, needs="no-such-program"), "no-such-program is not installed"),
    ({}, replace(PASSES, modules=("no_such.module",)), "package no_such.module is not"),
])  # fmt: skip
def test_what_is_left_out_says_why(begin, given, step, words):
    made = begin(**given)
    assert made.run([step]) == 0
    record = made.session.known(step.name)
    assert record.verdict == SKIPPED
    assert words in record.about


def test_a_gpu_is_asked_a_few_times(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(gpu, "PROBE", "raise SystemExit('no device')")
    waited = []
    assert gpu.answers("", 3, 20.0, sleep=waited.append) == "no device"
    assert waited == [20.0, 20.0]
    monkeypatch.setattr(gpu, "PROBE", "print('here')")
    assert gpu.answers("", sleep=waited.append) == ""


# -- plants ---------------------------------------------------------------------------------------


def test_a_planted_result_is_another_one(monkeypatch):
    import torch

    from kernelkit.call.operator import Operator

    real = Operator.__call__
    monkeypatch.setattr(Operator, "__call__", lambda self, given: (torch.zeros(2, 2), None))
    planted.result()
    assert Operator.__call__(None, {})[0].tolist() == [[1000, 0], [0, 0]]
    monkeypatch.setattr(Operator, "__call__", real)


def test_a_planted_address_is_an_error_of_the_emulator():
    with pytest.raises(Exception, match=r"global|address|memory"):
        planted.address()


def test_a_planted_fault_is_expected(begin):
    row = {"verdict": "wrong", "planted": "result"}
    assert not runner.is_unexpected(row)
    assert runner.is_unexpected({**row, "verdict": "passed"})
    assert runner.is_unexpected({**row, "planted": ""})
    assert not runner.is_unexpected({"verdict": NOT_RUN, "planted": ""})


@pytest.mark.parametrize("word", ["hang=kernels.nothing", "flood=kernels.fmha-base", "hang"])
def test_a_plant_that_is_none_is_refused(word):
    with pytest.raises(ValueError, match="--plant"):
        perform.plants_of([word], steps_of("sm_100a"))


# -- the steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_every_step_is_a_command_that_there_is(arch, monkeypatch):
    """Scripts are checked with their flags, and modules."""
    from importlib.util import find_spec

    from lab.commands import BENCH, CYCLES, RUN, SOAK

    tables = {"run.py": RUN, "bench.py": BENCH, "cycles.py": CYCLES, "soak.py": SOAK}
    found = steps_of(arch)
    assert len({step.name for step in found}) == len(found)
    lacking = {"assumptions"} if arch == HOPPER else set()
    assert {step.group for step in found} == {*GROUPS} - lacking
    for step in found:
        emulated = not step.why_not and arch != "sm_103a"
        for emulate in (False, True) if emulated else (False,):
            words = step.command(arch, emulate=emulate, places={JSON: "x.json", "{folder}": "/f"})
            assert not any("{" in word for word in words), step.name
            words = words[words.index("--") + 1 :] if "--" in words else words
            if words[0] == "-m":
                assert find_spec(words[1]), step.name
                continue
            script, name, *more = words
            table = tables.get(Path(script).name)
            if table:
                table[name].parser(script).parse_args(more)


def test_groups_and_names_are_chosen():
    found = steps_of("sm_90a")
    assert perform.chosen(found, []) == found
    assert {step.group for step in perform.chosen(found, ["speed"])} == {"speed"}
    (one,) = perform.chosen(found, ["kernels.fmha-256"])
    assert one.name == "kernels.fmha-256"
    with pytest.raises(ValueError, match="--only nothing"):
        perform.chosen(found, ["nothing"])


def test_quick_steps_take_ten_minutes_at_most():
    """The limits add up to ten minutes, hangs aside."""
    found = [step for step in steps_of("sm_100a") if step.quick]
    assert {step.group for step in found} >= {
        "doctor",
        "instructions",
        "kernels",
        "random",
        "speed",
    }
    assert len(found) < 50


def test_a_product_of_blackwell_is_no_step_of_hopper():
    names = {arch: {step.name for step in steps_of(arch)} for arch in ARCHS}
    assert "kernels.moe-nvfp4" in names["sm_100a"] & names["sm_103a"]
    assert "kernels.moe-nvfp4" not in names["sm_90a"]
    assert "kernels.moe-mxfp4-bf16" in names["sm_90a"]


# -- file, page, bundle ---------------------------------------------------------------------------


@pytest.mark.parametrize(("doctor", "smi", "torch", "name"), [
    ({"gpus": [{"name": "NVIDIA H200"}]}, "NVIDIA L4", "", "NVIDIA_H200"),
    ({"gpus": []}, "NVIDIA H200", "", "NVIDIA_H200"),
    (None, "NVIDIA H200", "", "NVIDIA_H200"),
    (None, "", "NVIDIA H200", "NVIDIA_H200"),
    (None, "", "", "GPU"),
])  # fmt: skip
def test_files_are_named_after_the_gpu(begin, monkeypatch, doctor, smi, torch, name):
    """Also in a run without the doctor's step, and where nvidia-smi is not installed."""
    made = begin()
    monkeypatch.setattr(gpu, "name", NAME)
    if doctor:
        made.session.folder.mkdir(parents=True, exist_ok=True)
        made.session.place("doctor.here", "json").write_text(json.dumps(doctor))
    monkeypatch.setattr(gpu, "state", lambda which: {"name": smi} if smi else {})
    code = f"print({torch!r})" if torch else "raise SystemExit(1)"
    real = subprocess.run
    monkeypatch.setattr(
        gpu.subprocess, "run", lambda command, **how: real([sys.executable, "-c", code], **how)
    )
    head = made.head() | {"date": "2026-12-24"}
    assert page.name_of(head) == f"bringup-{name}-2026-12-24"


def test_the_page_has_every_step_and_says_what_is_wrong(begin, tmp_path):
    made = begin()
    made.run(ALL)
    document = made.session.document(ALL, made.head() | {"date": "2026-12-24"})
    file, shown = page.save(document, made.session.folder)
    assert file.name == "bringup-GPU-2026-12-24.json"
    assert json.loads(file.read_text())["steps"][1]["verdict"] == "wrong"
    text = shown.read_text(encoding="utf-8")
    assert all(step.name in text for step in ALL)
    assert "3 differ" in text
    assert "1.5" in text  # among the figures
    assert (made.session.folder / "overview.png").stat().st_size > 1000
    assert pictures.summary_of(document["steps"]).startswith("6 steps: 2 passed")


def test_what_cannot_be_drawn_costs_itself_alone(begin, monkeypatch, capsys):
    """The page lacks code for some figures and pictures."""
    made = begin()
    made.run(ALL)
    for place, name in ((page, "tables_of"), (pictures, "draw_bringup")):
        monkeypatch.setattr(place, name, lambda *_: {}["no such name"])
    document = made.session.document(ALL, made.head())
    assert all(path.exists() for path in page.save(document, made.session.folder))
    assert capsys.readouterr().err.count("without") == 2


def test_a_bundle_says_nothing_of_the_machine(begin, monkeypatch, tmp_path):
    monkeypatch.setattr(page.getpass, "getuser", lambda: "grace")
    monkeypatch.setattr(page.socket, "gethostname", lambda: "lab-node-7")
    monkeypatch.setattr(page.platform, "release", lambda: "6.18-lab")
    said = (f"print('{page.ROOT}/x.py of grace on lab-node-7, Linux-6.18-lab-x86, "
            f"{HOMES}/linus/y; gracefully')")  # fmt: skip
    made = begin()
    made.run([replace(PASSES, argv=(PYTHON, said))])
    document = made.session.document([PASSES], made.head())
    page.save(document, made.session.folder)
    (made.session.folder / "profiles").mkdir()
    (made.session.folder / "profiles" / "a.ncu-rep").write_bytes(b"grace")
    path = page.pack(made.session, document)
    with tarfile.open(path) as archive:
        texts = {item.name: archive.extractfile(item).read() for item in archive}
        assert {(item.uid, item.uname, item.mtime) for item in archive} == {(0, "", 0)}
    assert not [name for name in texts if name.endswith("ncu-rep")]
    for name, data in texts.items():
        if not name.endswith(".png"):
            text = data.decode()
            assert "lab-node-7" not in text, name
            assert "linus" not in text, name
            assert str(page.ROOT) not in text, name
    (log,) = (data.decode() for name, data in texts.items() if name.endswith("passes.log"))
    assert log == (
        f"REPOSITORY/x.py of USER on HOST, Linux-KERNEL-x86, {HOMES}/USER/y; gracefully\n"
    )


def test_a_torn_record_is_none(tmp_path):
    session = Session(tmp_path)
    session.keep(Record("a.b", "passed"))
    assert session.known("a.b").verdict == "passed"
    session.place("a.b", "record").write_text("{")
    assert session.known("a.b") is None


def test_figures_that_are_large_are_left_out(tmp_path, monkeypatch):
    session = Session(tmp_path)
    monkeypatch.setattr("lab.bringup.session.MOST_BYTES", 4)
    session.place("a.b", "json").write_text("[1, 2, 3]")
    assert session.figures("a.b") == {"left out": "9 bytes, in a.b.json of the archive"}
    session.place("a.c", "json").write_text("[")
    assert session.figures("a.c") is None


def test_limits_that_are_not_those_of_the_plan_are_said():
    from kernelkit.plan import hw
    from lab.bringup.doctor import surprises

    here = {"smem_bytes_per_cta": hw.smem_bytes_per_cta("sm_90a"),
            "smem_bytes_per_sm": hw.smem_bytes_per_sm("sm_90a"),
            "registers_per_sm": hw.REGISTERS_PER_SM}  # fmt: skip
    assert surprises(here, "sm_90a") == []
    (words,) = surprises({**here, "registers_per_sm": 1}, "sm_90a")
    assert words.startswith("registers_per_sm is 1, kernelkit.plan.hw has")
    assert surprises({}, "sm_90a") == [] == surprises(here, None)


def steps_that(verdict: str, *names: str) -> list[dict]:
    return [{"name": name, "verdict": verdict} for name in names]


def test_the_table_of_what_ran_where():
    """The table counts steps that ran, leaves out those that did not, and says that no B200 was
    used."""
    rows = steps_that("passed", "kernels.fmha-128", "kernels.gqa-1", "random.fmha")
    rows += steps_that("wrong", "kernels.gqa-2") + steps_that(SKIPPED, "kernels.gqa-4")
    here = {"gpu": {"name": "NVIDIA H200"}, "emulated": False, "arch": "sm_90a"}
    here |= {"date": "2026-12-24", "steps": rows}
    text = where.table([here])
    assert text.startswith("|  | H200, native, 2026-12-24 | B200, native |\n| --- | --- | --- |\n")
    assert "| `fmha.attention` | 2 of 2 right | not run by anybody yet |" in text
    assert "| `gqa_lowlatency.decode` | 1 of 2 right |" in text
    assert "| `q8_0` | - |" in text
    blackwell = {**here, "gpu": {"name": "NVIDIA B200"}, "arch": "sm_100a"}
    assert "not run by anybody" not in where.table([here, blackwell])
    page = f"before {where.BEGIN} old {where.END} after"
    assert where.with_table(page, [here]).startswith(f"before {where.BEGIN}\n\n| ")
    with pytest.raises(ValueError, match="has no"):
        where.with_table("", [here])


def test_later_bring_ups_of_a_gpu_replace_steps_that_they_ran(tmp_path):
    def written(date: str, **verdicts: str) -> None:
        steps = [{"name": f"kernels.{name}", "verdict": word} for name, word in verdicts.items()]
        content = {"date": date, "arch": "sm_90a", "emulated": False, "gpu": {"name": "NVIDIA H9"}}
        file = tmp_path / f"bringup-NVIDIA_H9-{date}.json"
        file.write_text(json.dumps({**content, "steps": steps}), encoding="utf-8")

    written("2026-11-20", merge="wrong", q8_0="passed")
    written("2026-11-30", merge="passed", q8_0="not run", compress="passed")
    text = where.table(where.documents(tmp_path))
    assert "| H9, native, 2026-11-20 to 30 |" in text
    assert "| `fmha.merge` | 1 of 1 right |" in text
    assert "| `q8_0` | 1 of 1 right |" in text
    assert "| DeepSeek-V4's sparse attention | 1 of 1 right |" in text


def test_the_readme_has_the_table_of_today():
    text = where.README.read_text(encoding="utf-8")
    assert where.with_table(text, where.documents()) == text


def test_every_row_of_the_table_has_steps():
    names = [step.name for arch in ARCHS for step in steps_of(arch)]
    for beginnings in where.ROWS.values():
        assert all(any(name.startswith(word) for name in names) for word in beginnings)


def test_the_emulator_is_brought_up_by_names_that_it_has(capsys):
    assert perform.perform(flags(arch="sm_103a", emulate=True)) == 2
    assert "sm_100a" in capsys.readouterr().err
    assert perform.perform(flags(only=["nothing"])) == 2
    assert steps.ARCHS[0] == "sm_100a"
