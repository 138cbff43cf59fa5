"""scripts/check.py: the protocol of --module, schedules, messages, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from lab.house.source import ROOT
from tests.ptxemu.kernels import REVERSE

MODULE = """
from pathlib import Path
import ptxemu
from tests.ptxemu.kernels import launch
from tests.ptxemu.test_watch import HANG, NOTHING, RACE

def racy():
    launch(RACE, block=(64,))

def clean():
    launch(NOTHING)

def stuck():
    try:
        launch(HANG, block=(64,))
    finally:
        launch(NOTHING)

def stuck_and_silent():
    try:
        launch(HANG, block=(64,))
    except ptxemu.Deadlock:
        pass

def told(context):
    launch(NOTHING)
    words = [context.policy, str(context.seed), *context.arguments]
    with Path(__file__).with_name("told").open("a") as file:
        print(*words, file=file)

def wrong():
    launch(NOTHING)
    raise AssertionError("not the right numbers")

def unreadable():
    ptxemu.load("nonsense")

def idle():
    pass

if __name__ == "__main__":
    racy()
"""


@pytest.fixture
def module(tmp_path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(MODULE)
    return path


@pytest.fixture
def check(monkeypatch, capsys) -> Callable:
    """Run the script in this process without the simulated GPU; return exit code and stdout."""
    import check as script

    monkeypatch.setattr("ptxemu.host.gpu_machine.machine_with_gpu", lambda *_: nullcontext())

    def run(*arguments: object) -> tuple[int, str]:
        code = script.main([*map(str, arguments)])
        return code, capsys.readouterr().out

    return run


def test_a_race_is_an_error(check, module, tmp_path):
    written = tmp_path / "findings.json"
    code, out = check("--module", f"{module}:racy", "--json", written)
    assert code == 1
    assert "error: race: " in out
    assert out.endswith("1 error in 1 launch; rules: hardware\n")
    (launch,) = json.loads(written.read_text())["launches"]
    assert launch["findings"][0]["accesses"][0]["what"] == "write"


def test_a_clean_kernel_is_fine(check, module):
    clean = (0, "no findings in 1 launch; rules: hardware, manual\n")
    assert check("--module", f"{module}:clean", "--strict") == clean


def test_each_schedule_calls_the_function_once(check, module):
    schedules = ("--policy", "round-robin,random", "--seeds", "4,5")
    code, out = check("--module", f"{module}:told", *schedules, "--", "--size", "3")
    assert code == 0
    assert "in 3 launches" in out
    told = module.with_name("told").read_text().splitlines()
    assert told == ["round-robin 4 --size 3", "random 4 --size 3", "random 5 --size 3"]


def test_a_script_runs_as_it_is(check, module):
    code, out = check("--policy", "random", module, "its", "--arguments")
    assert (code, out.count("error: race")) == (1, 1)


@pytest.mark.parametrize("name", ["stuck", "stuck_and_silent"])
def test_a_launch_that_stops_is_an_error(check, module, name):
    code, out = check("--module", f"{module}:{name}")
    assert code == 1
    assert "stopped: Deadlock: " in out
    assert "failed: " not in out


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        ("wrong", "failed: round-robin, seed 0: AssertionError: not the right numbers", 1),
        ("unreadable", "failed: round-robin, seed 0: PtxSyntaxError: ", 2),
        ("idle", "no findings in 0 launches", 2),
    ],
)
def test_failures(check, module, name, words, code):
    found, out = check("--module", f"{module}:{name}")
    assert found == code
    assert words in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "is required"),
        (("--policy", "lifo", "x.py"), "lifo: must be some of round-robin"),
        (("nowhere.py",), "there is no file 'nowhere.py'"),
        (("--module", "nowhere.py:main"), "there is no file 'nowhere.py'"),
        (("--module", f"{__file__}:main"), "has no function 'main'"),
    ],
)
def test_refusals(check, capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        check(*arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


KERNEL = f"""{REVERSE}import ptxemu

def tensor():
    return torch.arange(64, dtype=torch.float32, device="cuda")

def main():
    host(from_dlpack(tensor()), True)
    host(from_dlpack(tensor()), False)
    cute.compile(host, from_dlpack(tensor()), False)(from_dlpack(tensor()))
    on_cpu = from_dlpack(torch.zeros(64))
    ptxemu.run(ptxemu.compile(host, on_cpu, False), on_cpu)
    as_ffi = from_dlpack(tensor(), enable_tvm_ffi=True)
    cute.compile(host, as_ffi, False, options="--enable-tvm-ffi")(tensor())
"""


def test_a_dsl_kernel_is_checked_whichever_way_it_is_launched(tmp_path):
    path = tmp_path / "shift.py"
    path.write_text(KERNEL)
    command = [sys.executable, "scripts/check.py", "--module", f"{path}:main"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    line = next(n for n, text in enumerate(KERNEL.split("\n"), 1) if "row[63 - i]" in text)
    assert f"at {path}:{line}: x[i] = row[63 - i]" in done.stdout
    assert "in all 4 launches" in done.stdout
    assert "uninitialised" in done.stdout  # the first warp reads what the other has not written yet
    assert done.stdout.endswith("2 errors in 5 launches; rules: hardware\n")
