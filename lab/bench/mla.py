"""`bench.py mla`: times of attention to latent keys beside FlashMLA, or static figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kernelkit.call.launch import Target
from kvcache.layouts.rows import Rows
from lab.bench.mla_peers import (
    INPUTS,
    PAGE,
    PEERS,
    ROWS,
    WINDOW,
    Inputs,
    Problem,
    checked,
    drawn,
    reference,
)
from lab.bench.perform import Bench
from lab.measure.timing import WHEN, Sample, cold_and_warm, measure
from lab.tools.tables import markdown as markdown_of
from lab.tools.tables import show, table
from mla.attention.api import dense_fields, sparse_fields
from mla.attention.choose import decide
from mla.attention.codec import RECORDS
from mla.attention.formats import FORMS
from mla.attention.launch import DECODE, SPARSE

ARCH = "sm_90a"  # of static figures
NO_GPU = """\
No CUDA GPU here. Not done: times of mla and FlashMLA, comparison with the reference. Below is what
follows from sizes alone."""
TIMES = (
    ("peer", "{peer}"), ("cold us", "{cold_us:.1f}"), ("warm us", "{warm_us:.1f}"),
    ("TFLOP/s", "{cold_tflops:.0f}"), ("TB/s", "{cold_tbs:.2f}"),
    ("warm TFLOP/s", "{warm_tflops:.0f}"), ("of FlashMLA", "{of_flashmla:.2f}"),
    ("spread", lambda row: f"{max(row['cold_spread'], row['warm_spread']):.1%}"),
    ("error", "{error:.1e}"), ("LSE", "{lse_error:.1e}"),
)  # fmt: skip
STATIC = (
    ("problem", "{problem}"), ("GFLOP", lambda row: f"{row['flop'] * 1e-9:.3g}"),
    ("MB", lambda row: f"{row['nbytes'] * 1e-6:.3g}"), ("kernel", "{kernel}"),
    ("cluster", "{cluster}"), ("parts", "{parts}"), ("CTAs", "{ctas}"),
)  # fmt: skip


def problems_of(rows: Sequence[str], heads: Sequence[int], entries: Sequence[int]) -> list[Problem]:
    """Return the problems of some sets; ValueError if the filters leave none."""
    found = [
        problem
        for name in rows
        for problem in ROWS[name]
        if (not heads or problem.heads in heads) and (not entries or problem.entries in entries)
    ]
    if not found:
        raise ValueError("--rows, --heads and --entries: no problem is left")
    return found


def rows_of(problem: Problem, peers: Sequence[str], sets: Sequence[Inputs]) -> list[dict]:
    """Return a row per peer: its times, or why there are none."""
    expected = [reference(sets[0], problem), reference(sets[-1], problem)]

    def sampled(name: str, row: dict) -> dict[str, Sample]:
        launches = PEERS[name](problem, sets)
        row |= checked(launches, expected)
        return cold_and_warm(launches)

    rows = [{**problem.sizes, "sets": len(sets), "peer": name} for name in peers]
    measure(rows, [partial(sampled, name) for name in peers])
    return with_rates(rows)


def with_rates(rows: list[dict]) -> list[dict]:
    """Return the rows with TFLOP/s, TB/s, and the cold time of FlashMLA over each one's."""
    theirs = next((row.get("cold_us") for row in rows if row["peer"] == "flashmla"), None)
    for row in rows:
        for when in WHEN:
            if f"{when}_us" in row:
                row[f"{when}_tflops"] = row["flop"] / row[f"{when}_us"] * 1e-6
                row[f"{when}_tbs"] = row["nbytes"] / row[f"{when}_us"] * 1e-6
        if theirs and "cold_us" in row:
            row["of_flashmla"] = theirs / row["cold_us"]
    return rows


