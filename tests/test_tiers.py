"""Tables of tiers: how a row is read, that each row decides something, and nothing else does."""

from __future__ import annotations

import re

import pytest

from lab.house.tiers import (
    DECIDED,
    MATRIX,
    QUICK,
    SWEEP,
    TESTS,
    Row,
    deciding,
    files_of,
    parse,
    table,
)

TABLE = """
| tests | tier | why |
|---|---|---|
| `test_a.py`, `test_b.py::test_one` | quick | both `files` |
| `test_a.py::test_two[*sm_90a*`, 2 of 3 | sweep | some |
| `test_b.py`, first 4 | matrix | some more |
| `test_b.py`, 2 of 2 in the matrix | sweep | fewer |
"""
FOLDERS = sorted(path.parent for path in TESTS.rglob("tiers.md"))
MARK = re.compile(r"\bmark\s*\.\s*(matrix|sweep)\b")


def test_rows_of_a_table():
    assert parse(TABLE) == (
        Row(("test_a.py", "test_b.py::test_one"), QUICK, "both `files`"),
        Row(("test_a.py::test_two[*sm_90a*",), SWEEP, "some", turn=2, of=3),
        Row(("test_b.py",), MATRIX, "some more", first=4),
        Row(("test_b.py",), SWEEP, "fewer", turn=2, of=2, in_matrix=True),
    )


@pytest.mark.parametrize(
    "line",
    ["| `test_a.py` | soon | x |", "| `test_a.py` | quick |", "| `test_a.py`, 2 | quick | x |"],
)
def test_a_line_that_is_no_row_is_an_error(line):
    with pytest.raises(ValueError, match=re.escape(line)):
        parse(line)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("test_a.py", True),
        ("test_a.py::test_one", True),
        ("test_a.py::test_one[*-x.y]", True),
        ("test_a.py::test_one[3-*", True),
        ("test_*::*one", True),
        ("test_a.py::test_on", False),
        ("test_a.py::test_one[3]", False),
        ("test_a.py::test_one[*x-y]", False),
    ],
)
def test_a_pattern_stands_for_what_it_names_and_all_in_it(pattern, matches):
    assert Row((pattern,), QUICK, "").matches("test_a.py::test_one[3-x.y]") == matches


def test_the_first_of_a_list():
    chosen = deciding((Row(("a",), SWEEP, "", first=2),), ["a[0]", "b", "a[1]", "a[2]"])
    assert [row is not None for row in chosen] == [True, False, True, False]


def test_of_the_matrix_every_other():
    rows = (
        Row(("a",), MATRIX, ""),
        Row(("a[1]",), QUICK, ""),
        Row(("a",), SWEEP, "", 2, 2, None, True),
    )
    chosen = deciding(rows, [f"a[{number}]" for number in range(5)])
    assert [row.tier for row in chosen] == [MATRIX, QUICK, SWEEP, MATRIX, SWEEP]


def test_the_last_row_decides_and_tests_take_turns():
    rows = (Row(("a",), SWEEP, "all"), Row(("a",), MATRIX, "some", 2, 3), Row(("a[3*",), QUICK, ""))
    chosen = deciding(rows, ["b", *(f"a[{number}]" for number in range(6))])
    assert chosen[0] is None
    assert [row.tier for row in chosen[1:]] == [SWEEP, MATRIX, SWEEP, QUICK, MATRIX, SWEEP]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_row_decides_something(folder, request):
    """This needs a folder that was collected as a whole, as by `make test`."""
    decided = request.config.stash[DECIDED]
    if folder not in decided:
        pytest.skip("not all of its tests were collected")
    assert not [row for row in table(folder) if row not in decided[folder]]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_mark_says_what_the_table_says(folder):
    texts = {file.name: file.read_text(encoding="utf-8") for file in files_of(folder)}
    assert not [name for name, text in texts.items() if MARK.search(text)]
