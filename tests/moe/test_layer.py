"""A whole layer in the emulator, from router logits to the combined output, beside its definition.

The error against bfloat16 weights is that of quantising: the kernels add nothing to what the
reference with the same rounding has.
"""

from __future__ import annotations

import shlex

import pytest

from lab.commands import EXPLAIN
from lab.measure.accuracy import EXTRA
from lab.problems.grouped_gemm import checked
from lab.problems.moe import errors_of, layer_of
from moe import reference_routing
from moe.api import fused_moe
from moe.packing import pack

QUANTISING = {"nvfp4": 0.26, "mxfp4": 0.3, "mxfp8": 0.08}  # of random numbers
IDLE = 1  # an expert that no token chooses

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")


def compare(flags: str, *, idle: bool) -> None:
    """The layer that the flags spell, beside bfloat16 weights; `-rP` shows both errors."""
    layer = layer_of(EXPLAIN["moe"].parser("").parse_args(shlex.split(flags)))
    x, w13, w2, logits = layer.tensors
    if idle:
        logits[:, IDLE] = -20.0
        assert IDLE not in reference_routing.route(logits, **vars(layer.router))[0]
    experts = pack(w13, w2, layer.format, granularity=layer.granularity)
    options = {"activation": layer.form, "scales": layer.scales, "tile_rows": layer.tile_rows}
    with checked():
        y = fused_moe(x, experts, logits, layer.router, **options)
    errors = errors_of(layer, experts, y)
    own, of_format = errors["relative"], errors["reference"]
    print(f"{layer}: relative error {own:.4f}, of quantising alone {of_format:.4f}")
    assert own <= EXTRA * of_format, errors
    assert of_format < QUANTISING[layer.format]


@pytest.mark.parametrize("flags", ["nvfp4", "nvfp4 --h-scale tensor", "mxfp8"])
def test_a_small_layer(flags):
    compare(f"--experts 5 --format {flags}", idle=False)


# No worker has to do all of them.
@pytest.mark.parametrize(("model", "fmt"), [
    pytest.param(*case.split(), marks=pytest.mark.xdist_group(case))
    for case in ("gpt-oss-120b nvfp4", "deepseek-v4-pro nvfp4", "gpt-oss-120b mxfp4",
                 "gpt-oss-120b mxfp8")
])  # fmt: skip
def test_decode_with_the_sizes_of_models(model, fmt):
    """A few tokens: weights are the rows of the MMA. One expert has none."""
    compare(f"--model {model} --experts 3 --format {fmt}", idle=True)


@pytest.mark.xdist_group("moe-prefill")
def test_prefill_with_the_sizes_of_a_model():
    """Tiles of pairs of CTAs, full ones and others, of two experts; the third one has no token."""
    flags = "--model gpt-oss-120b --experts 3 --tokens 130 --format nvfp4 --tile-rows 256"
    compare(flags, idle=True)
