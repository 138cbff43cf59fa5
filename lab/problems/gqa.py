"""Decode as the commands know it: from flags to a case, its run, its plan and its kernel."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gqa_lowlatency import decode, decode_plan, reference
from gqa_lowlatency.api import fields_of
from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.choose import TILE, choose_config, clusters_per_head, machine_of
from gqa_lowlatency.config import COLUMNS, HEAD_DIMS, TUNABLE, DecodeConfig
from gqa_lowlatency.launch import ARCHS, checked_decision, compile_for, has_keys, make_workspace
from gqa_lowlatency.portable.plan import SCORE_STAGES, PortablePlan
from gqa_lowlatency.sm100 import plan as sm100
from gqa_lowlatency.split import Reach, reach, share
from kernelkit.call.launch import Target
from kernelkit.compile.arch import written_for
from kernelkit.plan import hw
from kernelkit.plan.dtypes import ITEM_BYTES
from lab.measure.accuracy import ERRORS, LIMIT, coarser, errors_of
from lab.measure.timing import Sample, calls, cold_and_warm, sets_here
from lab.problems import family
from lab.problems.family import Family, Grid
from lab.problems.sections import (
    Rows,
    Section,
    byte_range,
    lines_of,
    parts_of,
    plural,
    smem_title,
)
from lab.problems.trees import words_of_tree
from lab.sass import loops
from lab.sass.kernel import Cell, Subject, print_kinds
from lab.tools import groups, tables
from lab.tools.common import changed, describe
from lab.tools.place import Place, is_of, native_arch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KV_DTYPES = DTYPES | {"e4m3": torch.float8_e4m3fn}
OUT_DTYPES = KV_DTYPES | {"fp32": torch.float32}
SEED = 0
SPARE_PAGES = 1  # pages of the pool that belong to no entry

# Flags that are fields of Case, and those that are options of `decode`, by their names there.
FIELDS = (
    *("batch", "kv_len", "kv_heads", "q_heads", "q_len", "head_dim", "dtype", "kv_dtype"),
    *("page_size", "sinks", "scales", "tree"),
)
OPTIONS = (
    *("causal", "window", "sink_tokens", "softcap", "batch_invariant", "parts", "pdl"),
    "kv_ready_before_pdl",
)
REFERENCE_KNOWS = {field.name for field in dataclasses.fields(reference.Options)}
LENGTHS_SHOWN = 8  # of the different ones of a batch
Drawn = tuple[list[torch.Tensor], dict[str, torch.Tensor]]  # q, k, v; tables by name


@dataclass(frozen=True)
class Case(family.Problem):
    """The flags' values by name; kv_len has one length or one per entry."""

    batch: int
    kv_len: tuple[int, ...]
    kv_heads: int
    q_heads: int
    q_len: int
    head_dim: int
    dtype: str
    kv_dtype: str
    page_size: int
    sinks: bool
    scales: bool
    tree: str
    arch: str
    options: dict[str, Any]
    tuning: dict[str, int]

    def __str__(self) -> str:
        lengths, heads = ",".join(map(str, self.kv_len)), f"h{self.q_heads}/{self.kv_heads}"
        words = [f"{self.q_len}x{lengths} {heads} b{self.batch}"]
        words += [f"d{self.head_dim} {self.dtype}" + f"/{self.kv_dtype}" * bool(self.kv_dtype)]
        words += [f"pages({self.page_size})"] * bool(self.page_size) + ["sinks"] * self.sinks
        words += ["scales"] * self.scales + [self.tree] * bool(self.tree)
        words += ["full"] * (not self.options["causal"])
        plain = {**self.options, **self.tuning, "causal": None}
        words += [f"{name}({value})" for name, value in plain.items() if value]
        return " ".join(words)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each entry."""
        return self.kv_len * self.batch if len(self.kv_len) == 1 else self.kv_len

    @property
    def pages(self) -> int:
        """Pages of an entry."""
        return -(-max(self.lengths, default=0) // self.page_size)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of q, and of k and v."""
        rows: tuple[int, ...] = (self.batch, max(self.lengths, default=0))
        if self.page_size:
            rows = (self.batch * self.pages + SPARE_PAGES, self.page_size)
        q = self.batch, self.q_len, self.q_heads, self.head_dim
        return q, (*rows, self.kv_heads, self.head_dim)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return DTYPES[self.dtype], KV_DTYPES[self.kv_dtype or self.dtype]

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, standard normal."""
        generator = torch.Generator().manual_seed(SEED)
        (q, kv), (q_dtype, kv_dtype) = self.shapes, self.dtypes
        queries = torch.randn(q, generator=generator)
        k, v = (torch.randn(kv, generator=generator).to(kv_dtype) for _ in range(2))
        return queries.to(q_dtype), k, v

    @cached_property
    def tables(self) -> dict[str, torch.Tensor]:
        """Lengths, page numbers, sinks and scales, by the names of `decode`."""
        generator = torch.Generator().manual_seed(SEED)
        found = {}
        if self.page_size or len(self.kv_len) > 1:
            found["kv_lens"] = torch.tensor(self.lengths, dtype=torch.int32)
        if self.page_size:
            order = torch.randperm(self.batch * self.pages, generator=generator)
            found["page_table"] = order.view(self.batch, self.pages).int()
        if self.tree:
            pick = random.Random(SEED)
            words = [words_of_tree(self.tree, self.q_len, pick) for _ in range(self.batch)]
            found["tree"] = torch.stack(words)
        if self.sinks:
            found["sinks"] = torch.randn(self.q_heads, generator=generator)
        for name in ("k_scale", "v_scale") if self.scales else ():
            found[name] = torch.rand(self.kv_heads, generator=generator) + 0.5
        return found

    def without_memory(self) -> Arguments:
        """Return the arguments of `decode` with tensors without contents, enough to check and
        plan."""
        q, k = (
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        tables = {name: table.to("meta") for name, table in self.tables.items()}
        return Arguments(**fields_of(q, k, k, tables | self.options), **self.tuning)

    @property
    def config(self) -> DecodeConfig | None:
        """Return the requested config, if any."""
        return DecodeConfig(**({"cluster": 0} | self.tuning)) if self.tuning else None

    @property
    def named(self) -> dict[str, Any]:
        return {"case": str(self)}

    def draw(self, seed: int, device: str) -> Drawn:
        """Numbers are the same, whatever the seed."""
        tables = {name: table.to(device) for name, table in self.tables.items()}
        return [tensor.to(device) for tensor in self.tensors], tables

    def _given(self, tables: dict[str, torch.Tensor], place: Place) -> dict[str, Any]:
        return {**tables, **self.options, **place.given, "config": self.config}

    def calls(self, drawn: Drawn, place: Place) -> dict[str, Callable[[], Any]]:
        tensors, tables = drawn
        given = self._given(tables, place)
        return {"": partial(decode, *tensors, return_lse=True, **given)}

    def judge(self, drawn: Drawn, name: str, results: Any, slack: float) -> dict[str, Any]:
        changes = {name: value for name, value in self.options.items() if name in REFERENCE_KNOWS}
        given = self.tables | changes | {"arch": self.arch}
        if results[0].dtype == torch.float8_e4m3fn:  # `tolerance.compare_e4m3` rounds it
            given["out_dtype"] = torch.float32
        exact, rounded = (
            judge(*self.tensors, **given) for judge in (reference.definition, reference.rounded)
        )
        grain = coarser((DTYPES[self.dtype], results[0].dtype))
        pairs = (exact.o, exact.lse), (rounded.o, rounded.lse)
        errors = errors_of(results, *pairs, grain, slack)
        return errors | {"ok": errors["of_limit"] <= 1.0}

    def samples(self, drawn: Drawn, results: Any, place: Place) -> dict[str, Sample]:
        """Return samples of a plan, whose launches write to their workspace, and of its eager
        call."""
        tensors, tables = drawn
        given = self._given(tables, place)
        plan = decode_plan(*tensors, **given)
        moving = {name: tables[name] for name in ("kv_lens", "page_table") if name in tables}

        def launch_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
            out, lse = (torch.empty_like(result) for result in results)
            return partial(plan, q, k, v, **moving, out=out, lse=lse)

        sets = sets_here(sum(tensor.nbytes for tensor in tensors))
        copies = ([tensor.clone() for tensor in tensors] for _ in range(sets - 1))
        steps = [launch_of(*some) for some in (tensors, *copies)]
        return cold_and_warm(steps) | {"host": calls(steps[0])}

    def plan(self, arch: str) -> Iterator[str]:
        return explain(Launch(self, *settled(self)))

    def kernels(self, arch: str) -> list[Subject]:
        return [subject_of(settled(self)[1], self.arch)]


def case_of(arguments: argparse.Namespace, arch: str | None = None) -> Case:
    """The case that the flags spell, for `arch` or --arch; ValueError for lengths that do not fit
    the batch."""
    options = {name: getattr(arguments, name) for name in OPTIONS}
    left, right = arguments.window
    options["window"] = left if right in (None, 0) else arguments.window
    options["out_dtype"] = OUT_DTYPES.get(arguments.out_dtype)
    tuning = {name: getattr(arguments, name) for name in TUNABLE}
    case = Case(
        **{name: getattr(arguments, name) for name in FIELDS},
        arch=arch or arguments.arch,
        options=options,
        tuning={name: value for name, value in tuning.items() if value is not None},
    )
    if case.kv_dtype not in ("", case.dtype, "e4m3"):
        raise ValueError(f"--kv-dtype {case.kv_dtype} with --dtype {case.dtype}: the same, or e4m3")
    if len(case.lengths) != case.batch:
        raise ValueError(
            f"--kv-len {case.kv_len} for --batch {case.batch} entries: one length, or as many"
        )
    return case


def settled(case: Case) -> tuple[Arguments, DecodeConfig]:
    """The problem, and what is compiled for it: on this machine, where its GPU is of case.arch.

    Raises what `decode` raises, without a look at the contents of tensors.
    """
    arguments, native = case.without_memory(), native_arch()
    arguments.check()
    backend = "cuda" if native and is_of(native, case.arch) else "emulate"
    return arguments, checked_decision(arguments, Target(backend, case.arch)).config


@dataclass(frozen=True)
class Cta:
    """Properties of a CTA on any architecture.

    tile: keys that it processes at a time."""

    plan: PortablePlan | sm100.Plan100
    tile: int
    threads: int
    stages: int
    smem_bytes: int


def cta_of(config: DecodeConfig, arch: str) -> Cta:
    """CTA of the kernel for `arch`."""
    if written_for(arch) == "sm_100a":
        wide = sm100.Plan100(config)
        return Cta(wide, sm100.TILE, sm100.ROLES.threads, wide.stages, wide.smem.bytes)
    plan = PortablePlan(config, arch)
    return Cta(plan, plan.tile, plan.threads, plan.slots, plan.smem_bytes)


# -- run ------------------------------------------------------------------------------------------


def tell(
    rows: Sequence[dict[str, Any]], options: argparse.Namespace, place: Place
) -> dict[str, Any]:
    """Errors, and beside them the time of a launch or the work of the emulator."""
    (row,), console = rows, Console()
    cost = (("warp-\ninstr.", "{instructions:,}"), ("\nseconds", "{seconds:.1f}"))
    if "warm_us" in row:
        cost = tuple((f"{name}\nus", f"{{{name}_us:.1f}}") for name in ("warm", "cold", "host"))
    columns = (("\ncase", "{case}"), ("\nrun as", "{backend}\n{arch}"), *ERRORS, *cost)
    tables.show(*tables.table("", columns, [row]), console)
    console.print(LIMIT)
    console.print("within tolerance" if row["ok"] else "out of tolerance")
    return {"row": row}


# -- explain --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A checked case, and what is launched for it."""

    case: Case
    arguments: Arguments
    config: DecodeConfig

    @property
    def cta(self) -> Cta:
        """Return the CTA's properties."""
        return cta_of(self.config, self.case.arch)

    @property
    def parts(self) -> int:
        """Clusters of a KV head."""
        if not self.config.parts:
            return 1
        return clusters_per_head(self.case.arch, self.arguments, self.config)

    @property
    def ctas(self) -> int:
        """CTAs that share the keys of a KV head."""
        return self.config.cluster * self.parts

    def reach(self, n_keys: int, tile: int) -> Reach:
        """Tiles of an entry that hold a key which some row sees."""
        window, sink_tokens = self.arguments.window_left, self.arguments.sink_tokens
        return reach(n_keys, self.config.q_tokens, tile, window, sink_tokens)


