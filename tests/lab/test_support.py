"""docs/support.md is what the checks say: made anew, held against random calls, and calls that it
accepts are right."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from lab.support import page
from lab.support.ask import Support, ask
from lab.support.perform import PAGE
from lab.support.space import GPU, Row, Space, Verdict
from lab.support.spaces import SPACES

KEPT = page.read(PAGE.read_text(encoding="utf-8"))
CALLS = {"fmha.attention": 650, "gqa_lowlatency.decode": 500, "moe.fused_moe": 150}  # of 2,000
OTHERS = 100  # calls of each other function
RUNS = {"fmha.attention": 60, "gqa_lowlatency.decode": 50, "moe.fused_moe": 27}  # of 200
FEW = 9  # of each other function
# What an error calls an argument, where it is not called as on the page.
WORDS = {
    GPU: ("arch", "on sm_"),
    "instructions": ("mma.sync",),
    "head dim": ("head_dim",),
    "page size": ("page_size", "page_table", "pages of"),
    "lengths of keys": ("kv_lens", "max_kv_len", "cu_seqlens_k"),
    "queries": ("max_seqlen_q",),
    "mask": ("causal", "window", "sink_tokens"),
    "result": ("normalize",),
    "scales": ("k_scale", "q_scale", "scales"),
    "heads": ("query heads",),
    "tokens": ("query tokens", "tokens", "tile_rows"),
    "cluster": ("cluster",),
    "kernel": ("kernel", "cluster"),
    "keys": ("kv", "keys of"),
    "max_kv_len": ("max_kv_len",),
    "experts": ("activations", "arranged", "weights in", "x 'e4m3'", "global scale"),
    "hidden": ("H =", "K ="),
    "intermediate": ("I =", "K ="),
    "activation": ("limit",),
    "groups": ("n_group", "groups"),
    "bytes of a token": ("bytes for a token",),
    "function": ("dtype", "x is"),
    "cols": ("cols", "stride"),
    "tables": ("owners", "block_tables", "positions", "slots"),
    "rows": ("x is",),
    "weights": ("weight is",),
    "record": ("record", "ring", "rows", "bytes"),
    "columns": ("bytes for a token", "out is", "columns"),
}
LIMITS = (":", "without", "expected", "at most", "written for", "not a multiple", "only", "with")


def drawn(space: Space, says: Support, pick: random.Random) -> dict[str, str]:
    """A random row; most have main arguments that the page accepts."""
    accepted = pick.random() < 0.8
    while True:
        row = space.default | {name: pick.choice(space.factors[name]) for name in space.table}
        if not (accepted and says.refusals(row)):
            break
    options = space.options
    for name in pick.sample(options, min(pick.choice((0, 1, 2, 3, 5, 8)), len(options))):
        row[name] = pick.choice(space.factors[name])
    return row


def rows_of(name: str) -> Iterator[dict[str, str]]:
    """Random rows of a function."""
    pick = random.Random(name)
    while True:
        yield drawn(SPACES[name], KEPT[name], pick)


def names_its_limit(space: Space, says: Support, row: Row, text: str) -> bool:
    """Whether an error names an argument of a rule of the page that refuses it, and a limit."""
    number = says.number_of(Verdict("", text))
    rules = [rule for rules in says.rules.values() for rule in rules if rule.result == number]
    names = {name for rule in rules if rule.holds(row) for name in rule.where}
    names = names or {name for name in row if row[name] != space.default[name]}
    words = [word for name in names for word in (name, *WORDS.get(name, ()))]
    return any(word in text for word in words) and any(word in text for word in LIMITS)


@pytest.mark.parametrize("name", SPACES)
def test_the_page_is_what_the_checks_say(name):
    """`python scripts/house.py support --write` makes it."""
    assert page.section(name, ask(SPACES[name])) == page.section(name, KEPT[name])


def test_the_page_has_every_function():
    assert [*KEPT] == [*SPACES]
    assert page.page(KEPT) == PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SPACES)
def test_random_calls_end_as_the_page_says(name):
    space, says, wrong = SPACES[name], KEPT[name], []
    for row, _ in zip(rows_of(name), range(CALLS.get(name, OTHERS)), strict=False):
        verdict, numbers = space.verdict(row), says.refusals(row)
        changed = {factor: value for factor, value in row.items() if value != space.default[factor]}
        if verdict.accepted != (not numbers):
            wrong.append(f"{changed}: {verdict}, the page says {numbers or 'yes'}")
        elif numbers and says.number_of(verdict) is None:
            wrong.append(f"{changed}: {verdict.refusal}, which is no limit of the page")
        elif numbers and not names_its_limit(space, says, row, verdict.refusal):
            wrong.append(f"{changed}: {verdict.refusal} names no argument and limit")
    assert not wrong, "\n".join(wrong)


def accepted(name: str) -> Iterator[dict[str, str]]:
    """The defaults on the first GPU that has a kernel, then random rows that the page accepts."""
    first = [SPACES[name].default | {GPU: gpu} for gpu in ("sm_100a", "sm_90a")]
    yield next(row for row in first if not KEPT[name].refusals(row))
    yield from (row for row in rows_of(name) if not KEPT[name].refusals(row))


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name in SPACES for number in range(RUNS.get(name, FEW))],
)
def test_accepted_calls_are_right(name, number):
    row = next(row for place, row in enumerate(accepted(name)) if place == number)
    assert SPACES[name].wrong(row) == []


def test_sets_of_values_are_read_as_they_are_written():
    every = ("none", *map(str, range(16, 513, 16)), "192/128", "8")
    pick = random.Random(0)
    for _ in range(200):
        values = frozenset(pick.sample(every, pick.randint(1, len(every))))
        assert page.values_of(page.values_text(values, every), every) == values
    with pytest.raises(ValueError, match="'24'"):
        page.values_of("8; 24", every)
