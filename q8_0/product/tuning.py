"""What of the product with many tokens can be tuned, by sizes that a user names: see
`kernelkit.tune.tuner`."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kernelkit.call.tensors import DTYPES
from kernelkit.tune.tuner import Call, Subject
from q8_0.product.choose import TUNED, choices
from q8_0.product.launch import PRODUCT
from q8_0.tuning import SIZES, random_activations, random_weights


@dataclass(frozen=True)
class Shape:
    """tokens x cols in integers times a matrix of rows x cols. layout: of the weights; out: of the
    result."""

    tokens: int = 2048
    rows: int = 4096
    cols: int = 4096
    layout: str = "soa"
    out: str = "bf16"


def call(shape: Shape, device: torch.device, arch: str | None = None) -> Call:
    """A call of `product` on random integers."""
    weights = random_weights(shape.rows, shape.cols, shape.layout, device)
    x = random_activations(shape.tokens, shape.cols, device)
    given = {"weights": weights, "x": x, "out_dtype": DTYPES[shape.out], "arch": arch}
    return PRODUCT, given


def draw(order: random.Random) -> Shape:
    """Of models of today."""
    rows, cols = (order.choice((1024, 2048, 4096, 8192, 14336)) for _ in range(2))
    return Shape(round(2 ** order.uniform(5, 13)), rows, cols)


KNOWN = tuple(Shape(tokens, *size) for size in SIZES for tokens in (128, 512, 2048))
SUBJECT = Subject(TUNED, Shape, call, choices, draw, KNOWN)
