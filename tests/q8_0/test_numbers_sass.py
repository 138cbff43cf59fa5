"""ptxas' code of the products of numbers: products that overlap, few instructions for a weight."""

from __future__ import annotations

from collections import Counter

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, read, tools_found
from q8_0.blocks import INTERLEAVED, LAYOUTS, SOA
from q8_0.numbers.choose import SHAPES, with_shape
from q8_0.numbers.config import DTYPES, NumbersConfig
from q8_0.numbers.launch import compile_kernel

pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas"),
]
PAIRS = 32  # of weights that a thread rounds in an iteration of the main loop
# Most instructions of the loop for a pair, waits and products included.
LIMITS = {("fp16", SOA): 9.8, ("fp16", INTERLEAVED): 9.8, ("bf16", SOA): 12.0,
          ("bf16", INTERLEAVED): 12.0}  # fmt: skip
CASES = [(dtype, layout, shape) for shape in SHAPES for dtype in DTYPES for layout in LAYOUTS]


def figures_of(config: NumbersConfig, folder) -> tuple:
    """Return the figures and the function of a config's machine code."""
    path = folder / "product.cubin"
    path.write_bytes(compile_kernel(config, "sm_90a").cubin)
    return read(path)


@pytest.mark.parametrize(("dtype", "layout", "shape"), CASES, ids=str)
def test_products_overlap(dtype, layout, shape, tmp_path):
    """No kernel is serialised, and none spills."""
    config = with_shape(NumbersConfig(layout, dtype, dtype), shape)
    found, _ = figures_of(config, tmp_path)
    assert (found["serialised"], found["stack"], found["spills"]) == (False, 0, 0)


@pytest.mark.parametrize(("dtype", "layout"), LIMITS, ids=str)
def test_the_loop(dtype, layout, tmp_path):
    """Two bytes are loaded at a time, and each pair is rounded by the fewest instructions."""
    _, function = figures_of(NumbersConfig(layout, dtype, dtype), tmp_path)
    bodies = [function.loops[head] for head in function.loops_with("HGMMA")]
    code = function.code(min(bodies, key=len))  # the other loop is that over tiles
    kinds = Counter(instruction.opcode.split(".")[0] for instruction in code)
    assert kinds["HGMMA"] == 8
    if dtype == "fp16":
        assert kinds["HMUL2"] == PAIRS
    else:
        assert (kinds["FFMA"], kinds["F2FP"]) == (2 * PAIRS, PAIRS)
    assert len(code) <= LIMITS[dtype, layout] * PAIRS
