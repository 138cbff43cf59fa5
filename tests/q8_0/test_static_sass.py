"""ptxas' code of the readers: enough warps on an SM, no spills, loads that stay together."""

from __future__ import annotations

import re
from itertools import pairwise, product

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, disassemble, resources, tools_found
from kernelkit.plan import hw
from q8_0.choose import product_config
from q8_0.config import RESIDENT_WARPS, BatchConfig, DequantiseConfig, RepackConfig
from q8_0.launch import compile_kernel

pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas"),
]
ARCHS = ("sm_90a", "sm_89", "sm_100a")
KINDS = [
    ("bf16", 1), ("q8_1", 1), ("bf16", 8), ("q8_1", 8), ("bf16", 16), ("fp16", 16), ("q8_1", 16)
]  # fmt: skip


def cubin_of(config, arch, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(compile_kernel(config, arch).cubin)
    return path


def config_of(layout: str, dtype: str, tokens: int):
    sizes = tokens, 8192, 2048
    return product_config(layout, dtype, "bf16", sizes=sizes, bias=False, sms=132)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["soa", "interleaved"])
@pytest.mark.parametrize(("dtype", "tokens"), KINDS)
def test_registers_leave_room_for_warps(dtype, tokens, layout, arch, tmp_path):
    config = config_of(layout, dtype, tokens)
    (found,) = resources(cubin_of(config, arch, tmp_path))
    assert found.stack == 0
    warps = hw.REGISTERS_PER_SM // (-(-found.registers // 8) * 8 * hw.WARP_THREADS)
    assert warps // config.warps * config.warps >= RESIDENT_WARPS


@pytest.mark.parametrize("arch", [*ARCHS, "sm_120a"])
def test_numbers_of_32_bits_are_not_spilled(arch, tmp_path):
    """These kernels use no tensor core, and as many registers as they need: with more warps ptxas
    would spill."""
    for layout, tokens in product(("soa", "interleaved"), (1, 2, 4, 8, 16)):
        (found,) = resources(cubin_of(config_of(layout, "fp32", tokens), arch, tmp_path))
        assert found.stack == 0


@pytest.mark.parametrize(("dtype", "tokens"), KINDS[1:])
def test_loads_of_weights_are_on_their_way_before_the_first_product(dtype, tokens, tmp_path):
    """No tensor core instruction, dp4a or sum of products lies between a loop's first and last load
    of weights: it would wait for the first of them."""
    config = config_of("soa", dtype, tokens)
    text = disassemble(cubin_of(config, "sm_90a", tmp_path))
    code = re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z]\S*)", text)
    loads = [place for place, name in enumerate(code) if name.startswith("LDG.E.NA")]
    each = 2 * config.unrolled if isinstance(config, BatchConfig) else config.rows * config.unrolled
    assert len(loads) >= each
    products = [place for place, name in enumerate(code) if re.match("HMMA|IMMA|IDP", name)]
    runs = sum(any(a < p < b for p in products) for a, b in pairwise(loads))
    assert runs <= 1  # at the loop's start, if ptxas has rotated it


@pytest.mark.parametrize("arch", ARCHS)
def test_movers_fill_an_sm(arch, tmp_path):
    for config in (RepackConfig(True), RepackConfig(False), DequantiseConfig("soa", "bf16")):
        (found,) = resources(cubin_of(config, arch, tmp_path))
        assert (found.stack, found.registers <= 64) == (0, True), config
