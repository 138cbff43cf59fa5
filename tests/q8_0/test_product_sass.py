"""What ptxas made of the product's loop: nothing is spilled, and few instructions stand beside an
mma, whose results alone need eight. No result shows either."""

from __future__ import annotations

from collections import Counter

import pytest

from cycle_model.sass.listing import read
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, resources, tools_found
from q8_0.blocks import INTERLEAVED, SOA
from q8_0.product.choose import Sizes, choose
from q8_0.product.launch import compile_kernel
from q8_0.product.split import STAGES_OF_TURN

pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas"),
]
ADDED = 8  # instructions that bring the four sums of an mma to its accumulators
# Instructions of the loop for each of its mmas, at most.
LIMITS = {
    (SOA, "sm_90a"): 11.2,
    (SOA, "sm_89"): 11.0,
    (SOA, "sm_80"): 11.2,
    (INTERLEAVED, "sm_90a"): 13.0,
}


def loop_of(path):
    """Instructions of the main loop, those of the turns of interleaved blocks once."""
    _, function = read(path)
    (head,) = function.loops_with("IMMA")
    body = function.loops[head]
    return function.code(body)


@pytest.mark.parametrize(("layout", "arch"), LIMITS, ids=lambda word: word)
def test_the_loop(layout, arch, tmp_path):
    sizes = Sizes(2048, 8192, 2048)
    config = choose(layout, "bf16", sizes, arch, aligned=True, vector=True)
    path = tmp_path / "product.cubin"
    path.write_bytes(compile_kernel(config, arch).cubin)
    (used,) = resources(path)
    assert used.stack == 0
    assert used.registers * config.threads * config.ctas_per_sm <= 65_536
    code = loop_of(path)
    words = Counter(instruction.word for instruction in code)
    mmas = words["IMMA"]
    assert mmas == config.warp_tokens // 16 * config.warp_rows // 8 * 2
    assert words["FFMA"] == ADDED * mmas
    assert words["I2F"] + words["I2FP"] == 0  # no integer is converted
    assert words["LDSM"] == (config.warp_tokens // 16 + config.warp_rows // 16) * 2
    # All turns of interleaved blocks stand there, one is executed.
    turns = words["PRMT"] // STAGES_OF_TURN * (STAGES_OF_TURN - 1) if layout == INTERLEAVED else 0
    assert (len(code) - turns) / mmas <= LIMITS[layout, arch]
