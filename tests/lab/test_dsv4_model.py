"""The reference model of the layer over the cache, compared with DeepSeek's inference code, which
works token by token: states of compressors begin at minus infinity and are shifted, biases are
added when a token arrives, and an index lists what a query sees.
"""

from __future__ import annotations

import math

import pytest
import torch

from kvcache.layouts.records import BF16_512, FP8_584, INDEXER_BF16, INDEXER_FP4
from lab.dsv4.model import Recompute
from lab.dsv4.weights import EPS, Weights, angles, frequencies, rotate
from lab.flags.dsv4 import MUTATIONS, ROPE, Definition, Shape
from mla.indexer.quantised import hadamard
from mla.reference import definition, rounded

TOKENS = 141
RECORDS = {"window": BF16_512, "keys": INDEXER_BF16}
QUANTISED = {"window": FP8_584, "keys": INDEXER_FP4}


def drawn(kind, mutation=None, records=RECORDS):
    model = Recompute(Weights(Shape(kind), 3), records, mutation or Definition())
    x = torch.randn(TOKENS, model.shape.hidden, generator=torch.Generator().manual_seed(1))
    return model, x.bfloat16()


def one_by_one(squeeze, values, scores, ratio, overlap, kind):
    """Entries of a compressor that gets one token at a time, in fp64."""
    width, wide = len(squeeze.norm), overlap * len(squeeze.norm)
    kept = torch.zeros(overlap * ratio, wide, dtype=torch.float64)
    kept_scores = torch.full_like(kept, -math.inf)
    found = []
    for position in range(len(values)):
        place = (overlap - 1) * ratio + position % ratio
        kept[place] = values[position]
        kept_scores[place] = scores[position].double() + squeeze.ape[position % ratio]
        if (position + 1) % ratio:
            continue
        rows = [
            (x[row, :width] if row < (overlap - 1) * ratio else x[row, wide - width :])
            for x in (kept, kept_scores)
            for row in range(overlap * ratio)
        ]
        rows, weights = torch.stack(rows).chunk(2)
        made = (rows * weights.softmax(0)).sum(0)
        made = made * (made.square().mean() + EPS).rsqrt() * squeeze.norm
        first = torch.tensor([position + 1 - ratio])
        found.append(rotate(made[None], *angles(kind, first))[0])
        if overlap == 2:
            kept[:ratio], kept_scores[:ratio] = kept[ratio:].clone(), kept_scores[ratio:].clone()
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_entries_of_a_compressor_that_gets_a_token_at_a_time(kind):
    model, x = drawn(kind)
    state, shape = model.state(x, 1), model.shape
    given = state.projected.main
    expected = one_by_one(model.weights.main, *given, shape.ratio, shape.overlap, kind)
    assert (state.entries.exact - expected).abs().max() < 1e-12
    assert len(expected) == TOKENS // shape.ratio == model.visible(TOKENS - 1)
    if kind == "csa":
        keys = one_by_one(model.weights.index, *state.projected.index, 4, 2, kind)
        assert (state.keys.exact - hadamard(keys)).abs().max() < 1e-12


def test_attention_by_hand():
    """Loop over heads and keys; a sink takes its share."""
    model, x = drawn("hca")
    state, position = model.state(x, 1), TOKENS - 1
    q = state.projected.q[position].double()
    window = state.window.stored[position - 127 : position + 1]
    keys = torch.cat((window, state.entries.stored))
    assert len(keys) == 128 + 1
    found = definition(model.token(q, state.window.stored, state.entries.stored, position))
    cos, sin = (table.double()[0] for table in angles("hca", torch.tensor([position])))
    for head in range(model.shape.heads):
        powers = [math.exp(float(q[head] @ key) * 512**-0.5) for key in keys]
        total = sum(powers) + math.exp(model.weights.sinks[head])
        o = sum(power / total * key for power, key in zip(powers, keys, strict=True))
        pairs = o[-ROPE:].unflatten(0, (-1, 2))
        turned = torch.complex(pairs[:, 0], pairs[:, 1]) * torch.complex(cos, -sin)
        expected = torch.cat((o[:-ROPE], torch.view_as_real(turned).flatten()))
        assert (found[head] - expected).abs().max() < 1e-12


def test_the_same_with_the_kernels_roundings():
    """Results are close to the definition, but not equal."""
    for kind in ("swa", "hca"):
        model, x = drawn(kind)
        state, position = model.state(x, 1), TOKENS - 1
        window = state.window.stored
        rows = window, state.entries.stored if state.entries else window[:0]
        found = rounded(model.token(state.projected.q[position], *rows, position))
        exact = definition(model.token(state.projected.q[position], *rows, position))
        assert 0 < (found - exact).abs().max() < 2**-7 * exact.abs().max()


def test_every_mutation_changes_what_it_names():
    model, x = drawn("csa")
    state, position = model.state(x, 2), TOKENS - 1
    rows = state.window.stored, state.entries.stored
    o = definition(model.token(state.projected.q[position], *rows, position))
    for name, mutation in MUTATIONS.items():
        wrong, _ = drawn("csa", mutation)
        other = wrong.state(x, 2)
        if name in ("phase", "rope"):
            assert not torch.equal(other.entries.exact, state.entries.exact), name
            assert not torch.equal(other.keys.exact, state.keys.exact), name
        else:
            assert torch.equal(other.entries.exact, state.entries.exact), name
            changed = definition(wrong.token(state.projected.q[position], *rows, position))
            assert (changed - o).abs().max() > 1e-4, name


def test_records_and_selection():
    """Stored rows are near exact ones; the selection has the best scores, in the order of
    entries."""
    model, x = drawn("csa", records=QUANTISED)
    state = model.state(x, 2)
    for rows, step in ((state.window, 2**-4), (state.entries, 2**-4), (state.keys, 2**-2)):
        error = (rows.stored - rows.exact).abs().amax(1)
        assert (error <= step * rows.exact.abs().amax(1)).all()
        assert error.max() > 0
    assert state.queries.shape == (2, model.shape.index_heads, 128)
    scores = model.score(state.queries[1], state.projected.index_weights[-1], state.keys.stored)
    chosen = model.select(scores)
    assert len(chosen) == model.shape.select < len(scores)
    rest = scores[[index for index in range(len(scores)) if index not in chosen.tolist()]]
    assert scores[chosen].min() >= rest.max()
    assert (chosen.diff() > 0).all()
    assert model.select(torch.ones(40)).tolist() == [*range(32)]


def test_frequencies():
    """YaRN keeps fast frequencies and divides slow ones by its factor; the window has no YaRN."""
    plain = 10_000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    assert torch.equal(frequencies("swa"), plain)
    base = 160_000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    ratio = frequencies("csa") / base
    assert (ratio[:15] - 1).abs().max() < 1e-12
    assert (ratio[-6:] - 1 / 16).abs().max() < 1e-12
    assert (ratio.diff() <= 1e-12).all()


def test_the_last_query_sees_the_window_that_it_completes():
    model, _ = drawn("csa")
    assert [model.visible(t) for t in (0, 2, 3, 6, 7)] == [0, 0, 1, 1, 2]
    assert drawn("swa")[0].visible(500) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [({"kind": "mla"}, "kind 'mla'"), ({"heads": 9}, "9 heads in 2 groups"),
     ({"choices": 7}, "7 choices of 6 experts")],
)  # fmt: skip
def test_shapes_that_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Shape(**given)
