"""One attention case, from its flags to its plan and its run: what the fmha commands share."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch

from fmha.api import attention, fields_of
from fmha.arguments import Arguments
from fmha.choose import choose_config
from fmha.config import TUNABLE, AttentionConfig
from fmha.plan import AttentionPlan, make_plan
from kernelkit.call.ranges import nvtx_range
from kernelkit.compile.plan_names import warps_of
from lab.problems.attention import Case, normalised
from lab.tools.place import Place, emulated
from ptxemu import LaunchReport

# Flags that are fields of a Case by the same name.
FIELDS = (
    *("dtype", "kv_dtype", "out_dtype", "scales", "causal", "window", "sink_tokens", "softcap"),
    *("sinks", "q_offset", "page_size", "rope_dim", "k_is_v", "pack_heads", "pdl", *TUNABLE),
)


def case_of(options: argparse.Namespace, of_shape: tuple[int, ...] = ()) -> Case:
    """The case that the flags spell, with another shape where one is given. Packed entries have
    lengths from 1 / batch of the longest up to it. ValueError for lengths that do not fit the
    batch."""
    keys, batch = options.kv_len, options.batch
    if len(keys) not in (1, batch):
        raise ValueError(f"--kv-len {keys} for --batch {batch} entries: one length, or as many")
    valid = options.kv_lens or (keys if len(keys) > 1 and not of_shape else ())
    shape = of_shape or (batch, options.q_len, max(keys), options.q_heads, options.kv_heads)
    batch, sq, skv, *heads = shape
    if len(valid) == 1 or (options.page_size and not valid):
        valid = (valid or (skv,)) * batch
    lengths = {side: [-(-longest * (entry + 1) // batch) for entry in range(batch)]
               for side, longest in (("q", sq), ("k", skv)) if side in options.packed}  # fmt: skip
    head_dim, v_head_dim = options.head_dim
    return Case(
        *(sq, skv, tuple(heads), batch),
        dims=(head_dim, v_head_dim or head_dim),
        kv_lens=valid or None,
        normalize=not options.raw,
        **{f"{side}_lens": tuple(rows) for side, rows in lengths.items()},
        **{name: getattr(options, name) for name in FIELDS},
    )


def arguments_of(case: Case, device: str) -> Arguments:
    """What the operator gets; on 'meta' there is nothing to compute, only to plan."""
    options = case.arguments()
    del options["return_lse"]
    return Arguments(**fields_of(*case.inputs(device), moved(options, device)))


def moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    """The same with tensors on the device, those of a pair, too."""

    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(move, value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in options.items()}


def check(case: Case, arch: str = "sm_100a") -> None:
    """Raise ValueError or NotImplementedError for a case that `attention` refuses."""
    arguments_of(case, "cpu").check()
    plan_of(case, arch)


def attend(
    case: Case, place: Place, options: argparse.Namespace, **more: Any
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[LaunchReport]]:
    """((O normalised, LSE), the emulator's launch reports).

    more: fields of the emulator's options.
    """
    inputs = case.inputs(place.device)
    arguments = moved(case.arguments(), place.device) | place.given
    with emulated(options, **more) as launches, nvtx_range(str(case)):
        results = attention(*inputs, **arguments)
    if place.backend == "cuda":
        torch.cuda.synchronize()
    o, lse = results[:2]
    return (o if case.normalize else normalised(*results), lse), launches


def config_of(case: Case, arch: str = "sm_100a") -> AttentionConfig:
    """What `attention` compiles for the case; not checked yet."""
    return choose_config(arguments_of(case, "meta"), arch)


def plan_of(case: Case, arch: str = "sm_100a") -> AttentionPlan:
    """The checked plan of the config that `attention` chooses for the case."""
    return make_plan(config_of(case, arch), arch)


def role_of_warp(case: Case, arch: str = "sm_100a") -> dict[int, str]:
    """Warp index -> name of its role, in the order of the plan."""
    return warps_of(plan_of(case, arch).roles)


def instructions_by_role(case: Case, arch: str, launches: list[LaunchReport]) -> dict[str, int]:
    """Warp-instructions of all launches per role; empty where nothing was emulated."""
    counts: dict[str, int] = {}
    for warp, role in role_of_warp(case, arch).items() if launches else ():
        executed = sum(launch.by_warp.get(warp, Counter()).total() for launch in launches)
        counts[role] = counts.get(role, 0) + executed
    return counts
