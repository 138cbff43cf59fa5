"""The flags of benchmarks; those of steps stand in `flags/steps.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fmha.config import FP8, HEAD_DIMS, IO_DTYPES, SCHEDULES
from gqa_lowlatency.config import KV_DTYPES, TUNABLE
from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.plan.limits import MAX_TREE_TOKENS
from lab.flags import attention
from lab.tools import groups
from lab.tools.groups import RECIPES, add, switch

# of the static table of fmha -> fields of its config
MASKS = {
    "full": {},
    "causal": {"right": True},
    "window": {"right": True, "left": True},
    "window and sink tokens": {"right": True, "left": True, "sink_tokens": True},
    "causal softcap": {"right": True, "softcap": True},
}
OWN_DIMS = (64, 128)
# of lab.bench.fmha_peers, which imports torch
ROWS = ("anchor", "gpt-oss", "gqa", "mla", "fp8", "e4m3", "masks", "trees", "sparse", "hd512")
FMHA_PEERS = (
    *("fmha", "mma.sync", "fa4", "flex", "fa3", "cudnn-graph", "cudnn-graph-e4m3", "cudnn", "fa2"),
    "flashinfer",
)
# of lab.bench.gqa_peers.PEERS, which imports torch
PEERS = (
    *("decode", "decode pdl", "decode pdl kv-ready", "torch cudnn", "torch flash", "flex"),
    *("flashinfer xqa", "flashinfer trtllm-gen", "flashinfer fa2"),
)
BATCHES, KV_LENS = (1, 8, 64), (1024, 8192, 65536)
# of lab.bench.first_call
OPERATORS = ("attention", "decode", "merge", "moe", "append")
# of lab.bench.emulator
EMULATED = ("fmha", "decode", "grouped", "append")
POOL_BATCHES, REQUESTS = (1, 10, 100, 1000, 10000), (1, 32, 256)
CTAS = (4224, 132, 32, 8)


def tuning(text: str) -> dict[str, int]:
    """Argument type: 'cluster=8,warps=16'."""
    known, fields = (*TUNABLE, "parts"), {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in known or not number.isdecimal():
            raise argparse.ArgumentTypeError(
                f"{part!r}: expected a number for one of {', '.join(known)}"
            )
        fields[name] = int(number)
    return fields


def mask(text: str) -> str:
    """Argument type: a mask, a recipe, 'tree:N' or 'sparse:P'."""
    name, _, number = text.partition(":")
    most = {"tree": MAX_TREE_TOKENS, "sparse": 100}.get(name, 0)
    is_numbered = number.isdecimal() and 1 <= int(number) <= most
    if text not in (*MASKS, *RECIPES) and not is_numbered:
        names = ", ".join((*MASKS, *RECIPES, f"tree:1 to tree:{MAX_TREE_TOKENS}"))
        raise argparse.ArgumentTypeError(f"{text!r}: one of {names}, sparse:1 to sparse:100")
    return text


def add_fmha(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py fmha`."""
    group = parser.add_argument_group("problems")
    some = {
        "nargs": "+",
        "choices": ROWS,
        "metavar": "SET",
        "shown": "anchor, or none with --shape",
    }
    add(group, "rows", f"sets of problems: {', '.join(ROWS)}", (), **some)
    some = {"type": attention.shape, "action": "append", "metavar": attention.SHAPE}
    add(group, "shape", "other sizes, full and causal; repeatable", shown="none", **some)
    some = {"type": int, "choices": [*dict(HEAD_DIMS)], "nargs": "+", "metavar": "D"}
    words = "columns of Q and K: for --shape and the static table, and as a filter for sets"
    add(group, "head-dim", words, (), shown=f"{' '.join(map(str, OWN_DIMS))}, and all", **some)
    some = {"type": mask, "nargs": "+", "metavar": "MASK", "shown": "all but recipes"}
    names = ", ".join((*MASKS, *RECIPES))
    words = f"masks: {names}, tree:N for N draft tokens, or sparse:P for P %% of all blocks"
    add(group, "mask", words, (), **some)
    dtypes = {"choices": (*IO_DTYPES, FP8), "shown": "of the set, bf16 with --shape"}
    add(group, "dtype", "dtype of q, k and v", "", **dtypes)
    add(
        group, "kv-dtype", "dtype of k and v only, with q in bf16", "", shown="none", choices=(FP8,)
    )
    group = parser.add_argument_group("times, if there is a GPU")
    some = {"nargs": "+", "choices": FMHA_PEERS, "metavar": "NAME", "shown": "all"}
    add(group, "peers", f"peers: {', '.join(FMHA_PEERS)}", (), **some)
    words = "rounds of each peer; a multiple of their number is fair"
    add(group, "rounds", words, 10, type=groups.positive_count)
    wish = {"action": argparse.BooleanOptionalAction, "default": True}
    words = "overwrite L2 before each call; default: yes"
    group.add_argument("--flush", help=words, **wish)
    group.add_argument("--timing", help="measure times; default: yes", **wish)
    group = parser.add_argument_group("static table")
    wish = {"action": argparse.BooleanOptionalAction}
    group.add_argument(
        "--static", help="print the static table; default: if nothing is timed", **wish
    )
    add(group, "schedule", "schedule of the kernels", "", shown="base", choices=SCHEDULES)
    add(group, "arch", "architecture of the kernels", groups.ARCHS[0], choices=ARCHITECTURES)
    groups.add_report(parser.add_argument_group("output"), "TFLOP/s, or the static table")


