"""Command lines of Nsight Compute and Nsight Systems for the kernels that run.py knows, and for the
whole model of examples/gpt_oss.

ncu answers why one launch takes its time, nsys what happens around the launches. Both see the NVTX
ranges of our operators and of the model's layers; ncu also sees the Python line of every
instruction.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from io import StringIO
from pathlib import Path

from kernelkit.call.ranges import VARIABLE as RANGES
from lab.commands import RUN
from lab.tools.common import refuse

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
    "mla": "^mla_attention_(portable_)?sm",
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
    "norm_rope": "^mla_glue_sm",
}
# Name -> flags where none are given: a problem of the size that people ask about.
HEADLINES = {
    "fmha": "--shape 2,4k,4k,16,16 --head-dim 128 --causal --unjudged",
    "gqa": "--kv-len 8k --q-heads 64 --kv-heads 8",
    "mla": "--kv-len 8k --heads 128 --unjudged",
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
    """Return commands that read the report: what bounds the kernel, and the cost of each line of
    Python."""
    if options.tool != "ncu":
        return []
    report = ["ncu", "--import", f"{options.out}.ncu-rep"]
    source = ["--page", "source", "--print-source", "cuda,sass", "--csv"]
    return [[*report, "--page", "details"], [*report, *source]]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Options of the profiler; what stands behind `--` goes to the run script."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description="Nsight Compute or Nsight Systems on a kernel of run.py, or on the model of "
        "examples/gpt_oss.",
        epilog="After -- come flags of run.py NAME, or of the example; without any, the problem "
        "has a typical size. If the tool is not installed, or with --print, the command line is "
        f"printed and nothing runs. `{TABLE}` instead of NAME makes a slim CSV of reports.",
    )
    parser.add_argument("kernel", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--tool", choices=TOOLS, default="ncu", help="default: ncu")
    parser.add_argument("--out", type=Path, metavar="STEM", help="default: out/profile/KERNEL")
    parser.add_argument(
        "--name", metavar="REGEX", help="profile kernels with this name instead (ncu)"
    )
    parser.add_argument(
        "--launch-skip", type=int, default=0, help="matching launches to skip (ncu)"
    )
    parser.add_argument(
        "--launch-count", type=int, default=1, help="launches to profile; default: 1 (ncu)"
    )
    parser.add_argument("--section", action="append", help="only this section (ncu, repeatable)")
    parser.add_argument("--clock-control", choices=CLOCKS, default="none", help="passed to ncu")
    parser.add_argument(
        "--cache-control", choices=("all", "none"), default="all", help="passed to ncu"
    )
    parser.add_argument("--gpu-metrics", action="store_true", help="sample the GPU (nsys)")
    parser.add_argument("--nvtx-include", metavar="RANGE", help="profile only inside this range")
    parser.add_argument("--python", default="python", help="default: the one on the PATH")
    parser.add_argument("--print", action="store_true", help="only print the command line")
    options = parser.parse_args(arguments[:end])
    options.run = arguments[end + 1 :]
    options.out = options.out or Path("out") / "profile" / options.kernel
    return options


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else [*argv]
    if arguments[:1] == [TABLE]:
        return main_of_table(arguments[1:])
    options = parse_arguments(arguments)
    command = command_line(options)
    found = shutil.which(options.tool)
    if options.print or not found:
        if not found:
            print(f"{options.tool} is not on the PATH here; run this where it is:")
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


# A slim table of reports of Nsight Compute: a row per launch, and few of ncu's 2,200 metrics.
#
#     ncu --import out/profile/gqa.ncu-rep --page raw --csv > out/profile/gqa.csv
#     python scripts/nsight.py table out/profile/gqa.csv --out results/ncu_h200.csv
#
# It has the form of ncu's own export: a line of names, one of units, then the launches. Above them
# stand comments, the GPU and the date first. Names of hosts, processes and files are left out.


GPU = "device__attribute_display_name"
WORDS = ("Kernel Name", "Grid Size", "Block Size")  # everything else is a number
STALL, PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"  # what the stalls add up to
METRICS = (
    "launch__cluster_size",
    "launch__waves_per_multiprocessor",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block",
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.avg",
    "sm__cycles_active.avg",
    "sm__cycles_elapsed.avg.per_second",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    LATENCY,
    *(f"{STALL}{reason}{PER_ISSUE}" for reason in (
        "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
        "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc",
        "no_instruction", "not_selected", "selected", "short_scoreboard", "sleeping",
        "tex_throttle", "wait",
    )),
)  # fmt: skip
# ncu prints what is readable, which differs from report to report: to base units, as its
# `--print-units base` does.
TIMES = {"us": 1000, "ms": 10**6, "s": 10**9}
PREFIXES = {"K": 1000, "M": 10**6, "G": 10**9, "T": 10**12}
SCALED = ("byte", "hz")


def slim(exports: Sequence[Path], day: str, notes: Sequence[str] = ()) -> str:
    """The table of these exports, as CSV.

    day: of the measurement. ValueError where a file is no such export, or where reports of several
    GPUs or in different units are among them; OSError where it cannot be read.
    """
    found = [launch for export in exports for launch in launches(export)]
    gpus = sorted({launch[GPU][0] for launch in found})
    if len(gpus) != 1:
        raise ValueError(f"expected reports of one GPU, not of {', '.join(gpus) or 'none'}")
    out = StringIO()
    out.writelines(f"# {note}\n" for note in (f"gpu: {gpus[0]}", f"date: {day}", *notes))
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow([*WORDS, *METRICS])
    lines.writerow(["" for _ in WORDS] + [_unit(name, found) for name in METRICS])
    for launch in found:
        lines.writerow([launch[name][0] for name in (*WORDS, *METRICS)])
    return out.getvalue()


def launches(export: Path) -> list[dict[str, tuple[str, str]]]:
    """Metrics of each launch in an export: metric -> (value, unit), in base units."""
    with export.open(encoding="utf-8", newline="") as file:
        names, units, *rows = [*csv.reader(file), [], []]  # of an empty file, too
    missing = {GPU, *WORDS, *METRICS} - {*names}
    if missing:
        raise ValueError(
            f"{export} lacks {min(missing)}: not made with `--page raw --csv`, or too few sections"
        )
    places = {name: names.index(name) for name in (GPU, *WORDS, *METRICS)}
    return [
        {name: (row[at], "") if name in (GPU, *WORDS) else in_base_units(row[at], units[at])
         for name, at in places.items()}
        for row in rows
        if row
    ]  # fmt: skip


def in_base_units(value: str, unit: str) -> tuple[str, str]:
    """12.128 us is 12128 ns, 33.8 Kbyte/block is 33800 byte/block; thousands lose their commas."""
    scale = 1
    if unit in TIMES:
        scale, unit = TIMES[unit], "ns"
    elif unit[:1] in PREFIXES and unit[1:].startswith(SCALED):
        scale, unit = PREFIXES[unit[0]], unit[1:]
    return f"{(Decimal(value.replace(',', '')) * scale).normalize():f}", unit


def _unit(name: str, found: Sequence[dict[str, tuple[str, str]]]) -> str:
    units = {launch[name][1] for launch in found}
    if len(units) != 1:
        raise ValueError(f"{name} is in {' and in '.join(sorted(units))}")
    return units.pop()


def main_of_table(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="nsight.py table",
        description="A slim CSV of exports of Nsight Compute, a row per launch.",
        epilog="To export one: ncu --import STEM.ncu-rep --page raw --csv > STEM.csv",
    )
    parser.add_argument("exports", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the terminal")
    words = "date of the measurement; default: today"
    parser.add_argument("--date", default=date.today().isoformat(), help=words)
    parser.add_argument("--note", action="append", default=[], help="driver, clocks (repeatable)")
    options = parser.parse_args([*arguments])
    try:
        text = slim(options.exports, options.date, options.note)
        if options.out:
            options.out.write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0
