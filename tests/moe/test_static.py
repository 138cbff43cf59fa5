"""The grouped GEMM before anything runs: shared and tensor memory of every config, and ptxas' code:
no config spills, and its registers fit an SM.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, resources, tools_found
from kernelkit.plan import hw
from moe.config import GRANULARITIES, OUT_BITS, PART, TILE_N, TILE_ROWS, GroupedConfig
from moe.formats import FORMATS
from moe.launch import compile_for
from moe.sm100.plan import ROLES, make_plan

pytestmark = pytest.mark.usefixtures("whole_ptxas")
needs_tools = pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)

# (tile_rows, tile_n) -> for nvfp4, mxfp4, mxfp8: (stages, bytes of one, columns of tensor memory).
# A stage of a CTA: lines of 128 bytes of rows of x and w, atoms of 512 bytes of scale factors.
MEMORY = {
    (8, 128): ((8, 21_504, 48), (8, 19_456, 32), (8, 18_432, 24)),
    (16, 128): ((8, 22_528, 64), (8, 20_480, 48), (8, 19_456, 40)),
    (32, 128): ((8, 24_576, 96), (8, 22_528, 80), (8, 21_504, 72)),
    (64, 128): ((6, 28_672, 160), (7, 26_624, 144), (7, 25_600, 136)),
    (128, 128): ((6, 36_864, 288), (6, 34_816, 272), (6, 33_792, 264)),
    (256, 128): ((7, 28_672, 288), (8, 26_624, 272), (8, 25_600, 264)),
    (128, 256): ((4, 55_296, 512), (4, 52_224, 504), (4, 50_688, 508)),
    (256, 256): ((5, 38_912, 512), (6, 35_840, 504), (6, 34_304, 508)),
}
TILES = tuple(MEMORY)
SHAPES = [{"tile_rows": rows, "tile_n": columns} for rows, columns in TILES]

QUICK = (
    GroupedConfig(limit=True, amax=True, out="nvfp4", granularity=8),
    GroupedConfig(limit=True, amax=True, out="nvfp4", tile_rows=8),
    GroupedConfig(granularity=64, out="fp32", tile_rows=256, bias=True),
    GroupedConfig("mxfp4", x_fmt="mxfp8", limit=True, bias=True, out="mxfp8", tile_rows=64),
)
OUTPUTS = ("bf16", "nvfp4", "mxfp8")
GRID = [
    GroupedConfig(fmt, granularity=granularity, limit=granularity > 0, out=out, amax=True)
    for fmt, granularity, out in itertools.product(FORMATS, (0, *GRANULARITIES), OUTPUTS)
]
# For each tile the config with most registers: numbers per row or expert, whole blocks, the amax.
OF_TILES = [
    GroupedConfig(
        fmt, fmt == "nvfp4", granularity, granularity > 0, out, amax=True, bias=bias, **shape
    )
    for bias in (False, True)
    for shape in SHAPES
    for fmt, granularity, out in (
        ("nvfp4", 8, "nvfp4"), ("nvfp4", 64, "fp32"), ("mxfp8", 16, "mxfp8"), ("mxfp4", 0, "bf16"),
    )
]  # fmt: skip
OF_TILES += [
    GroupedConfig("mxfp4", x_fmt="mxfp8", limit=True, bias=True, amax=True, out="mxfp8", **shape)
    for shape in SHAPES
]
CARRYING = [
    GroupedConfig(granularity=8, limit=True, out=out, amax=True, bias=bias, carry=True, **shape)
    for bias in (False, True)
    for shape in SHAPES
    if shape["tile_rows"] >= 128
    for out in OUTPUTS
]
LONGER = [config for config in dict.fromkeys((*OF_TILES, *CARRYING, *GRID)) if config not in QUICK]


@needs_tools
@pytest.mark.parametrize("config", [*QUICK, *LONGER], ids=str)
def test_no_config_spills(config, tmp_path):
    """Registers spill to the stack; the role with most registers sets those of all warps."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_for(config, "sm_100a").cubin)
    (usage,) = resources(cubin)
    assert usage.stack == 0
    assert usage.registers * ROLES.threads <= hw.REGISTERS_PER_SM


def test_every_tile_is_in_the_table():
    tiles = []
    for rows, columns in itertools.product(TILE_ROWS, TILE_N):
        with contextlib.suppress(ValueError):
            make_plan(GroupedConfig(tile_rows=rows, tile_n=columns))
            tiles.append((rows, columns))
    assert sorted(tiles) == sorted(TILES)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_shared_and_tensor_memory(tile, fmt):
    """Sizes equal the table and, for any output, are within the limits of a CTA."""
    stages, stage_bytes, columns = MEMORY[tile][list(FORMATS).index(fmt)]
    shape = {"tile_rows": tile[0], "tile_n": tile[1]}
    for granularity, out in itertools.product((0, *GRANULARITIES), (*OUT_BITS, *FORMATS)):
        plan = make_plan(GroupedConfig(fmt, granularity=granularity, out=out, **shape))
        assert (plan.stages, plan.stage_bytes) == (stages, stage_bytes)
        assert max(item.end for item in plan.tmem.ranges) == columns
        assert columns <= plan.tmem.allocated <= hw.TMEM_COLUMNS
        assert plan.smem.bytes <= hw.SMEM_BYTES_PER_CTA == 232_448
        assert plan.k_block * 4 == plan.k_stage
        assert plan.k_stage * plan.element_bits == 128 * 8
        scales = plan.x_scale_bytes + plan.w_scale_bytes
        assert plan.moved_bytes == stage_bytes - scales
        assert plan.group_bytes == plan.group * scales
        assert plan.group in (1, 2, 4)
        assert plan.group * plan.atoms <= 4


@pytest.mark.parametrize(("fmt", "column"), [("nvfp4", 208), ("mxfp4", 224), ("mxfp8", 240)])
@pytest.mark.parametrize("rows", [128, 256])
def test_accumulators_that_share_columns(fmt, column, rows):
    """The second one begins at a multiple of 16. The shared columns are in the part of each that
    the epilogue has read before it lets the next product begin."""
    plan = make_plan(GroupedConfig(fmt, tile_rows=rows, tile_n=256))
    assert plan.shares_columns
    begin, end = plan.tmem["acc1_begin"], plan.tmem["acc1"].end
    assert begin.begin == plan.second == column
    assert begin.end == plan.tmem["acc0"].end == plan.tmem["acc1"].begin == plan.n
    assert plan.tmem["x_scales"].begin == end == plan.second + plan.n
    assert begin.columns <= PART


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_memory_of_mixed_formats(tile):
    """Memory is that of mxfp8: an e2m1 element takes a byte. TMA counts half of them."""
    shape = {"tile_rows": tile[0], "tile_n": tile[1]}
    plan, other = (
        make_plan(GroupedConfig(**formats, **shape))
        for formats in ({"fmt": "mxfp4", "x_fmt": "mxfp8"}, {"fmt": "mxfp8"})
    )
    for name in ("stages", "stage_bytes", "k_stage", "k_block", "atoms", "smem", "tmem"):
        assert getattr(plan, name) == getattr(other, name)
    padding = plan.w_rows * 128 // 2
    assert plan.moved_bytes == other.moved_bytes - padding
    assert plan.edges["ab"].tx_bytes == other.edges["ab"].tx_bytes - padding
