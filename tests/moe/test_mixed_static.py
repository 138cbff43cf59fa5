"""ptxas' code of Hopper's grouped GEMM: products overlap, and nothing spills."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, read, tools_found
from kernelkit.compile import compiler as kernel_compile
from kernelkit.compile import store
from kernelkit.compile.compiler import compile_once
from kernelkit.plan import hw
from moe.mixed import config as limits
from moe.mixed.choose import choose_split, choose_teams, choose_tile_rows, tiles_of
from moe.mixed.config import PARTS, SPLITS, TEAMS, TILE_ROWS, MixedConfig
from moe.mixed.launch import KERNELS
from moe.mixed.sm90 import kernel, roles
from moe.mixed.sm90.plan import make_plan

pytestmark = pytest.mark.usefixtures("whole_ptxas")
needs_tools = pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)

GROUPS, ARCH = 4, "sm_90a"
# Both products of a layer, the first with all features of an epilogue.
FIRST = MixedConfig(swiglu=True, limit=True, bias=True, pdl=True)
GATHERED = replace(FIRST, gather=True)
SECOND = MixedConfig(bias=True, pdl=True)
NVFP4 = replace(FIRST, fmt="nvfp4", bias=False)
FP8 = replace(FIRST, x="e4m3", row_scale=True, out="e4m3")
FP8_SECOND = replace(SECOND, x="e4m3")
KINDS = (FIRST, FP8, NVFP4, SECOND, FP8_SECOND, GATHERED)
EXPERTS = (1, 2, 8, 32, 128, 256, 384)
COLUMNS = (1024, 1536, 2880, 4096, 5760, 7168, 14336, 28672)  # weight rows of models
ROWS = [n << power for n in (1, 3) for power in range(15)]
UNITS = (6, 45, 224)  # of K


def chosen(x: str) -> list[tuple[int, int, int, int]]:
    """All (rows of a tile, warpgroups, multiples of 64 weight rows of each, CTAs that share K) that
    can be chosen for rows of x."""
    found = set()
    for rows, experts, columns in itertools.product(ROWS, EXPERTS, COLUMNS):
        for tile_rows in choose_tile_rows(rows, experts, ARCH, x):
            teams, parts = choose_teams(rows, experts, columns, tile_rows, ARCH, x)
            tiles = tiles_of(rows, experts, columns, tile_rows, teams * parts)
            splits = {choose_split(tiles, tile_rows, n, ARCH) for n in UNITS}
            found |= {(tile_rows, teams, parts, split) for split in splits}
    return sorted(found)


def with_tile(kind: MixedConfig, tile: tuple[int, int, int, int]) -> MixedConfig:
    return replace(kind, **dict(zip(("tile_rows", "teams", "parts", "split"), tile, strict=True)))


def is_possible(config: MixedConfig) -> bool:
    try:
        make_plan(config)
    except (ValueError, NotImplementedError):
        return False
    return True


def is_met(kind: MixedConfig, tile: tuple[int, int, int, int]) -> bool:
    """Whether sizes can lead to this tile for this kind; only the fewest rows are gathered."""
    return tile in TILES[kind.x] and (not kind.gather or tile[0] == TILE_ROWS[0])


# Each tile with one kind, alternating; then with every kind; then every tile.
TILES = {x: chosen(x) for x in ("bf16", "e4m3")}
EVERY = sorted({*itertools.chain(*TILES.values())})
MET = [[kind for kind in KINDS if is_met(kind, tile)] for tile in EVERY]
QUICK = [with_tile(kinds[n % len(kinds)], tile)
         for n, (tile, kinds) in enumerate(zip(EVERY, MET, strict=True))]  # fmt: skip
MATRIX = [config for tile, kinds in zip(EVERY, MET, strict=True) for kind in kinds
          if (config := with_tile(kind, tile)) not in QUICK]  # fmt: skip
SWEEP = [config for tile in itertools.product(TILE_ROWS, TEAMS, PARTS, SPLITS) for kind in KINDS
         if not is_met(kind, tile) and is_possible(config := with_tile(kind, tile))]  # fmt: skip


def in_groups(configs: list[MixedConfig]) -> list:
    """Parameters in groups of xdist: kernels are not shared, so configs can be split between
    workers."""
    marks = [pytest.mark.xdist_group(f"moe-mixed-static-{number}") for number in range(GROUPS)]
    named = ("fmt", "x", "swiglu", "tile_rows", "teams", "parts", "split")
    return [
        pytest.param(each, marks=marks[n % GROUPS],
                     id="-".join(str(getattr(each, name)) for name in named))
        for n, each in enumerate(configs)
    ]  # fmt: skip


def figures(config: MixedConfig, folder: Path) -> dict:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_once(config, ARCH, KERNELS[ARCH]).cubin)
    return read(cubin)[0]


def check(config: MixedConfig, folder: Path) -> None:
    found = figures(config, folder)
    assert (found["serialised"], found["stack"], found["spills"]) == (False, 0, 0)
    assert found["registers"] * make_plan(config).roles.threads <= hw.REGISTERS_PER_SM


@needs_tools
@pytest.mark.parametrize("config", in_groups(QUICK))
def test_every_tile_that_is_chosen(config, tmp_path):
    check(config, tmp_path)


@needs_tools
@pytest.mark.parametrize("config", in_groups(MATRIX))
def test_every_kind_of_it(config, tmp_path):
    check(config, tmp_path)


@needs_tools
@pytest.mark.parametrize("config", in_groups(SWEEP))
def test_every_other_tile(config, tmp_path):
    check(config, tmp_path)


# -- what makes ptxas serialise -------------------------------------------------------------------


@pytest.fixture
def _nothing_known(monkeypatch):
    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.setenv(store.VARIABLE, "off")


@needs_tools
@pytest.mark.usefixtures("_nothing_known")
def test_too_few_registers_serialise(monkeypatch, tmp_path):
    """Each of two widths has registers for weights: `OTHERS` keeps no more registers free than
    necessary."""
    config = with_tile(FIRST, (128, 3, 1, 1))
    assert len(make_plan(config).widths) == 1
    monkeypatch.setattr(limits, "OTHERS", limits.OTHERS - 4)
    assert len(make_plan(config).widths) == 2
    assert figures(config, tmp_path)["serialised"]


@needs_tools
@pytest.mark.usefixtures("_nothing_known")
def test_a_branch_in_front_of_registers_of_weights_serialises(changed, tmp_path):
    """The branch frees a stage between a product in flight and the registers of the next one."""
    begin, call = " " * 20, "self.release(scope, held[unit], "
    branch = f"{begin}if step > 0:\n{begin}    {call}Boolean(True))\n"
    changed(roles, [kernel], "Math", (f"{begin}{call}step > 0)\n", branch))
    assert figures(with_tile(FIRST, (16, 3, 1, 1)), tmp_path)["serialised"]
