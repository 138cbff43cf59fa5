"""Tiles of each CTA: every tile with a visible key, once, for any number of CTAs."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gqa_lowlatency import reference
from gqa_lowlatency.split import active, reach, share

CTAS = 40
TILES = st.sampled_from((8, 16, 64, 128))
WINDOWS = st.one_of(st.none(), st.integers(0, 400))
quietly = settings(max_examples=300, derandomize=True, database=None, deadline=None)


def visible_tiles(n_keys, tokens, tile, left, sink_tokens):
    """Tiles that hold a key which some token sees, found by looking at every key."""
    options = reference.Options(causal=False, window=left, sink_tokens=sink_tokens)
    seen = reference.visible_keys(tokens, n_keys, options).any(dim=0)
    return [index for index, part in enumerate(seen.split(tile)) if len(part) and part.any()]


@quietly
@given(st.integers(0, 700), st.integers(1, 8), TILES, WINDOWS, st.integers(0, 500))
@example(130, 1, 128, 0, 128)
@example(129, 1, 128, 0, 129)
@example(0, 8, 16, 0, 4)
def test_tiles_are_those_with_a_visible_key(n_keys, tokens, tile, left, sink_tokens):
    sink_tokens = 0 if left is None else sink_tokens
    found = reach(n_keys, tokens, tile, left, sink_tokens)
    listed = [found.tile(index) for index in range(found.tiles)]
    assert listed == visible_tiles(n_keys, tokens, tile, left, sink_tokens)


@quietly
@given(st.integers(0, 200), st.integers(1, CTAS))
def test_every_tile_is_dealt_once_and_evenly(tiles, ctas):
    shares = [share(tiles, ctas, rank) for rank in range(ctas)]
    dealt = [tile for first, number in shares for tile in range(first, first + number)]
    assert dealt == list(range(tiles))
    numbers = [number for _, number in shares]
    assert max(numbers) - min(numbers) <= 1
    assert numbers == sorted(numbers, reverse=True), "the remainder goes to the low ranks"
    assert active(tiles, ctas) == sum(number > 0 for number in numbers)


def test_the_example_of_the_design():
    """6 tiles on 4 CTAs, as in the design."""
    assert [share(6, 4, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 1)]


@quietly
@given(st.integers(0, 3000), st.integers(1, 16), st.integers(1, 16))
def test_a_share_depends_on_the_length_alone(n_keys, ctas, rank):
    """Batch invariance depends on this: neither the batch nor the capacity is an argument."""
    rank %= ctas
    tiles = reach(n_keys, 1, 128).tiles
    assert share(tiles, ctas, rank) == share(-(-n_keys // 128), ctas, rank)
