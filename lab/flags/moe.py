"""The flags that spell a MoE layer; `lab.problems.moe.layer_of` makes it."""

from __future__ import annotations

import argparse
from pathlib import Path

from lab.tools import groups
from lab.tools.groups import add, switch
from moe.config import DEFAULT_GRANULARITY, GRANULARITIES, TILE_N, TILE_ROWS
from moe.formats import FORMATS
from moe.mixed.config import ARCHS as MIXED_ARCHS
from moe.routing.config import SCORINGS

ARCHS = ("sm_100a",)
# what the products take of a token -> what their kernels are written for
ARCHS_OF = {"quantised": ARCHS, "bf16": MIXED_ARCHS, "e4m3": ("sm_90a",)}
ACTIVATION_DTYPES = (*ARCHS_OF,)
DTYPES = ("bf16", "fp16")
FOUND = ("tensor", "token")  # what a global scale may be found from
PRODUCTS = ("w13", "w2")
TUNED = ("teams", "parts", "split")
# name -> arguments of SwiGLU
ACTIVATIONS: dict[str, dict[str, float]] = {
    "swiglu": {},
    "deepseek-v4": {"limit": 10.0},
    "gpt-oss": {"alpha": 1.702, "beta": 1.0, "limit": 7.0},
}
# True sizes of a layer; experts and tokens are those of the flags. 384 and 128 experts in truth.
MODELS = {
    "deepseek-v4-pro": {
        "hidden": 7168, "intermediate": 3072, "activation": "deepseek-v4",
        "scoring": "sqrtsoftplus",
    },
    "gpt-oss-120b": {
        "hidden": 2880, "intermediate": 2880, "activation": "gpt-oss", "scoring": "softmax",
    },
}  # fmt: skip
OF_A_MODEL = {"tokens": 3, "experts": 2, "top_k": 2}  # where no flag says otherwise
PLAIN = {
    "tokens": 9, "hidden": 256, "intermediate": 128, "experts": 6, "top_k": 2,
    "activation": "swiglu", "scoring": "softmax",
}  # fmt: skip
# of moe.models.CONFIGS, and lab.bench.moe_peers, which import torch
MODEL_NAMES = (
    *("gpt-oss-120b", "gpt-oss-20b", "deepseek-v3", "deepseek-v4-pro", "deepseek-v4-flash"),
    *("kimi-k2", "qwen3-235b-a22b", "qwen3-30b-a3b", "mixtral-8x7b", "mixtral-8x22b"),
)
# one of each family whose layers differ, and both DeepSeeks
ONE_OF_EACH = (
    *("gpt-oss-120b", "deepseek-v3", "deepseek-v4-pro", "kimi-k2", "qwen3-235b-a22b"),
    "mixtral-8x7b",
)
PARTS = ("layer", "w13", "w13-ordered", "w2")
PEERS = (
    *("moe", "moe-e4m3", "moe-steps", "triton", "triton-plain", "torch"),
    *("humming", "humming-ordered", "humming-tight", "humming-ordered-tight"),
    *("humming-e4m3", "humming-ordered-e4m3"),
    *("marlin", "flashinfer", "deepgemm-e4m3"),
)
ROUTINGS = ("balanced", "random", "power-law")
MODEL_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
OF_MODELS = (
    "routing",
    "format",
    "parts",
    "peers",
    "rounds",
    "flush",
    "eager",
)  # flags with --model alone
SIZES = {
    "tokens": "number of tokens",
    "hidden": "hidden size, the width of a token",
    "intermediate": "intermediate size, the width of an expert",
    "experts": "number of experts, all on this GPU",
    "top-k": "experts per token",
}


def scale(text: str) -> str | float:
    """Argument type: 'tensor', 'token' or a positive number."""
    if text in FOUND:
        return text
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a number, {' or '.join(FOUND)}"
        ) from error
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
    return value


