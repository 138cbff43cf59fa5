"""tcgen05.mma and TMA compared with published numbers of a B200, and the modelled main loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cycle_model.engine import layout as L
from cycle_model.engine.tables import mma_parts
from cycle_model.gpus import GPUS
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from kernelkit.call.launch import emulation
from lab.cycles.mainloop_plan import MainloopConfig
from lab.cycles.mainloops import Published, published_in, row_of, run_mainloop
from ptxemu.options import Options

B200 = GPUS["B200"]
TABLE = Path(__file__).parents[2] / "results" / "published_mainloops_b200.csv"
# (m, n, CTAs, A in tensor memory): cycles between two products, and from one to the end of a wait
PUBLISHED = {
    (64, 64, 1, False): (32.02, 152),
    (64, 256, 1, False): (128.0, 248),
    (128, 64, 1, False): (48.02, 168),
    (128, 112, 1, False): (60.01, 192),
    (128, 128, 1, False): (64.02, 200),
    (128, 64, 1, True): (32.02, 136),
    (128, 256, 1, True): (128.03, 232),
    (128, 64, 2, False): (25.02, 173),
    (128, 128, 2, False): (32.01, 197),
    (256, 64, 2, False): (43.02, 202),
    (256, 128, 2, False): (64.03, 234),
    (128, 64, 2, True): (18.02, 162),
    (256, 256, 2, True): (128.02, 266),
}  # SA, BF16; other formats differ by less than 1 %


@pytest.mark.parametrize(("m", "n", "ctas", "in_tmem"), PUBLISHED)
def test_the_law_of_an_mma_is_the_published_one(m, n, ctas, in_tmem):
    interval, latency = PUBLISHED[m, n, ctas, in_tmem]
    parts = mma_parts(B200, m, n, ctas, in_tmem)
    assert parts.next / L.PART == pytest.approx(interval, rel=0.035)
    name = f"commit_latency_{'tmem' if in_tmem else 'smem'}_{ctas}"
    alone = (parts.next + parts.tail) / L.PART + B200.value(name)
    assert alone == pytest.approx(latency, rel=0.06)


def test_the_table_has_every_row_that_ran():
    rows = [*published_in(TABLE)]
    assert len(rows) == 702
    assert {row.group for row in rows} == {"BF16", "FP8_E4M3"}
    assert rows[0].nbytes == (64 + 16) * 131072 * 2


def test_another_table_is_refused_with_a_column_that_it_lacks(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("# source\nTILE_M,TILE_N\n64,16\n")
    with pytest.raises(ValueError, match="'dtype' is missing"):
        [*published_in(path)]


@pytest.mark.parametrize(
    ("given", "message"),
    [((32, 64, 64), "m=32"), ((64, 24, 64), "n=24"), ((64, 64, 24), "k=24"),
     ((128, 256, 512), "0 stages")],
)  # fmt: skip
def test_tiles_that_do_not_exist_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        MainloopConfig(*given, "bf16")


@pytest.mark.parametrize(
    ("config", "stages"),
    [(MainloopConfig(64, 32, 16, "bf16"), 2), (MainloopConfig(128, 64, 256, "e4m3"), 3)],
)
def test_the_main_loop_is_right_and_clean(config, stages):
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float8_e4m3fn
    generator = torch.Generator().manual_seed(1)
    a, b = (
        torch.randn(rows, 7 * config.k, generator=generator).to(dtype)
        for rows in (config.m, config.n)
    )
    d = torch.full((config.m, config.n), torch.nan)
    with emulation(Options(check=True)) as run:
        run_mainloop(config, a, b, d, stages)
    assert not run.reports[0].findings
    torch.testing.assert_close(d.double(), a.double() @ b.double().T, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="stages=17"):
        run_mainloop(config, a, b, d, 17)


@pytest.mark.parametrize(
    ("tile", "dtype", "stages", "us"),
    [
        ((128, 64, 32), "bf16", 8, 611.9),  # TMA's rows
        ((64, 128, 128), "e4m3", 8, 209.9),  # TMA and the tensor core share shared memory
        ((64, 64, 32), "e4m3", 2, 1087.4),  # the latency of a stage's round trip
    ],
)
def test_what_bounds_a_main_loop(tile, dtype, stages, us):
    if not tools_found():
        pytest.skip(HOW_TO_GET_TOOLS)
    config = MainloopConfig(*tile, dtype)
    row = row_of(Published(config, dtype, stages, 131072, us), B200.changed(clock=1.965), 0)
    assert abs(row["error"]) < 0.07