def explain(launch: Launch) -> Iterator[str]:
    """The whole plan, line by line."""
    yield f"gqa_lowlatency for {launch.case.arch}: {describe(launch.config)}"
    yield f"for {launch.case}"
    if not has_keys(launch.arguments):
        yield "\nNo keys: no launch."
        return
    plan = launch.cta.plan
    of_a_cta = of_hopper(plan) if isinstance(plan, PortablePlan) else parts_of(plan, sm100.ROLES)
    yield from lines_of((sharing(launch), *of_a_cta))


def sharing(launch: Launch) -> Section:
    """Describe how the CTAs share the work, and what limits it."""
    config, arguments, sms = launch.config, launch.arguments, machine_of(launch.case.arch).sms
    sizes = launch.ctas, arguments.kv_heads * config.row_tiles, arguments.batch
    ctas = f"{' x '.join(map(str, sizes))} = {math.prod(sizes)} CTAs for {sms} SMs"
    invariance = "off: cluster, and so the bits, depend on the batch"
    if arguments.batch_invariant:
        most = arguments.most_seen
        invariance = f"on: the cluster depends only on the limit of {most} visible keys"
    rows = [
        ("grid", f"{ctas}: CTAs of a KV head, KV heads x row tiles, entries"),
        ("cluster", cluster(launch)),
        ("not wider", limits(launch)),
        ("query rows", query_rows(config)),
        ("owners", owners(config)),
        ("tile", f"{launch.cta.tile} keys"),
        *entries(launch),
        ("must read", reads(launch)),
        ("CTAs of an SM", residents(launch.cta, launch.case.arch)),
        ("batch_invariant", invariance),
    ]
    return "How the CTAs share the work", rows


