"""Every example of ptxemu's pages runs: Python, files, commands with their exit codes. Every link
has a target.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lab.house.source import ROOT
from ptxemu import nvrtc
from ptxemu.__main__ import COMMANDS

PAGES = [
    *(ROOT / "ptxemu").rglob("README.md"),
    *sorted((ROOT / "docs" / "ptxemu").glob("*.md")),
]
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
TEXT = "\n".join(TEXTS.values())
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
FILES = {text.split("\n")[0].removeprefix("# "): text for text in PYTHON if text[:2] == "# "}
for _path in (ROOT / "examples" / "bugs").glob("c*.py"):
    FILES[_path.name] = _path.read_text(encoding="utf-8")
_LINES = [line for language, text in BLOCKS for line in text.splitlines() if not language]
LINES = [line for line in _LINES if line.startswith("python ")]
MODULE = "python -m ptxemu"


def test_the_pages_have_what_these_tests_look_for():
    assert {"reverse.py", "by_hand.py", "test_reverse.py", "column_sums.py"} <= FILES.keys()
    assert all(f"{MODULE} {name} " in TEXT for name in COMMANDS)
    assert len(LINES) >= 18


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert link.startswith("https://") or target.exists(), link
        if heading:
            found = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in found]


def has_cub() -> bool:
    """Whether NVRTC and the headers of CUB are here."""
    folders = nvrtc.include_folders()
    return nvrtc.library_path() is not None and any((f / "cub").exists() for f in folders)


def has_tilelang() -> bool:
    """Whether TileLang and what compiles its CUDA C++ are here."""
    return has_cub() and importlib.util.find_spec("tilelang") is not None


def has_numba() -> bool:
    """Whether Numba, its CUDA target and NVVM are here."""
    found = any([*(Path(place) / "nvidia").glob("*/nvvm")] for place in sys.path)
    return found and importlib.util.find_spec("numba_cuda") is not None


def has_triton() -> bool:
    """Whether Triton is here."""
    return importlib.util.find_spec("triton") is not None


# page -> packages that its Python needs, and whether they are here
NEEDED = {
    "cuda_cpp.md": ("nvidia-cuda-nvrtc and nvidia-cuda-cccl", has_cub),
    "numba.md": ("numba-cuda[cu13]", has_numba),
    "tilelang.md": ("tilelang and nvidia-cuda-nvrtc", has_tilelang),
    "triton.md": ("triton", has_triton),
}


def require(text: str) -> None:
    """Skip a test of a page's example whose packages are not installed."""
    for page, (packages, present) in NEEDED.items():
        if text in TEXTS[ROOT / "docs" / "ptxemu" / page] and not present():
            pytest.skip(f"{page} needs {packages}, which are not installed")


@pytest.mark.parametrize("text", [text for text in PYTHON if text not in FILES.values()])
def test_python_runs(text):
    require(text)
    exec(text, {})


def test_every_flag_exists():
    plugin = (ROOT / "ptxemu" / "pytest_plugin.py").read_text(encoding="utf-8")
    told = {"pytest": plugin}
    for line in LINES:
        words = shlex.split(line)
        if words[:3] == MODULE.split():
            name = words[3] if words[3] in COMMANDS else "run"
            if name not in told:
                help_text = [sys.executable, "-m", "ptxemu", name, "--help"]
                told[name] = subprocess.run(help_text, capture_output=True, text=True).stdout
        else:
            name = "pytest"
        missing = [flag for flag in words if flag.startswith("--") and flag not in told[name]]
        assert not missing, (line, missing)


def run(line: str, folder: Path) -> subprocess.CompletedProcess:
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    words = shlex.split(line, comments=True)
    if words[1:3] == ["-m", "pytest"]:  # as if ptxemu were installed, however it is present here
        words[3:3] = ["-p", "ptxemu.pytest_plugin"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("line", LINES)
def test_commands_run(line, tmp_path):
    require(line)
    done = run(line, tmp_path)
    expected = re.search(r"# exit code (\d)", line)
    assert done.returncode == (int(expected[1]) if expected else 0), done.stdout + done.stderr
    for written in re.findall(r"--(?:json|report|out) (\S+)", line):
        assert (tmp_path / written).exists()
