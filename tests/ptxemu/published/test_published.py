"""Published kernels under `python -m ptxemu`: the table is well-formed, and each row is right.

`PUBLISHED="flash-attn-4==4.0.0b37" pytest tests/ptxemu/published` tries that release in every row
that has the package, and no other row.
"""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.ptxemu.published.environment import (
    PINNED,
    ROOT,
    SCRIPTS,
    NotInTheIndex,
    distribution,
    run,
    with_releases,
)
from tests.ptxemu.published.packages import TABLE
from tests.ptxemu.published.scripts import judged

PAGE = ROOT / "docs" / "ptxemu" / "published.md"
RELEASES = os.environ.get("PUBLISHED", "").split()
NAMES = {distribution(requirement) for row in TABLE for requirement in row.requirements}
HELPERS = {"judged"}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_kernels(row):
    requirements = with_releases(row, RELEASES)
    if RELEASES and requirements == row.requirements:
        pytest.skip("PUBLISHED names no other release of a package of this row")
    try:
        found = run(row, requirements)
    except NotInTheIndex as reason:
        pytest.skip(str(reason))
    print(found.text, f"{found.seconds:.0f} s of the CPU")
    assert found.code == 0
    assert found.error is not None
    assert found.error <= row.bound
    assert found.kernels >= row.kernels


def test_releases_are_of_packages_in_the_table():
    unknown = {distribution(release) for release in RELEASES} - NAMES
    assert not unknown, f"no row of the table has {', '.join(unknown)}"


def test_a_release_takes_the_place_of_another():
    row = TABLE[0]
    other = f"{distribution(row.requirements[0]).replace('-', '_').upper()}==99.0"
    assert with_releases(row, [other, "absent==1.0"]) == (other, *row.requirements[1:])
    with pytest.raises(ValueError, match="flash-attn-4>=4"):
        with_releases(row, ["flash-attn-4>=4"])


def test_every_version_is_pinned_once():
    requirements = {requirement for row in TABLE for requirement in row.requirements}
    assert all(map(PINNED.fullmatch, requirements))
    for row in TABLE:
        names = [*map(distribution, row.requirements)]
        assert len(set(names)) == len(names)


def test_every_row_has_its_script_and_every_script_a_row():
    scripts = {path.stem for path in SCRIPTS.glob("*.py")} - HELPERS
    assert scripts == {row.script for row in TABLE}
    assert len({row.name for row in TABLE}) == len(TABLE)


def test_the_page_has_every_package():
    text = PAGE.read_text(encoding="utf-8").lower()
    tested = {row.requirements[0].replace("==", " ") for row in TABLE}
    assert not [package for package in tested if f"| {package} |" not in text]


def test_a_wrong_result_is_an_error_that_counts(capsys):
    right = np.array([1.0, -4.0, np.inf])
    judged.report((right, right), (np.array([1.5, -4.0, np.inf]), right))
    judged.report((np.array([np.nan]), np.array([2.0])))
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"error": 0.5, "largest": np.inf}
    assert second == {"error": np.inf, "largest": 2.0}
    with pytest.raises(ValueError, match=r"\(1,\)"):
        judged.report((right[:1], right))
