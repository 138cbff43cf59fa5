"""The pages outside of packages are true: their Python runs, their commands and trees exist, links
to headings have targets, and the index of notes/ lists every page and its newest entry.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import PurePosixPath

from kernelkit import __main__ as command_line
from kernelkit.compile import aot, store
from kernelkit.compile.compiler import collecting
from lab.house.source import PACKAGES, ROOT, files

HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)")
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
NOTES = PurePosixPath("notes")
ENTRY = re.compile(r"^## (\d{4}-\d\d-\d\d) · (.+)$", re.MULTILINE)
INDEXED = re.compile(r"^\| \[\w+\]\((\w+\.md)\) \|.*\| (\S+) \|$", re.MULTILINE)


def text_of(page: PurePosixPath | str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


README, COMPILED = text_of("README.md"), text_of("docs/compiled_kernels.md")


def test_python_of_the_readme_runs():
    (program,) = PYTHON.findall(README)
    names: dict = {}
    exec(program, names)
    assert names["out"].shape == (1, 200, 8, 64)
    assert names["lse"].shape == (1, 8, 200)


def test_commands_of_the_readme_are_targets():
    targets = set(re.findall(r"\bmake ([a-z]+)", README))
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"demo", "test", "matrix"} <= targets <= set(re.findall(r"make (\w+)", listed.stdout))


def test_tree_of_the_readme_exists():
    drawn = set(re.findall(r"^    (\w[\w./]*/) ", README, re.MULTILINE))
    assert {"tests/", "scripts/", "notes/"} <= drawn
    missing = [name for name in drawn if not (ROOT / name).exists()]
    assert not missing
    undrawn = [name for name in PACKAGES if (ROOT / name).is_dir() and f"{name}/" not in drawn]
    assert not undrawn


def test_scripts_of_the_readme_exist():
    (listed,) = re.findall(r"^    scripts/ +([\w, ]+)$", README, re.MULTILINE)
    names = listed.split(", ")
    assert {"run_fmha", "explain", "bench"} <= set(names)
    assert not [name for name in names if not (ROOT / "scripts" / f"{name}.py").exists()]


# ---- docs/compiled_kernels.md


def test_python_about_compiled_kernels_runs():
    """The program runs, and names kernels; other tests check that these compile."""
    (program,) = PYTHON.findall(COMPILED)
    with collecting() as keys:
        exec(program, {})
    assert keys


def test_commands_about_compiled_kernels_exist():
    help_text = command_line._parser().format_help()
    for command in re.findall(r"python -m kernelkit (\w+)", COMPILED):
        assert command in help_text


def test_variables_about_compiled_kernels_exist():
    known = {store.VARIABLE, store.LIMIT_VARIABLE, aot.VARIABLE, aot.RECORD_VARIABLE}
    known.add(store.SHARED_VARIABLE)
    assert set(re.findall(r"BLACKWELL_KERNELS_\w+", COMPILED)) == known
    assert f"`{store.LIMIT_VARIABLE}` ({store.DEFAULT_LIMIT})" in COMPILED


# ---- links


def anchor(heading: str) -> str:
    """Return the anchor that GitHub makes for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(path: PurePosixPath) -> list[str]:
    return HEADING.findall(re.sub(r"^(```|    ).*$", "", text_of(path), flags=re.MULTILINE))


def test_links_to_headings_lead_somewhere():
    lost = []
    for path in files(".md"):
        for page, name in LINK.findall(text_of(path)):
            target = path.parent / page if page else path
            if name not in map(anchor, headings(target)):
                lost.append(f"{path}: {page}#{name}")
    assert not lost


def pages_of_notes() -> list[PurePosixPath]:
    return [page for page in files(".md") if page.parent == NOTES]


def test_the_index_of_the_notes_has_every_page_and_its_newest_entry():
    newest = {}
    for page in pages_of_notes():
        if entries := ENTRY.findall(text_of(page)):
            dates = [date for date, _ in entries]
            assert dates == sorted(dates, reverse=True), page
            assert len(entries) == len(set(entries)), page
            newest[page.name] = dates[0]
    rows = INDEXED.findall(text_of(NOTES / "README.md"))
    assert sorted(rows) == sorted(newest.items())


def test_headings_of_the_notes_fit_a_line_of_80():
    for page in pages_of_notes():
        long = [line for line in text_of(page).splitlines() if line[:3] == "## " and len(line) > 80]
        assert not long, page
