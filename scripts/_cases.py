"""One attention problem, its inputs, and its run on a backend: what the fmha scripts share."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

import torch

from fmha import AttentionConfig, attention
from fmha.plan import AttentionPlan, make_plan
from kernelkit.launch import emulation
from ptxemu import LaunchReport, Options

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
        return f"{self.sq}x{self.skv} h{heads} b{self.batch} {self.dtype} {self.mask}"

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


def attend(
    case: Case, backend: str, options: Options
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[LaunchReport]]:
    """((O, LSE), the emulator's launch reports); backend 'cuda' or 'emulate'."""
    inputs = case.inputs("cuda" if backend == "cuda" else "cpu")
    with emulation(options) as emulated:
        outputs = attention(*inputs, causal=case.mask == "causal", return_lse=True, backend=backend)
    if backend == "cuda":
        torch.cuda.synchronize()
    return outputs, [launch for report in emulated.reports for launch in report.launches]


def plan_of(case: Case) -> AttentionPlan:
    """The plan of the config that `attention` chooses for the case."""
    return make_plan(AttentionConfig(head_dim=case.head_dim, dtype=case.dtype, mask=case.mask))


def role_of_warp(case: Case) -> dict[int, str]:
    """Warp index -> name of its role, in the order of the plan."""
    return {
        warp: role.name
        for role in plan_of(case).roles.roles
        for warp in range(role.first_warp, role.first_warp + role.warps)
    }


def instructions_by_role(case: Case, launches: list[LaunchReport]) -> dict[str, int]:
    """Warp-instructions of all launches per role; empty where nothing was emulated."""
    counts: dict[str, int] = {}
    for warp, role in role_of_warp(case).items() if launches else ():
        executed = sum(launch.by_warp.get(warp, Counter()).total() for launch in launches)
        counts[role] = counts.get(role, 0) + executed
    return counts