def add_layer(parser: argparse.ArgumentParser) -> None:
    """All flags of a layer."""
    group = parser.add_argument_group("layer")
    words = "use the hidden and intermediate size, activation and router of this model"
    add(group, "model", words, choices=MODELS)
    for name, words in SIZES.items():
        add(group, name, words, shown=str(PLAIN[name.replace("-", "_")]))
    add(
        group,
        "activation",
        "activation of the experts",
        choices=ACTIVATIONS,
        shown=PLAIN["activation"],
    )
    add(group, "scoring", "scoring of the router", choices=SCORINGS, shown=PLAIN["scoring"])
    add(group, "dtype", "dtype of x and the output", "bf16", choices=DTYPES)
    words = (
        "activations of the products: quantised to --format on Blackwell; bf16 or e4m3 on Hopper"
    )
    add(group, "activations", words, "quantised", choices=ACTIVATION_DTYPES)
    words = "format of both operands, or of the weights only with --activations bf16 or e4m3"
    add(group, "format", words, "nvfp4", choices=FORMATS)
    switch(group, "bias", "add a bias to both products, as in gpt-oss")
    words = "rows of gate in w13 that alternate with as many rows of up"
    add(group, "granularity", words, DEFAULT_GRANULARITY, type=int, choices=GRANULARITIES)
    found = {"type": scale, "metavar": "S"}
    words = "global scale of x in nvfp4: a known number, or found from each token or tensor"
    add(group, "x-scale", words, shown="token", **found)
    words = "global scale of the result of SwiGLU; 1 with --activations e4m3"
    add(group, "h-scale", words, shown="300", **found)
    switch(group, "amax", "also find the largest |h|")
    add(group, "tile-rows", f"rows per tile, one of {TILE_ROWS}", shown="by sizes")


def add_product(parser: argparse.ArgumentParser) -> None:
    """Flags of `explain.py moe`: which of a layer's two products, and what of its config
    fused_moe leaves to sizes."""
    add_layer(parser)
    group = parser.add_argument_group("product")
    add(group, "product", "which of the layer's two products", PRODUCTS[0], choices=PRODUCTS)
    add(group, "arch", "architecture to compile for", choices=groups.SERVED, shown=groups.SERVED[0])
    add(group, "tile-n", f"columns per tile, one of {TILE_N}", shown="by sizes")
    switch(group, "carry", "quantise 8 columns at a time; needs --granularity 8")
    for name, words in {
        "teams": "warpgroups that compute", "parts": "times 64 rows of weights for each of them",
        "split": "CTAs that share a tile along K",
    }.items():  # fmt: skip
        add(group, name, f"on Hopper: {words}", shown="by sizes")


def add_dump(parser: argparse.ArgumentParser) -> None:
    """Flags of `dump.py moe`."""
    add_product(parser)
    switch(parser, "grid", "print a table over tile_rows, with several formats and outputs")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py moe`."""
    add_layer(parser)
    group = groups.add_run(parser)
    groups.add_tolerance(group)
    words = f"columns per tile of packed experts, one of {TILE_N}"
    add(group, "tile-n", words, type=int, choices=TILE_N, shown="by sizes")


def add_models(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py moe --model`."""
    group = parser.add_argument_group("layers of models, on Hopper, compared with peers")
    some = {"nargs": "+", "metavar": "NAME"}
    words = f"a layer of these instead of the steps: {', '.join(MODEL_NAMES)}"
    add(group, "model", words, (), choices=MODEL_NAMES, shown="none", **some)
    words = f"how tokens choose experts, of {', '.join(ROUTINGS)}"
    add(group, "routing", words, ROUTINGS[1:2], choices=ROUTINGS, shown=ROUTINGS[1], **some)
    add(group, "format", "format of the weights", "mxfp4", choices=("mxfp4", "nvfp4"))
    words = f"the whole layer, and its products: {', '.join(PARTS)}"
    add(group, "parts", words, PARTS, choices=PARTS, shown="all", **some)
    add(
        group, "peers", f"peers to time: {', '.join(PEERS)}", (), choices=PEERS, shown="all", **some
    )
    add(group, "rounds", "rounds of each peer", 10, type=groups.positive_count)
    wish = {"action": argparse.BooleanOptionalAction, "default": True}
    words = "overwrite L2 before each call; default: yes"
    group.add_argument("--flush", help=words, **wish)
    words = "time calls as well as CUDA graphs; default: yes"
    group.add_argument("--eager", help=words, **wish)


def add_errors(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py models`."""
    group = parser.add_argument_group("layers of models")
    words = f"models: {', '.join(MODEL_NAMES)}"
    some = {"nargs": "+", "metavar": "NAME", "choices": MODEL_NAMES}
    add(group, "model", words, (), shown="one of each family", **some)
    switch(group, "markdown", "print the table in Markdown")
    words = "print the table of such a file instead, in Markdown"
    group.add_argument("--show", type=Path, metavar="FILE", help=words)
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures to this file"
    )
