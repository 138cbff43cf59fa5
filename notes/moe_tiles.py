"""Tiles of Blackwell's grouped GEMM by the cycle model, from which `moe/choose.py` has its limits:
`PYTHONPATH=.:scripts python notes/moe_tiles.py --json FILE`, half an hour of a core.

The first product of gpt-oss-120b (128 experts, K = 2,880, N = 5,760) with rows of weights that
tokens choose at random, so that experts have more and fewer rows than the average. Modelled on a
B200, not measured.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

from cycle_model import gpus
from cycle_model.grid import LaunchModel
from cycle_model.launch import bind
from lab.problems.moe import blank
from lab.tools.common import write_json
from lab.tools.tables import show, table
from moe import grouped_gemm
from moe.arguments import Activation
from moe.models import of_model
from moe.reference_routing import permutation
from ptxemu.watch import watched

EXPERTS, K, N, TOP_K = 128, 2880, 5760, 4
AVERAGES = (16, 48, 64, 96, 128, 192, 256, 512)
TILES = ((64, 128), (128, 128), (128, 256), (256, 128), (256, 256))
FORMATS = (("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"))
CLUSTERS = 3


def microseconds(x_fmt: str, w_fmt: str, average: int, tile: tuple[int, int]) -> float:
    """Modelled microseconds of a launch whose weights come from memory."""
    generator = torch.Generator().manual_seed(average)
    tokens = average * EXPERTS // TOP_K
    noise = torch.rand(tokens, EXPERTS, generator=generator)
    offsets = permutation(noise.topk(TOP_K).indices.int(), EXPERTS).offsets
    rows = tokens * TOP_K
    x = blank((rows, K), x_fmt, EXPERTS, 1, "cpu")
    w = blank((EXPERTS, N, K), w_fmt, EXPERTS, EXPERTS, "cpu")
    form = of_model("gpt-oss-120b").activation
    encode = torch.ones(1) if x_fmt == "nvfp4" else None
    with watched(record=True, limit=None, clusters=CLUSTERS) as report:
        grouped_gemm(
            x, w, offsets, activation=Activation(32, **vars(form)), bias=torch.zeros(EXPERTS, N),
            out=x_fmt, encode_scale=encode, tile_rows=tile[0], tile_n=tile[1],
            backend="emulate", arch="sm_100a",
        )  # fmt: skip
    (launch,) = (bind(each.recording) for each in report.launches)
    return LaunchModel(launch, gpus.named("B200")).predict().microseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--json", type=Path, help="keep every figure there")
    options = parser.parse_args()
    rows = []
    for (x_fmt, w_fmt), average in itertools.product(FORMATS, AVERAGES):
        row = {"formats": f"{x_fmt} x {w_fmt}", "average": average}
        for tile in TILES:
            row["{}x{}".format(*tile)] = microseconds(x_fmt, w_fmt, average, tile)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        if options.json:
            write_json(options.json, {"gpu": "B200", "rows": rows})
    columns = [("activations x weights", "{formats}"), ("rows of an expert", "{average}")]
    names = ["{}x{}".format(*tile) for tile in TILES]
    columns += [(f"{name}\nus", f"{{{name}:.0f}}") for name in names]
    show(*table("tiles, modelled, not measured", columns, rows))


if __name__ == "__main__":
    main()
