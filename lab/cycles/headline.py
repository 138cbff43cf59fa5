"""`cycles.py fmha --peers` without a case: headline shapes of attention. Compares our modelled
kernels with modelled peers and with published figures."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cycle_model.parameters.parameter import Gpu
from lab.cycles import subjects
from lab.cycles.peers import Shape, peers_of
from lab.cycles.published import published_in, reader_of
from lab.cycles.sample import case_options, case_parser, microseconds, ours
from lab.report.attention import draw_b200
from lab.report.documents import Document
from lab.tools.common import refuse, write_json
from lab.tools.tables import Column, show, table
from ptxemu.errors import PtxEmuError

OURS = "ours"
WIDE = 260  # characters of a line, where the output is no terminal
RESULTS = Path(__file__).parents[2] / "results"
RIVALS = RESULTS / "published_attention_rivals.csv"
OF_FLASH = ("published_fa4_b200.csv", "published_fa4_gb200.csv")
CAUSAL, WINDOW = "--causal", "--causal --window 127 --sinks"  # 128 keys with its own


def _flags(dims: str, tokens: str, batch: int, heads: int, kv_heads: int, more: str = "") -> str:
    sizes = f"--q-len {tokens} --kv-len {tokens} --batch {batch}"
    return f"--head-dim {dims} {sizes} --q-heads {heads} --kv-heads {kv_heads} {more}".strip()


HEADLINES = {
    "hd64-full": _flags("64", "8k", 4, 32, 32),
    "hd64-causal": _flags("64", "8k", 4, 32, 32, CAUSAL),
    "hd128-full": _flags("128", "8k", 4, 16, 16),
    "hd128-causal": _flags("128", "8k", 4, 16, 16, CAUSAL),
    "hd256-full": _flags("256", "8k", 1, 32, 2),
    "hd256-causal": _flags("256", "8k", 1, 32, 2, CAUSAL),
    "hd192x128-full": _flags("192,128", "8k", 2, 64, 64),
    "hd192x128-causal": _flags("192,128", "8k", 2, 64, 64, CAUSAL),
    "hd96-full": _flags("96", "8k", 4, 16, 16),
    "hd96-causal": _flags("96", "8k", 4, 16, 16, CAUSAL),
    "hd512-causal": _flags("512", "8k", 1, 16, 2, CAUSAL),
    "gpt-oss-window-8k": _flags("64", "8k", 1, 64, 8, WINDOW),
    "gpt-oss-window-2k": _flags("64", "2k", 1, 64, 8, WINDOW),
    "gpt-oss-causal-8k": _flags("64", "8k", 1, 64, 8, f"{CAUSAL} --sinks"),
    "gqa-full-8k": _flags("128", "8k", 2, 64, 8),
    "gqa-causal-8k": _flags("128", "8k", 2, 64, 8, CAUSAL),
    "gqa-causal-2k": _flags("128", "2k", 1, 64, 8, CAUSAL),
}
"""Names of the flags that spell a case, as `--row` has them."""


@dataclass(frozen=True)
class Rival:
    """A published time of another kernel for a row."""

    row: str
    rival: str
    gpu: str
    us: float
    source: str


def is_asked(options: argparse.Namespace) -> bool:
    """No flag of a case was given, but --peers."""
    return options.subject == "fmha" and options.peers and not options.given & _of_a_case()


def _of_a_case() -> set[str]:
    return {action.dest for action in case_parser()._actions} | {"arch"}


def perform(options: argparse.Namespace) -> int:
    """The table, the file and the picture."""
    try:
        rows = _chosen(options)
        subjects.check(options)
        gpu = subjects.gpu_of(options, options.gpu or ("" if options.parameters else "B200"))
    except (ValueError, OSError) as refused:
        return refuse(refused)
    sets = [gpu, *map(gpu.perturbed, range(options.perturbed))]
    document: dict[str, Any] = {"gpu": gpu.name, "perturbed": options.perturbed,
                                "parameters": subjects.origin(options), "rows": []}  # fmt: skip
    for row in rows:
        document["rows"].append(modelled(row, options, sets))
        if options.json:  # whoever stops here keeps what there is
            write_json(options.json, document)
    told(document["rows"])
    subjects.told(options)
    if options.plot:
        draw_b200(options.plot, Document("", data=document))
    return 0


def _chosen(options: argparse.Namespace) -> list[str]:
    """The rows that are asked for. ValueError for one that is none, and for flags that say
    something of one case alone."""
    for name in ("what_if", "launch", "trace"):
        if name in options.given:
            words = "is for one case: give one, such as --head-dim 64"
            raise ValueError(f"--{name.replace('_', '-')} {words}")
    if not isinstance(options.clusters, int):
        raise ValueError("--clusters: the table needs a count; numbers and all are for one case")
    for name in options.row:
        if name not in HEADLINES:
            raise ValueError(f"--row {name}: one of {', '.join(HEADLINES)}")
    return [name for name in HEADLINES if name in (options.row or HEADLINES)]


def modelled(row: str, options: argparse.Namespace, sets: Sequence[Gpu]) -> dict[str, Any]:
    """A row: what each kernel takes, and what is published."""
    given = case_options(HEADLINES[row], options)
    kernels: dict[str, dict[str, Any]] = {}
    for name, peer in {OURS: ours, **peers_of("fmha")}.items():
        began = time.perf_counter()
        try:
            us = microseconds(peer, given, sets)
            kernels[name] = figures(us, flops_of(given), kernels.get(OURS, {}).get("sets"))
        except Exception as error:  # noqa: BLE001 - a peer raises what it likes, the rest is wanted
            kernels[name] = {"refused": _reason(error)}
        kernels[name]["seconds"] = time.perf_counter() - began
        words = f"{kernels[name]['us']:.1f} us" if "us" in kernels[name] else "refused"
        words += f", in {kernels[name]['seconds']:.0f} s"
        print(f"{row}, {name}: {words}", file=sys.stderr, flush=True)
    rivals = [vars(each) for each in rivals_of(row, given)]
    return {"row": row, "flags": HEADLINES[row], "kernels": kernels, "published": rivals}


def _reason(error: Exception) -> str:
    """Describe an error in one line; for an assertion without a message, return its source line."""
    said = str(error).strip().partition("\n")[0]
    said = said or traceback.extract_tb(error.__traceback__)[-1].line or ""
    plain = isinstance(error, (ValueError, NotImplementedError, ImportError, PtxEmuError)) and said
    return said if plain else f"{type(error).__name__}: {said}"


def figures(us: Sequence[float], flops: float, ours: Sequence[float] | None) -> dict[str, Any]:
    """Return times, speeds and ratios; speeds are compared set by set.

    us: nominal, then with each set of parameters.
    ours: the times of our kernel, if `us` is of another one."""
    found: dict[str, Any] = {"us": us[0], "low_us": min(us), "high_us": max(us), "sets": list(us),
                             "tflops": flops / us[0] * 1e-6}  # fmt: skip
    if ours:
        ratios = [theirs / mine for theirs, mine in zip(us, ours, strict=True)]
        found |= {"ratio": ratios[0], "low_ratio": min(ratios), "high_ratio": max(ratios)}
    return found


def flops_of(options: argparse.Namespace) -> float:
    """Count operations as benchmarks do: half of the products of a causal problem, and only
    visible ones with a window."""
    (keys,), queries = options.kv_len, options.q_len
    seen = queries * keys / (2 if options.causal else 1)
    left, _ = options.window
    if left is not None:
        seen = sum(min(query + 1, left + 1) for query in range(queries))
    first, second = options.head_dim
    return 2.0 * (first + (second or first)) * seen * options.q_heads * options.batch


# -- published ------------------------------------------------------------------------------------


def rivals_of(row: str, options: argparse.Namespace) -> list[Rival]:
    """The fastest first."""
    found = [
        Rival(**{**each, "us": float(each["us"])})
        for each in reader_of(RIVALS)
        if each["row"] == row
    ]
    return sorted([*found, *_of_flash(row, options)], key=lambda each: each.us)


def _of_flash(row: str, options: argparse.Namespace) -> Iterator[Rival]:
    """FlashAttention-4's rows of the same shape."""
    (keys,), (first, second) = options.kv_len, options.head_dim
    if options.sinks or options.window != (None, None) or second or keys != options.q_len:
        return
    heads = options.q_heads, options.kv_heads
    shape = Shape(first, options.causal, options.batch, keys, *heads)
    for name in OF_FLASH:
        for each in published_in(RESULTS / name):
            if each.shape == shape:
                yield Rival(row, f"FlashAttention-4 {each.table}", each.gpu, each.us, name)


