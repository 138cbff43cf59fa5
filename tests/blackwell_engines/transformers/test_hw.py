"""On a GPU: tiny models in bf16 compared with their own attention, and decoding as `generate`
compiles it.

`python -m pytest --hw -m hw tests/blackwell_engines/transformers/test_hw.py`
"""

from __future__ import annotations

import pytest
import torch

from blackwell_engines.transformers import NAME, pack_experts, register
from kernelkit.numerics.tolerance import compare_output
from tests.blackwell_engines.transformers.models import (
    MODELS,
    decisive,
    generated,
    padding,
    prompt,
    tiny,
)
from tests.blackwell_engines.transformers.test_experts import on_grid

pytestmark = [
    pytest.mark.hw,
    pytest.mark.xdist_group("transformers-hw"),
    pytest.mark.usefixtures("poisoned_outputs"),
]
DEVICE, SIZES = "cuda", (2, 150)

register()


def on_device(given):
    return tuple(None if tensor is None else tensor.to(DEVICE) for tensor in given)


@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, side):
    ids, mask = on_device((prompt(*SIZES), padding(*SIZES, side)))
    found = []
    for dtype, attention in (("float32", "eager"), ("bfloat16", "eager"), ("bfloat16", NAME)):
        model = tiny(name, getattr(torch, dtype)).to(DEVICE)
        model.set_attn_implementation(attention)
        with torch.no_grad():
            found.append(model(ids, attention_mask=mask, use_cache=False).logits)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    exact, rounded, ours = (logits[real].cpu() for logits in found)
    report = compare_output(ours, exact, rounded, torch.bfloat16)
    assert report.ok, str(report)


@pytest.mark.parametrize("side", ["", "left"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name, kind, side):
    """Inductor compiles decoding with a static cache into CUDA graphs."""
    given = on_device(decisive(tiny(name, torch.float32), SIZES, side))
    model, found = tiny(name, torch.bfloat16).to(DEVICE), {}
    for attention in ("eager", NAME):
        model.set_attn_implementation(attention)
        found[attention] = generated(model, given, cache_implementation=kind)
    assert torch.equal(found[NAME], found["eager"])


def test_generate_with_experts():
    given = on_device(decisive(on_grid("gpt-oss", torch.float32), SIZES))
    model = on_grid("gpt-oss", torch.bfloat16).to(DEVICE)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    plain = generated(model, given, cache_implementation="dynamic")
    model.set_attn_implementation(NAME)
    assert torch.equal(generated(pack_experts(model), given), plain)
