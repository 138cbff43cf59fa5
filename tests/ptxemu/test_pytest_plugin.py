"""The pytest plugin: schedules, the checker, failures with the report, and no effect if unused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lab.house.source import ROOT
from tests.lab.test_start_up import HEAVY
from tests.ptxemu.kernels import REVERSE

pytest_plugins = ["pytester"]

HEAD = """
import pytest
from tests.ptxemu.test_watch import HANG, NOTHING, RACE

def go(text, warps=2):
    import ptxemu
    return ptxemu.load(text).launch(grid=(1,), block=(32 * warps,))
"""


@pytest.fixture
def tests(pytester, monkeypatch):
    """Run the body of a test file in this process; return pytest's result."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("CI", "BUILD_NUMBER"):  # with them, the summary repeats each report whole
        monkeypatch.delenv(name, raising=False)

    def run(body, *options):
        pytester.makepyfile(HEAD + body)
        return pytester.runpytest_inprocess("-p", "ptxemu.pytest_plugin", *options)

    return run


def test_the_fixture_is_the_package_with_a_report(tests):
    tests("""
def test(ptxemu):
    own = ptxemu.load(NOTHING).launch(grid=(1,), block=(32,))
    go(NOTHING)
    assert ptxemu.report.launches[0] is own
    assert len(ptxemu.report.launches) == 2
    assert ptxemu.schedule is None and not own.options.check
    with pytest.raises(ptxemu.Deadlock):
        go(HANG)
    with pytest.raises(AttributeError):
        ptxemu.nothing

def test_alone_nobody_checks(ptxemu):
    go(RACE)
""").assert_outcomes(passed=2)


def test_the_mark_runs_a_test_once_for_each_schedule(tests):
    done = tests(
        """
@pytest.mark.ptxemu(policies=["round-robin", "adversarial"], seeds=[0, 1])
@pytest.mark.parametrize("x", ["a"])
def test(x, ptxemu):
    options = go(NOTHING).options
    assert (options.policy, options.seed) == ptxemu.schedule
    assert options.check and not options.strict

@pytest.mark.ptxemu(policies="random", seeds=3, strict=True)
class TestClass:
    def test_in(self):
        options = go(NOTHING).options
        assert (options.policy, options.seed, options.strict) == ("random", 3, True)

@pytest.mark.ptxemu
def test_bare():
    assert go(NOTHING).options.check

@pytest.mark.ptxemu(check=False)
def test_unchecked():
    assert not go(RACE).findings
""",
        "-v",
    )
    done.assert_outcomes(passed=6)
    for name in ("a-round-robin-0", "a-adversarial-0", "a-adversarial-1"):
        done.stdout.fnmatch_lines([f"*::test[[]{name}[]] PASSED*"])
    done.stdout.fnmatch_lines(["*::test_in[[]random-3[]] PASSED*", "*::test_bare PASSED*"])


def test_a_finding_fails_the_test_with_the_report_alone(tests):
    done = tests("""
@pytest.mark.ptxemu
def test():
    go(RACE)
""")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines([
        "*error: race: ld.shared is not ordered after st.shared",
        "*write of shared memory*by warp 0*",
        "*1 error in 1 launch; rules: hardware",
    ])  # fmt: skip
    text = done.stdout.str()
    assert "Traceback" not in text
    assert "pytest_plugin.py" not in text
    assert text.count("error: race: ") == 1


