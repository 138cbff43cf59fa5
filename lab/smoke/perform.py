"""`smoke.py`: inspects the wheels, installs them, and uses them without a checkout."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

from lab.house.source import APART, OLD_NAMES, PACKAGES, ROOT, files
from lab.smoke.inside import FAILED, report


def expected(distribution: str) -> set[str]:
    """Names of the files that a wheel installs beside its metadata."""
    packages = {distribution} if distribution in APART else {*PACKAGES, *OLD_NAMES} - {*APART}
    ours = {str(path) for path in files(".py", ".json") if path.parts[0] in packages}
    return ours | {f"{package}/py.typed" for package in packages - {*OLD_NAMES}}


def differences(wheel: Path) -> list[str]:
    """List the files that the wheel lacks and those that are unexpected, a line each."""
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = expected(wheel.name.split("-")[0])
    lacking, foreign = sorted(wanted - names), sorted(names - wanted)
    return [f"lacks {name}" for name in lacking] + [f"should not have {name}" for name in foreign]


_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# (page, which of its examples) -> why it does not run in the smoke test; tests run it.
LEFT_OUT = {
    ("blackwell_engines/README.md", 1): "transformers, which no user has to have",
    ("blackwell_engines/README.md", 2): "the same",
    ("docs/deepseek_v4.md", 2): "it continues the first one",
    ("docs/deepseek_v4.md", 3): "the same",
    ("docs/moe_hopper.md", 1): "a checkpoint",
    ("docs/ptxemu/commands.md", 1): "a file for the commands of the page",
    ("docs/ptxemu/cuda_cpp.md", 1): "NVRTC, which no user has to have",
    ("docs/ptxemu/from_python.md", 3): "it imports that file",
    ("docs/ptxemu/numba.md", 1): "Numba, which no user has to have",
    ("docs/ptxemu/pytest.md", 1): "it imports a file of another page",
    ("docs/ptxemu/tilelang.md", 1): "TileLang, which no user has to have",
    ("docs/ptxemu/triton.md", 1): "Triton, which no user has to have",
    ("q8_0/README.md", 2): "a model's file",
}
OUTSIDE = ("examples", "findings", "lab", "notes", "tests")  # no part of the wheel


def has_examples(page: PurePosixPath) -> bool:
    """Whether the Python of a page runs with the wheel alone."""
    return page.parts[0] not in OUTSIDE


@dataclass(frozen=True)
class Example:
    """Python of a page. line: of the page, where its first line stands."""

    page: PurePosixPath
    line: int
    text: str

    def write(self, folder: Path) -> Path:
        """Write to a file of `folder` with the page's line numbers. No example can import it by
        mistake: its name is not a valid module name."""
        path = folder / f"{str(self.page).replace('/', '-')}-line-{self.line}.py"
        path.write_text("\n" * (self.line - 1) + self.text, encoding="utf-8")
        return path


def examples() -> Iterator[Example]:
    """Yield all but those left out, page by page."""
    for page in files(".md"):
        if has_examples(page):
            text = (ROOT / page).read_text(encoding="utf-8")
            for number, match in enumerate(_PYTHON.finditer(text), start=1):
                if (str(page), number) not in LEFT_OUT:
                    line = text.count("\n", 0, match.start(1)) + 1
                    yield Example(page, line, match[1])


EXTRA = "cycles"  # llvmlite, which makes the emulator quick, and nvdisasm
ALSO = ("pytest",)  # whose plugin ptxemu is
PLUGIN_TEST = "def test_the_fixture_is_there(ptxemu):\n    assert ptxemu is not None\n"
COMMANDS = (  # of Python, in the folder
    ("-m", "kernelkit", "--help"),
    ("-m", "ptxemu", "--help"),
    ("-m", "ptxemu", "column_sums.py"),
    ("-m", "cycle_model", "column_sums.py"),
    ("-m", "pytest", "-q", "test_plugin.py"),
)


@dataclass(frozen=True)
class Place:
    """An environment and an empty folder beside it, outside of the repository."""

    root: Path

    @property
    def environment(self) -> Path:
        return self.root / "environment"

    @property
    def folder(self) -> Path:
        return self.root / "folder"

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """Variables of a process there: nothing that leads back to the repository, caches of its
        own."""
        kept = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
        caches = {"BLACKWELL_KERNELS_CACHE": "kernels", "PTXEMU_CACHE": "ptx"}
        return kept | {name: str(self.root / folder) for name, folder in caches.items()}

    def run(self, name: str, *command: object) -> str:
        """Run a command in the folder; the report of it."""
        began = time.monotonic()
        done = subprocess.run(
            [*map(str, command)],
            cwd=self.folder,
            env=self.variables(),
            capture_output=True,
            text=True,
        )
        failed = f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return report(name, began, failed if done.returncode else "")


def perform(options: argparse.Namespace) -> int:
    """Exit code 0, or 1 where anything failed, which the last lines name."""
    wheels, began, lines = [w.resolve(strict=True) for w in options.wheel], time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="smoke-") as root:
        for text in smoke(wheels, Place(Path(root)), options.jobs):
            print(text, end="", flush=True)
            lines.append(text.partition("\n")[0])
    failed = [line for line in lines if line.startswith(FAILED)]
    names = ", ".join(wheel.name for wheel in wheels)
    print("", f"{names}, {time.monotonic() - began:.0f} s", *failed, sep="\n")
    print(f"{len(lines) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def smoke(wheels: Sequence[Path], place: Place, jobs: int) -> Iterator[str]:
    """Reports, as they arise; none behind an installation that failed."""
    place.folder.mkdir()
    for wheel in wheels:
        yield report(f"files of {wheel.name}", time.monotonic(), "\n".join(differences(wheel)))
    for name, command in installation(wheels, place):
        yield (said := place.run(name, *command))
        if said.startswith(FAILED):
            return
    shutil.copy(ROOT / "examples" / "bugs" / "column_sums.py", place.folder)
    (place.folder / "test_plugin.py").write_text(PLUGIN_TEST, encoding="utf-8")
    for words in COMMANDS:
        yield place.run(f"python {' '.join(words)}", place.python, *words)
    yield from run_inside(place, wheels[0].name.split("-")[1], jobs)


def installation(wheels: Sequence[Path], place: Place) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield the commands that make the environment, by name.

    pip runs from this process on the other environment. Compiling is left to the first
    import, as most of torch's files are never imported: this saves two thirds of the time.
    """
    pip = (sys.executable, "-m", "pip", "--python", place.python)
    quiet = ("install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt")
    yield "empty environment", (sys.executable, "-m", "venv", "--without-pip", place.environment)
    given = [wheel if wheel.name.startswith(APART) else f"{wheel}[{EXTRA}]" for wheel in wheels]
    yield "pip install", (*pip, *quiet, *given, *ALSO)
    yield "pip check", (*pip, "check")


def run_inside(place: Place, version: str, jobs: int) -> Iterator[str]:
    """Yield the reports of inside.py; a report begins at a line that is not indented."""
    pages = [example.write(place.folder) for example in examples()]
    script = Path(__file__).with_name("inside.py")
    command = (place.python, "-I", script, version, ",".join(PACKAGES), jobs, *pages)
    said = ""
    with subprocess.Popen(
        [*map(str, command)],
        cwd=place.folder,
        env=place.variables(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout or ():
            if said and not line.startswith(" "):
                yield said
                said = ""
            said += line
    yield said
    if process.returncode:
        yield report(script.name, time.monotonic(), f"exit code {process.returncode}")
