"""`python -m ptxemu`: its commands, the view of a script, and a whole script with its launches."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from contextlib import nullcontext

import pytest

from ptxemu import __main__ as command
from tests.lab.test_start_up import HEAVY, SECONDS, started


@pytest.fixture
def run_main(monkeypatch):
    """Run main() in this process without the simulated GPU; return the launcher that it made."""
    made = []

    def machine(launcher, gpu=None):
        made.append(launcher)
        return nullcontext()

    monkeypatch.setattr("ptxemu.host.gpu_machine.machine_with_gpu", machine)

    def run(*arguments):
        command.main([str(argument) for argument in arguments])
        return made[-1]

    return run


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_options(run_main, script):
    options = run_main(*("--policy", "adversarial", "--seed", 7, "--limit", 5), script("")).options
    assert (options.policy, options.seed, options.limit) == ("adversarial", 7, 5.0)
    assert run_main("--limit", 0, script("")).options.limit is None


def test_the_script_sees_its_own_arguments(run_main, script, tmp_path):
    out = tmp_path / "seen"
    path = script(f"import sys; open({str(out)!r}, 'w').write(repr((sys.argv, sys.path[0])))")
    before = list(sys.argv), list(sys.path)
    run_main(path, "--seed", 3, "-h", "--policy=x")
    seen = ([str(path), "--seed", "3", "-h", "--policy=x"], str(tmp_path))
    assert out.read_text() == repr(seen)
    assert (sys.argv, sys.path) == before


def test_siblings_and_modules_are_importable(run_main, script, monkeypatch, tmp_path):
    script("value = 5", "ptxemu_test_sibling.py")
    run_main(script("import ptxemu_test_sibling as s; assert s.value == 5"))
    script("import sys; assert sys.argv[1:] == ['--seed', '1']", "ptxemu_test_module.py")
    monkeypatch.chdir(tmp_path)
    run_main("-m", "ptxemu_test_module", "--seed", 1)


def test_the_exit_code_passes_through(run_main, script):
    with pytest.raises(SystemExit) as caught:
        run_main(script("import sys; sys.exit(7)"))
    assert caught.value.code == 7


def test_a_script_is_required(run_main, capsys):
    with pytest.raises(SystemExit) as caught:
        run_main("--seed", 1)
    assert caught.value.code == 2
    assert "script" in capsys.readouterr().err


def test_the_report_is_written_even_for_a_failing_script(run_main, script, tmp_path):
    report = tmp_path / "report.json"
    with pytest.raises(ZeroDivisionError):
        run_main("--report", report, script("1 / 0"))
    assert json.loads(report.read_text())["launches"] == []


RACY = """
import sys
import ptxemu
from tests.ptxemu.test_watch import RACE
ptxemu.load(RACE).launch(grid=(1,), block=(64,))
sys.exit({code})
"""


@pytest.mark.parametrize("flag", ["--check", "--strict"])
def test_a_finding_makes_a_good_ending_a_bad_one(run_main, script, capsys, flag):
    path = script(RACY.format(code=0))
    run_main(path)
    told = capsys.readouterr().err
    assert told == "ptxemu: 1 kernel launched, 8 warp-instructions, 0.0 s\n"
    run_main("--quiet", path)
    assert not capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        run_main(flag, path)
    assert caught.value.code == 1
    assert "error: race: " in capsys.readouterr().err


def test_a_script_that_launches_nothing_is_told(run_main, script, capsys):
    run_main(script(""))
    assert "warning: no kernel was launched" in capsys.readouterr().err


def test_the_gpu_is_chosen_and_must_agree_with_the_environment(
    run_main, script, capsys, monkeypatch
):
    run_main("--gpu", "h100", script(""))
    for words, told in (
        (("--gpu", "h300"), "unknown GPU 'h300': must be one of a100, "),
        (("--gpu", "h100"), "--gpu contradicts CUTE_DSL_ARCH=sm_100a: NVIDIA H100"),
    ):
        monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
        with pytest.raises(SystemExit) as caught:
            run_main(*words, script(""))
        assert caught.value.code == 2
        assert told in " ".join(capsys.readouterr().err.split())


def test_a_bad_ending_stays_and_findings_are_told(run_main, script, capsys, tmp_path):
    written = tmp_path / "new" / "findings.json"
    with pytest.raises(SystemExit) as caught:
        run_main("--check-json", written, script(RACY.format(code=5)))
    assert caught.value.code == 5
    assert "1 error in 1 launch; rules: hardware" in capsys.readouterr().err
    (launch,) = json.loads(written.read_text())["launches"]
    assert [finding["check"] for finding in launch["findings"]] == ["race"]


def test_a_clean_script_ends_as_it_is(run_main, script, capsys):
    run_main("--check", script(RACY.format(code=0).replace("64", "32")))
    assert "no findings in 1 launch; rules: hardware" in capsys.readouterr().err


# ---- commands


@pytest.mark.parametrize("name", ["", *command.COMMANDS])
def test_help_comes_at_once_and_names_every_flag(name):
    found = started("-m", "ptxemu", *name.split(), "--help")
    assert found.code == 0, found.err
    assert found.out.startswith("usage: python -m ptxemu " + name)
    assert not found.modules & HEAVY
    assert found.seconds < SECONDS
    module = importlib.import_module(f"ptxemu.commands.{name or 'run'}")
    parser = getattr(module, "arguments_of", None) or module.parser_of
    flags = [action.option_strings[-1] for action in parser("x")._actions if action.option_strings]
    assert len(flags) > 5
    assert not [flag for flag in flags if flag not in found.out]


@pytest.mark.parametrize("name", [name for name in command.COMMANDS if name != "run"])
def test_exit_codes_stand_in_the_help(name, capsys):
    with pytest.raises(SystemExit):
        command.main([name, "--help"])
    assert "Exit code 0: nothing is wrong; 1: errors" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["./check"], ["run", "check"], ["run", "./check"]])
def test_a_script_may_be_called_like_a_command(run_main, script, monkeypatch, tmp_path, words):
    script("import sys; open('ran', 'a').write(repr(sys.argv[1:]))", "check")
    monkeypatch.chdir(tmp_path)
    run_main(*words, "--seed", 1)
    assert (tmp_path / "ran").read_text() == "['--seed', '1']"


def test_a_command_alone_says_how_its_namesake_is_run(run_main, script, monkeypatch, capsys):
    monkeypatch.chdir(script("", "check").parent)
    with pytest.raises(SystemExit) as caught:
        run_main("check")
    assert caught.value.code == 2
    assert "(the file 'check' itself: ./check)" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.COMMANDS)
@pytest.mark.parametrize("words", [("nowhere.py",), ()])
def test_what_is_not_there_is_refused(run_main, capsys, name, words):
    with pytest.raises(SystemExit) as caught:
        run_main(name, *words)
    assert caught.value.code == 2
    assert ("there is no file 'nowhere.py'" if words else "is required") in capsys.readouterr().err


def test_check_of_a_pip_user(run_main, script, capsys):
    path = script(RACY.format(code=0))
    with pytest.raises(SystemExit) as caught:
        run_main("check", "--policy", "round-robin,random", "--seeds", "0,1", path)
    assert caught.value.code == 1
    assert "in 3 launches; rules: hardware" in capsys.readouterr().out


SCRIPT = """
import sys, torch, cutlass, cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack
from cuda.bindings import driver