def test_an_error_of_the_emulator_ends_at_the_line_that_launched(tests):
    done = tests("""
@pytest.mark.ptxemu
def test():
    go(HANG)
""")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*return ptxemu.load(text).launch(*", "*- ptxemu -*"])
    done.stdout.fnmatch_lines(["*stopped: Deadlock: *", "*1 launch stopped early*"])
    text = done.stdout.str()
    assert "module.py" not in text
    assert "scheduler.py" not in text


def test_a_wrong_number_is_shown_beside_what_explains_it(tests):
    done = tests("""
@pytest.mark.ptxemu
def test():
    go(RACE)
    assert 1 == 2
""")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*assert 1 == 2*", "*- ptxemu -*", "*error: race: *"])


def test_what_a_failed_test_left_unwritten_stands_beside_it(tests):
    done = tests("""
from tests.ptxemu.test_check_manual import HALF, two_ctas_store

@pytest.mark.ptxemu
@pytest.mark.parametrize("right", [False, True])
def test(right):
    two_ctas_store(HALF)
    assert right
""")
    done.assert_outcomes(failed=1, passed=1)
    clue = "  written in part: parameter 0: 128 of 256 bytes*"
    done.stdout.fnmatch_lines(["*assert False*", "*- ptxemu -*", clue])
    assert sum("written in part" in line for line in done.outlines) == 1


def test_expected_findings_can_be_taken(tests):
    tests("""
@pytest.mark.ptxemu
def test(ptxemu):
    go(RACE)
    (launch,) = ptxemu.take()
    assert launch.errors and not ptxemu.report.launches

@pytest.mark.ptxemu
@pytest.mark.xfail(strict=True)
def test_known():
    go(RACE)
""").assert_outcomes(passed=1, xfailed=1)


def test_launches_of_other_fixtures_belong_to_the_test(tests):
    done = tests("""
@pytest.fixture
def before():
    go(RACE)

@pytest.fixture
def after():
    yield
    go(RACE)

@pytest.mark.ptxemu
def test_before(before):
    pass

@pytest.mark.ptxemu
def test_after(after):
    pass
""")
    done.assert_outcomes(passed=1, failed=1, errors=1)
    assert done.stdout.str().count("error: race: ") == 2


OPTIONS = """
def test_fixture(ptxemu):
    go(RACE)

@pytest.mark.ptxemu(policies=["adversarial"], seeds=[1])
def test_mark():
    go(NOTHING)

def test_neither():
    go(RACE)
"""


@pytest.mark.parametrize(
    ("options", "outcomes", "names"),
    [
        ((), {"passed": 3}, ["test_fixture", "test_mark[adversarial-1]"]),
        (("--ptxemu-check",), {"passed": 2, "failed": 1}, ["test_mark[adversarial-1]"]),
        (("--ptxemu-strict",), {"passed": 2, "failed": 1}, []),
        (("--ptxemu-policy", "random"), {"passed": 3},
         ["test_fixture[random-0]", "test_mark[random-1]"]),
        (("--ptxemu-seed", "4,5"), {"passed": 4},
         ["test_fixture[round-robin-4]", "test_mark[adversarial-4]", "test_mark[adversarial-5]"]),
        (("--ptxemu-policy", "round-robin,random", "--ptxemu-seed=0,7"), {"passed": 7},
         ["test_fixture[random-7]", "test_mark[round-robin-0]"]),
    ],
)  # fmt: skip
def test_options_say_more_than_marks(tests, options, outcomes, names):
    done = tests(OPTIONS, "-v", *options)
    done.assert_outcomes(**outcomes)
    ran = {line.split("::")[1].split()[0] for line in done.outlines if line.count("::") == 1}
    assert {*names, "test_neither"} <= ran


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ('policies=["lifo"]', "*policies=*lifo*; must be of round-robin, random, adversarial*"),
        ('seeds=["1"]', "*seeds=*; must be of round-robin*"),
        ("seeds=[]", "*seeds=*; must be of round-robin*"),
        ("policy=3", "*unexpected keyword argument 'policy'*"),
    ],
)
def test_a_mark_that_makes_no_sense_is_refused(tests, mark, words):
    done = tests(f"""
@pytest.mark.ptxemu({mark})
def test():
    pass
""")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines([f"@pytest.mark.ptxemu: {words}"])
    assert "pytest_plugin.py" not in done.stdout.str()


def test_an_option_that_makes_no_sense_is_refused(tests):
    done = tests(OPTIONS, "--ptxemu-policy", "lifo")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*lifo: must be some of round-robin, random, adversarial*"])


