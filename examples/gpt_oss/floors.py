"""Lower bounds of a step's kernel times, to compare with what they needed.

The GPU has to read bytes once, as fast as a large read, and to multiply, as fast as torch does with
large matrices. The bound is the longer of the two. Each kernel with a bound belongs to one of three
parts: experts, attention, dense products. Writes and elementwise work could be part of a product's
kernel and have no bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from examples.gpt_oss.config import Config
from examples.gpt_oss.report import Kernel
from examples.gpt_oss.weights import Weights

EXPERTS, ATTENTION, DENSE, CACHE, REST = "experts", "attention", "dense products", "cache", "rest"
PACKAGES = {"moe": EXPERTS, "fmha": ATTENTION, "gqa_lowlatency": ATTENTION, "kvcache": CACHE}
PRODUCT = re.compile("nvjet|gemm|gemv|splitK|cutlass", re.IGNORECASE)  # in the names of torch's
READ_BYTES, SIDE, TURNS = 1 << 31, 8192, 10  # of what is timed


@dataclass(frozen=True)
class Speed:
    """Bytes in a second of a read, and FLOP of a product in bf16, of the GPU at hand."""

    read: float
    product: float

    @classmethod
    def measured(cls, device: torch.device) -> Speed:
        """Both, by torch."""
        large = torch.zeros(READ_BYTES // 8, dtype=torch.int64, device=device)
        a, b = (torch.randn(SIDE, SIDE, device=device).bfloat16() for _ in range(2))
        return cls(READ_BYTES / _seconds(large.max), 2 * SIDE**3 / _seconds(lambda: torch.mm(a, b)))


def _seconds(call: Callable[[], object]) -> float:
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TURNS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / TURNS


@dataclass(frozen=True)
class Part:
    """Time of one part of a step.

    Attributes:
        microseconds: Time of its kernels.
        floor: Lower bound in microseconds, or None.
    """

    name: str
    microseconds: float
    floor: float | None


def part_of(kernel: Kernel) -> str:
    """The part that a kernel belongs to."""
    if kernel.package == "example":
        return DENSE if "product" in kernel.name else REST
    if kernel.package in PACKAGES:
        return PACKAGES[kernel.package]
    return DENSE if PRODUCT.search(kernel.name) else REST


def parts_of(
    kernels: Sequence[Kernel], steps: int, work: Mapping[str, tuple[float, float]], speed: Speed
) -> list[Part]:
    """Return the parts of one of the `steps` that ran these kernels. work: see `work_of`."""
    found = []
    for name in (EXPERTS, ATTENTION, DENSE, CACHE, REST):
        spent = sum(kernel.microseconds for kernel in kernels if part_of(kernel) == name) / steps
        floor = None
        if name in work:
            read, flop = work[name]
            floor = 1e6 * max(read / speed.read, flop / speed.product)
        found.append(Part(name, spent, floor))
    return found


def part_table(parts: Sequence[Part]) -> list[str]:
    """Lines: microseconds of a step, the floor, and how many times it that is."""
    lines = ["      us     floor   times  part"]
    for part in parts:
        beside = " " * 18
        if part.floor:
            beside = f"{part.floor:10.1f} {part.microseconds / part.floor:7.2f}"
        lines.append(f"{part.microseconds:8.1f}{beside}  {part.name}")
    return lines


def work_of(
    config: Config,
    weights: Weights,
    added: Sequence[int],
    before: Sequence[int],
    *,
    experts_share: float = 1.0,
    tokens_share: float = 1.0,
) -> dict[str, tuple[float, float]]:
    """(bytes, FLOP) of a step that adds so many tokens to each request, behind so many.

    Bytes of experts are those that balanced routing chooses, so of few tokens an expectation; of
    keys and values what each request's layers see, once. Behind the last layer's attention there
    is one token of each request. experts_share, tokens_share: a rank's, of all.
    """
    form, layers = config.experts, weights.layers
    tokens, wanted = sum(added) * tokens_share, len(added)
    behind = [tokens] * (len(layers) - 1) + [wanted]  # the attention of each layer
    unchosen = 1 - form.router.top_k / form.experts
    chosen = [
        layer.experts.nbytes * (1 - unchosen**t) for layer, t in zip(layers, behind, strict=True)
    ]
    routed = form.router.top_k * sum(behind) * experts_share
    dense = [tensor for layer in layers for tensor in (layer.qkv, layer.out, layer.router)]
    multiplied = wanted * weights.head.numel() + sum(
        tokens * layer.qkv.numel() + count * (layer.out.numel() + layer.router.numel())
        for layer, count in zip(layers, behind, strict=True)
    )
    keys, pairs = _seen(config, added, before)
    row = 2 * config.kv_heads * config.head_dim * weights.head.element_size()
    width = config.q_heads * config.head_dim
    return {
        EXPERTS: (sum(chosen), 6.0 * form.hidden * form.intermediate * routed),
        ATTENTION: (row * keys, 4.0 * width * pairs * tokens_share),
        DENSE: (sum(tensor.nbytes for tensor in (*dense, weights.head)), 2.0 * multiplied),
    }


def _seen(config: Config, added: Sequence[int], before: Sequence[int]) -> tuple[float, float]:
    """Count keys that are read, and pairs of a query and a visible key, over layers and requests.

    Tokens at the beginning of a window count as if it were full.
    """
    keys = pairs = 0.0
    for sliding in config.sliding:
        for new, old in zip(added, before, strict=True):
            seen = min(config.window, old + new) if sliding else old + (new + 1) / 2
            keys += min(config.window + new, old + new) if sliding else old + new
            pairs += new * seen
    return keys, pairs