@cute.kernel
def double(x: cute.Tensor):
    i, _, _ = cute.arch.thread_idx()
    x[i] = x[i] + x[i]

@cute.jit
def host(x: cute.Tensor):
    double(x).launch(grid=(1, 1, 1), block=(cute.size(x), 1, 1))

assert driver.cuInit(0)[0] == driver.CUresult.CUDA_SUCCESS
assert torch.cuda.is_available()
x = torch.arange(64, dtype=torch.float32, device="cuda")
tensor = from_dlpack(x, assumed_align=128)
host(tensor)
compiled = cute.compile(host, tensor)
compiled(tensor)
compiled.to(0)(tensor)
with_ffi = cute.compile(host, from_dlpack(x, enable_tvm_ffi=True), options="--enable-tvm-ffi")
with_ffi(x)
torch.cuda.synchronize()
sys.exit(0 if x.cpu().tolist() == [16.0 * i for i in range(64)] else 3)
"""


def test_a_script_end_to_end(script, tmp_path):
    report = tmp_path / "report.json"
    command_line = [sys.executable, "-m", "ptxemu", "--report", str(report), str(script(SCRIPT))]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    launches = json.loads(report.read_text())["launches"]
    assert [launch["block"] for launch in launches] == [[64, 1, 1]] * 4
