"""Queries see exactly the keys of transformers' own mask; a mask that cannot be expressed is
refused.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from blackwell_engines.transformers.attention import attention_forward
from blackwell_engines.transformers.masks import Sight, keys_in_sight, sides_of
from tests.blackwell_engines.transformers.models import padding

BATCH, WINDOW = 3, 5
FUNCTIONS = {
    "causal": causal_mask_function,
    "sliding": sliding_window_causal_mask_function(WINDOW),
    "everything": bidirectional_mask_function,
    "both sides": sliding_window_bidirectional_mask_function(WINDOW),
}
# (queries, tokens before them, tokens that the cache has dropped, columns of the cache)
FORWARDS = {
    "prompt": (12, 0, 0, 12),
    "prompt, static": (12, 0, 0, 20),
    "step": (1, 12, 0, 13),
    "step, static": (1, 12, 0, 20),
    "step, sliding": (1, 12, 8, 5),
    "piece": (4, 9, 0, 13),
    "piece, static": (4, 9, 0, 20),
    "piece, sliding": (4, 9, 5, 8),
}


def shown(sight):
    """bool [batch, queries, keys], by the definition of `Sight`."""
    start, end, first = (
        torch.full((sight.batch,), default) if table is None else table
        for table, default in (
            (sight.start, sight.keys - sight.queries), (sight.end, sight.keys), (sight.first, 0),
        )
    )  # fmt: skip
    place = start[:, None, None] + torch.arange(sight.queries)[:, None]
    key = torch.arange(sight.keys)
    seen = (key >= first[:, None, None]) & (key < end[:, None, None])
    if sight.left is not None:
        seen = seen & (key >= place - sight.left)
    if sight.right is not None:
        seen = seen & (key <= place + sight.right)
    return seen.expand(sight.batch, sight.queries, sight.keys)


@pytest.mark.parametrize("side", ["", "none", "left", "right"])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_keys(function, forward, side):
    queries, before, dropped, keys = FORWARDS[forward]
    total = before + queries
    mask = torch.ones(BATCH, total) if side == "none" else padding(BATCH, total, side)
    mask = None if mask is None else mask.bool()
    given = {
        "batch_size": BATCH, "q_length": queries, "kv_length": keys, "kv_offset": dropped,
        "mask_function": FUNCTIONS[function], "attention_mask": mask, "device": "cpu",
    }  # fmt: skip
    theirs = masking_utils.sdpa_mask(
        q_offset=before, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **given
    )[:, 0]
    for offset in (before, torch.tensor(before)):  # static caches have tensors
        sight = keys_in_sight(q_offset=offset, **given)
        real = torch.ones(BATCH, queries) if mask is None else mask[:, before:]
        assert torch.equal(shown(sight)[real.bool()], theirs[real.bool()])
        if sight.right == 0:
            assert sight.newest == (mask is None or queries == 1 or bool(mask[:, -1].all()))


def test_a_mask_that_was_made_ahead_is_taken():
    given = {"batch_size": 2, "q_length": 1, "kv_length": 9, "q_offset": 8}
    sight = keys_in_sight(**given)
    assert keys_in_sight(**given, attention_mask=sight) is sight
    given["mask_function"] = FUNCTIONS["sliding"]
    with pytest.raises(ValueError, match=r"\(2, 1, 9, None, 0\) for layers of \(2, 1, 9, 4, 0\)"):
        keys_in_sight(**given, attention_mask=sight)


def test_pads_between_tokens_are_refused():
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 4:6] = False
    with pytest.raises(ValueError, match="entry 1 has 2 pads between its tokens 0 and 8"):
        keys_in_sight(2, 9, 9, attention_mask=mask)
    mask[1, 6:] = False  # now they are at the end
    keys_in_sight(2, 9, 9, attention_mask=mask)


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
        masking_utils.or_masks(causal_mask_function, bidirectional_mask_function),
        masking_utils.and_masks(causal_mask_function, lambda b, h, q, k: k != 3),
        masking_utils.packed_sequence_mask_function(torch.zeros(2, 9)),
        masking_utils.blockwise_overlay(torch.zeros(2, 9)),
    ],
    ids=["chunks", "or", "own", "packed", "blocks"],
)
def test_other_functions_are_refused(function):
    with pytest.raises(NotImplementedError, match=r"^mask function .*(overlay|mask|lambda)"):
        sides_of(function)


def test_a_window_of_one_side_is_refused():
    """A row without a right edge sees all keys up to the block of queries in kernels, none after
    it."""
    function = masking_utils.sliding_window_overlay(4)
    assert sides_of(function) == (3, None)
    with pytest.raises(NotImplementedError, match="window of 4 keys to the left"):
        keys_in_sight(2, 9, 9, mask_function=function)


@pytest.mark.parametrize("hole", [False, True])
def test_pads_between_tokens_are_noticed_where_they_are_traced(hole):
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :2] = False
    mask[0, 4] = not hole
    made = torch.compile(lambda mask: keys_in_sight(2, 9, 9, attention_mask=mask), backend="eager")
    if hole:
        with pytest.raises(RuntimeError, match="has pads between tokens"):
            made(mask)
        return
    assert torch.equal(shown(made(mask)), shown(keys_in_sight(2, 9, 9, attention_mask=mask)))


def test_padding_that_knows_nothing_of_the_cache_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask \(2, 1\): .* those 4 that a sliding"):
        keys_in_sight(2, 1, 8, 11, 4, attention_mask=torch.ones(2, 1, dtype=torch.bool))


# ---- arguments that a layer refuses


def call(mask=None, queries=3, keys=7, **options):
    layer = SimpleNamespace(is_causal=True)
    q, k, v = torch.ones(1, 2, queries, 64), *torch.ones(2, 1, 1, keys, 64)
    return attention_forward(layer, q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, **options)


SIGHT = Sight(1, 3, 7, None, 0)
REFUSED = {
    "4-d mask": ({"mask": torch.zeros(1, 1, 3, 7)}, r"Tensor \(1, 1, 3, 7\): only padding"),
    "other sizes": ({"mask": Sight(1, 3, 9, None, 0)}, "3 queries and 7 keys, but .* 1, 3 and 9"),
    "no mask": ({}, "no attention_mask for 3 queries and 7 keys of a causal layer"),
    "dropout": ({"mask": SIGHT, "dropout": 0.1}, r"dropout 0\.1"),
    "weights": ({"mask": SIGHT, "output_attentions": True}, "output_attentions"),
    "window": ({"mask": SIGHT, "sliding_window": 4}, "sliding_window 4, but the mask shows all"),
    "bias": ({"mask": SIGHT, "position_bias": torch.ones(1, 2, 3, 7)}, r"position_bias \(1, 2, 3"),
    "packed": ({"mask": SIGHT, "cu_seq_lens_q": torch.zeros(2)}, r"cu_seq_lens_q \(2,\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_layer_refuses(what, no_compile):
    options, words = REFUSED[what]
    with pytest.raises((ValueError, NotImplementedError), match=words):
        call(**options)


def test_kernels_refuse_what_they_have_not(no_compile):
    layer, tensors, sight = SimpleNamespace(), torch.ones(3, 1, 1, 9, 64), Sight(1, 9, 9, None, 0)
    with pytest.raises(NotImplementedError, match=r"float32 of q"):
        attention_forward(layer, *tensors, sight)
    tensors = tensors.bfloat16().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"q requires grad: .* use no_grad\(\)"):
        attention_forward(layer, *tensors, sight)


def test_pads_of_every_length_are_packed_without_a_copy():
    """Rows of a cache [B, H, S, D] are addressed by entry and key, whatever the head."""
    from blackwell_engines.transformers.attention import _rows

    cache = torch.arange(2 * 3 * 5 * 4).view(2, 3, 5, 4)
    rows, pitch = _rows(cache.transpose(1, 2))
    assert rows.data_ptr() == cache.data_ptr()
    for entry, key, head in itertools.product(range(2), range(5), range(3)):
        assert torch.equal(rows[entry * pitch + key, head], cache[entry, head, key])
