"""Kernels of ours that were timed on a GPU, as calls that can be made again and modelled.

A row of results/*.json names the problem; what drew it then draws it now. Values do not matter to
time, sizes do: large inputs stay memory that nobody has touched, where nothing is read from them to
decide what is done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cycle_model import gpus
from lab.tools.common import read_rows

Call = Callable[[], Any]
PEERS = 3  # of a step: ours, torch, a copy
_DECODE = re.compile(r"decode( \w+=\S+)?")
_DEPENDENT = {"decode pdl": {"pdl": True},
              "decode pdl kv-ready": {"pdl": True, "kv_ready_before_pdl": True}}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A measured problem.

    group: the step.
    us: measured microseconds.
    memory: 'cold' or 'warm'.
    make: allocates the inputs and returns the call.
    nbytes: bytes of the inputs.
    others: number of torch launches in addition to ours.
    whole: whether all clusters must run, as a launch reads addresses that an earlier one
    found.
    flags: flags of an attention case, of which a few blocks are run and modelled instead.
    Such a case was measured in cycles: us is the time at the clock of the GPU's parameters.
    """

    group: str
    name: str
    gpu: str
    memory: str
    us: float
    nbytes: int
    make: Callable[[], Call]
    others: int = 0
    whole: bool = False
    flags: str = ""
    cycles: float = 0

    def microseconds(self, clock: float) -> float:
        """At a clock in GHz, where cycles were measured."""
        return self.cycles / clock / 1e3 if self.cycles else self.us


def measured_in(path: Path) -> Iterator[Measured]:
    """Rows of a file that `bench.py` has saved. ValueError for one that has no kernel of ours."""
    try:
        saved: Any = read_rows(path)
        rows = [saved, *saved["rows"]] if isinstance(saved, dict) else saved  # its setting first
        gpu = _gpu_of(rows)
        found = [each for row in rows[1:] for each in _measured(row, gpu, rows[0])]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a file that bench.py writes: {error}") from None
    except LookupError as missing:
        raise ValueError(f"{path}: not a file that bench.py writes: no {missing}") from None
    if not found:
        raise ValueError(f"{path}: no times of kernels that can be modelled")
    yield from found


def _gpu_of(rows: list[dict[str, Any]]) -> str:
    """The name that parameters have it by."""
    if not rows:
        raise ValueError("no rows")
    setting = rows[0].get("setting", rows[0])
    gpu = setting.get("gpu", {})
    name = gpu if isinstance(gpu, str) else gpu.get("name", "")
    known = next((word for word in name.split() if word in gpus.GPUS), "")
    if not known:
        raise ValueError(f"the setting has an unknown GPU: {name!r}")
    return known


def _measured(row: dict[str, Any], gpu: str, setting: dict[str, Any]) -> Iterator[Measured]:
    if _is_decode(row):
        tuned = row["peer"].removeprefix("decode")
        name = f"batch {row['batch']}, {row['kv_len']} keys{',' * bool(tuned)}{tuned}"
        group = "decode, dependent" if row["peer"] in _DEPENDENT else "decode"
        make = partial(_decode, row)
        for memory in ("cold", "warm"):
            yield Measured(group, name, gpu, memory, row[f"{memory}_us"], row["nbytes"], make)
    elif row.get("peer") in _LATENT and "window_record" in row:
        yield from _latent(row, gpu)
    elif row.get("kind") == "cycles" and row["peer"] == "fmha":
        yield _attention(row, gpu)
    elif "merge_us" in row:
        step = {
            "step": "merge",
            "name": f"{row['parts']} parts of head_dim {row['head_dim']}, {row['form']}",
            "tokens": row["rows"],
        }
        nbytes = (row["parts"] + 1) * row["rows"] * row["head_dim"] * 2
        yield _step({**step, "us": row["merge_us"], "nbytes": nbytes, **row}, gpu, setting)
    elif row.get("peer") in ("moe", "kvcache", "merge") and "us" in row and row["step"] != "host":
        yield _step(row, gpu, setting)


def _is_decode(row: dict[str, Any]) -> bool:
    """Ours, with or without dependent launches."""
    if row.get("kind") != "latency" or "cold_us" not in row:
        return False
    return row["peer"] in _DEPENDENT or bool(_DECODE.fullmatch(row["peer"]))


