"""The flags of `cycles.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from lab.flags import moe
from lab.tools import groups
from lab.tools.groups import add

GPUS = ("B200", "GB200", "GB300", "H100", "H200")
MEMORY = ("cold", "warm")
PERTURBED = 12
BOOST = 1.965  # GHz of a B200 that is not at its limit: cycles over ns of its published latencies
OF_LAYERS = 3
OF_PUBLISHED = 32  # clusters: 12 misjudge causal grids by up to 28 %, 32 by 2 %


def clusters(text: str) -> int | tuple[int, ...] | None:
    """Argument type: '8', 'all', or '0,3,7'."""
    if text == "all":
        return None
    parts = text.split(",")
    numbers = tuple(groups.number(part) for part in parts if part.isdecimal())
    if len(numbers) < len(parts) or numbers == (0,):
        words = "expected a count from 1 on, 'all', or numbers such as 0,3,7"
        raise argparse.ArgumentTypeError(f"{text!r}: {words}")
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: give each cluster only once")
    return numbers if len(numbers) > 1 else numbers[0]


def edit(text: str) -> str:
    """Argument type: checked later, by what knows the parameters."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected NAME=NUMBER, 'apart OPCODE=N' or 'drop OPCODE'")
    return text


def add_parameters(group: argparse._ActionsContainer) -> None:
    """--parameters, of a GPU that was measured."""
    words = "parameters from `python -m lab.bringup.rates` instead of the model's"
    group.add_argument("--parameters", type=Path, metavar="FILE", help=words)


def add_beside(parser: argparse.ArgumentParser) -> None:
    """Add flags that choose which measured kernels are modelled, and how."""
    words = "results of bench.py on a Hopper GPU"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=words)
    group = parser.add_argument_group("model")
    group.add_argument(
        "--only", nargs="+", metavar="STEP", help="only these steps, such as decode or append"
    )
    how = {"type": groups.positive_count, "metavar": "N"}
    add(group, "every", "model only every Nth row", 1, **how)
    how = {"type": clusters, "metavar": "N", "shown": "8, spread over the grid"}
    add(group, "clusters", "clusters to run and model: a count, numbers, or all", 8, **how)
    how = {"type": groups.count, "metavar": "N"}
    add(group, "perturbed", "random sets of parameters within their ranges", PERTURBED, **how)
    words = "leave out problems of more than this, in MiB"
    add(group, "most-mib", words, 1 << 11, **how)
    how = {"type": groups.count, "metavar": "SECONDS"}
    add(group, "limit", "leave out launches that take longer to emulate here", 60, **how)
    add_parameters(group)
    group = parser.add_argument_group("output")
    groups.add_plot(group, "modelled over measured times")
    groups.add_json(group)


def add_mainloops(parser: argparse.ArgumentParser) -> None:
    """Add flags that choose which published main loops are modelled."""
    words = "a table with K, TILE_M, TILE_N, TILE_K, STAGES, dtype and time_ms"
    parser.add_argument("file", type=Path, metavar="FILE", help=words)
    group = parser.add_argument_group("model")
    add(group, "gpu", "GPU whose parameters are used", "B200", choices=("B200", "GB200", "GB300"))
    words = "clock of the GPU in GHz, with one SM busy"
    add(group, "clock", words, BOOST, type=groups.positive, metavar="GHZ")
    add(group, "every", "model only every Nth row", 1, type=groups.positive_count, metavar="N")
    how = {"type": groups.count, "metavar": "N"}
    add(group, "perturbed", "random sets of parameters within their ranges", 0, **how)
    add_parameters(group)
    group = parser.add_argument_group("output")
    groups.add_plot(group, "modelled over published times")
    groups.add_json(group)