def cluster(launch: Launch) -> str:
    """Describe the cluster's CTAs, and the clusters per KV head."""
    words = f"{plural(launch.config.cluster, 'CTA')} for a KV head of an entry"
    if launch.parts == 1:
        return words
    workspace = make_workspace(launch.arguments, launch.config, launch.parts)
    room = sum(tensor.nbytes for tensor in workspace)
    return (
        f"{words}, with {plural(launch.parts - 1, 'cluster')} more; the last to arrive merges "
        f"the parts in {room:,} bytes of workspace"
    )


def limits(launch: Launch) -> str:
    """Why not a cluster of twice as many CTAs."""
    config, arguments, arch = launch.config, launch.arguments, launch.case.arch
    if arguments.cluster:
        return "as asked"
    machine, wider = machine_of(arch), 2 * config.cluster
    if machine.widest == 1:
        return "on this GPU only parts split keys over CTAs"
    clusters = arguments.batch * arguments.kv_heads * config.row_tiles
    clusters = 1 if arguments.batch_invariant else clusters
    tiles = -(-arguments.most_seen // TILE)
    apart = choose_config(arguments, Target("emulate", arch)).cluster
    reasons = {
        f"{machine.widest} CTAs are the most that pay off": wider > machine.widest,
        f"{plural(tiles, 'tile')} of {TILE} keys": wider > tiles,
        f"{clusters} x {wider} CTAs for {machine.sms} SMs": clusters * wider > machine.sms,
        "limit of clusters that this GPU runs at once": config.cluster < apart,
    }
    return "; ".join(words for words, holds in reasons.items() if holds) or "as measured"


def query_rows(config: DecodeConfig) -> str:
    """Query rows of a KV head, and where they stand."""
    heads, tokens = plural(config.group, "head"), plural(config.q_tokens, "token")
    words = f"{config.rows} of a KV head ({heads} x {tokens}) in "
    if config.row_tiles == 1:
        return f"{words}{config.columns} columns"
    return f"{words}{config.row_tiles} row tiles of {config.columns} columns, next to each other"


def owners(config: DecodeConfig) -> str:
    """Describe which CTAs finish which columns of O."""
    if config.cluster == 1:
        return "the only CTA finishes O"
    each = f"{config.owned_columns} of its {config.columns} columns each"
    return f"{config.owner_ctas} of {config.cluster} CTAs finish O, {each}"


def entries(launch: Launch) -> Rows:
    """A row per length, the longest first."""
    lengths = sorted(Counter(launch.case.lengths).items(), reverse=True)
    rows = [
        (f"{count} x {n_keys:,} keys", shares(launch, n_keys))
        for n_keys, count in lengths[:LENGTHS_SHOWN]
    ]
    hidden = len(lengths) - len(rows)
    return rows + [("shorter", plural(hidden, "more length"))] * bool(hidden)


def shares(launch: Launch, n_keys: int) -> str:
    """Tiles of the first and the last CTA of an entry."""
    seen, ctas = launch.reach(n_keys, launch.cta.tile), launch.ctas
    ranks = (0, ctas - 1) if ctas > 1 else (0,)
    dealt = (f"CTA {rank}: {tiles_of(seen, *share(seen.tiles, ctas, rank))}" for rank in ranks)
    return f"{plural(seen.tiles, 'tile')}; {'; '.join(dealt)}"


def tiles_of(seen: Reach, begin: int, count: int) -> str:
    """Describe the number of tiles and their indices: two ranges if sink tokens and a window are
    apart."""
    if count == 0:
        return "none"
    first, last = seen.tile(begin), seen.tile(begin + count - 1)
    if count == 1:
        return f"1 ({first})"
    if last - first < count:
        return f"{count} ({first}..{last})"
    return f"{count} ({first}..{seen.sink_tiles - 1}, {seen.first}..{last})"


def reads(launch: Launch) -> str:
    """Bytes of Q and of all keys and values that some row sees, and what row tiles read again."""
    config, arguments, times = launch.config, launch.arguments, launch.config.row_tiles
    keys = sum(launch.reach(n_keys, tile=1).tiles for n_keys in launch.case.lengths)
    kv = 2 * keys * arguments.kv_heads * config.head_dim * ITEM_BYTES[config.keys_dtype]
    q = arguments.q.numel() * config.io_bytes
    words = f"{kv + q:,} bytes: K and V {kv:,}, Q {q:,}"
    if times == 1:
        return words
    return f"{words}; each row tile reads K and V again, {times} times: {times * kv:,} bytes"


def residents(cta: Cta, arch: str) -> str:
    """CTAs that stand on an SM at the same time, and what their threads may then need."""
    room = hw.smem_bytes_per_sm(arch)
    fit = {"shared memory": room // (cta.smem_bytes + hw.SMEM_RESERVED_BYTES)}
    if isinstance(cta.plan, sm100.Plan100):
        fit["tensor memory"] = hw.TMEM_COLUMNS // cta.plan.tmem.allocated
    fewest = min(fit.values())
    registers = hw.REGISTERS_PER_SM // (fewest * cta.threads) // 8 * 8
    by = ", ".join(f"{count} by {what}" for what, count in fit.items())
    most = min(registers, hw.REGISTERS_PER_THREAD)
    return f"{by}; {fewest} by registers, if a thread uses at most {most}"


def of_hopper(plan: PortablePlan) -> tuple[Section, ...]:
    """Describe a CTA's resources: all of its warps do the same, each for its keys."""
    queries = "shared memory, read again for every step" if plan.queries_in_smem else "registers"
    warps = [
        ("a step", f"{plan.keys} keys of the tile, by {of_a_team(plan)}"),
        (
            "ring",
            f"{plan.slots} slots of {plan.slot_bytes:,} bytes, alternately for K and V of a step",
        ),
        ("after it", f"{4 * plan.partial_words:,} bytes over the ring: results of the warp"),
        ("Q", f"in {queries}"),
        ("products", f"mma.sync m16n8k16: Q K^T in {plan.q_dtype}, V^T P in {plan.p_dtype}"),
    ]
    return (f"Warps: {plan.warps}, {plan.threads} threads", warps), hopper_smem(plan)


def of_a_team(plan: PortablePlan) -> str:
    """Describe the warps that share the keys of a step."""
    return "one warp" if plan.slices == 1 else f"two warps, each with {plan.dims} of head_dim"


def hopper_smem(plan: PortablePlan) -> Section:
    """A row per range."""
    config = plan.config
    words = {
        "rings": f"{plan.warps} x {plan.ring_bytes:,} bytes",
        "queries": f"fragments of Q, {config.columns} columns",
        "scores": f"Q K^T of {plan.slices} slices of the head, in {SCORE_STAGES} stages",
        "statistics": f"of {config.cluster} CTAs: maxima and sums",
        "mail": f"of {config.cluster} CTAs: {config.owned_columns} columns of O",
        "arrived": "mbarrier of the mailbox",
    }
    begins = [begin for begin, _ in plan.smem.offsets().values()]
    rows = [
        (byte_range(begin, end), *named)
        for named, begin, end in zip(
            words.items(), begins, (*begins[1:], plan.smem_bytes), strict=True
        )
        if begin < end
    ]
    return smem_title(plan.smem_bytes, plan.smem_limit), rows


# -- dump -----------------------------------------------------------------------------------------


KV_DTYPES_OF_GRID = ("bf16", "e4m3")
GRID = tuple(itertools.product(groups.ARCHS[::-1], KV_DTYPES_OF_GRID, HEAD_DIMS, COLUMNS))


def subject_of(config: DecodeConfig, arch: str) -> Subject:
    """The kernel of a config."""
    cta = cta_of(config, arch)
    planned = {"warps": cta.threads // hw.WARP_THREADS, "stages": cta.stages}
    planned |= {"smem_bytes": cta.smem_bytes}
    return Subject(
        *("gqa_lowlatency", "gqa", config, arch),
        compile=partial(compile_for, config, arch),
        figures=lambda cubin: planned | loops.decode_figures(cubin, config, arch),
        show=lambda found: print_kinds(
            f"Loop over keys, per warp and {found['unit']}", found["loop"]
        ),
    )


def cell_of(case: Case, columns: int) -> Cell:
    """The config of a case with so many columns."""

    def figures(folder: Path) -> dict[str, Any]:
        _, config = settled(case)
        if config.columns != columns:
            raise ValueError(f"{config.row_tiles} row tiles of {config.columns} instead")
        subject = subject_of(config, case.arch)
        return {"config": changed(config)} | subject.figures(subject.write(folder)[1])

    names = ("arch", "kv_dtype", "head_dim")
    return {name: getattr(case, name) for name in names} | {"columns": columns}, figures


def cases_of(case: Case) -> Iterator[tuple[Case, int]]:
    """(case, columns) of the grid; all that it does not vary is as in `case`."""
    for arch, kv_dtype, head_dim, columns in GRID:
        q_heads = case.kv_heads * max(1, columns // case.q_len)
        fields = {"arch": arch, "kv_dtype": kv_dtype, "head_dim": head_dim, "q_heads": q_heads}
        yield replace(case, **fields), columns


FIGURES = (
    ("arch", "{arch}"), ("K, V", "{kv_dtype}"), ("head_dim", "{head_dim}"),
    ("columns", "{columns}"), ("cluster", lambda row: str(row["config"].get("cluster", 1))),
    ("warps", "{warps}"), ("stages", "{stages}"), ("registers", "{registers}"),
    ("stack", "{stack}"), ("spills", "{spills}"), ("SMEM bytes", "{smem_bytes:,}"),
    ("SASS", "{instructions}"), ("loop", lambda row: f"{sum(row['loop'].values()):g}"),
)  # fmt: skip


def grid_of(options: argparse.Namespace) -> Grid:
    """The case in every architecture, dtype of keys, head dim and number of columns."""
    case = case_of(options)
    cells = [cell_of(*one) for one in cases_of(case)]
    return Grid(cells, FIGURES, {"case": f"{case}, except what a row names"})


FAMILY = Family(
    lambda options: ARCHS, lambda options, place: [case_of(options, place.arch)], tell, grid_of
)
