"""The flags of benchmarks; those of steps stand in `flags/steps.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fmha.config import FP8, HEAD_DIMS, IO_DTYPES, SCHEDULES
from gqa_lowlatency.config import KV_DTYPES, TUNABLE
from kernelkit.compile.arch import ARCHITECTURES
from lab.flags import attention
from lab.tools import groups
from lab.tools.groups import add, switch

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
ROWS = ("anchor", "gpt-oss", "gqa", "mla", "fp8", "hd512")
FMHA_PEERS = ("fmha", "mma.sync", "fa4", "cudnn", "fa2", "flashinfer")
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
            raise argparse.ArgumentTypeError(f"{part!r}: a number for one of {', '.join(known)}")
        fields[name] = int(number)
    return fields


def add_fmha(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py fmha`."""
    group = parser.add_argument_group("problems")
    some = {
        "nargs": "+",
        "choices": ROWS,
        "metavar": "SET",
        "shown": "anchor, or none with --shape",
    }
    add(group, "rows", f"sets of {', '.join(ROWS)}", (), **some)
    some = {"type": attention.shape, "action": "append", "metavar": attention.SHAPE}
    add(group, "shape", "own sizes, full and causal, repeatable", shown="none", **some)
    some = {"type": int, "choices": [*dict(HEAD_DIMS)], "nargs": "+", "metavar": "D"}
    words = "columns of Q and K: of --shape and the static table, and which rows of a set"
    add(group, "head-dim", words, (), shown=f"{' '.join(map(str, OWN_DIMS))}, and all", **some)
    some = {"choices": MASKS, "nargs": "+", "metavar": "MASK", "shown": "all"}
    add(group, "mask", f"of {', '.join(MASKS)}", (*MASKS,), **some)
    dtypes = {"choices": (*IO_DTYPES, FP8), "shown": "of the set, bf16 with --shape"}
    add(group, "dtype", "of q, k and v", "", **dtypes)
    add(group, "kv-dtype", "of k and v alone, with q in bf16", "", shown="none", choices=(FP8,))
    group = parser.add_argument_group("times, where there is a GPU")
    some = {"nargs": "+", "choices": FMHA_PEERS, "metavar": "NAME", "shown": "all"}
    add(group, "peers", f"of {', '.join(FMHA_PEERS)}", (), **some)
    words = "turns of each; a multiple of the peers is fair"
    add(group, "rounds", words, 10, type=groups.positive_count)
    wish = {"action": argparse.BooleanOptionalAction, "default": True}
    words = "overwrite L2 in front of each call; default: yes"
    group.add_argument("--flush", help=words, **wish)
    group.add_argument("--timing", help="take times; default: yes", **wish)
    group = parser.add_argument_group("static table")
    wish = {"action": argparse.BooleanOptionalAction}
    group.add_argument("--static", help="print it; default: where nothing is timed", **wish)
    add(group, "schedule", "of the kernels", "", shown="base", choices=SCHEDULES)
    add(group, "arch", "of the kernels", groups.ARCHS[0], choices=ARCHITECTURES)
    groups.add_report(parser.add_argument_group("output"), "TFLOP/s, or the static table")


def add_gqa(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py gqa`."""
    group, many = parser.add_argument_group("problems"), {"nargs": "+"}
    add(group, "batch", "entries", BATCHES, old=["BS"], shown="1 8 64", **many)
    many |= {"type": groups.positive_count, "shown": "1k 8k 64k"}
    add(group, "kv-len", "keys of each entry, also as 8k", KV_LENS, old=["kvL"], **many)
    add(group, "q-heads", "query heads", 64, old=["qH"])
    add(group, "kv-heads", "KV heads", 8, old=["kvH"])
    add(group, "head-dim", "columns of a head", 128, old=["dH", "D"])
    add(group, "dtype", "e4m3: of K and V, with bf16 queries", "bf16", choices=KV_DTYPES)
    group = parser.add_argument_group("who is timed")
    some = {"nargs": "+", "choices": PEERS, "metavar": "NAME", "shown": "all"}
    add(group, "peers", f"of {', '.join(PEERS)}", **some)
    words = "time decode tuned like this, too: cluster=8,warps=16,stages=2,parts=1"
    add(group, "tune", words, (), nargs="+", type=tuning, metavar="X=N", shown="none")
    switch(group, "host", "what an eager call costs the host, and nothing else")
    groups.add_report(parser.add_argument_group("output"), "latency")


def add_host(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py kvcache-host`."""
    add(parser, "blocks", "of the pools", 100_000)
    words = "blocks taken and given back at a time"
    add(parser, "batches", words, POOL_BATCHES, nargs="+", shown="1 to 10000")
    add(parser, "requests", "of the manager", REQUESTS, nargs="*", shown="1 32 256")
    add(parser, "repeats", "rounds, fewer of long ones", 2000)
    add(parser, "vllm", "vLLM's sources, a peer", type=Path, metavar="CHECKOUT")
    groups.add_json(parser)
    groups.add_file(parser, "show", "tables of an earlier run's file, nothing is measured")


def add_tier(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py kvcache-tier`."""
    add(parser, "blocks", "in a transfer", 128)
    add(parser, "ctas", "of the copy kernel", CTAS, nargs="*", shown=" ".join(map(str, CTAS)))
    groups.add_json(parser)
    groups.add_file(parser, "show", "the table of an earlier run's file, nothing is measured")


def add_emulator(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py emulator`; those of a case are of fmha's."""
    attention.add_case(parser, attention.PLAIN | {"q_len": 512, "kv_len": 512})
    group = parser.add_argument_group("run")
    some = {"nargs": "+", "choices": EMULATED, "shown": "all"}
    add(group, "kernel", "whose launches", EMULATED, **some)
    groups.add_schedule(group)
    add(group, "repeat", "launches behind the first one, of which the quickest counts", 20)
    add(group, "processes", "that share the CTAs of a grid", 1)
    group = parser.add_argument_group("output")
    groups.add_file(group, "show", "the table of an earlier run's file, nothing is measured")
    switch(group, "markdown", "with --show: the table for a page")
    groups.add_file(group, "json", "every figure with its machine, a line per row")


def add_first_call(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py first-call`."""
    add(parser, "device", "of tensors", choices=("cpu", "cuda"), shown="a GPU if there is one")
    some = {"nargs": "+", "choices": OPERATORS, "shown": "all that run"}
    add(parser, "operators", "whose first calls", **some)
    add(parser, "repeat", "processes that find the kernels", 3)
    groups.add_json(parser)


def add_eager(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench.py eager`."""
    groups.add_json(parser, "the figures with their setting")