# -- told -----------------------------------------------------------------------------------------


def told(rows: Sequence[dict[str, Any]]) -> None:
    """A table, and below it why kernels are missing, each reason once."""
    reasons: dict[str, int] = {}
    for name, reason in _refusals(rows):
        reasons.setdefault(f"{name}: {reason}", len(reasons) + 1)
    names = list(dict.fromkeys(name for row in rows for name in row["kernels"]))
    show(*table("modelled, not measured", _columns(names, rows, reasons), rows), width=WIDE)
    for reason, number in reasons.items():
        print(f"[{number}] {reason}")


def _refusals(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        kernels = row["kernels"].items()
        yield from ((name, each["refused"]) for name, each in kernels if "refused" in each)


def _columns(names: Sequence[str], rows: Sequence[Any], reasons: dict[str, int]) -> list[Column]:
    """Columns of a table; of a kernel that no row has a time of, one column alone says why."""

    def time_of(name: str) -> Column:
        def cell(row: Any) -> str:
            kernel = row["kernels"][name]
            if "refused" in kernel:
                return f"refused [{reasons[f'{name}: ' + kernel['refused']]}]"
            return f"{kernel['us']:.4g} ({kernel['low_us']:.4g} .. {kernel['high_us']:.4g})"

        return "\n".join((*name.split(), "us")), cell

    def rate_of(name: str) -> Column:
        return "TFLOP/s", lambda row: "{tflops:.0f}".format_map(row["kernels"][name])

    def ratio_of(name: str) -> Column:
        words = "{ratio:.2f} ({low_ratio:.2f} .. {high_ratio:.2f})"
        return "our speed\nover its", lambda row: words.format_map(row["kernels"][name])

    columns: list[Column] = [("shape", "{row}"), ("batch, tokens,\nheads", _sizes)]
    for name in names:
        modelled_once = any("us" in row["kernels"][name] for row in rows)
        columns += [time_of(name), *[rate_of(name)] * modelled_once]
        columns += [ratio_of(name)] * (modelled_once and name != OURS)
    return [*columns, ("published, us", _published)]


def _sizes(row: Any) -> str:
    given = case_parser().parse_args(shlex.split(row["flags"]))
    return f"{given.batch} x {given.q_len}, {given.q_heads}/{given.kv_heads}"


def _published(row: Any) -> str:
    """The fastest; the file has all of them."""
    if not row["published"]:
        return "-"
    best = row["published"][0]
    return f"{best['us']:.4g} {best['rival']}, {best['gpu']}"