def _latent(row: dict[str, Any], gpu: str) -> Iterator[Measured]:
    """Times of `bench.py mla`, as far as its inputs were where the name of a time says."""
    name = row["problem"].removeprefix(f"{row['rows']}: ") + row["peer"].removeprefix("mla")
    fits = row["nbytes"] <= gpus.named(gpu).l2_bytes // 2  # both halves keep a copy
    for memory in ("cold", "warm") if fits else ("cold",):
        if f"{memory}_us" in row:
            make = partial(_latent_call, row, gpu)
            us, group = row[f"{memory}_us"], f"mla {row['rows']}"
            yield Measured(group, name, gpu, memory, us, row["nbytes"], make)


def _attention(row: dict[str, Any], gpu: str) -> Measured:
    causal, pairs = "--causal" in row["flags"], "--ctas 2" in row["flags"]
    group = f"attention, {'causal' if causal else 'full'}{', pairs' * pairs}"
    us = row["cycles"] / gpus.named(gpu).value("clock") / 1e3
    return Measured(group, row["name"], gpu, "cold", us, 0, _no_call, flags=row["flags"],
                    cycles=row["cycles"])  # fmt: skip


def _no_call() -> Call:
    raise ValueError("attention is modelled from a few of its blocks")


def _step(row: dict[str, Any], gpu: str, setting: dict[str, Any]) -> Measured:
    name = f"{row['name']}, {row['tokens']} rows"
    # Those who are timed take turns, and both halves of L2 keep a copy of what they read.
    moved = PEERS * row.get("sets", 1) * row["nbytes"]
    memory = "warm" if not row["cold"] and moved <= gpus.named(gpu).l2_bytes // 2 else "cold"
    make = partial(_problem, row, gpu, setting.get("hidden", 0))
    others = next(
        (n for words, n in _OTHERS.items() if f"{row['step']}: {name}".startswith(words)), 0
    )
    whole = row["step"] in _WHOLE
    return Measured(row["step"], name, gpu, memory, row["us"], row["nbytes"], make, others, whole)


def _decode(row: dict[str, Any]) -> Call:
    """Return the call with the default tuning, or that in the peer's name: 'decode
    cluster=8,parts=2'."""
    import torch

    from gqa_lowlatency import DecodeConfig, decode_plan
    from lab.flags.bench import tuning

    batch, head_dim = row["batch"], row["head_dim"]
    q = torch.randn(batch, 1, row["q_heads"], head_dim).bfloat16()
    shape = batch, row["kv_len"], row["kv_heads"], head_dim
    k, v = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    given: dict[str, Any] = dict(_DEPENDENT.get(row["peer"], {}))
    fields = tuning(row["peer"].split()[1]) if " " in row["peer"] and not given else {}
    parts = fields.pop("parts", 0)
    config = DecodeConfig(**({"cluster": 0} | fields)) if fields else None

    def call() -> None:
        plan = decode_plan(
            q, k, v, parts=parts, config=config, arch="sm_90a", backend="emulate", **given
        )
        plan(q, k, v)

    return call


def _latent_call(row: dict[str, Any], gpu: str) -> Call:
    from kernelkit.call.launch import emulation
    from lab.bench.mla_peers import PEERS, Problem, drawn

    names = ("rows", "entries", "heads", "keys", "record", "window", "window_record")
    problem = Problem(**{name: row[name] for name in names})
    inputs = drawn(problem, 1, "cpu", empty=True)

    def call() -> None:
        with emulation(arch=gpus.named(gpu).arch):
            PEERS[row["peer"]](problem, inputs)[0]()

    return call


def _problem(row: dict[str, Any], gpu: str, hidden: int) -> Call:
    from kernelkit.call.launch import emulation
    from lab.flags.steps import ABOUT
    from lab.problems.steps import MODULES, problems_of

    assert row["step"] in ABOUT, row["step"]
    family = _FAMILIES[row["step"]]
    assert family in MODULES
    found = problems_of(family, [row["step"]], [row["tokens"]], hidden, [row["name"]])
    problem = next(each for each in found if each.name == row["name"])
    if problem.beside:
        raise ValueError(f"{problem.beside} is torch's")
    arguments = problem.draw(0, "cpu")

    def call() -> None:
        with emulation(arch=gpus.named(gpu).arch):
            problem.peers[problem.ours](*arguments)

    return call


_LATENT = ("mla", "mla pdl", "mla warp", "mla wgmma")
_OTHERS = {"checksum": 1, "quantise: nvfp4, scale of the tensor": 1}  # torch's zeros
_WHOLE = ("permutation",)  # rows go where counts of all of them say
_FAMILIES = {
    "merge": "merge",
    **dict.fromkeys(("quantise", "route", "route_tokens", "permutation", "combine"), "moe"),
    **dict.fromkeys(("append", "gather", "copy", "checksum"), "kvcache"),
    **dict.fromkeys(("compress", "query", "score", "topk", "norm_rope"), "dsv4"),
}
