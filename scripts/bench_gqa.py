"""Decode attention beside torch and FlashInfer: latency on the GPU at hand, static figures without.

    python scripts/bench.py gqa [--BS 1 8 64] [--kvL 1k 8k 64k] [--peers decode "torch cudnn"]
    python scripts/bench.py gqa --host                    what an eager call costs the host

Latency is the median of CUDA graph replays, per launch. Cold: launches rotate over buffers of more
than twice the L2 cache. Warm: all launches read the same buffers. Every peer is timed in the same
run on the same tensors, after its result has been compared with an fp32 reference. The floor is
the bytes of a launch at the bandwidth of a copy, which is measured first.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from _gqa_peers import (
    CALLS,
    DTYPES,
    INPUTS,
    MAX_ERROR,
    PEERS,
    Inputs,
    Launch,
    Peer,
    Problem,
    error_of,
    reference,
    tuned,
)
from _timing import MAX_LAUNCHES, MIN_GRAPH_SECONDS, capture, elapsed, setting

BATCHES = (1, 8, 64)
KV_LENS = (1024, 8192, 65536)
REPEATS = 21
COPY_BYTES = 1 << 30  # that a copy of the bandwidth measurement reads, and writes
MEMORY_SHARE = 0.85  # of what is free, for buffers
HOST_CALLS, HOST_BLOCKS = 100, 21
WHEN = ("cold", "warm")
# arch -> (GPU, bytes per second, where that is from), for floors without a GPU
MACHINES = {
    "sm_90a": ("H100 SXM", 3.02e12, "a copy, measured"),
    "sm_100a": ("B200", 8.0e12, "its data sheet"),
}
NO_GPU = """\
No CUDA GPU here. Not done: latency of decode and of its peers (cold, warm, with programmatic
dependent launch), the bandwidth of a copy, the cost of a call on the host, comparison with the
reference. Below is what follows from sizes alone; the floors take bandwidths of other machines."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Microseconds of one launch: the median, and (third quartile - first quartile) / median."""

    median: float
    spread: float


# -- time -----------------------------------------------------------------------------------------


