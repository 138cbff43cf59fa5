"""Steps of a bring-up that run in parallel: on one GPU, and on several of a host."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bringup import gpu, perform, runner
from lab.bringup.session import Record, Session
from lab.bringup.steps import ARCHS, Step, rounds_of, steps_of
from lab.tools.bringup_words import NOT_RUN
from tests.lab.test_bringup import PASSES, PYTHON, WRITES, WRONG, flags, verdicts

STATE = gpu.state
SAYS = (PYTHON, "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Simulate GPUs that answer; nvidia-smi is not run."""
    monkeypatch.setattr(gpu, "state", lambda which: {"name": which} if which < "8" else {})
    monkeypatch.setattr(gpu, "answers", lambda which: "")


@pytest.fixture
def begin(tmp_path):
    def make(**given: object) -> runner.BringUp:
        return runner.BringUp(Session(tmp_path / "session"), "sm_90a", flags(**given), {})

    return make


def test_checks_run_beside_each_other_and_what_fails_once_more_alone(begin, tmp_path):
    """A step that fails because of a parallel one passes alone; one that is wrong fails twice."""
    lock, meet = tmp_path / "lock", tmp_path / "meet"
    script = (f"import pathlib, sys, time\nbegun = [pathlib.Path(p) for p in ({str(meet)!r} + '0', "
              f"{str(meet)!r} + '1')]\nbegun[int(sys.argv[1])].touch()\n"
              "while not all(p.exists() for p in begun): time.sleep(0.01)\n"
              f"pathlib.Path({str(lock)!r}).mkdir()\ntime.sleep(1)\n"
              f"pathlib.Path({str(lock)!r}).rmdir()")  # fmt: skip
    pair = [Step(f"kernels.{k}", "", (PYTHON, script, str(k)), seconds=30) for k in range(2)]
    made = begin(jobs=2)
    assert made.run([PASSES, *pair, WRONG, WRITES]) == 0
    found = verdicts(made, [*pair, WRONG, WRITES])
    assert found == {"0": "passed", "1": "passed", "wrong": "wrong", "writes": "passed"}


def test_an_interrupt_ends_all_that_run_beside(begin, tmp_path, monkeypatch):
    sleeps = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    pair = [Step(f"kernels.{k}", "", (PYTHON, sleeps)) for k in range(2)]
    made = begin(jobs=2)
    logs = [made.session.place(step.name, "log") for step in pair]

    def interrupted(*given: object) -> None:
        while not all(log.exists() and log.read_text().strip() for log in logs):
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "wait", interrupted)
    assert made.run(pair) == runner.INTERRUPTED
    for log in logs:
        with pytest.raises(ProcessLookupError):
            os.kill(int(log.read_text()), 0)
    assert set(verdicts(made, pair).values()) == {NOT_RUN}


@pytest.mark.parametrize(
    ("verdict", "seconds", "again"),
    [("wrong", 20.0, True), ("wrong", 480.0, False), ("hung", 480.0, True), ("died", 480.0, True),
     ("passed", 20.0, False), ("refused", 20.0, False)],
)  # fmt: skip
def test_what_was_wrong_after_minutes_is_not_run_again(verdict, seconds, again):
    record = Record("random.a", verdict, seconds=seconds)
    assert runner.may_be_the_neighbours(record) == again
    if again:
        assert not runner.may_be_the_neighbours(replace(record, planted="hang"))


def beside(tmp_path: Path, *names: str) -> list[Step]:
    """Steps that end when all of them have begun."""
    begun = [str(tmp_path / name) for name in names]
    script = ("import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\n"
              f"while not all(os.path.exists(each) for each in {begun}): time.sleep(0.01)\n"
              "print(os.environ['CUDA_VISIBLE_DEVICES'])")  # fmt: skip
    return [Step(name, "", (PYTHON, script, path), 30)
            for name, path in zip(names, begun, strict=True)]  # fmt: skip


def test_what_measures_has_a_gpu_for_itself(begin, tmp_path):
    """Checks run in parallel on the other GPUs."""
    steps = beside(tmp_path, "kernels.a", "kernels.b", "rates.c")
    first, last = Step("doctor.d", "", SAYS), Step("model.e", "", SAYS)
    made = begin(jobs=2, gpus=["5", "1", "2"])
    assert made.run([first, *steps, last]) == 0
    gpus = {name: made.session.known(name).about for name in
            ("doctor.d", "kernels.a", "kernels.b", "rates.c", "model.e")}  # fmt: skip
    assert gpus.pop("kernels.a") != gpus["kernels.b"] in ("1", "2")
    assert gpus == {"doctor.d": "5", "kernels.b": gpus["kernels.b"], "rates.c": "5", "model.e": "5"}
    said = made.session.known("rates.c").gpu
    assert said == {"seen": "5", "before": {"name": "5"}, "after": {"name": "5"}}


def test_one_gpu_is_the_one_that_processes_see(begin, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    made = begin(jobs=2)
    made.run([Step("kernels.a", "", SAYS), Step("rates.b", "", SAYS)])
    assert {made.session.known(name).about for name in ("kernels.a", "rates.b")} == {"7"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("gpus", [[], ["0"], ["0", "1", "2"]])
def test_every_step_has_one_lane(arch, gpus):
    """On one GPU steps keep the order of the list; a measurement never shares its GPU."""
    rounds = [*rounds_of(steps_of(arch), 4, gpus)]
    found = [step for lanes in rounds for lane in lanes for step in lane.steps]
    assert sorted(found, key=str) == sorted(steps_of(arch), key=str)
    if len(gpus) < 2:
        assert found == steps_of(arch)
    for lanes in rounds:
        measured = [lane for lane in lanes if any(step.measures for step in lane.steps)]
        for lane in measured:
            others = {which for each in lanes if each is not lane for which in each.gpus}
            assert lane.jobs == 1
            assert not others & {*lane.gpus}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus": ["0", "0"]}, "--gpus 0, twice"),
        ({"gpus": ["0", "9"]}, "--gpus 9: nvidia-smi does not list it"),
        ({"gpus": ["1"], "emulate": True}, "--gpus 1 with --emulate"),
    ],
)
def test_gpus_that_are_refused(capsys, given, words):
    assert perform.perform(flags(**given)) == 2
    assert words in capsys.readouterr().err


def test_the_state_is_of_the_gpu_that_is_seen(tmp_path, monkeypatch):
    """Each of two runs on two GPUs of a host reads the state of its own."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho $1, 2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert STATE("")["name"] == "--id=3"
    assert STATE("1")["name"] == "--id=1"