def without_memory(problem: Problem) -> Any:
    """Return the arguments of the operator with tensors that have no contents."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    n, columns = problem.entries, problem.columns
    q, integer = empty(n, problem.heads, columns), {"dtype": torch.int32}
    if problem.dense:
        given = {"page_table": empty(n, problem.keys // PAGE, **integer)}
        given["kv_lens"] = empty(n, **integer)
        return DECODE.arguments(dense_fields(q, empty(n, PAGE, columns), given))
    caches = [(problem.record, PAGE, problem.keys)]
    if problem.window:
        caches.insert(0, (problem.window_record, WINDOW, problem.window))
    (record, rows, k), *others = caches
    options: dict[str, Any] = {}
    for other, page, count in others:
        options |= {"extra": _store(other, page), "extra_indices": empty(n, count, **integer)}
    fields = sparse_fields(q, _store(record, rows), empty(n, k, **integer), options)
    return SPARSE.arguments(fields | {"many": problem.rows == "prefill"})


def _store(record: str, rows: int) -> torch.Tensor | Rows:
    """Return a cache of some pages without contents."""
    if FORMS[record].plain:
        return torch.empty(8, rows, FORMS[record].columns, dtype=torch.bfloat16, device="meta")
    stored = RECORDS[record]
    pool = torch.empty(8, stored.page_bytes(rows), dtype=torch.uint8, device="meta")
    return Rows(pool, 0, rows * stored.data_bytes if stored.scale_bytes else 0, rows, stored)


def static_row(problem: Problem) -> dict[str, Any]:
    """Return what follows from the sizes of a problem, on Hopper."""
    decision = decide(without_memory(problem), Target("emulate", ARCH))
    chosen = {"cluster": decision.config.cluster, "parts": decision.parts, "ctas": decision.grid}
    return problem.sizes | {"arch": ARCH, "kernel": decision.kernel.split(".")[2]} | chosen


def markdown(rows: Sequence[dict]) -> str:
    """Return a line per problem: microseconds of each peer, cold and warm; rates of the first."""
    peers = [*dict.fromkeys(row["peer"] for row in rows)]
    lines = []
    for problem in dict.fromkeys(row["problem"] for row in rows):
        found = {row["peer"]: row for row in rows if row["problem"] == problem}
        ours = found.get(peers[0], {})
        rates = [f"{ours[name]:.3g}" if name in ours else "-" for name in RATES]
        lines.append([problem, *(_pair(found.get(peer, {})) for peer in peers), *rates])
    return markdown_of(["problem", *peers, "TFLOP/s", "TB/s"], lines)


RATES = ("cold_tflops", "cold_tbs")


def _pair(row: Mapping[str, Any]) -> str:
    return f"{row['cold_us']:.1f} / {row['warm_us']:.1f}" if "cold_us" in row else "-"


class Latent(Bench):
    """Attention to latent keys beside FlashMLA."""

    kind = "latent"
    no_gpu = NO_GPU
    static_columns = STATIC
    selects = ("rows", "heads", "entries", "peers")

    def problems(self) -> Sequence[Problem]:
        return problems_of(self.options.rows, self.options.heads, self.options.entries)

    def setting(self) -> dict[str, Any]:
        return {"inputs": INPUTS}

    def rows(self, problem: Problem) -> list[dict]:
        cache = torch.cuda.get_device_properties().L2_cache_size
        sets = drawn(problem, problem.sets(cache), "cuda")
        return rows_of(problem, self.options.peers, sets)

    def known(self, problems: Sequence[Problem]) -> list[dict]:
        return [static_row(problem) for problem in problems]

    def show(self, rows: Sequence[dict]) -> None:
        show(*table(rows[0]["problem"], TIMES, rows))

    def subject(self, row: Mapping[str, Any]) -> str:
        return row["problem"]

    def has(self, row: Mapping[str, Any]) -> bool:
        asked = self.options
        wanted = (asked.heads, row["heads"]), (asked.entries, row["entries"])
        if any(some and value not in some for some, value in wanted):
            return False
        return row["rows"] in asked.rows and ("peers" not in asked.given or self._named(row))

    def _named(self, row: Mapping[str, Any]) -> bool:
        return row["peer"] in self.options.peers

    def markdown(self, rows: Sequence[dict]) -> str:
        return markdown(rows)


BENCH = Latent
