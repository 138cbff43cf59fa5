"""Whole models: attention by its definition in fp64 gives the results of the model's own attention
to six digits, with every cache and padding; so positions, windows, sinks and lengths are right.

`test_kernels.py` runs the kernels.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from blackwell_engines.transformers import NAME
from tests.blackwell_engines.transformers.models import MODELS, SIZES, WINDOW, padding, prompt, tiny

DIGITS = 2e-5  # the softmax of most models is in fp32; one key too many changes results by 1e-2
BATCH, TOKENS, ROOM = 3, 3 * WINDOW + 3, 40


def made_cache(model, kind):
    """Make a cache with the model's own kinds of layers; None if nothing is cached."""
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=ROOM)
    return DynamicCache(config=model.config) if kind == "dynamic" else None


def logits_of(model, attention, ids, mask, cuts=(), kind=""):
    """Return the logits of all tokens, which are passed in pieces that end at `cuts`."""
    model.set_attn_implementation(attention)
    cache, found = made_cache(model, kind), []
    edges = [0, *cuts, ids.shape[1]]
    with torch.no_grad():
        for begin, end in pairwise(edges):
            seen = None if mask is None else mask[:, :end]
            given = {"cache": cache, "use_cache": True} if kind else {"use_cache": False}
            found.append(model(ids[:, begin:end], attention_mask=seen, **given).logits)
    return torch.cat(found, 1)


def assert_same(model, mask, **how):
    ids = prompt(BATCH, TOKENS)
    exact = logits_of(model, "eager", ids, mask, **how)
    ours = logits_of(model, NAME, ids, mask, **how)
    real = torch.ones_like(ids) if mask is None else mask
    assert (ours - exact)[real.bool()].abs().max() < DIGITS
    assert ours.isfinite().all()  # rows of pads, too


@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_prefill(by_definition, name, side):
    assert_same(tiny(name, torch.float32), padding(BATCH, TOKENS, side))
    assert {name for name, _ in by_definition} == {"attention"}


# Pieces of 5, 5, 1, 3 and 13 tokens: the second one ends after the end of a window.
CUTS = (5, WINDOW + 2, WINDOW + 3, WINDOW + 6)


@pytest.mark.parametrize("side", ["", "left"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_of_a_prompt(by_definition, name, kind, side):
    """Keys of earlier pieces come from the cache; no query sees its unused slots."""
    assert_same(tiny(name, torch.float32), padding(BATCH, TOKENS, side), cuts=CUTS, kind=kind)
    queries = {count for name, count in by_definition if name == "decode"}
    if not side:
        assert queries == {1, 3, 5}


@pytest.mark.parametrize("side", ["", "left"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(by_definition, name, kind, side):
    model, ids = tiny(name, torch.float32), prompt(BATCH, TOKENS)
    mask = padding(BATCH, TOKENS, side)
    if mask is not None:
        ids = ids * mask
    found = {}
    for attention in ("eager", NAME):
        model.set_attn_implementation(attention)
        how = {"max_new_tokens": 6, "do_sample": False, "cache": made_cache(model, kind)}
        found[attention] = model.generate(ids, attention_mask=mask, **how)
    assert torch.equal(found[NAME], found["eager"])
    steps = {name for name, count in by_definition if count == 1}
    assert steps == {"decode"}


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_other_ways_to_generate(by_definition, name, how):
    """Beams reorder the cache; prompt lookup proposes several new tokens at once."""
    model, ids, mask = tiny(name, torch.float32), prompt(2, TOKENS), None
    if "num_beams" in how:
        mask = padding(2, TOKENS, "left")
        ids = ids * mask
    else:
        ids = ids[:1]
    found = {}
    for attention in ("eager", NAME):
        model.set_attn_implementation(attention)
        given = {"max_new_tokens": 8, "do_sample": False, **how}
        found[attention] = model.generate(ids, attention_mask=mask, **given)
    assert torch.equal(found[NAME], found["eager"])


ENCODERS = {
    "Bert": {},
    "ModernBert": {
        "local_attention": WINDOW, "global_attn_every_n_layers": 2, "bos_token_id": None,
        "eos_token_id": None, "cls_token_id": None, "sep_token_id": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(by_definition, name, side):
    """Tokens see later ones, too; a window of ModernBERT has two sides."""
    sizes = {name: SIZES[name] for name in ("vocab_size", "intermediate_size", "initializer_range")}
    config = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, **sizes}
    kind = getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(kind(pad_token_id=0, **config, **ENCODERS[name]))
    model.eval()
    ids, mask = prompt(BATCH, TOKENS), padding(BATCH, TOKENS, side)
    found = []
    for attention in ("eager", NAME):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            found.append(model(ids, attention_mask=mask).last_hidden_state)
    real = torch.ones_like(ids) if mask is None else mask
    assert (found[0] - found[1])[real.bool()].abs().max() < DIGITS
    assert by_definition
