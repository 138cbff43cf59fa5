"""The smoke test of a wheel notices faults; `make smoke` tests the wheel itself."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest

from lab.house.source import PACKAGES, ROOT, files
from lab.smoke import inside, perform

EXAMPLES = list(perform.examples())


def test_every_example_runs_or_has_a_reason():
    pages = [ROOT / page for page in files(".md") if page.parts[0] not in perform.OUTSIDE]
    assert {*(ROOT / "docs").rglob("*.md")} <= {*pages}
    blocks = sum(p.read_text(encoding="utf-8").count("\n```python\n") for p in pages)
    assert blocks == len(EXAMPLES) + len(perform.LEFT_OUT)
    assert all((ROOT / page).is_file() for page, _ in perform.LEFT_OUT)


def test_every_package_is_used_at_least_once():
    text = "\n".join(example.text for example in EXAMPLES)
    assert set(PACKAGES) <= set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))


def test_a_file_has_the_lines_of_its_page(tmp_path):
    for example in EXAMPLES:
        path, page = example.write(tmp_path), (ROOT / example.page).read_text(encoding="utf-8")
        written, there = (
            text.splitlines()[example.line - 1 :] for text in (path.read_text(), page)
        )
        assert written == there[: len(written)]
        assert not path.stem.isidentifier()


def test_a_wheel_that_lacks_a_file_or_has_another_is_noticed(tmp_path):
    wheel, names = tmp_path / "a.whl", perform.expected("a") | {"a-1.dist-info/RECORD"}
    for left_out, added, said in (
        (set(), set(), []),
        ({"fmha/py.typed"}, set(), ["lacks fmha/py.typed"]),
        ({"moe/api.py"}, {"tests/x.py"}, ["lacks moe/api.py", "should not have tests/x.py"]),
    ):
        with ZipFile(wheel, "w") as archive:
            for name in sorted(names - left_out | added):
                archive.writestr(name, "")
        assert perform.differences(wheel) == said


def test_no_file_is_in_two_wheels(tmp_path):
    alone, others = perform.expected("ptxemu"), perform.expected("blackwell_kernels")
    assert not alone & others
    assert {name.split("/")[0] for name in alone} == {"ptxemu"}
    assert {"ptxemu/py.typed", "ptxemu/module.py"} <= alone
    wheel = tmp_path / "ptxemu-1-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for name in sorted(alone | {"fmha/api.py"}):
            archive.writestr(name, "")
    assert perform.differences(wheel) == ["should not have fmha/api.py"]


def test_extras_are_those_of_the_wheel_that_has_them(tmp_path):
    wheels = [tmp_path / f"{name}-1-py3-none-any.whl" for name in ("ptxemu", "blackwell_kernels")]
    _, (name, command), _ = perform.installation(wheels, perform.Place(tmp_path))
    assert name == "pip install"
    assert {wheels[0], f"{wheels[1]}[{perform.EXTRA}]"} < {*command}


def reports_of(programs: dict[str, str], folder: Path, jobs: int) -> dict[str, str]:
    """Reports of `run_all` on each program, in a process that may safely fork."""
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from lab.smoke.inside import run_all;"
        "print(*run_all([Path(p) for p in sys.argv[3:]], int(sys.argv[2])), sep='')"
    )
    files = [folder / f"{name}.py" for name in programs]
    command = [sys.executable, "-c", code, ROOT, jobs, *files]
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"\n(?=\S)", done.stdout)
    return {re.search(r"example (\w+)", part)[1]: part for part in parts}


def test_examples_that_fail_are_named_with_what_they_say(tmp_path):
    reports = reports_of(
        {
            "right": "print('all is well')",
            "wrong": "\n\nx = nothing",
            "ends": "import sys; sys.exit(3)",
            "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        },
        tmp_path,
        jobs=2,
    )
    assert {name for name, text in reports.items() if text.startswith("ok ")} == {"right"}
    assert "well" not in reports["right"]
    assert 'wrong.py", line 3' in reports["wrong"]
    assert "NameError: name 'nothing'" in reports["wrong"]
    assert "SystemExit: 3" in reports["ends"]
    assert "killed by signal 9" in reports["dies"]


def test_no_more_run_at_a_time_than_asked_for(tmp_path):
    slow = "import time; time.sleep(0.2); open('done', 'w')"
    reports = reports_of({"first": slow, "second": "open('done')"}, tmp_path, jobs=1)
    assert reports["second"].startswith("ok ")


def test_a_package_of_elsewhere_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "stray.py").write_text("__version__ = '1'")
    monkeypatch.syspath_prepend(tmp_path)
    problems = list(inside.package_problems("2", ["stray"]))
    assert problems[0] == f"stray comes from {tmp_path}"
    assert problems[1:] == ["stray.__version__ is 1, the wheels' 2", "stray has no py.typed"]


def test_entry_points_are_those_of_the_project():
    for folder, name in (ROOT, "blackwell-kernels"), (ROOT / "ptxemu", "ptxemu"):
        project = (folder / "pyproject.toml").read_text(encoding="utf-8")
        groups = re.findall(r'^\[project\.entry-points\."?([\w.]+)"?\]', project, re.MULTILINE)
        assert set(groups) == inside.ENTRY_POINTS[name]
        assert f'\nname = "{name}"\n' in project


@pytest.mark.parametrize(("value", "left_out", "said"), [
    ("os.path:join", "", "ok "),
    ("os.path:nothing", "", "has no attribute 'nothing'"),
    ("os.path:join", "pytest11", "entry points of ptxemu in [], not in ['pytest11']"),
])  # fmt: skip
def test_an_entry_point_that_does_not_load_is_noticed(monkeypatch, value, left_out, said):
    def installed(name: str) -> SimpleNamespace:
        groups = inside.ENTRY_POINTS[name] - {left_out}
        return SimpleNamespace(
            entry_points=EntryPoints(EntryPoint("name", value, group) for group in groups)
        )

    monkeypatch.setattr(inside, "distribution", installed)
    assert said in inside.tried("entry points", inside.entry_point_problems)


def test_a_check_that_raises_has_failed():
    assert inside.tried("check", list).startswith("ok ")
    assert inside.tried("check", lambda: ["bad"]).endswith("check\n    bad\n")
    assert "ZeroDivisionError" in inside.tried("check", lambda: iter([1 / 0]))


def test_nothing_leads_back_to_the_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("BLACKWELL_KERNELS_CACHE", str(ROOT))
    place = perform.Place(tmp_path)
    place.folder.mkdir()
    code = "import os; print(os.getcwd(), os.environ['BLACKWELL_KERNELS_CACHE'], *os.sys.path); 1/0"
    assert str(ROOT) not in place.run("variables", sys.executable, "-S", "-c", code)
    said = place.run("words", sys.executable, "-c", "print('out'); 1 / 0")
    assert said.startswith(inside.FAILED)
    assert "    exit code 1\n    out\n" in said
    assert "ZeroDivisionError" in said


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("it is broken", 1)])
def test_the_last_lines_name_what_failed(run, tmp_path, monkeypatch, problem, code):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    reports = [inside.report(name, time.monotonic(), problem * (name == "b")) for name in "abc"]
    monkeypatch.setattr(perform, "smoke", lambda *given: iter(reports))
    refused = run("smoke.py", wheel)
    assert (refused.returncode, refused.stderr[:8]) == (2, "refused:")
    wheel.touch()
    done = run("smoke.py", wheel)
    assert done.returncode == code
    assert done.stdout.endswith(f"{3 - code} passed, {code} failed\n")
    assert bool(re.search(r"whl, 0 s\nFAILED .* b\n", done.stdout)) == bool(code)


def test_nothing_runs_where_the_installation_failed(tmp_path, monkeypatch):
    wheel, place = tmp_path / "a-1-py3-none-any.whl", perform.Place(tmp_path)
    monkeypatch.setattr(perform, "differences", lambda wheel: [])
    failing = (sys.executable, "-c", "raise SystemExit('no index')")
    monkeypatch.setattr(perform, "installation", lambda *given: [("pip install", failing)])
    first, last = perform.smoke([wheel], place, jobs=1)
    assert first.startswith("ok ")
    assert last.startswith(inside.FAILED)
    assert "no index" in last
