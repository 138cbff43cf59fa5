"""Decode attention beside torch and FlashInfer: latency on the GPU at hand, static figures without.

    python scripts/bench.py gqa [--BS 1 8 64] [--kvL 1k 8k 64k] [--peers decode "torch cudnn"]
    python scripts/bench.py gqa --host                    what an eager call costs the host
    python scripts/bench.py gqa --show results/gqa_h100.json [--markdown]     of an earlier run

Latency is the median of CUDA graph replays, per launch. Cold: launches rotate over buffers of more
than twice the L2 cache. Warm: all launches read the same buffers. Every peer is timed in the same
run on the same tensors, after its result has been compared with an fp32 reference. The floor is
the bytes of a launch at the bandwidth of a large read (torch.amax), which is measured first.
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

from _common import write_rows
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
from _gqa_tables import draw, host_table, latency_table, markdown, show, static_table
from _timing import MAX_LAUNCHES, MIN_GRAPH_SECONDS, capture, elapsed, setting

BATCHES = (1, 8, 64)
KV_LENS = (1024, 8192, 65536)
REPEATS = 21
READ_BYTES = 1 << 30  # of the bandwidth measurement
MEMORY_SHARE = 0.85  # of what is free, for buffers
HOST_CALLS = 100
WHEN = ("cold", "warm")
# arch -> (GPU, bytes per second, where that is from), for floors without a GPU
MACHINES = {
    "sm_90a": ("H100 SXM", 3.08e12, "a read, measured"),
    "sm_100a": ("B200", 8.0e12, "its data sheet"),
}
NO_GPU = """\
No CUDA GPU here. Not done: latency of decode and of its peers (cold, warm, with programmatic
dependent launch), the bandwidth of a read, the cost of a call on the host, comparison with the
reference. Below is what follows from sizes alone; the floors take bandwidths of other machines."""


Sample = Callable[[], float]  # microseconds of one launch, measured once


@dataclasses.dataclass(frozen=True)
class Spread:
    """Microseconds of one launch: the median, and (third quartile - first quartile) / median."""

    median: float
    spread: float


@dataclasses.dataclass(frozen=True)
class Replay:
    """A sample of a captured graph, which holds what its launches write to and read."""

    graph: torch.cuda.CUDAGraph
    count: int
    launches: Sequence[Launch]

    def __call__(self) -> float:
        return elapsed(self.graph) / self.count * 1e6


# -- time -----------------------------------------------------------------------------------------


def replay(launches: Sequence[Launch]) -> Sample:
    """Of a graph in which the launches take turns, each equally often."""
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
    stream.synchronize()
    return Replay(many, count, launches)


def calls(launch: Launch) -> Sample:
    """Of eager calls that do not wait for the GPU: what they cost the host."""

    def sample() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            launch()
        return (time.perf_counter() - begin) / HOST_CALLS * 1e6

    return sample


def spreads(samples: Sequence[Sample]) -> list[Spread]:
    """Of each. They take turns, so that what changes in time, clocks and heat, befalls all."""
    rounds = [[sample() for sample in samples] for _ in range(REPEATS + 1)][1:]
    found = []
    for taken in zip(*rounds, strict=True):
        low, middle, high = statistics.quantiles(taken, n=4)
        found.append(Spread(middle, (high - low) / middle))
    return found


def read_bandwidth() -> float:
    """Bytes per second of a large read: the maximum of 64-bit integers was the fastest reduction of
    torch on an H100, 3.08 TB/s where a copy read and wrote 2.43."""
    source = torch.zeros(READ_BYTES // 8, dtype=torch.int64, device="cuda")
    return READ_BYTES / spreads([replay([source.amax])])[0].median * 1e6


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
    samples_of: Callable[[list[Launch]], dict[str, Sample]],
    *,
    sets: Sequence[Inputs],
) -> list[dict]:
    """A row per peer: the microseconds of each of its samples, or why there is nothing to say."""
    expected = [reference(sets[0]), reference(sets[-1])]
    rows, samples = [], {}
    for name, make in peers.items():
        row = {**dataclasses.asdict(problem), "nbytes": problem.nbytes, "sets": len(sets)}
        row |= {"peer": name, "inputs": INPUTS}
        rows.append(row)
        try:
            launches = make(problem, sets)
            row["error"] = checked(launches, expected, MAX_ERROR[problem.dtype])
            found = samples_of(launches)
        except Exception as refusal:  # noqa: BLE001  foreign libraries raise what they like
            reason = str(refusal).strip().partition("\n")[0]
            row["refused"] = f"{type(refusal).__name__}: {reason}"
        else:
            samples |= {(len(rows) - 1, what): sample for what, sample in found.items()}
    gc.collect()
    for (place, what), spread in zip(samples, spreads([*samples.values()]), strict=True):
        rows[place] |= {f"{what}_us": spread.median, f"{what}_spread": spread.spread}
    return rows


def latency_samples(launches: list[Launch]) -> dict[str, Sample]:
    """Launches that rotate over all buffers, and one again and again."""
    return {"cold": replay(launches), "warm": replay(launches[:1])}


def with_bandwidth(row: dict, bandwidth: float) -> dict:
    """The row of a latency, beside the floor of its problem."""
    row["floor_us"] = row["nbytes"] / bandwidth * 1e6
    for when in WHEN:
        if f"{when}_us" in row:
            row[f"{when}_tbs"] = row["nbytes"] / row[f"{when}_us"] * 1e-6
    return row


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
        found = rows_of(problem, peers, latency_samples, sets=sets)
        found = [with_bandwidth(row, bandwidth) for row in found]
        del sets
        console(*latency_table(found))
        rows += found
    return rows


def host_rows(problem: Problem) -> list[dict]:
    """What eager calls cost the host; the GPU's own time is short for this problem."""
    inputs = [problem.inputs("cuda")]
    return rows_of(problem, CALLS, lambda launches: {"host": calls(launches[0])}, sets=inputs)


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
    shown = "tables (and --plot) of an earlier run's file, nothing is measured"
    parser.add_argument("--show", type=Path, metavar="FILE", help=shown)
    parser.add_argument("--markdown", action="store_true", help="with --show: one table for a page")
    every = "every figure, a line per row; an array if the name ends in .json"
    parser.add_argument("--json", type=Path, metavar="FILE", help=every)
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


