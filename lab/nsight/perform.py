"""Command lines of Nsight Compute and Nsight Systems for the kernels that run.py knows, and for the
whole model of examples/gpt_oss.

ncu answers why one launch takes its time, nsys what happens around the launches. Both see the NVTX
ranges of our operators and of the model's layers; ncu also sees the Python line of every
instruction.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kernelkit.call.ranges import VARIABLE as RANGES
from lab.commands import RUN
from lab.nsight import table as nsight_table

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TOOLS = ("ncu", "nsys")
CLOCKS = ("none", "base", "boost")
LINE_INFO = "CUTE_DSL_LINEINFO=1"  # the DSL then adds Python lines; the code stays the same

# Sections that matter for kernels of tensor cores, TMA and warp roles; `ncu --list-sections`.
SECTIONS = (
    "SpeedOfLight",
    "SpeedOfLight_HierarchicalTensorRooflineChart",
    "PmSampling",  # utilisation over the time of the launch: prologue, tail, waves
    "PmSampling_WarpStates",
    "ComputeWorkloadAnalysis",  # pipes: tensor core, FMA, MUFU (XU), ALU
    "InstructionStats",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Chart",
    "MemoryWorkloadAnalysis_Tables",
    "SchedulerStats",
    "WarpStateStats",
    "WorkloadDistribution",
    "LaunchStats",
    "Occupancy",
    "SourceCounters",  # stalls by line of source and SASS
)


TABLE = "table"  # in place of a name: what nsight_table.py does
EXAMPLE = "gpt-oss"  # a name beside those of run.py: the whole model of examples/gpt_oss
NAMES = [*(name for name in RUN if name != "models"), EXAMPLE]  # models only runs in the emulator
# Name -> what the kernel's name matches; each kernel of ours has its architecture in it.
OURS = "_sm[0-9]+"
KERNELS = {
    "fmha": "^fmha_sm",
    "gqa": "^gqa_decode_sm",
    "moe": "^moe_(grouped|mixed)_gemm_sm",
    "q8_0": "^q8_0_(matvec|batch|product)_sm",
    "merge": "^fmha_merge_sm",
    "quantise": "^moe_quantiser_",
    "route": "^moe_route_sm",
    "route_tokens": "^moe_route_tokens_sm",
    "permutation": "^moe_routing_permutation_",
    "combine": "^moe_combine_sm",
    "append": "^kvcache_movement_append_sm",
    "gather": "^kvcache_movement_dequantise_sm",
    "copy": "^kvcache_movement_slots_sm",
    "checksum": "^kvcache_movement_checksum_sm",
    "compress": "^mla_compressor_",
    "query": "^mla_indexer_query_sm",
    "score": "^mla_indexer_scores_sm",
    "topk": "^mla_indexer_select_sm",
}
# Name -> flags where none are given: a problem of the size that people ask about.
HEADLINES = {
    "fmha": "--shape 2,4k,4k,16,16 --head-dim 128 --causal --unjudged",
    "gqa": "--kv-len 8k --q-heads 64 --kv-heads 8",
    "moe": "--model gpt-oss-120b --tokens 64 --format mxfp4 --activations bf16",
    "append": "--rows 32k",
    "gather": "--rows 32k",
    "compress": "--rows 4k",
    "score": "--rows 8k",
    "topk": "--rows 32k",
    EXAMPLE: "--model 20b --prompt-len 2048 --new-tokens 8 --no-warm-up",
}


def command_line(options: argparse.Namespace) -> list[str]:
    """The profiler with its flags, then what it looks at with its own."""
    profiler = ncu(options) if options.tool == "ncu" else nsys(options)
    flags = options.run or shlex.split(HEADLINES.get(options.kernel, ""))
    if options.kernel == EXAMPLE:
        run = [options.python, "-m", "examples.gpt_oss", *flags]
    else:
        script = os.path.relpath(SCRIPTS / "run.py")
        run = [options.python, script, options.kernel, "--backend", "cuda", *flags]
    return ["env", LINE_INFO, f"{RANGES}=1", *profiler, *run]


def ncu(options: argparse.Namespace) -> list[str]:
    """Nsight Compute: the sections of SECTIONS for chosen launches of one kernel."""
    name = options.name or KERNELS.get(options.kernel, OURS)
    flags = [
        *("--target-processes", "all", "--kernel-name", f"regex:{name}"),
        *("--launch-skip", str(options.launch_skip), "--launch-count", str(options.launch_count)),
        *("--clock-control", options.clock_control, "--cache-control", options.cache_control),
        *("--import-source", "yes", "--source-folders", os.path.relpath(SCRIPTS.parent)),
        *("--nvtx", "--force-overwrite", "--export", str(options.out)),
    ]
    if options.nvtx_include:
        flags += ["--nvtx-include", options.nvtx_include]
    sections = options.section or SECTIONS
    return ["ncu", *flags, *(word for section in sections for word in ("--section", section))]


def nsys(options: argparse.Namespace) -> list[str]:
    """Nsight Systems: launches, copies and NVTX ranges over time, the nodes of graphs apart.

    It records every kernel, and prints tables by kernel and range at the end.
    """
    flags = [
        *("profile", "--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node"),
        *("--sample=none", "--cpuctxsw=none", "--stats=true"),
        *("--force-overwrite=true", f"--output={options.out}"),
    ]
    if options.gpu_metrics:
        flags.append("--gpu-metrics-devices=all")
    if options.nvtx_include:
        flags += ["--capture-range=nvtx", f"--nvtx-capture={options.nvtx_include}"]
        flags += ["--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0", "--capture-range-end=stop"]
    return ["nsys", *flags]


def reading(options: argparse.Namespace) -> list[list[str]]:
    """How to read the report: what bounds the kernel, and what each line of Python costs."""
    if options.tool != "ncu":
        return []
    report = ["ncu", "--import", f"{options.out}.ncu-rep"]
    source = ["--page", "source", "--print-source", "cuda,sass", "--csv"]
    return [[*report, "--page", "details"], [*report, *source]]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Options of the profiler; what stands behind `--` goes to the run script."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description="Nsight Compute or Nsight Systems on a kernel that run.py knows, or on the "
        "model of examples/gpt_oss.",
        epilog="Behind -- stand flags of run.py NAME, or of the example; without any, the problem "
        "is one of the size that people ask about. Without the tool, or with --print, the "
        f"command line is printed and nothing runs. `{TABLE}` in place of NAME makes a slim CSV of "
        "reports.",
    )
    parser.add_argument("kernel", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--tool", choices=TOOLS, default="ncu", help="default: ncu")
    parser.add_argument("--out", type=Path, metavar="STEM", help="default: out/profile/KERNEL")
    parser.add_argument("--name", metavar="REGEX", help="kernel name to profile instead (ncu)")
    parser.add_argument("--launch-skip", type=int, default=0, help="matching launches (ncu)")
    parser.add_argument("--launch-count", type=int, default=1, help="default: 1 (ncu)")
    parser.add_argument("--section", action="append", help="instead of all (ncu, repeatable)")
    parser.add_argument("--clock-control", choices=CLOCKS, default="none", help="(ncu)")
    parser.add_argument("--cache-control", choices=("all", "none"), default="all", help="(ncu)")
    parser.add_argument("--gpu-metrics", action="store_true", help="sample the GPU (nsys)")
    parser.add_argument("--nvtx-include", metavar="RANGE", help="profile inside this range only")
    parser.add_argument("--python", default="python", help="default: the one on the PATH")
    parser.add_argument("--print", action="store_true", help="print the command line only")
    options = parser.parse_args(arguments[:end])
    options.run = arguments[end + 1 :]
    options.out = options.out or Path("out") / "profile" / options.kernel
    return options


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else [*argv]
    if arguments[:1] == [TABLE]:
        return nsight_table.main(arguments[1:])
    options = parse_arguments(arguments)
    command = command_line(options)
    found = shutil.which(options.tool)
    if options.print or not found:
        if not found:
            print(f"{options.tool} is not on the PATH here; to be run where it is:")
        print(shlex.join(command))
        _say_how_to_read(options)
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(shlex.join(command), flush=True)
    code = subprocess.run(command, check=False).returncode
    _say_how_to_read(options)
    return code


def _say_how_to_read(options: argparse.Namespace) -> None:
    for words in reading(options):
        print(f"to read it: {shlex.join(words)}")
