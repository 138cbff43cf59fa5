"""Attention to latent keys as the commands know it: from flags to a case, its run, its plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from rich.console import Console

from kernelkit.compile.keys import KernelKey
from kernelkit.numerics import tolerance
from lab.flags.mla import NO_RECORD
from lab.measure.accuracy import share
from lab.measure.timing import Sample, calls, cold_and_warm
from lab.problems import family, latent
from lab.problems.family import Family
from lab.problems.latent import Cache, Dense, Sparse, moved
from lab.problems.sections import (
    Section,
    edges,
    lines_of,
    named_barriers,
    roles,
    shared_memory,
)
from lab.sass.kernel import Subject
from lab.sass.kernel import subject_of as kernel_of
from lab.tools import tables
from lab.tools.common import describe
from lab.tools.place import Place
from mla import decode, sparse_decode, sparse_prefill
from mla.attention.arguments import Arguments
from mla.attention.choose import ARCHS, WARP, Decision, plan_of, tile_of
from mla.attention.config import LatentConfig
from mla.attention.launch import prepare
from mla.attention.portable.plan import PortablePlan
from mla.attention.sm90.plan import Plan90
from mla.attention.sm100.plan import Plan100

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "decode": decode, "sparse_decode": sparse_decode, "sparse_prefill": sparse_prefill,
}  # fmt: skip
POOL = 4  # entries of a cache for each one that a token lists
ROWS = 64  # of a page of a cache from which tokens list entries
LIMIT = "reference: plain torch with the kernel's roundings; limit: 2 x that + 1 ulp"
Plan = PortablePlan | Plan90 | Plan100


@dataclass(frozen=True)
class Case(family.Problem):
    """A call: its function, its inputs, and the options that change no result.

    arch: architecture of the kernel.
    """

    operation: str
    inputs: latent.Case
    options: dict[str, Any]
    arch: str

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.options.items() if value]
        return " ".join([f"{self.operation} {self.inputs}", *words])

    @property
    def named(self) -> dict[str, Any]:
        return {"case": str(self)}

    def draw(self, seed: int, device: str) -> latent.Given:
        """Numbers are the same, whatever the seed."""
        return moved(self.inputs.inputs(), device)

    def calls(self, drawn: latent.Given, place: Place) -> dict[str, Callable[[], Any]]:
        return {"": self._call(drawn, place)}

    def _call(self, drawn: latent.Given, place: Place) -> Callable[[], Any]:
        given, options = drawn
        options = options | self.options | place.given
        return partial(FUNCTIONS[self.operation], *given, return_lse=True, **options)

    def judge(self, drawn: latent.Given, name: str, results: Any, slack: float) -> dict[str, Any]:
        place = {"arch": self.arch} if results[0].device.type == "cpu" else {}
        device, place = str(results[0].device), place | self.options
        senders = latent.senders_of(self._case, place, device)
        o, lse = self.inputs.judge(results, device, senders=senders)
        return errors_of(o, lse, slack) | {"ok": max(share(o, slack), share(lse, slack)) <= 1.0}

    def samples(self, drawn: latent.Given, results: Any, place: Place) -> dict[str, Sample]:
        """Return samples of a launch with the same tensors, and of the eager call."""
        call = self._call(drawn, place)
        warm = cold_and_warm([call])["warm"]
        return {"warm": warm, "host": calls(call)}

    @property
    def _case(self) -> latent.Case:
        """The inputs, which say whether there are many tokens."""
        many = self.operation == "sparse_prefill"
        return replace(self.inputs, options=((latent.MANY, True),) if many else ())

    @cached_property
    def decision(self) -> Decision:
        """Return what is launched, as if there were no GPU; raises what the call raises."""
        return prepare(self.without_memory())[1]

    def without_memory(self) -> Arguments:
        """Return the arguments of the operator with tensors without contents."""
        return latent.arguments_of(self._case, self.options | {"arch": self.arch})

    def plan(self, arch: str) -> Iterator[str]:
        return explain(self)

    def kernels(self, arch: str) -> list[Subject]:
        decision = self.decision
        return [kernel_of(KernelKey(decision.kernel, decision.config, self.arch))]


def errors_of(o: tolerance.Report, lse: tolerance.Report, slack: float) -> dict[str, Any]:
    """Return the errors of a call as columns."""
    return {
        "max_error": o.error,
        "reference_error": o.reference_error,
        "of_limit": max(share(o, slack), share(lse, slack)),
        "lse_error": lse.error,
    }


def case_of(options: argparse.Namespace, arch: str = "") -> Case:
    """Return the case that the flags spell; ValueError for flags that do not belong together."""
    dense = options.operation == "decode"
    names = ("kernel", "cluster", "parts", "batch_invariant", "pdl")
    launched = {name: getattr(options, name) for name in names}
    inputs = _dense(options) if dense else _sparse(options)
    return Case(options.operation, inputs, launched, arch or options.arch)


def _dense(options: argparse.Namespace) -> Dense:
    if options.extra != NO_RECORD or options.rope:
        raise ValueError("--extra and --rope belong to sparse_decode and sparse_prefill")
    return Dense(
        heads=options.heads,
        tokens=options.tokens,
        lens=tuple(options.kv_len),
        page=options.page_size,
        causal=not options.full,
        scaled=options.e4m3,
        sinks=options.sinks,
    )


def _sparse(options: argparse.Namespace) -> Sparse:
    if options.e4m3 or options.full:
        raise ValueError("--e4m3 and --full belong to decode; --record names the format")
    extra = None
    if options.extra != NO_RECORD:
        extra = _cache(options.extra, options.extra_chosen)
    cache = _cache(options.record, options.chosen)
    case = Sparse(heads=options.heads, tokens=options.tokens, cache=cache)
    return replace(case, extra=extra, rope=options.rope, sinks=options.sinks)


def _cache(record: str, chosen: int) -> Cache:
    pages = -(-POOL * chosen // ROWS)
    return Cache(record, ROWS, chosen, wide=False, pages=pages, spare=0)


# -- run ------------------------------------------------------------------------------------------

COLUMNS = (
    ("\ncase", "{case}"), ("\nrun as", "{backend}\n{arch}"),
    ("max abs\nerror", "{max_error:.1e}"), ("refer-\nence", "{reference_error:.1e}"),
    ("of\nlimit", lambda row: f"{row['of_limit']:.0%}" if row["of_limit"] < 10 else "> 999%"),
    ("LSE\nerror", "{lse_error:.1e}"), ("", lambda row: "ok" if row["ok"] else "OUT"),
)  # fmt: skip


def tell(
    rows: Sequence[dict[str, Any]], options: argparse.Namespace, place: Place
) -> dict[str, Any]:
    """Print errors, and the time of a launch or the work of the emulator."""
    (row,), console = rows, Console()
    if getattr(options, "unjudged", False):
        return {"row": row}
    cost = (("warp-\ninstr.", "{instructions:,}"), ("\nseconds", "{seconds:.1f}"))
    if "warm_us" in row:
        cost = tuple((f"{name}\nus", f"{{{name}_us:.1f}}") for name in ("warm", "host"))
    tables.show(*tables.table("", (*COLUMNS, *cost), [row]), console)
    console.print(LIMIT)
    console.print("within tolerance" if row["ok"] else "out of tolerance")
    return {"row": row}


# -- explain --------------------------------------------------------------------------------------


def plan_for(config: LatentConfig, kernel: str, arch: str) -> Plan:
    """Return the plan of a kernel, after its checks."""
    plan = PortablePlan(config, arch) if kernel == WARP else plan_of(kernel, config)
    plan.check()
    return plan


def explain(case: Case) -> Iterator[str]:
    """Yield the whole plan, line by line."""
    decision = case.decision
    plan = plan_for(decision.config, decision.kernel, case.arch)
    yield f"{decision.kernel} for {case.arch}: {describe(decision.config)}"
    yield f"for {case}"
    yield from lines_of([launch(case, decision), tiles(plan), *of_plan(plan)])


def launch(case: Case, decision: Decision) -> Section:
    """Describe the CTAs and what they share."""
    arguments, tile = case.without_memory(), tile_of(decision.kernel, decision.config)
    config = decision.config
    sharing = config.cluster * decision.parts
    steps = -(-arguments.longest // tile.keys)
    most = -(-steps // sharing)
    rows = [
        ("grid", f"{decision.entries} query entries x {decision.row_tiles} row tiles x "
                 f"{decision.parts} parts x {config.cluster} CTAs of a cluster"),
        ("keys", f"up to {arguments.longest} of an entry, {steps} tiles; a CTA has up to {most}"),
        ("workspace", f"{decision.workspace_bytes:,} bytes"),
    ]  # fmt: skip
    for name, source in zip(("cache", "extra cache"), config.sources, strict=False):
        by = "listed" if source.listed else f"by pages of {source.rows}"
        form = source.form
        nbytes = form.data_bytes + form.scale_bytes
        rows.append((name, f"{source.record}, {nbytes} bytes an entry, {by}"))
    return f"Launch: {decision.grid} CTAs", rows


def tiles(plan: Plan) -> Section:
    """Describe the tiles of a CTA."""
    if isinstance(plan, PortablePlan):
        how = "copied as they are" if plan.direct else "copied, then converted to bf16"
        rows = [
            ("rows", f"{plan.rows} query rows"),
            ("keys", f"32 keys, {how}; {plan.stages} stages"),
        ]
        return "Tiles", rows
    how = "threads, which convert them to bf16" if plan.copies else "TMA"
    rows = [
        ("rows", f"{plan.tiles.heads} heads x {plan.tiles.tokens} tokens of {plan.mail.most_rows}"),
        ("keys", f"{plan.keys} keys in panels of 64 columns, brought by {how}"),
    ]
    if plan.reduces:
        rows.append(("reduction", f"a rank of the cluster finishes {plan.mail.owned_rows} rows"))
    return "Tiles", rows


def of_plan(plan: Plan) -> Iterator[Section]:
    """Yield roles, edges, barriers and shared memory."""
    yield roles(plan.roles)
    if not isinstance(plan, PortablePlan):
        yield edges(plan.edges)
    yield named_barriers(plan.barriers)
    yield shared_memory(plan.smem)


FAMILY = Family(lambda options: ARCHS, lambda options, place: [case_of(options, place.arch)], tell)
