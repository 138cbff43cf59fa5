"""The command-line flags that spell a MoE layer, in groups; `_moe_layers.layer_of` makes it."""

from __future__ import annotations

import argparse

from moe.config import DEFAULT_GRANULARITY, GRANULARITIES, TILE_N, TILE_ROWS
from moe.formats import FORMATS
from moe.routing.config import SCORINGS

DTYPES = ("bf16", "fp16")
FOUND = ("tensor", "token")  # what a global scale may be found from
PRODUCTS = ("w13", "w2")
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


def scale(text: str) -> str | float:
    """Argument type: 'tensor', 'token' or a positive number."""
    if text in FOUND:
        return text
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: a number, {' or '.join(FOUND)}") from error
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
    return value


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of a layer."""
    group = parser.add_argument_group("layer")
    group.add_argument("--model", choices=MODELS, help="its hidden size, I, activation and router")
    for name, words in (
        ("tokens", "T"), ("hidden", "H"), ("intermediate", "I"), ("experts", "E"),
        ("top-k", "choices of a token"),
    ):  # fmt: skip
        plain = PLAIN[name.replace("-", "_")]
        group.add_argument(f"--{name}", type=int, metavar="N", help=f"{words}; {plain}")
    group.add_argument("--activation", choices=ACTIVATIONS, help=f"{PLAIN['activation']}")
    group.add_argument("--scoring", choices=SCORINGS, help=f"of the router; {PLAIN['scoring']}")
    group.add_argument("--dtype", choices=DTYPES, default="bf16", help="of x and the output; bf16")
    group.add_argument("--format", choices=FORMATS, default="nvfp4", help="of products; nvfp4")
    group.add_argument(
        "--granularity", type=int, choices=GRANULARITIES, default=DEFAULT_GRANULARITY,
        help=f"rows of gate, then of up, in w13; {DEFAULT_GRANULARITY}",
    )  # fmt: skip
    words = "global scale in nvfp4: a number that is known, or found: 'tensor', 'token'"
    group.add_argument("--x-scale", type=scale, metavar="S", help=f"{words}; tensor")
    group.add_argument("--h-scale", type=scale, metavar="S", help="of what SwiGLU gives; 300")
    group.add_argument("--amax", action="store_true", help="find the largest |h|, too")
    group.add_argument(
        "--tile-rows", type=int, metavar="N", help=f"one of {TILE_ROWS}; chosen by sizes"
    )


def add_product_arguments(parser: argparse.ArgumentParser) -> None:
    """Which of the two products, and what of its config fused_moe leaves to sizes."""
    group = parser.add_argument_group("product")
    words = f"which of the two; {PRODUCTS[0]}"
    group.add_argument("--product", choices=PRODUCTS, default=PRODUCTS[0], help=words)
    group.add_argument("--tile-n", type=int, metavar="N", help=f"one of {TILE_N}; chosen by sizes")
    group.add_argument("--carry", action="store_true", help="8 columns at a time; granularity 8")
