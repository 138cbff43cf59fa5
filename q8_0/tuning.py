"""Tunable products, by sizes that a user names: see `kernelkit.tune.tuner`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from kernelkit.call.tensors import DTYPES
from kernelkit.tune.tuner import Call, Subject
from q8_0.activations import Activations
from q8_0.blocks import BLOCK, INTERLEAVED
from q8_0.choose import TUNED, choices
from q8_0.config import INTEGERS
from q8_0.launch import INTEGER_MATVEC, MATVEC
from q8_0.product.choose import TUNED as PRODUCTS_TUNED
from q8_0.product.choose import choices as choices_of_product
from q8_0.product.launch import PRODUCT
from q8_0.weights import Weights, empty


@dataclass(frozen=True)
class FewTokens:
    """Shape: tokens x cols times a matrix of rows x cols.

    layout: layout of the weights
    dtype: dtype of x, 'q8_1' for integers
    out: dtype of the result
    """

    tokens: int = 1
    rows: int = 4096
    cols: int = 4096
    layout: str = "soa"
    dtype: str = "bf16"
    out: str = "bf16"
    bias: bool = False


def call_few(shape: FewTokens, device: torch.device, arch: str | None = None) -> Call:
    """A call of `matvec` on random numbers."""
    weights = random_weights(shape.rows, shape.cols, shape.layout, device)
    given: dict[str, Any] = {"weights": weights, "out_dtype": DTYPES[shape.out], "arch": arch}
    if shape.bias:
        given["bias"] = torch.zeros(shape.rows, dtype=DTYPES[shape.out], device=device)
    if shape.dtype == INTEGERS:
        integers = random_activations(shape.tokens, shape.cols, device)
        return INTEGER_MATVEC, given | {"x": integers}
    x = torch.randn(shape.tokens, shape.cols, device=device).to(DTYPES[shape.dtype])
    return MATVEC, given | {"x": x}


def random_weights(rows: int, cols: int, layout: str, device: torch.device) -> Weights:
    """Quants are any, scales 2^-8."""
    weights = empty(rows, cols, layout, device)
    if device.type == "meta":
        return weights
    weights.data.random_(0, 256)
    scale = torch.tensor([2.0**-8], dtype=torch.float16, device=device).view(torch.uint8)
    if layout == INTERLEAVED:
        weights.data.view(rows, cols // BLOCK, BLOCK + 2)[..., :2] = scale
    else:
        weights.scales.copy_(scale.view(torch.float16).expand(weights.scales.shape))
    return weights


def random_activations(tokens: int, cols: int, device: torch.device) -> Activations:
    """Quants are any, scales 2^-4."""
    quants = torch.randint(-127, 128, (tokens, cols), dtype=torch.int8, device=device)
    scales = torch.full((tokens, cols // BLOCK), 2.0**-4, dtype=torch.float16, device=device)
    return Activations(quants, scales)


def draw_few(order: random.Random) -> FewTokens:
    """Draw sizes of current models."""
    rows, cols = (order.choice((1024, 2048, 4096, 8192, 14336)) for _ in range(2))
    return FewTokens(order.choice((1, 1, 2, 4, 8, 16)), rows, cols)


SIZES = ((8192, 2048), (2048, 8192), (6144, 2048))  # rows and columns
KNOWN = tuple(FewTokens(tokens, *size) for size, tokens in product(SIZES, (1, 4, 16)))
MATVECS = Subject(TUNED, FewTokens, call_few, choices, draw_few, KNOWN)


@dataclass(frozen=True)
class ManyTokens:
    """Shape: tokens x cols in integers times a matrix of rows x cols.

    layout: layout of the weights
    out: dtype of the result
    """

    tokens: int = 2048
    rows: int = 4096
    cols: int = 4096
    layout: str = "soa"
    out: str = "bf16"


def call_many(shape: ManyTokens, device: torch.device, arch: str | None = None) -> Call:
    """A call of `product` on random integers."""
    weights = random_weights(shape.rows, shape.cols, shape.layout, device)
    x = random_activations(shape.tokens, shape.cols, device)
    given = {"weights": weights, "x": x, "out_dtype": DTYPES[shape.out], "arch": arch}
    return PRODUCT, given


def draw_many(order: random.Random) -> ManyTokens:
    """Draw sizes of current models."""
    rows, cols = (order.choice((1024, 2048, 4096, 8192, 14336)) for _ in range(2))
    return ManyTokens(round(2 ** order.uniform(5, 13)), rows, cols)


KNOWN_MANY = tuple(ManyTokens(tokens, *size) for size in SIZES for tokens in (128, 512, 2048))
PRODUCTS = Subject(PRODUCTS_TUNED, ManyTokens, call_many, choices_of_product, draw_many, KNOWN_MANY)
