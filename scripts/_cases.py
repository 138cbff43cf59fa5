"""One attention problem, its inputs, and its run on a backend: what the fmha scripts share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEED = 0


@dataclass(frozen=True)
class Case:
    """q [batch, sq, q_heads, head_dim]; k, v [batch, skv, kv_heads, head_dim]."""

    batch: int
    sq: int
    skv: int
    q_heads: int
    kv_heads: int
    dtype: str = "bf16"
    mask: str = "full"
    head_dim: int = 64

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}"
        return f"{self.dtype} {self.mask:<6} {self.sq} x {self.skv}, heads {heads}, B {self.batch}"

    def inputs(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v: standard normal, the same numbers on every device."""
        generator = torch.Generator().manual_seed(SEED)
        shapes = (
            (self.batch, self.sq, self.q_heads, self.head_dim),
            *[(self.batch, self.skv, self.kv_heads, self.head_dim)] * 2,
        )
        return tuple(
            torch.randn(shape, generator=generator).to(device, DTYPES[self.dtype])
            for shape in shapes
        )


def shape(text: str) -> tuple[int, int, int, int, int]:
    """Argument type: 'B,Sq,Skv,Hq,Hkv'."""
    try:
        batch, sq, skv, q_heads, kv_heads = (int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not B,Sq,Skv,Hq,Hkv") from error
    return batch, sq, skv, q_heads, kv_heads


def add_case_arguments(parser: argparse.ArgumentParser, default_shape: str) -> None:
    """--shape, --dtype and --mask of one case."""
    parser.add_argument(
        "--shape",
        type=shape,
        default=shape(default_shape),
        metavar="B,Sq,Skv,Hq,Hkv",
        help=f"default: {default_shape}",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    parser.add_argument("--mask", choices=("full", "causal"), default="full", help="default: full")


def case_of(options: argparse.Namespace) -> Case:
    """The case that `add_case_arguments` let the user spell."""
    return Case(*options.shape, dtype=options.dtype, mask=options.mask)