def save_rows(path: Path, rows: list[dict]) -> None:
    """JSON, a line per row; an array of them in a .json."""
    if path.suffix == ".json":
        write_rows(path, rows)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict]:
    """What `save_rows` wrote."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [*map(json.loads, text.splitlines())]


def show_again(options: argparse.Namespace) -> None:
    """Tables of the file of an earlier run."""
    found = read_rows(options.show)
    gpu = found[0].get("gpu", {}).get("name", "no GPU")
    print(f"{gpu}, {found[0]['date']}, cold / warm microseconds")
    rows = [row for row in found if row["kind"] == "latency"]
    rows = [row for row in rows if not options.peers or row["peer"] in options.peers]
    if options.markdown:
        print(markdown(rows, list(dict.fromkeys(row["peer"] for row in rows))))
    else:
        for _, group in itertools.groupby(rows, key=lambda row: (row["batch"], row["kv_len"])):
            show(*latency_table(list(group)))
    if options.plot:
        draw(options.plot, rows)


def on_gpu(options: argparse.Namespace, problems: Sequence[Problem]) -> tuple[dict, list[dict]]:
    """(what was found out of the machine, rows)."""
    everything = not (options.peers or options.tune)
    host = host_rows(problems[0]) if options.host or everything else []
    if host:
        show(*host_table(host))
    called = [{"kind": "host", **row} for row in host]
    if options.host:
        return {}, called
    peers = {name: PEERS[name] for name in options.peers or PEERS}
    for wanted in options.tune:
        peers["decode " + ",".join(f"{name}={n}" for name, n in wanted.items())] = tuned(**wanted)
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a read moves {bandwidth * 1e-12:.2f} TB/s")
    rows = time_all(problems, peers, bandwidth, show)
    if options.plot:
        draw(options.plot, rows)
    machine = {
        "read_tbs": bandwidth * 1e-12,
        "l2_bytes": torch.cuda.get_device_properties().L2_cache_size,
    }
    return machine, [*({"kind": "latency", **row} for row in rows), *called]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.show:
        show_again(options)
        return 0
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
        save_rows(options.json, [head, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
