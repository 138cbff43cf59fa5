"""ptxas' code of the product's loop: nothing is spilled, and few instructions accompany an mma. Its
results alone need eight, or four for pairs of numbers. No result shows either.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, read, resources, tools_found
from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.plan import hw
from q8_0.blocks import INTERLEAVED, LAYOUTS, SOA
from q8_0.product.choose import Sizes, choose
from q8_0.product.config import PAIRS, ProductConfig
from q8_0.product.launch import compile_kernel
from q8_0.product.load import STAGES_OF_TURN

pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas", "largest_tiles"),
]
ADDED = 8  # instructions that add the four sums of an mma to its accumulators
# Most instructions of the loop per mma, of ptxas 13.4.
LIMITS = {
    (SOA, "sm_90a"): 10.7,
    (SOA, "sm_89"): 10.7,
    (SOA, "sm_80"): 10.7,
    (SOA, "sm_100a"): 6.7,
    (SOA, "sm_120a"): 10.8,
    (INTERLEAVED, "sm_90a"): 12.9,
}


def loop_of(path: Path) -> list:
    """Instructions of the main loop; the variants for interleaved blocks are all included."""
    _, function = read(path)
    (head,) = function.loops_with("IMMA")
    body = function.loops[head]
    return function.code(body)


def compiled(config: ProductConfig, arch: str, folder: Path) -> Path:
    """Compile a config, check that nothing is spilled, and return the file with its machine
    code."""
    path = folder / "product.cubin"
    path.write_bytes(compile_kernel(config, arch).cubin)
    (used,) = resources(path)
    assert used.stack == 0, config
    assert used.registers * config.threads * config.ctas_per_sm <= hw.REGISTERS_PER_SM
    return path


@pytest.mark.parametrize(("layout", "arch"), LIMITS, ids=lambda word: word)
def test_the_loop(layout, arch, tmp_path):
    sizes = Sizes(2048, 8192, 2048)
    config = choose(layout, "bf16", sizes, arch, aligned=True, vector=True)
    code = loop_of(compiled(config, arch, tmp_path))
    words = Counter(instruction.word for instruction in code)
    mmas = words["IMMA"]
    assert mmas == config.warp_tokens // 16 * config.warp_rows // 8 * 2
    if config.adding == PAIRS:
        assert (words["FFMA2"], words["FFMA"]) == (ADDED // 2 * mmas, 0)
    else:
        assert words["FFMA"] == ADDED * mmas
    assert words["I2F"] + words["I2FP"] == 0  # no integer is converted
    assert words["LDSM"] == (config.warp_tokens // 16 + config.warp_rows // 16) * 2
    # All variants for interleaved blocks are in the loop, but one is executed.
    turns = words["PRMT"] // STAGES_OF_TURN * (STAGES_OF_TURN - 1) if layout == INTERLEAVED else 0
    assert (len(code) - turns) / mmas <= LIMITS[layout, arch]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nothing_is_spilled(layout, arch, tmp_path):
    """Any tile is tried, full or not, with and without a bias; interleaved weights also with blocks
    at any address."""
    for tokens, bias in (
        (2048, True),
        (2048, False),
        (100, False),
        (63, True),
        (31, True),
        (5, True),
    ):
        for aligned in {True, layout == SOA}:
            sizes, places = Sizes(tokens, 8192, 2048), {"aligned": aligned, "vector": True}
            config = choose(layout, "fp32", sizes, arch, **places, bias=bias)
            compiled(config, arch, tmp_path)
