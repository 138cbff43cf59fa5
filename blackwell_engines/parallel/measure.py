"""Implementation of `python -m blackwell_engines.parallel`: compare a sequence shared by GPUs with
one GPU's result."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from blackwell_engines.parallel.ring import own_positions, own_tokens, ring_attention
from fmha import attention, reference
from kernelkit.numerics.tolerance import compare_output

EXACT_QUERIES = 8  # of a rank, whose results are compared with fp64


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    made = argparse.ArgumentParser(
        prog="python -m blackwell_engines.parallel",
        description="Starts one process per GPU (without GPUs two, in the emulator), lets them "
        "share a sequence, compares the result with fp64 and with that of one GPU, and on GPUs "
        "times both. Exit code 1: out of tolerance; 2: refused.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    gpus = torch.cuda.device_count()
    add(
        "--ranks",
        type=int,
        default=max(gpus, 2),
        help="processes, each with a GPU if there are any",
    )
    add(
        "--tokens",
        type=_count,
        default=65536 if gpus else 64,
        help="tokens of all ranks together, also as 64k",
    )
    add("--heads", type=int, default=64 if gpus else 4, help="query heads")
    add("--kv-heads", type=int, default=8 if gpus else 2, help="KV heads")
    add("--head-dim", type=int, default=128, help="columns of a head")
    add("--causal", action=argparse.BooleanOptionalAction, default=True, help="mask later keys")
    add("--repeats", type=int, default=20, help="timed calls; the median is shown")
    add("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return made


def _count(text: str) -> int:
    """65536, or 64k."""
    number, thousand = text.removesuffix("k"), 1024 if text.endswith("k") else 1
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a number of tokens, such as 65536 or 64k"
        )
    return int(number) * thousand


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 out of tolerance; 2 for what is refused."""
    options = parser().parse_args(arguments)
    gpus = torch.cuda.device_count()
    try:
        if gpus and options.ranks > gpus:
            raise ValueError(f"{options.ranks} ranks: there are {gpus} GPUs")
        own_positions(options.tokens, 0, options.ranks)
    except ValueError as refused:
        print(f"refused: {refused}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_a_rank, (options, folder), nprocs=options.ranks)
        found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    _show(found)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["within_tolerance"] else 1


def _on_a_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    meeting = f"file://{folder}/meet"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=meeting, rank=rank, world_size=options.ranks,
        device_id=device if on_gpu else None,
    )  # fmt: skip
    try:
        mine = _found(rank, options, device)
        ranks: list[Any] = [None] * options.ranks
        dist.all_gather_object(ranks, mine)
        if not rank:
            text = json.dumps(_together(ranks, options, device))
            Path(folder, "found.json").write_text(text, encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _found(rank: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Compare a rank's result with fp64 and with one GPU's result, and time it."""
    numbers = torch.Generator(device).manual_seed(0)  # the same sequence on every rank
    q, k, v = (
        torch.randn(
            (1, options.tokens, heads, options.head_dim), generator=numbers, device=device,
        ).bfloat16()
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )  # fmt: skip
    own = [own_tokens(x, rank, options.ranks) for x in (q, k, v)]

    shared = partial(ring_attention, *own, causal=options.causal)
    alone = partial(attention, q, k, v, causal=options.causal)
    ours, whole = shared(), alone()
    one = own_tokens(whole, rank, options.ranks)
    rows = torch.linspace(0, ours.shape[1] - 1, EXACT_QUERIES).long()
    places = own_positions(options.tokens, rank, options.ranks)[rows].tolist()
    exact = torch.cat([_exact(q, k, v, place, options.causal) for place in places], 1)
    picked = [x[:, rows.to(device)].cpu() for x in (ours, one)]
    report = compare_output(picked[0], exact.cpu(), picked[1], torch.bfloat16)
    apart = (ours.float() - one.float()).norm() / one.float().norm()
    found = {"ok": report.ok, "report": str(report), "apart": float(apart)}
    if device.type == "cuda":
        found |= {
            "shared_ms": _milliseconds(shared, options.repeats),
            "alone_ms": _milliseconds(alone, options.repeats),
        }
    return found


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: int, causal: bool
) -> torch.Tensor:
    """O of one query in fp64, [1, 1, Hq, D]."""
    seen = place + 1 if causal else q.shape[1]
    return reference.definition(q[:, place : place + 1], k[:, :seen], v[:, :seen]).o


def _milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The median of a call, all ranks beginning together."""
    call()
    found = []
    for _ in range(repeats):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def _together(
    ranks: Sequence[dict[str, Any]], options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Join the rows of all ranks: a caller waits for the slowest one."""
    on_gpu = device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "emulator",
        "torch": torch.__version__,
        **{name: value for name, value in vars(options).items() if name != "json"},
        "within_tolerance": all(each["ok"] for each in ranks),
        "beside_fp64": [each["report"] for each in ranks],
        "beside_one_gpu": max(each["apart"] for each in ranks),
    }
    if on_gpu:
        shared, alone = (max(each[f"{name}_ms"] for each in ranks) for name in ("shared", "alone"))
        found |= {"shared_ms": shared, "alone_ms": alone, "times": alone / shared}
    return found


def _show(found: dict[str, Any]) -> None:
    mask = "causal" if found["causal"] else "full"
    print(
        f"{found['tokens']} tokens, {found['heads']} / {found['kv_heads']} heads of "
        f"{found['head_dim']}, {mask}, {found['ranks']} ranks: {found['device']}"
    )
    for rank, report in enumerate(found["beside_fp64"]):
        print(f"rank {rank} beside fp64: {report}")
    print(f"beside one GPU: {found['beside_one_gpu']:.3%} in the norm")
    if "times" in found:
        one, several = f"one GPU {found['alone_ms']:.3f} ms", f"{found['ranks']} GPUs"
        print(f"{one}, {several} {found['shared_ms']:.3f} ms: {found['times']:.2f} x")
