"""What bench_fmha.py does: times beside torch's kernels, and what ptxas made of ours."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from fmha import AttentionConfig, attention
from fmha.config import HEAD_DIMS
from workbench.cases.attention import DTYPES
from workbench.common import describe, write_json
from workbench.dump.fmha import compile_to, span
from workbench.flags.bench import MASKS
from workbench.sass.listing import HOW_TO_GET_TOOLS, tools_found
from workbench.sass.softmax import static
from workbench.timing import measure, setting, why_not_here

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TORCH = {"torch cudnn": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}
SHAPES = (  # B, Sq, Skv, Hq, Hkv: many rows, long rows, grouped heads, one query per entry
    (4, 4096, 4096, 16, 16),
    (1, 16384, 16384, 16, 16),
    (2, 8192, 8192, 64, 8),
    (64, 1, 8192, 64, 8),
)
COLUMNS = {  # of the static table: heading -> kinds of SOFTMAX_KINDS
    "MUFU": ("MUFU.EX2", "MUFU other"),
    "packed": ("FFMA2", "FADD2", "FMUL2"),
    "F2FP": ("F2FP",),
    "FMNMX": ("FMNMX",),
    "mask": ("mask",),
}
WHEN = ("cold", "warm")
SEED = 0
MAX_DIFFERENCE = 0.02  # norm over norm, between kernels that round P differently

Grid = list[tuple[str, AttentionConfig]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One timed shape; causal is aligned bottom-right."""

    batch: int
    sq: int
    skv: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str
    causal: bool

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}"
        mask = "causal" if self.causal else "full"
        return f"b{self.batch} {self.sq}x{self.skv} h{heads} d{self.head_dim} {self.dtype} {mask}"

    @property
    def flop(self) -> int:
        """Of both products, visible pairs only."""
        pairs = self.sq * self.skv
        if self.causal:
            seen = (min(self.skv, max(0, self.skv - self.sq + row + 1)) for row in range(self.sq))
            pairs = sum(seen)
        return 2 * pairs * (self.head_dim + self.v_dim) * self.q_heads * self.batch

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k, v on the GPU: [batch, length, heads, columns], standard normal."""
        generator = torch.Generator("cuda").manual_seed(SEED)
        shapes = (
            (self.batch, self.sq, self.q_heads, self.head_dim),
            (self.batch, self.skv, self.kv_heads, self.head_dim),
            (self.batch, self.skv, self.kv_heads, self.v_dim),
        )
        options = {"generator": generator, "device": "cuda", "dtype": DTYPES[self.dtype]}
        return tuple(torch.randn(size, **options) for size in shapes)


def torch_attention(problem: Problem, backend: SDPBackend, inputs: tuple) -> torch.Tensor:
    """torch's answer [batch, sq, heads, v_dim]; raises RuntimeError where it has none."""
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs)
    square = problem.sq == problem.skv
    mask = causal_lower_right(problem.sq, problem.skv) if problem.causal and not square else None
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=mask,
            is_causal=problem.causal and square,
            enable_gqa=problem.q_heads != problem.kv_heads,
        )
    return o.transpose(1, 2)


def contenders(problem: Problem, p_paths: list[str]) -> Iterator[tuple[str, Callable]]:
    """Name and launch of torch's kernels and, where they run, of ours on every P path."""
    inputs = problem.inputs()
    for name, backend in TORCH.items():
        yield name, lambda backend=backend: torch_attention(problem, backend, inputs)
    for p_path in p_paths if why_not_here() is None else ():
        config = AttentionConfig(p_path=p_path)
        yield (
            f"fmha {p_path}",
            lambda config=config: attention(
                *inputs, causal=problem.causal, backend="cuda", config=config
            ),
        )


def time_problem(problem: Problem, p_paths: list[str]) -> list[dict]:
    """A row per contender: its times, or why it has none. All agree with the first that ran."""
    rows, expected = [], None
    for name, launch in contenders(problem, p_paths):
        row = {"problem": str(problem), **dataclasses.asdict(problem), "kernel": name}
        try:
            actual = launch().float()
            expected = actual if expected is None else expected
            difference = ((actual - expected).norm() / expected.norm()).item()
            if not difference <= MAX_DIFFERENCE:
                raise ValueError(f"differs by {difference:.1%} from the first kernel that ran")
            seconds = measure(launch)
        except (RuntimeError, ValueError, NotImplementedError) as refusal:
            rows.append({**row, "refused": str(refusal).strip().partition("\n")[0]})
            continue
        tflops = {f"{when}_tflops": problem.flop / getattr(seconds, when) * 1e-12 for when in WHEN}
        rows.append({**row, **dataclasses.asdict(seconds), **tflops})
    return rows


def time_all(problems: list[Problem], p_paths: list[str], console: Console) -> list[dict]:
    """All rows, under a progress bar."""
    rows = []
    with bar(console) as progress:
        for problem in progress.track(problems, description="timing"):
            rows += time_problem(problem, p_paths)
    return rows


def grid(options: argparse.Namespace) -> Grid:
    """(name, config) of the static table: head dims x P paths x masks."""
    same = {"dtype": options.dtype, "schedule": options.schedule}
    return [
        (mask, AttentionConfig(p_path=p_path, **dims, **same, **MASKS[mask]))
        for dims in ({"head_dim": dim, "v_head_dim": v_head_dim(dim)} for dim in options.head_dim)
        for p_path in options.p_path
        for mask in options.mask
    ]


def v_head_dim(head_dim: int) -> int:
    """The field of the config: 0 where V is as wide as K."""
    v_dim = dict(HEAD_DIMS)[head_dim]
    return 0 if v_dim == head_dim else v_dim