def add_published(parser: argparse.ArgumentParser) -> None:
    """Add flags that choose which published rows are modelled, and how."""
    words = "published times, with columns hd, causal, batch, seqlen, fa4_tflops"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.csv", help=words)
    group = parser.add_argument_group("model")
    words = "a checkout of flash-attention instead of the installed one"
    group.add_argument("--source", type=Path, metavar="FOLDER", help=words)
    words = "only these rows, such as 'C hd64 causal'"
    group.add_argument("--only", nargs="+", metavar="ROWS", help=words)
    how = {"type": groups.positive_count, "metavar": "N"}
    add(group, "every", "model only every Nth row", 1, **how)
    words = "clusters to run and model if CTAs are not persistent"
    add(group, "clusters", words, OF_PUBLISHED, **how)
    how = {"type": groups.count, "metavar": "N"}
    add(group, "perturbed", "random sets of parameters within their ranges", 0, **how)
    words = "fit a parameter on hd128 by choosing among these values; at most three of these flags"
    how = {"action": "append", "metavar": "NAME=V1,V2"}
    group.add_argument("--fit", default=[], help=words, **how)
    add_parameters(group)
    group = parser.add_argument_group("output")
    groups.add_plot(group, "modelled over published times")
    groups.add_json(group)


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Add flags that choose which layers of experts are modelled."""
    group = parser.add_argument_group("layers")
    some = {"nargs": "+", "metavar": "NAME"}
    default = ("gpt-oss-120b", "deepseek-v4-pro")
    words = f"layers of these models: {', '.join(moe.MODEL_NAMES)}"
    add(group, "model", words, default, choices=moe.MODEL_NAMES, shown=" ".join(default), **some)
    how = {"type": groups.positive_count, "nargs": "+", "metavar": "N"}
    add(group, "tokens", "tokens of a layer", moe.MODEL_TOKENS, shown="1 to 16k", **how)
    words = f"how tokens choose experts, of {', '.join(moe.ROUTINGS)}"
    add(group, "routing", words, moe.ROUTINGS[:1], choices=moe.ROUTINGS, shown="balanced", **some)
    formats = ("nvfp4", "mxfp4", "mxfp8")
    add(group, "format", "format of the weights", choices=formats, shown="as for the peers")
    words = "format of the products' activations"
    add(group, "activations", words, choices=formats, shown="mxfp8 with mxfp4, else as the weights")
    how = {"type": groups.positive_count, "metavar": "N"}
    add(group, "tile-rows", "tile rows of both products", shown="by sizes", **how)
    group = parser.add_argument_group("model")
    add(group, "gpu", "GPU whose parameters are used", "B200", choices=("B200", "GB200", "GB300"))
    words = "clusters to run and model of each launch after the routing"
    add(group, "clusters", words, OF_LAYERS, **how)
    how = {"type": groups.count, "metavar": "N"}
    add(group, "perturbed", "random sets of parameters within their ranges", OF_LAYERS, **how)
    add_parameters(group)
    group = parser.add_argument_group("output")
    groups.add_plot(group, "modelled and published times")
    groups.add_json(group)


def names(text: str) -> tuple[str, ...]:
    """Argument type: 'one,other'."""
    return tuple(part.strip() for part in text.split(","))


def add_peers(parser: argparse.ArgumentParser, *, headlines: bool) -> None:
    """Whether other people's kernels are modelled as well, and where they are."""
    group = parser.add_argument_group("peers")
    words = "also model FlashAttention-4, FROST and CUTLASS for the same case"
    rows = "; of fmha without a case: a table of headline shapes"
    groups.switch(group, "peers", words + rows * bool(headlines))
    if headlines:
        words = "only these rows of that table"
        how = {"type": names, "metavar": "NAME[,NAME]", "shown": "all"}
        add(group, "row", words, (), **how)
    words = "a checkout of flash-attention instead of the installed one"
    group.add_argument("--source", type=Path, metavar="FOLDER", help=words)
    group.add_argument("--cutlass", type=Path, metavar="FOLDER", help="a checkout of CUTLASS")


def add_cycles(parser: argparse.ArgumentParser, *, headlines: bool = False) -> None:
    """Add flags that choose what is modelled and reported.

    headlines: whether there is also a table of peers."""
    group = parser.add_argument_group("model")
    words = "GPU whose parameters are used"
    shown = "that of --parameters, else B200; H100 for kernels for sm_90a"
    add(group, "gpu", words, choices=GPUS, shown=shown)
    add_parameters(group)
    words = "whether the inputs are in L2 before"
    add(group, "memory", words, MEMORY[0], choices=MEMORY)
    how = {"type": clusters, "metavar": "N", "shown": "8, spread over the grid"}
    add(group, "clusters", "clusters to run and model: a count, numbers, or all", 8, **how)
    how = {"type": groups.count, "metavar": "N"}
    add(group, "perturbed", "random sets of parameters within their ranges", PERTURBED, **how)
    words = (
        "also with this change, such as tmem_load_latency=80, 'apart MUFU.EX2=8', 'drop STL', "
        "'emulate MUFU.EX2=1/4', 'move STS@2 by -40', or several with a semicolon; repeatable"
    )
    how = {"type": edit, "action": "append", "metavar": "EDIT"}
    group.add_argument("--what-if", default=[], help=words, **how)
    words = "number of the launch to explain, from 0 on"
    groups.add(group, "launch", words, shown="the longest", type=groups.count)
    add_peers(parser, headlines=headlines)
    group = parser.add_argument_group("output")
    groups.add_file(group, "trace", "write a Perfetto trace of one cluster")
    groups.add_plot(group, "the timeline of one cluster")
    groups.add_json(group)
