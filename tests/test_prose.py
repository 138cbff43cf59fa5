"""The language of docstrings and pages follows its rules; each rule fails on an example."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from lab.house import prose
from lab.house.source import Source

PROBES = [
    (prose.docstring_subject, "Of the rings.", "Return the stage of the rings."),
    (prose.docstring_subject, "Those that there are.", "Map each name to its tensor."),
    (prose.docstring_sentences, f"Return {'a ' * 35}tile.", f"Return {'a ' * 33}tile."),
    (prose.docstring_sentences, f"Return {'a ' * 35}tile.", f"Return `{'a ' * 35}` tiles."),
    (prose.docstring_fields, "x: tokens. w: weights.", "x: tokens.\nw: weights."),
    (prose.banned_phrases, "A damaged file is said.", "Warn about a damaged file."),
]


@pytest.mark.parametrize(("rule", "wrong", "right"), PROBES)
def test_a_rule_fails_on_what_it_is_against(rule, wrong, right):
    for text, broken in ((wrong, True), (right, False)):
        lines = f'def f():\n    """{text}"""\n'
        assert bool([*rule(Source(PurePosixPath("kernelkit/probe.py"), lines))]) is broken


def test_a_long_heading_is_seen_outside_of_code():
    path = PurePosixPath("docs/page.md")
    assert [*prose.heading_length(path, "## " + "a" * 81)]
    assert not [*prose.heading_length(path, "## " + "a" * 80)]
    assert not [*prose.heading_length(path, "```\n# " + "a" * 90 + "\n```")]


@pytest.mark.parametrize(("rule", "wrong", "right"), [
    (prose.page_sentences, f"It has {'a ' * 34}tile.", f"It has {'a ' * 32}tile."),
    (prose.page_sentences, f"- {'a ' * 36}", f"| {'a ' * 36} |"),
    (prose.page_sentences, f"- {'a ' * 36}", f"```\n{'a ' * 36}\n```"),
    (prose.page_phrases, "A damaged file is said.", "A warning names a damaged file."),
])  # fmt: skip
def test_a_rule_of_pages_fails_on_what_it_is_against(rule, wrong, right):
    for text, broken in ((wrong, True), (right, False)):
        assert bool([*rule(PurePosixPath("docs/page.md"), text)]) is broken
