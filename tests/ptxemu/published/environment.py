"""Environments for the rows: packages from the index, installed once and kept; a script run there.

Each requirement is a folder of the cache. An environment is a venv with hard links to the files of
the folders of its row; the packages of the running Python follow on its search path.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.ptxemu.published.packages import Published

CACHE_VARIABLE = "PUBLISHED_CACHE"
SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).resolve().parents[3]
PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+_-]+)")
SECONDS = 900
_LAUNCHED = re.compile(r"ptxemu: ([\d,]+) kernels? launched")


class NotInTheIndex(Exception):
    """pip could not install a requirement; the message is its last line."""


@dataclass(frozen=True)
class Outcome:
    """What a run printed: its errors if it came to an end, and launches."""

    code: int
    text: str
    kernels: int
    seconds: float  # of the CPU
    error: float | None = None
    largest: float | None = None


def distribution(requirement: str) -> str:
    """Return the normalised name that a requirement is about."""
    match = PINNED.fullmatch(requirement)
    if match is None:
        raise ValueError(f"{requirement!r} is not NAME==VERSION")
    return re.sub(r"[-_.]+", "-", match[1]).lower()


def with_releases(row: Published, releases: Iterable[str]) -> tuple[str, ...]:
    """Return the row's requirements, with these releases in the place of those of the table."""
    others = {distribution(release): release for release in releases}
    return tuple(others.get(distribution(old), old) for old in row.requirements)


def cache() -> Path:
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ptxemu" / "published"


def run(row: Published, requirements: tuple[str, ...]) -> Outcome:
    """Run the row's script under `python -m ptxemu` with these requirements.

    Raises:
        NotInTheIndex: pip cannot install one of them.
    """
    words: list[str | Path] = [python_of(requirements), "-m", "ptxemu", "--gpu", row.gpu]
    words += [SCRIPTS / f"{row.script}.py", *filter(None, [row.argument])]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    launched = _LAUNCHED.search(done.stdout)
    kernels = int(launched[1].replace(",", "")) if launched else 0
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"error"')]
    found = json.loads(lines[-1]) if lines else {}
    return Outcome(done.returncode, done.stdout, kernels, seconds, **found)


def python_of(requirements: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment that has these requirements; make it if need be."""
    folders = [_installed(requirement) for requirement in requirements]
    running = sysconfig.get_path("purelib")
    key = sha256("\n".join([*requirements, running, sys.prefix]).encode()).hexdigest()[:16]
    home = cache() / f"environment-{key}"
    packages = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    last = packages / "published.pth"
    if not last.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, symlinks=True)
        for folder in folders:  # links to files: folders such as nvidia/ are of several packages
            shutil.copytree(folder, packages, copy_function=os.link, dirs_exist_ok=True)
        last.write_text(f"import site; site.addsitedir({running!r})\n", encoding="utf-8")
    return home / "bin" / "python"


def _installed(requirement: str) -> Path:
    folder = cache() / f"cp{sys.version_info[0]}{sys.version_info[1]}" / requirement
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{requirement}.{os.getpid()}")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    words += ["--disable-pip-version-check", "--target", str(unfinished), requirement]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        shutil.rmtree(unfinished, ignore_errors=True)
        errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
        raise NotInTheIndex((errors or done.stdout.splitlines() or ["pip said nothing"])[-1])
    if folder.exists():  # another process was faster
        shutil.rmtree(unfinished)
    else:
        unfinished.rename(folder)
    return folder