def add_gqa(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py gqa`."""
    group, many = parser.add_argument_group("problems"), {"nargs": "+"}
    add(group, "batch", "entries", BATCHES, old=["BS"], shown="1 8 64", **many)
    many |= {"type": groups.positive_count, "shown": "1k 8k 64k"}
    add(group, "kv-len", "keys per entry, also as 8k", KV_LENS, old=["kvL"], **many)
    add(group, "q-heads", "query heads", 64, old=["qH"])
    add(group, "kv-heads", "KV heads", 8, old=["kvH"])
    add(group, "head-dim", "columns of a head", 128, old=["dH", "D"])
    add(group, "dtype", "dtype; e4m3 is for K and V, with bf16 queries", "bf16", choices=KV_DTYPES)
    group = parser.add_argument_group("peers")
    some = {"nargs": "+", "choices": PEERS, "metavar": "NAME", "shown": "all"}
    add(group, "peers", f"peers: {', '.join(PEERS)}", **some)
    words = "also time decode with this config: cluster=8,warps=16,stages=2,parts=1"
    add(group, "tune", words, (), nargs="+", type=tuning, metavar="X=N", shown="none")
    switch(group, "host", "measure only the host time of an eager call")
    groups.add_report(parser.add_argument_group("output"), "latency")


def add_host(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py kvcache-host`."""
    add(parser, "blocks", "blocks per pool", 100_000)
    words = "blocks allocated and freed at a time"
    add(parser, "batches", words, POOL_BATCHES, nargs="+", shown="1 to 10000")
    add(parser, "requests", "requests of the manager", REQUESTS, nargs="*", shown="1 32 256")
    add(parser, "repeats", "rounds; fewer if they are long", 2000)
    add(parser, "vllm", "vLLM's sources, to compare with", type=Path, metavar="CHECKOUT")
    groups.add_json(parser)
    groups.add_file(parser, "show", "print the tables of an earlier run's file; measure nothing")


def add_tier(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py kvcache-tier`."""
    add(parser, "blocks", "blocks per transfer", 128)
    add(parser, "ctas", "CTAs of the copy kernel", CTAS, nargs="*", shown=" ".join(map(str, CTAS)))
    groups.add_json(parser)
    groups.add_file(parser, "show", "print the table of an earlier run's file; measure nothing")


def add_emulator(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py emulator`; those of a case are of fmha's."""
    attention.add_case(parser, attention.PLAIN | {"q_len": 512, "kv_len": 512})
    group = parser.add_argument_group("run")
    some = {"nargs": "+", "choices": EMULATED, "shown": "all"}
    add(group, "kernel", "kernels to emulate", EMULATED, **some)
    groups.add_schedule(group)
    add(group, "repeat", "launches after the first one; the fastest counts", 20)
    add(group, "processes", "processes that share the CTAs of a grid", 1)
    group = parser.add_argument_group("output")
    groups.add_file(group, "show", "print the table of an earlier run's file; measure nothing")
    switch(group, "markdown", "with --show: the table in Markdown")
    groups.add_file(group, "json", "write every figure with its machine, one line per row")


def add_first_call(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py first-call`."""
    add(
        parser,
        "device",
        "device of the tensors",
        choices=("cpu", "cuda"),
        shown="a GPU if there is one",
    )
    some = {"nargs": "+", "choices": OPERATORS, "shown": "all that run"}
    add(parser, "operators", "operators whose first calls are timed", **some)
    add(parser, "repeat", "processes that find the kernels in the cache", 3)
    groups.add_json(parser)


def add_eager(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py eager`."""
    groups.add_json(parser, "the figures with their setting")


def add_toolchains(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py toolchains`."""
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="made by --make")
    group = parser.add_argument_group("kernels")
    words = "compile every case with the DSL of this environment into this folder"
    groups.add_file(group, "make", words)
    archs = (*groups.ALL_ARCHS, "sm_101a", "sm_110a")
    some = {"nargs": "+", "choices": archs, "metavar": "ARCH", "shown": "sm_90a"}
    add(group, "arch", "with --make: architectures", ("sm_90a",), **some)
    group = parser.add_argument_group("times, if there is a GPU")
    add(group, "rounds", "turns of each toolchain and case", 9, type=groups.positive_count)
    add(group, "turn", "samples of a turn", 8, type=groups.positive_count)
    groups.add_file(group, "times", "take the times from this file of an earlier run, not anew")
    group = parser.add_argument_group("output")
    groups.add_file(group, "show", "print the tables of an earlier run's file; measure nothing")
    switch(group, "markdown", "the tables in Markdown")
    groups.add_json(group)
