"""Choice and number of tiles, compared with every distribution of rows to experts."""

from __future__ import annotations

import itertools
import json

import pytest

from lab.house.source import ROOT
from lab.problems.grouped_gemm import Case
from moe import launch
from moe.api import grouped_gemm
from moe.choose import FEW, check_tile_rows, choose_tile_n, choose_tile_rows, row_tiles
from moe.config import TILE_ROWS, GroupedConfig
from moe.sm100.plan import make_plan

MODELLED = ROOT / "results" / "moe_tiles_b200.json"

CHOICES = [  # rows, experts, most rows of one -> rows of a tile, for four bits and for eight
    (8, 384, 1, 8, 8),  # a token of a large model
    (64, 384, 8, 8, 8),
    (65, 384, 9, 16, 16),
    (128, 384, 16, 16, 16),
    (136, 384, 17, 32, 32),
    (256, 384, 32, 32, 32),
    (257, 384, 33, 64, 64),  # a second tile of 32 rows would begin at an odd column of factors
    (60 * 384, 384, 3072, 64, 64),
    (60 * 384 + 1, 384, 3080, 64, 128),
    (128 * 384, 384, 6145, 64, 128),
    (132 * 384, 384, 6145, 128, 128),
    (132 * 384 + 1, 384, 6145, 128, 256),
    (384 * 384, 384, 9000, 128, 256),
    (384 * 384 + 1, 384, 9000, 256, 256),
    (200, 1, 200, 128, 128),  # a pair's tile would have empty rows
    (255, 1, 255, 128, 128),
    (256, 1, 256, 128, 256),
    (385, 1, 385, 256, 256),
    (100, 2, 33, 64, 64),
]


@pytest.mark.parametrize(("rows", "experts", "most", "four", "eight"), CHOICES)
def test_choices(rows, experts, most, four, eight):
    assert choose_tile_rows(rows, experts, most, 4) == four
    assert choose_tile_rows(rows, experts, most, 8) == eight


def test_limits_are_where_the_model_has_the_next_tile_faster():
    """Between the modelled averages, the chosen tile takes at most 6 % longer than the best one."""
    for row in json.loads(MODELLED.read_text("utf-8"))["rows"]:
        bits = 4 if row["formats"] == "nvfp4 x nvfp4" else 8
        rows = 128 * row["average"]
        tile_rows = choose_tile_rows(rows, 128, rows, bits)
        tile = f"{tile_rows}x{choose_tile_n(rows, 5760, tile_rows, bits)}"
        best = min(value for name, value in row.items() if "x" in name)
        assert row[tile] <= 1.06 * best, row


WIDTHS = [  # rows, packed columns, rows of a tile, bits -> columns of a tile
    (100_000, 6144, 64, 4, 128),  # weights are the M of the MMA
    (100_000, 128, 128, 4, 128),
    (128 * 6, 6144, 128, 4, 128),  # 6 x 24 wide tiles, four too few for 148 SMs
    (128 * 7, 6144, 128, 4, 256),
    (256 * 3, 6144, 256, 4, 128),  # 3 x 24 pairs of CTAs
    (256 * 3 + 1, 6144, 256, 4, 256),
    (100_000, 256, 256, 4, 256),
    (100_000, 6144, 256, 8, 128),
]


@pytest.mark.parametrize(("rows", "columns", "tile_rows", "bits", "tile_n"), WIDTHS)
def test_widths(rows, columns, tile_rows, bits, tile_n):
    assert choose_tile_n(rows, columns, tile_rows, bits) == tile_n


def test_what_is_chosen_is_possible():
    sizes = (0, 1, 8, 9, 16, 17, 100, 128, 129, 1000, 100_000)
    for rows, experts in itertools.product(sizes, (1, 2, 8, 384)):
        for most in {min(rows, bound) for bound in (-(-rows // experts), 16, rows)}:
            chosen = choose_tile_rows(rows, experts, most, 4)
            assert chosen in TILE_ROWS
            check_tile_rows(chosen, most)


@pytest.mark.parametrize("tile_rows", FEW)
def test_a_tile_of_few_rows_holds_an_expert(tile_rows):
    check_tile_rows(tile_rows, tile_rows)
    words = f"tile_rows {tile_rows}: an expert may have {tile_rows + 1} rows"
    with pytest.raises(ValueError, match=words):
        check_tile_rows(tile_rows, tile_rows + 1)
    check_tile_rows(64, 10_000)


@pytest.mark.parametrize("tile_rows", [2, 3, 8])
def test_the_bound_of_tiles_is_met_and_never_passed(tile_rows):
    """All counts of three experts with up to six rows each are tried."""
    found: dict[tuple[int, int], int] = {}
    for counts in itertools.product(range(7), repeat=3):
        tiles = sum(-(-count // tile_rows) for count in counts)
        for most in range(max(counts), 7):
            key = sum(counts), most
            found[key] = max(found.get(key, 0), tiles)
    for (rows, most), tiles in found.items():
        bound = row_tiles(rows, 3, tile_rows, most)
        assert bound >= tiles, (rows, most)
        if most >= rows:
            assert bound == tiles, (rows, most)
    assert row_tiles(1000, 500, 8, 8) == 500
    assert row_tiles(3, 500, 128, 3) == 3
    assert row_tiles(0, 500, 128, 0) == 0


def given(counts: tuple[int, ...], columns: int = 64) -> tuple:
    case = Case(counts, 128, columns, form=None, granularity=0)
    return *case.inputs(), case.offsets


@pytest.fixture
def launched(monkeypatch):
    """Rows of a tile and CTAs of each launch."""
    seen = []

    def record(config: GroupedConfig, given: list, *_: object) -> None:
        make_plan(config)
        seen.append((config.tile_rows, given[0].ctas))

    monkeypatch.setattr(launch, "compile_for", lambda config, arch: config)
    monkeypatch.setattr(launch, "launch", record)
    return seen


@pytest.mark.parametrize(("counts", "options", "expected"), [
    ((3, 5), {}, (8, 2)),
    ((3, 6), {}, (16, 2)),
    ((3, 6), {"most_rows": 6}, (8, 2)),
    ((3, 6), {"most_rows": 100}, (16, 2)),  # no expert has more than nine
    ((8, 8, 8), {"most_rows": 8}, (8, 3)),  # five, if one could have more
    ((3, 6), {"tile_rows": 128}, (128, 2)),
    ((3, 27, 0), {}, (32, 3)),  # 30 rows of three experts are in three tiles at most
    ((3, 30, 0), {}, (64, 3)),
    ((1, 299), {}, (128, 4)),  # one tile and three
    ((1, 899), {}, (256, 10)),  # one tile and two, each of a pair of CTAs
])  # fmt: skip
def test_what_is_launched(launched, counts, options, expected):
    grouped_gemm(*given(counts), **options)
    assert launched == [expected]


def test_no_more_ctas_than_sms(launched, monkeypatch):
    monkeypatch.setattr(launch, "sms_of", lambda device: 5)
    x, w, offsets = given((300, 300, 300), 512)
    for tile_rows, ctas in ((64, 5), (256, 4)):
        grouped_gemm(x, w, offsets, tile_rows=tile_rows)
        assert launched.pop() == (tile_rows, ctas)


def test_wide_tiles(launched):
    """300 rows are at most three tiles of 128, 512 columns two of 256; there are two pairs."""
    x, w, offsets = given((300,), 512)
    for tile_rows, ctas in ((128, 6), (256, 8)):
        grouped_gemm(x, w, offsets, tile_rows=tile_rows, tile_n=256)
        assert launched.pop() == (tile_rows, ctas)