def test_a_test_case_runs_under_one_schedule(tests):
    tests("""
import unittest

class TestCase(unittest.TestCase):
    @pytest.mark.ptxemu(policies=["random"])
    def test_one(self):
        assert go(NOTHING).options.policy == "random"

    @pytest.mark.ptxemu(seeds=[0], policies=["random", "adversarial"])
    def test_two(self):
        pass
""").assert_outcomes(passed=1, errors=1)


def test_the_mark_is_registered(tests):
    tests("@pytest.mark.ptxemu\ndef test(): pass", "--strict-markers").assert_outcomes(passed=1)


UNUSED = """
import sys
def test():
    print("MODULES", *sorted(sys.modules))
"""


def test_unused_it_imports_nothing_heavy(pytester):
    path = pytester.makepyfile(UNUSED)
    command = [sys.executable, "-m", "pytest", "-p", "ptxemu.pytest_plugin", "-s", str(path)]
    done = subprocess.run(
        command, cwd=pytester.path, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    modules = done.stdout.partition("MODULES")[2].partition("\n")[0].split()
    assert "ptxemu.pytest_plugin" in modules
    assert not HEAVY & {*modules}


def test_pip_tells_pytest_of_it():
    text = (ROOT / "ptxemu" / "pyproject.toml").read_text()
    assert (
        '[project.entry-points.pytest11]\n"ptxemu.pytest_plugin" = "ptxemu.pytest_plugin"' in text
    )


DSL = """
import sys
import pytest

def test_libraries_come_within(ptxemu):
    assert not {"torch", "cutlass"} & {*sys.modules}
    import torch
    assert torch.zeros(1, device="cuda").is_cuda
    import shift
    shift.reverse(shift.tensor(), True)
    assert len(ptxemu.report.launches) == 1

def test_the_pretence_ends_with_the_test():
    import torch
    from cutlass.cutlass_dsl import CuTeDSL
    assert not torch.cuda.is_available()
    assert not torch.zeros(1).is_cuda
    assert not CuTeDSL._get_dsl().envar.keep_ptx

@pytest.fixture(scope="module")
def compiled():
    import cutlass.cute as cute, shift
    return cute.compile(shift.host, shift.from_dlpack(shift.tensor()), True)

@pytest.mark.ptxemu(policies=["round-robin", "adversarial"])
def test_cuda_tensors(compiled):
    import shift
    x = shift.tensor()
    compiled(shift.from_dlpack(x))
    assert x.cpu().tolist() == [*range(63, -1, -1)]

@pytest.mark.ptxemu
def test_a_race():
    import shift
    shift.reverse(shift.tensor(), False)

def test_cpu_tensors(ptxemu):
    import shift
    x = shift.from_dlpack(shift.tensor("cpu"))
    compiled = ptxemu.compile(shift.host, x, True)
    ptxemu.run(compiled, x, options=ptxemu.Options(policy="random"))
    (launch,) = ptxemu.report.launches
    assert launch.options.policy == "random"
"""
SHIFT = f"""{REVERSE}def tensor(device="cuda"):
    return torch.arange(64, dtype=torch.float32, device=device)

def reverse(x, barrier):
    host(from_dlpack(x), barrier)
"""


def test_dsl_code_in_a_running_process(pytester):
    """Simulates a machine without a GPU; a test imports the libraries."""
    pytester.makepyfile(shift=SHIFT, test_dsl=DSL)
    command = [sys.executable, "-m", "pytest", "-p", "ptxemu.pytest_plugin", "-W", "error"]
    done = subprocess.run(
        command, cwd=pytester.path, capture_output=True, text=True,
        env={"PYTHONPATH": f"{ROOT}:{pytester.path}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
             "CUDA_VISIBLE_DEVICES": "", "HOME": str(pytester.path)},
    )  # fmt: skip
    assert "1 failed, 5 passed" in done.stdout, done.stdout + done.stderr
    assert "x[i] = row[63 - i]" in done.stdout  # the line of Python, in the race's report
    assert "FAILED test_dsl.py::test_a_race" in done.stdout
