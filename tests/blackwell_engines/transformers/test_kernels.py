"""Models in bf16 on the kernels themselves, which run in the emulator.

Logits are compared with those of the same weights in fp32. Their error may be twice that of the
model's own attention on the same inputs, plus an ulp; `generate` gives the same tokens as the
model's own attention.
"""

from __future__ import annotations

import pytest
import torch

from blackwell_engines.transformers import NAME, register
from kernelkit.numerics.tolerance import compare_output
from tests.blackwell_engines.transformers.models import (
    MODELS,
    WINDOW,
    decisive,
    generated,
    on_any_device,
    padding,
    prompt,
    tiny,
)

SIZES = BATCH, TOKENS = 2, 2 * WINDOW + 3

register()


def logits_of(model, attention, ids, mask):
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, side, poisoned_outputs):
    ids, mask = prompt(BATCH, TOKENS), padding(BATCH, TOKENS, side)
    model = tiny(name, torch.bfloat16)
    exact = logits_of(tiny(name, torch.float32), "eager", ids, mask)
    rounded, ours = (logits_of(model, attention, ids, mask) for attention in ("eager", NAME))
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    report = compare_output(ours[real], exact[real], rounded[real], torch.bfloat16)
    assert report.ok, str(report)


@pytest.mark.parametrize("side", ["", "left"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name, kind, side, poisoned_outputs):
    model, given = tiny(name, torch.bfloat16), decisive(tiny(name, torch.float32), SIZES, side)
    found = {}
    for attention in ("eager", NAME):
        model.set_attn_implementation(attention)
        found[attention] = generated(model, given, cache_implementation=kind)
    assert torch.equal(found[NAME], found["eager"])


# ---- torch.compile


@pytest.mark.parametrize("side", ["full", "left"])
@pytest.mark.parametrize(("name", "fullgraph"), [("llama", True), ("gpt-oss", False)])
def test_a_compiled_forward(name, fullgraph, side):
    """Masks are made in the graph; with a sliding window between two graphs."""
    model, ids = tiny(name, torch.bfloat16), prompt(BATCH, TOKENS)
    mask = padding(BATCH, TOKENS, side) if side == "left" else torch.ones_like(ids)
    plain = logits_of(model, NAME, ids, mask)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        ours = compiled(ids, attention_mask=mask, use_cache=False).logits
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("side", ["", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_compiles_decoding(name, side):
    """Decoding is one graph, as on a GPU with a static cache; masks come as arguments."""
    model, given = tiny(name, torch.bfloat16), decisive(tiny(name, torch.float32), SIZES, side)
    model.set_attn_implementation(NAME)
    plain = generated(model, given)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(generated(model, given, compile_config=on_any_device()), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