def timed(launches: Sequence[Launch]) -> Spread:
    """Of graphs in which the launches take turns, each equally often."""
    turn = itertools.cycle(launches)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2 * len(launches)):
            next(turn)()
        once = capture(lambda: next(turn)(), len(launches))
        elapsed(once)
        rounds = round(MIN_GRAPH_SECONDS / elapsed(once))
        rounds = max(1, min(rounds, MAX_LAUNCHES // len(launches)))
        count = rounds * len(launches)
        many = capture(lambda: next(turn)(), count)
        elapsed(many)
        samples = [elapsed(many) / count * 1e6 for _ in range(REPEATS)]
    stream.synchronize()
    low, middle, high = statistics.quantiles(samples, n=4)
    return Spread(middle, (high - low) / middle)


def copy_bandwidth() -> float:
    """Bytes per second, those read and those written, of a large copy."""
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * COPY_BYTES / timed([lambda: target.copy_(source)]).median * 1e6


def host_us(launch: Launch) -> Spread:
    """Of eager calls that do not wait for the GPU."""
    samples = []
    for block in range(HOST_BLOCKS + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            launch()
        taken = time.perf_counter() - begin
        if block >= 2:
            samples.append(taken / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    low, middle, high = statistics.quantiles(samples, n=4)
    return Spread(middle, (high - low) / middle)


# -- rows -----------------------------------------------------------------------------------------


def allocate(problem: Problem, cache_bytes: int, free_bytes: int, device: str) -> list[Inputs]:
    """The buffer sets of a rotation. ValueError where not even they fit."""
    wanted = problem.sets(cache_bytes)
    if wanted * problem.nbytes > MEMORY_SHARE * free_bytes:
        needed = wanted * problem.nbytes / 1e9
        raise ValueError(f"{wanted} buffer sets are {needed:.1f} GB, free {free_bytes / 1e9:.1f}")
    return [problem.inputs(device, seed) for seed in range(wanted)]


def checked(launches: Sequence[Launch], expected: Sequence[torch.Tensor], limit: float) -> float:
    """The larger error of the first and the last launch; ValueError if it is beyond the limit."""
    ends = (launches[0], launches[-1])
    error = max(error_of(launch(), o) for launch, o in zip(ends, expected, strict=True))
    if not error <= limit:
        raise ValueError(f"wrong: a row is {error:.1%} off the reference, limit {limit:.1%}")
    return error


def rows_of(
    problem: Problem,
    peers: dict[str, Peer],
    measure: Callable[[list[Launch]], dict],
    *,
    sets: Sequence[Inputs],
) -> list[dict]:
    """A row per peer: what `measure` says of its launches, or why there is nothing to say."""
    expected = [reference(sets[0]), reference(sets[-1])]
    rows = []
    for name, make in peers.items():
        row = {**dataclasses.asdict(problem), "nbytes": problem.nbytes, "sets": len(sets)}
        row |= {"peer": name, "inputs": INPUTS}
        try:
            launches = make(problem, sets)
            row["error"] = checked(launches, expected, MAX_ERROR[problem.dtype])
            row |= measure(launches)
        except Exception as refusal:  # noqa: BLE001  foreign libraries raise what they like
            reason = str(refusal).strip().partition("\n")[0]
            row["refused"] = f"{type(refusal).__name__}: {reason}"
        rows.append(row)
    return rows


def latency(problem: Problem, bandwidth: float) -> Callable[[list[Launch]], dict]:
    """Measures launches cold and warm, beside the floor of the problem."""
    floor = problem.nbytes / bandwidth * 1e6

    def measure(launches: list[Launch]) -> dict:
        found = {"floor_us": floor}
        for when, chosen in zip(WHEN, (launches, launches[:1]), strict=True):
            spread = timed(chosen)
            found |= {f"{when}_us": spread.median, f"{when}_spread": spread.spread}
            found[f"{when}_tbs"] = problem.nbytes / spread.median * 1e-6
        return found

    return measure


def time_all(
    problems: Iterable[Problem], peers: dict[str, Peer], bandwidth: float, console: Callable
) -> list[dict]:
    """Rows of all problems; each is shown when it is done."""
    rows: list[dict] = []
    for problem in problems:
        gc.collect()
        torch.cuda.empty_cache()
        cache = torch.cuda.get_device_properties().L2_cache_size
        try:
            sets = allocate(problem, cache, torch.cuda.mem_get_info()[0], "cuda")
        except ValueError as refusal:
            sizes = dataclasses.asdict(problem)
            rows += [{**sizes, "peer": name, "refused": str(refusal)} for name in peers]
            continue
        found = rows_of(problem, peers, latency(problem, bandwidth), sets=sets)
        del sets
        console(*latency_table(found))
        rows += found
    return rows


def host_rows(problem: Problem) -> list[dict]:
    """What eager calls cost the host; the GPU's own time is short for this problem."""

    def measure(launches: list[Launch]) -> dict:
        spread = host_us(launches[0])
        return {"host_us": spread.median, "host_spread": spread.spread}

    return rows_of(problem, CALLS, measure, sets=[problem.inputs("cuda")])


def static_row(problem: Problem, arch: str) -> dict:
    """What sizes say of a launch on `arch`."""
    from gqa_lowlatency.arguments import Arguments
    from gqa_lowlatency.forward import choose_config, clusters_per_head
    from kernelkit.launch import Target

    gpu, bandwidth, source = MACHINES[arch]
    arguments = Arguments(*problem.inputs("meta"))
    config = choose_config(arguments, Target("emulate", arch))
    parts = clusters_per_head(arch, arguments, config)
    if arch == "sm_90a":
        from gqa_lowlatency.sm90.plan import Plan90

        smem = Plan90(config).smem_bytes
    else:
        from gqa_lowlatency.sm100.plan import make_plan

        smem = make_plan(config).smem.bytes
    return {
        **dataclasses.asdict(problem),
        "arch": arch,
        "cluster": config.cluster,
        "ctas": config.cluster * parts * problem.batch * problem.kv_heads * config.row_tiles,
        "smem_bytes": smem,
        "nbytes": problem.nbytes,
        "floor_us": problem.nbytes / bandwidth * 1e6,
        "floor_of": f"{gpu}, {bandwidth * 1e-12:g} TB/s ({source})",
    }


def static_rows(problems: Iterable[Problem]) -> list[dict]:
    """A row per problem and architecture, or why there is none."""
    rows = []
    for problem, arch in itertools.product(problems, MACHINES):
        try:
            rows.append(static_row(problem, arch))
        except (ImportError, ValueError, NotImplementedError) as refusal:
            sizes = dataclasses.asdict(problem)
            rows.append({**sizes, "arch": arch, "refused": str(refusal).partition("\n")[0]})
    return rows


# -- tables ---------------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]  # title, heads, rows


def title_of(row: dict) -> str:
    heads = f"{row['q_heads']} query heads, {row['kv_heads']} KV heads of {row['head_dim']}"
    return f"batch {row['batch']}, {row['kv_len']} keys, {heads}, {row['dtype']}"


def latency_table(rows: Sequence[dict]) -> Table:
    """Of one problem; the fastest cold one is marked."""
    heads = ["peer", "cold us", "TB/s", "x floor", "warm us", "TB/s", "spread", "error"]
    best = min((row["cold_us"] for row in rows if "cold_us" in row), default=0)
    cells = []
    for row in rows:
        if "refused" in row:
            cells.append([row["peer"], "-", "", "", "-", "", "", row["refused"][:60]])
            continue
        mark = " *" if row["cold_us"] == best else ""
        cells.append(
            [
                row["peer"] + mark,
                *(f"{row['cold_us']:.2f}", f"{row['cold_tbs']:.2f}"),
                f"{row['cold_us'] / row['floor_us']:.2f}",
                *(f"{row['warm_us']:.2f}", f"{row['warm_tbs']:.2f}"),
                f"{max(row['cold_spread'], row['warm_spread']):.1%}",
                f"{row['error']:.1e}",
            ]
        )
    floors = {row["floor_us"] for row in rows if "floor_us" in row}
    floor = f"; floor {floors.pop():.2f} us" if floors else ""
    return title_of(rows[0]) + floor, heads, cells


def host_table(rows: Sequence[dict]) -> Table:
    cells = [
        [row["peer"], "-", "", row["refused"][:60]]
        if "refused" in row
        else [row["peer"], f"{row['host_us']:.2f}", f"{row['host_spread']:.1%}", ""]
        for row in rows
    ]
    return f"host, {title_of(rows[0])}", ["call", "us", "spread", ""], cells


def static_table(rows: Sequence[dict]) -> Table:
    heads = ["batch", "keys", "arch", "cluster", "CTAs", "SMEM KB", "MB", "floor us", "floor of"]
    cells = []
    for row in rows:
        cell = [str(row["batch"]), str(row["kv_len"]), row["arch"]]
        if "refused" in row:
            cells.append([*cell, "-", "", "", "", "", row["refused"][:60]])
            continue
        cell += [str(row["cluster"]), str(row["ctas"]), f"{row['smem_bytes'] / 1024:.1f}"]
        cell += [f"{row['nbytes'] / 1e6:.1f}", f"{row['floor_us']:.2f}", row["floor_of"]]
        cells.append(cell)
    return "static figures", heads, cells


def show(title: str, heads: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """On the terminal, with rich where it is installed."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        columns = zip(heads, *cells, strict=True)
        widths = [max(map(len, column)) for column in columns]
        print(title)
        for line in (heads, *cells):
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = RichTable(title=Text(title), box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k > 0 else "left", no_wrap=True)
    for line in cells:
        table.add_row(*map(Text, line))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def draw(path: Path, rows: Sequence[dict]) -> None:
    """Latency against KV length, one picture per batch: cold lines, warm dots, the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed_rows = [row for row in rows if "cold_us" in row]
    batches = sorted({row["batch"] for row in timed_rows})
    names = list(dict.fromkeys(row["peer"] for row in timed_rows))
    colours = {name: f"C{k % 10}" for k, name in enumerate(names)}
    figure, axes = pyplot.subplots(
        1, max(1, len(batches)), squeeze=False, figsize=(5 * max(1, len(batches)), 5)
    )
    for axis, batch in zip(axes[0], batches, strict=False):
        chosen = [row for row in timed_rows if row["batch"] == batch]
        floor = dict(sorted((row["kv_len"], row["floor_us"]) for row in chosen))
        axis.plot(floor.keys(), floor.values(), "k--", label="read floor")
        for name in names:
            line = sorted(
                (r["kv_len"], r["cold_us"], r["warm_us"]) for r in chosen if r["peer"] == name
            )
            lengths = [x for x, *_ in line]
            axis.plot(lengths, [y for _, y, _ in line], "-o", color=colours[name], label=name)
            axis.plot(lengths, [y for *_, y in line], "x:", color=colours[name], alpha=0.6)
        axis.set(xscale="log", yscale="log", title=f"batch {batch}", xlabel="keys", ylabel="us")
        axis.set_xticks(list(floor), [str(length) for length in floor])
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7, title="cold lines, warm crosses", title_fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


# -- command line ---------------------------------------------------------------------------------


def length(text: str) -> int:
    """Argument type: '8192' or '8k'."""
    kilo = text.lower().endswith("k")
    value = int(text[:-1] if kilo else text)
    return value * 1024 if kilo else value


def tuning(text: str) -> dict[str, int]:
    """Argument type: 'cluster=8,warps=16'."""
    from gqa_lowlatency.config import TUNABLE

    known, fields = (*TUNABLE, "parts"), {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in known or not number.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r}: a number for one of {', '.join(known)}")
        fields[name] = int(number)
    return fields


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many = {"nargs": "+", "metavar": "N"}
    parser.add_argument("--BS", type=int, default=BATCHES, help="batch; default: 1 8 64", **many)
    lens = "keys, also as 8k; default: 1k 8k 64k"
    parser.add_argument("--kvL", type=length, default=KV_LENS, help=lens, **many)
    parser.add_argument("--kvH", type=int, default=8, help="KV heads; default: 8")
    parser.add_argument("--qH", type=int, default=64, help="query heads; default: 64")
    parser.add_argument("--dH", type=int, default=128, help="head dim; default: 128")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="e4m3: of K and V")
    known = ", ".join(PEERS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, metavar="NAME", help=f"of {known}")
    tuned = "time decode tuned like this, too: cluster=8,warps=16,stages=2,parts=1"
    parser.add_argument("--tune", nargs="+", type=tuning, default=(), metavar="X=N", help=tuned)
    parser.add_argument("--host", action="store_true", help="the host's cost of eager calls alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure, a line per row")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw latency, with matplotlib")
    return parser.parse_args(arguments)


def problems_of(options: argparse.Namespace) -> list[Problem]:
    found = [
        Problem(batch, kv_len, options.qH, options.kvH, options.dH, options.dtype)
        for batch, kv_len in itertools.product(options.BS, options.kvL)
    ]
    for problem in found:
        problem.check()
    return found


def write_lines(path: Path, lines: Iterable[dict]) -> None:
    """JSON, a line per entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def on_gpu(options: argparse.Namespace, problems: Sequence[Problem]) -> tuple[dict, list[dict]]:
    """(what was found out of the machine, rows)."""
    if options.host:
        rows = host_rows(problems[0])
        show(*host_table(rows))
        return {}, [{"kind": "host", **row} for row in rows]
    peers = {name: PEERS[name] for name in options.peers or PEERS}
    for wanted in options.tune:
        peers["decode " + ",".join(f"{name}={n}" for name, n in wanted.items())] = tuned(**wanted)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth * 1e-12:.2f} TB/s")
    rows = time_all(problems, peers, bandwidth, show)
    if options.plot:
        draw(options.plot, rows)
    machine = {
        "copy_tbs": bandwidth * 1e-12,
        "l2_bytes": torch.cuda.get_device_properties().L2_cache_size,
    }
    return machine, [{"kind": "latency", **row} for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        problems = problems_of(options)
    except ValueError as error:
        sys.exit(f"refused: {error}")
    head = {"kind": "setting", "date": datetime.date.today().isoformat(), "inputs": INPUTS}
    head |= setting()
    if torch.cuda.is_available():
        machine, rows = on_gpu(options, problems)
        rows.append({"kind": "after", "gpu": setting().get("gpu")})
        head |= machine
    else:
        print(NO_GPU)
        rows = [{"kind": "static", **row} for row in static_rows(problems)]
        show(*static_table(rows))
    if options.json:
        write_lines(options.json, [head, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