def read_static(configs: Grid, arch: str, console: Console) -> list[dict]:
    """A row per config: what `_softmax_sass.static` reads, or why it cannot be compiled."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, bar(console) as progress:
        for mask, config in progress.track(configs, description="compiling"):
            row = {"mask": mask, "name": describe(config), "config": dataclasses.asdict(config)}
            try:
                config.check()
            except (ValueError, NotImplementedError) as refusal:
                rows.append({**row, "refused": str(refusal)})
                continue
            _, cubin = compile_to(Path(folder), config, arch)
            rows.append({**row, **static(cubin).as_dict()})
    return rows


def bar(console: Console) -> Progress:
    """The progress bar of this script; it vanishes when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def static_table(rows: list[dict]) -> Table:
    """A line per softmax loop; positions are shares of its body."""
    table = Table("config", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("regs", "stack", "spills", "loop", "SASS", *COLUMNS, "rest", "O fix", "stats at")
    for name in (*names, "P at", "P ready"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if "refused" in row:
            table.add_row(row["name"], *[""] * 3, "refused")
            continue
        head = [row["name"], *(str(row[name]) for name in ("registers", "stack", "spills"))]
        for loop in row["loops"]:
            table.add_row(*head, *loop_cells(loop))
            head = [""] * len(head)
    return table


def loop_cells(loop: dict) -> list[str]:
    """Cells of the static table from 'loop' on."""
    counts = [sum(loop["kinds"][kind] for kind in kinds) for kinds in COLUMNS.values()]
    places = loop["publishes"]
    return [
        "masked" if loop["masked"] else "unmasked",
        *(f"{count:g}" for count in (loop["total"], *counts, loop["total"] - sum(counts))),
        str(loop["correction"]),
        *(span(places[name]) for name in ("statistics", "p", "ready")),
    ]


def timing_table(rows: list[dict]) -> Table:
    """A line per problem and kernel."""
    table = Table("problem", "kernel", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("cold us", "TFLOP/s", "warm us", "TFLOP/s", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [row["problem"], row["kernel"]]
        if "refused" in row:
            table.add_row(*cells, "-", "", "-", "", "")
            continue
        for when in WHEN:
            cells += [f"{row[when] * 1e6:.1f}", f"{row[f'{when}_tflops']:.0f}"]
        table.add_row(*cells, f"{row['spread']:.1%}")
    return table


def draw(path: Path, document: dict) -> None:
    """A picture: TFLOP/s where there are times, and the SASS of every loop by kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [
        (draw_times, [row for row in document["timing"] if "refused" not in row]),
        (draw_static, [row for row in document["static"] if "refused" not in row]),
    ]
    parts = [(painter, rows) for painter, rows in parts if rows]
    lengths = [1 + sum(len(row.get("loops", "1")) for row in rows) for _, rows in parts]
    figure, axes = pyplot.subplots(
        max(1, len(parts)),
        squeeze=False,
        figsize=(13, 1 + 0.28 * sum(lengths)),
        height_ratios=lengths or None,
        layout="constrained",
    )
    for axis, (painter, rows) in zip(axes[:, 0], parts, strict=False):
        painter(axis, rows)
        axis.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_times(axis: Axes, rows: list[dict]) -> None:
    """Two bars per problem and kernel."""
    names = [f"{row['problem']}, {row['kernel']}" for row in rows]
    for shift, when in ((-0.2, "cold"), (0.2, "warm")):
        places = [index + shift for index in range(len(rows))]
        axis.barh(places, [row[f"{when}_tflops"] for row in rows], height=0.4, label=when)
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    axis.set_xlabel("TFLOP/s")
    axis.legend(fontsize=7)


def draw_static(axis: Axes, rows: list[dict]) -> None:
    """A stacked bar per softmax loop."""
    from matplotlib import colormaps

    loops = [(row["name"], loop) for row in rows for loop in row["loops"]]
    names = [f"{name}, {'masked' if loop['masked'] else 'unmasked'}" for name, loop in loops]
    left = [0.0] * len(loops)
    colours = iter(colormaps["tab20"].colors)
    for kind in loops[0][1]["kinds"]:
        widths = [loop["kinds"][kind] for _, loop in loops]
        if any(widths):
            colour = next(colours)
            axis.barh(range(len(loops)), widths, left=left, height=0.8, color=colour, label=kind)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(loops)), names, fontsize=7)
    axis.set_xlabel("SASS instructions per warp and tile, correction excluded")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def problems_of(options: argparse.Namespace) -> list[Problem]:
    """Every shape at every head dim, full and causal; one row sees everything either way."""
    return [
        Problem(*size, head_dim, dict(HEAD_DIMS)[head_dim], options.dtype, causal)
        for head_dim in options.head_dim
        for size in options.shape or SHAPES
        for causal in (False, True)
        if not (causal and size[1] == 1) and ("causal" if causal else "full") in options.mask
    ]


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    document: dict = {"setting": setting(), "static": [], "timing": []}
    if options.static and tools_found():
        document["static"] = read_static(grid(options), options.arch, console)
        console.print(static_table(document["static"]))
    elif options.static:
        console.print(HOW_TO_GET_TOOLS, markup=False)
    if options.timing and torch.cuda.is_available():
        document["timing"] = time_all(problems_of(options), options.p_path, console)
        document["after"] = setting().get("gpu")
        console.print(timing_table(document["timing"]))
    if options.timing and why_not_here():
        console.print(f"fmha is not timed: {why_not_here()}")
    if options.json:
        write_json(options.json, document)
    if options.plot:
        draw(options.plot, document)
    return 0
