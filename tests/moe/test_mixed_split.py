"""CTAs that share a tile of Hopper's grouped GEMM along K, in the emulator under its checker:
values, bits for every order of arrival, choices and refusals, and the removal of each wait.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from kernelkit.plan import hw
from lab.problems import mixed_gemm as cases
from lab.problems.grouped_gemm import CHECKED, PATIENCE, checked
from lab.problems.mixed_gemm import Case
from moe.mixed.choose import LEAST_UNITS, choose_split
from moe.mixed.config import SPLIT_ROWS, SPLITS, MixedConfig
from moe.mixed.fragments import fragments
from moe.mixed.launch import write_rows
from moe.mixed.sm90 import exchange, roles
from moe.mixed.sm90.plan import make_plan
from ptxemu import Options, PtxEmuError
from tests.moe.mixed_space import FIRST

CTAS = 4  # two clusters of two, or one of four: each has several tiles
# A short ring, eleven units of K: all shares except the last have more steps than stages.
PLAIN = Case(
    (9, 0, 17), 704, 136, form=None, bias=True, room=3, tile_rows=8, teams=3, parts=1, split=2
)  # fmt: skip
GATHERED = replace(FIRST, counts=(33, 0, 1, 9), k=672, tile_rows=32, split=4)
ONE_UNIT = replace(PLAIN, k=64, columns=40, teams=2, split=4)
LATE = Options("adversarial", 1, check=True, limit=PATIENCE)


@pytest.fixture(autouse=True)
def _few_ctas_and_stages(monkeypatch):
    monkeypatch.setattr("moe.mixed.launch.sms_of", lambda device: CTAS)
    monkeypatch.setattr("moe.mixed.sm90.plan.MAX_STAGES", 5)


def result_of(case: Case, options: Options = CHECKED) -> torch.Tensor:
    inputs = case.inputs()
    result = cases.run(case, options)
    for report in cases.judge(case, result, inputs):
        assert report.ok, f"{case}: {report}"
    return result.view(torch.int16)


@functools.cache
def expected(case: Case) -> torch.Tensor:
    return result_of(case)


@pytest.mark.parametrize("case", [PLAIN, GATHERED, ONE_UNIT], ids=["plain", "gathered", "one unit"])
def test_values_and_bits(case):
    """Under the checker, also if every event is as late as possible."""
    assert torch.equal(expected(case), result_of(case, LATE))


@pytest.mark.parametrize("tile", [
    {"tile_rows": 16, "teams": 2}, {"tile_rows": 64, "teams": 1}, {"teams": 3, "parts": 2}
])  # fmt: skip
def test_every_tile_gives_the_bits_of_its_split(tile):
    """Shares are whole pairs of units, for any stage size; they are added in the order of CTAs."""
    four = replace(PLAIN, split=4)
    assert torch.equal(expected(four), result_of(replace(four, **tile)))


def test_any_number_of_clusters_gives_the_same_bits():
    wanted = expected(PLAIN)
    for ctas in (1, 132):
        with mock.patch("moe.mixed.launch.sms_of", lambda device, ctas=ctas: ctas):
            assert torch.equal(wanted, result_of(PLAIN))


def test_a_share_is_no_other_ones():
    """x selects single columns of K at the borders of shares: each product occurs exactly once."""
    inputs = PLAIN.inputs()
    x = torch.zeros_like(inputs.x)
    x[:, [0, 255, 256, 383, 384, 703]] = 1.0
    one, two, four = (cases.run(replace(PLAIN, split=n), x=x)[: PLAIN.rows] for n in SPLITS)
    assert one.abs().amin(1).gt(0).any()
    for other in (two, four):
        assert (one.double() - other.double()).norm() < 0.01 * one.double().norm()


def test_in_e4m3():
    """Sums are scaled row by row after the exchange."""
    inputs, rows = PLAIN.inputs(), PLAIN.rows
    codes, scale = write_rows(inputs.x[:rows].contiguous(), "e4m3", backend="auto", arch="sm_90a")
    given = {"x": codes, "x_scale": scale, "w": fragments(inputs.quantised, None, "e4m3")}
    results = []
    for split in SPLITS:
        with checked(CHECKED):
            results.append(cases.call(replace(PLAIN, split=split), inputs, **given).double())
    exact = cases.definition(
        PLAIN, replace(inputs, x=codes.double() * scale[:, None]), torch.float64
    )
    for result in results:
        assert (result - exact).norm() < 2**-8 * exact.norm()


# -- each wait removed ----------------------------------------------------------------------------

SENDS = ("    wait(freed(scope, team), turn % 2 ^ 1)\n    owner", "    owner")
ADDS = ("    wait(arrived(scope, team), turn % 2)\n", "")
LEAVES = ("        wait(freed(scope, team), turn % 2 ^ 1)\n\n", "        pass\n\n")
RELAXED = ("mbarrier.arrive.release.cluster", "mbarrier.arrive.relaxed.cluster")


@pytest.mark.parametrize(("name", "change"), [
    ("exchange", SENDS), ("exchange", ADDS), ("leave", LEAVES), ("exchange", RELAXED)
], ids=["sends", "adds", "leaves", "relaxed"])  # fmt: skip
def test_a_wait_that_is_missing_is_found(changed, name, change):
    changed(exchange, [roles], name, change)
    with pytest.raises((AssertionError, PtxEmuError)):
        cases.run(PLAIN)


# -- choices and refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(("tiles", "tile_rows", "units", "split"), [
    (23, 8, 45, 4), (33, 8, 45, 4), (34, 8, 45, 2), (66, 64, 45, 2), (67, 8, 45, 1),
    (23, 128, 45, 1), (23, 8, 4 * LEAST_UNITS - 1, 2), (1, 8, 2 * LEAST_UNITS - 1, 1),
])  # fmt: skip
def test_what_sizes_choose(tiles, tile_rows, units, split):
    assert choose_split(tiles, tile_rows, units, "sm_90a") == split


def chosen(counts: tuple[int, ...], columns: int, k: int, **given) -> MixedConfig:
    return cases.arguments_of(Case(counts, k, columns, form=None, **given)).config


def test_products_of_models():
    """A single token: one expert of gpt-oss, the second product of Mixtral, of gpt-oss-120b."""
    assert chosen((1,), 2880, 2880).split == 4
    assert chosen((1, 1), 4096, 14336).split == 2
    assert chosen((1, 1, 1, 1), 2880, 2880).split == 1
    assert chosen((1,), 2880, 2880, teams=2).split == 1
    assert chosen((1,), 2880, 2880, split=1).split == 1
    assert chosen((1,), 2880, 2880, tile_rows=128).split == 1


def test_refused():
    inputs = PLAIN.inputs()
    for split, words in ((3, "split 3: one of"), (0, "split 0: one of")):
        with pytest.raises(NotImplementedError, match=words):
            cases.call(PLAIN, inputs, split=split)
    limit = f"split 2 with tile_rows 128: 1 beyond {SPLIT_ROWS} rows"
    with pytest.raises(NotImplementedError, match=limit):
        cases.call(PLAIN, inputs, tile_rows=128)


def test_sums_on_their_way_have_memory():
    for split in SPLITS:
        plan = make_plan(MixedConfig(tile_rows=32, teams=3, parts=2, split=split))
        assert plan.smem.bytes <= hw.SMEM_BYTES_PER_CTA
        assert plan.mails == {1: 0, 2: 2, 4: 3}[split]
        assert any(buffer.name == "mail" for buffer in plan.smem.buffers) == (split > 1)
