"""The merge of attention results: parts of many rows, as a list or as one stacked tensor."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch

from kernelkit.merge.api import merge
from lab.cases.steps import Arguments, Maker, Outputs, Problem, expect_close, normal

HEADS = 32
HEAD_DIMS, PARTS, FORMS = (64, 128, 512), (2, 4, 8), ("list", "stack")
LIMIT = 0.01  # O is rounded to bf16


def makers(hidden: int) -> dict[str, list[Maker]]:
    """By step."""
    kinds = itertools.product(HEAD_DIMS, PARTS, FORMS)
    return {"merge": [partial(_merge, *kind) for kind in kinds]}


def _merge(head_dim: int, parts: int, form: str, rows: int) -> Problem:
    """Counted are the bytes of the parts' O, read, and of the merged O, written."""
    heads = math.gcd(rows, HEADS)
    shape = (parts, 1, rows // heads, heads, head_dim)

    def draw(seed: int, device: str) -> Arguments:
        lse = normal(seed + 1, device, parts, 1, heads, rows // heads).float()
        stack = normal(seed, device, *shape), lse
        return (stack if form == "stack" else list(zip(*stack, strict=True)),)

    def check(arguments: Arguments, outputs: Outputs) -> None:
        """Against a softmax over the parts in fp32."""
        (given,) = arguments
        o, lse = given if form == "stack" else map(torch.stack, zip(*given, strict=True))
        weights = lse.softmax(dim=0).transpose(-1, -2)[..., None]
        expect_close(outputs[0].float(), (weights * o).sum(dim=0), LIMIT)
        expect_close(outputs[1], lse.logsumexp(dim=0), LIMIT)

    name = f"{parts} parts of head_dim {head_dim}, {form}"
    nbytes = (parts + 1) * rows * head_dim * torch.bfloat16.itemsize
    return Problem("merge", name, rows, nbytes, draw, {"merge": merge}, check)
