"""Bytes of a step: counted by hand for DeepSeek-V4-Pro, and row by row for any step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.layouts.layout import Tail
from kvcache.layouts.models import Options, deepseek_v4
from kvcache.layouts.presets import preset
from kvcache.planner.traffic import step_traffic

PRO = preset("deepseek-v4-pro")
CONTEXT = 1 << 16


def by_name(*given, **options):
    return {part.name: part for part in step_traffic(*given, **options)}


def test_a_decode_step_of_v4_pro():
    """64k tokens behind it: the keys of the indexer are most of what is read."""
    parts = by_name(PRO, [(CONTEXT - 1, CONTEXT)], selected={"csa": 1024})
    assert parts["swa"].read == 61 * 128 * 584
    assert parts["swa"].written == 61 * 584
    assert parts["index"].read == 30 * CONTEXT // 4 * 68
    assert parts["csa"].read == 30 * 1024 * 584
    assert parts["hca"].read == 31 * CONTEXT // 128 * 584
    assert [parts[name].written for name in ("csa", "index", "hca")] == [
        30 * 584,
        30 * 68,
        31 * 584,
    ]
    # The token completes a window of each kind; its own rows come from its projections.
    assert parts["csa_tail"].read == 30 * 7 * 512 * 8
    assert parts["hca_tail"].read == 31 * 127 * 512 * 8
    assert parts["hca_tail"].written == 31 * 512 * 8
    assert parts["index"].seconds(1e12) == parts["index"].bytes / 1e12


def test_what_is_refused():
    with pytest.raises(ValueError, match="from 5 to 4 tokens"):
        step_traffic(PRO, [(5, 4)])
    with pytest.raises(ValueError, match=r"\['main'\]: deepseek-v4-pro has no such stream"):
        step_traffic(PRO, [(4, 5)], {"main": 3})


def test_no_tokens_no_bytes():
    assert not any(part.bytes for part in step_traffic(PRO, [(300, 300)], {"csa": 4}))
    assert not any(part.bytes for part in step_traffic(PRO, []))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 700), st.integers(0, 300), st.booleans(), st.integers(0, 4))
def test_tails_row_by_row(start, tokens, online, draft):
    """What windows that are completed read, every half row as often as it is needed."""
    options = Options(draft=draft, online_hca=online)
    layout, length = deepseek_v4("v4", [4, 128], 128, options), start + tokens
    parts = by_name(layout, [(start, length)])
    for tail in layout.tails:
        assert parts[tail.name].read == sum(_halves(tail, start, length)) * tail.width * 4
        rows = min(tokens, tail.rows(draft)) * (3 if tail.online else 2 * tail.overlap)
        assert parts[tail.name].written == rows * tail.width * 4


def _halves(tail: Tail, start: int, length: int):
    """fp32 rows of `width` that the step reads."""
    if tail.online:
        yield 3 * (start % tail.ratio > 0 and length > start)
        return
    for position in range(start, length):
        if (position + 1) % tail.ratio == 0:
            first = position + 1 - tail.overlap * tail.ratio
            yield from (2 for row in range(first, position + 1) if 0 <= row < start)
