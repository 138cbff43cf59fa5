"""`bench.py gqa`: tables of the latency of decode and its peers, or of static figures."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.choose import choose_config, clusters_per_head
from kernelkit.call.launch import Target
from lab.bench.gqa_peers import (
    CALLS,
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
from lab.bench.perform import Bench
from lab.measure.timing import (
    WHEN,
    Sample,
    calls,
    cold_and_warm,
    measure,
    replay,
    spreads,
)
from lab.problems.gqa import cta_of
from lab.report.attention import draw_decode
from lab.report.documents import Document
from lab.tools.groups import spelt
from lab.tools.tables import Table, show, table
from lab.tools.tables import markdown as markdown_of


def title_of(row: Mapping[str, Any]) -> str:
    heads = f"{row['q_heads']} query heads, {row['kv_heads']} KV heads of {row['head_dim']}"
    return f"batch {row['batch']}, {row['kv_len']} keys, {heads}, {row['dtype']}"


LATENCY = (
    ("peer", "{peer}{mark}"), ("cold us", "{cold_us:.2f}"), ("TB/s", "{cold_tbs:.2f}"),
    ("x floor", lambda row: f"{row['cold_us'] / row['floor_us']:.2f}"),
    ("warm us", "{warm_us:.2f}"), ("TB/s", "{warm_tbs:.2f}"),
    ("spread", lambda row: f"{max(row['cold_spread'], row['warm_spread']):.1%}"),
    ("error", "{error:.1e}"),
)  # fmt: skip
HOST = (("call", "{peer}"), ("us", "{host_us:.2f}"), ("spread", "{host_spread:.1%}"), ("", ""))
STATIC = (
    ("batch", "{batch}"), ("keys", "{kv_len}"), ("arch", "{arch}"), ("cluster", "{cluster}"),
    ("CTAs", "{ctas}"), ("SMEM bytes", "{smem_bytes:,}"), ("bytes", "{nbytes:,}"),
    ("floor us", "{floor_us:.2f}"), ("floor of", "{floor_of}"),
)  # fmt: skip


def latency_table(rows: Sequence[dict]) -> Table:
    """Table of one problem; the fastest cold one is marked."""
    timed = [row for row in rows if "cold_us" in row]
    best = min((row["cold_us"] for row in timed), default=0)
    floor = f"; floor {timed[0]['floor_us']:.2f} us" if timed else ""
    marked = [row | {"mark": " *" * (row.get("cold_us") == best)} for row in rows]
    return table(title_of(rows[0]) + floor, LATENCY, marked)


def markdown(rows: Sequence[dict], peers: Sequence[str]) -> str:
    """A line per problem: cold and warm microseconds of each peer, the floor before them."""
    lines = []
    problems = dict.fromkeys((row["batch"], row["kv_len"]) for row in rows)
    for batch, length in problems:
        found = {r["peer"]: r for r in rows if (r["batch"], r["kv_len"]) == (batch, length)}
        floor = next((_short(row["floor_us"]) for row in found.values() if "cold_us" in row), "")
        cells = [_pair(found.get(name, {})) for name in peers]
        lines.append([f"{batch} x {spelt(length)}", floor, *cells])
    return markdown_of(["batch x keys", "floor", *peers], lines)


def _pair(row: dict) -> str:
    return f"{_short(row['cold_us'])} / {_short(row['warm_us'])}" if "cold_us" in row else "-"


def _short(us: float) -> str:
    return f"{us:.{2 if us < 10 else 1 if us < 100 else 0}f}"


READ_BYTES = 1 << 30  # of the bandwidth measurement
MEMORY_SHARE = 0.85  # of what is free, for buffers
# arch -> (GPU, bytes per second, where that is from), for floors without a GPU
MACHINES = {
    "sm_90a": ("H100 SXM", 3.08e12, "a read, measured"),
    "sm_100a": ("B200", 8.0e12, "its data sheet"),
}
NO_GPU = """\
No CUDA GPU here. Not done: latency of decode and of its peers (cold, warm, with programmatic
dependent launch), the bandwidth of a read, the cost of a call on the host, comparison with the
reference. Below is what follows from sizes alone; the floors take bandwidths of other machines."""


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

    def sampled(make: Peer, row: dict) -> dict[str, Sample]:
        launches = make(problem, sets)
        row["error"] = checked(launches, expected, MAX_ERROR[problem.dtype])
        return samples_of(launches)

    same = {**dataclasses.asdict(problem), "nbytes": problem.nbytes, "sets": len(sets)}
    rows = [{**same, "peer": name, "inputs": INPUTS} for name in peers]
    measure(rows, [partial(sampled, make) for make in peers.values()])
    return rows


def with_bandwidth(row: dict, bandwidth: float) -> dict:
    """The row of a latency, beside the floor of its problem."""
    row["floor_us"] = row["nbytes"] / bandwidth * 1e6
    for when in WHEN:
        if f"{when}_us" in row:
            row[f"{when}_tbs"] = row["nbytes"] / row[f"{when}_us"] * 1e-6
    return row


def host_rows(problem: Problem) -> list[dict]:
    """Return the host time of eager calls; the GPU time of this problem is short."""
    inputs = [problem.inputs("cuda")]
    return rows_of(problem, CALLS, lambda launches: {"host": calls(launches[0])}, sets=inputs)


def static_row(problem: Problem, arch: str) -> dict:
    """Return figures of a launch on `arch` that follow from sizes alone."""
    gpu, bandwidth, source = MACHINES[arch]
    arguments = Arguments(*problem.inputs("meta"))
    config = choose_config(arguments, Target("emulate", arch))
    parts = clusters_per_head(arch, arguments, config)
    return {
        **dataclasses.asdict(problem),
        "arch": arch,
        "cluster": config.cluster,
        "ctas": config.cluster * parts * problem.batch * problem.kv_heads * config.row_tiles,
        "smem_bytes": cta_of(config, arch).smem_bytes,
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
        except (ValueError, NotImplementedError) as refusal:
            sizes = dataclasses.asdict(problem)
            rows.append({**sizes, "arch": arch, "refused": str(refusal).partition("\n")[0]})
    return rows


def problems_of(options: argparse.Namespace) -> list[Problem]:
    found = [
        Problem(batch, kv_len, options.q_heads, options.kv_heads, options.head_dim, options.dtype)
        for batch, kv_len in itertools.product(options.batch, options.kv_len)
    ]
    for problem in found:
        problem.check()
    return found


class Decode(Bench):
    """Decode attention beside torch and FlashInfer. `once` takes the host time of eager calls, if
    the flags do not choose peers."""

    kind = "latency"
    more = ("host",)
    selects = ("peers",)
    no_gpu = NO_GPU
    static_columns = STATIC

    def problems(self) -> Sequence[Problem]:
        return problems_of(self.options)

    def setting(self) -> dict[str, Any]:
        return {"inputs": INPUTS}

    def machine(self) -> dict[str, Any]:
        if self.options.host:
            return {}
        self.bandwidth = read_bandwidth()
        print(f"a read moves {self.bandwidth * 1e-12:.2f} TB/s")
        cache = torch.cuda.get_device_properties().L2_cache_size
        return {"read_tbs": self.bandwidth * 1e-12, "l2_bytes": cache}

    def once(self, problems: Sequence[Problem]) -> list[dict]:
        if not self.options.host and (self.options.peers or self.options.tune):
            return []
        return [{"kind": "host", **row} for row in host_rows(problems[0])]

    @cached_property
    def peers(self) -> dict[str, Peer]:
        """Peers by name, with those of --tune."""
        found = {name: PEERS[name] for name in self.options.peers or PEERS}
        for wanted in self.options.tune:
            name = "decode " + ",".join(f"{field}={n}" for field, n in wanted.items())
            found[name] = tuned(**wanted)
        return found

    def rows(self, problem: Problem) -> list[dict]:
        if self.options.host:
            return []
        cache = torch.cuda.get_device_properties().L2_cache_size
        try:
            sets = allocate(problem, cache, torch.cuda.mem_get_info()[0], "cuda")
        except ValueError as refusal:
            sizes = dataclasses.asdict(problem)
            return [{**sizes, "peer": name, "refused": str(refusal)} for name in self.peers]
        found = rows_of(problem, self.peers, cold_and_warm, sets=sets)
        return [with_bandwidth(row, self.bandwidth) for row in found]

    def known(self, problems: Sequence[Problem]) -> list[dict]:
        return static_rows(problems)

    def show(self, rows: Sequence[dict]) -> None:
        show(*latency_table(rows))

    def tell(self, rows: Sequence[dict]) -> None:
        host = [row for row in rows if row["kind"] == "host"]
        if host:
            show(*table(f"host, {title_of(host[0])}", HOST, host))

    def subject(self, row: Mapping[str, Any]) -> str:
        return title_of(row)

    def has(self, row: Mapping[str, Any]) -> bool:
        return not self.options.peers or row["peer"] in self.options.peers

    def markdown(self, rows: Sequence[dict]) -> str:
        return markdown(rows, [*dict.fromkeys(row["peer"] for row in rows)])

    def draw(self, path: Path, document: Document) -> None:
        draw_decode(path, document)


BENCH = Decode
