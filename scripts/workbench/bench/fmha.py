"""What `bench.py fmha` does: times beside torch's kernels, and what ptxas made of ours."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from fmha import AttentionConfig, attention
from fmha.config import HEAD_DIMS
from fmha.launch import ARCHS
from fmha.plan import make_plan
from workbench.common import describe, progress_bar, write_json
from workbench.dump.fmha import span, subject_of
from workbench.dump.kernel import Cell, rows_of
from workbench.flags.bench import MASKS
from workbench.place import why_not_here
from workbench.problems.attention import DTYPES
from workbench.sass.softmax import SOFTMAX_KINDS, static
from workbench.tables import Row, picture, show, table
from workbench.timing import WHEN, Sample, cold_and_warm, measure, sets_here, setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TORCH = {"torch cudnn": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}
SHAPES = (  # B, Sq, Skv, Hq, Hkv: many rows, long rows, grouped heads, one query per entry
    (4, 4096, 4096, 16, 16),
    (1, 16384, 16384, 16, 16),
    (2, 8192, 8192, 64, 8),
    (64, 1, 8192, 64, 8),
)
KINDS = {  # of the static table: heading -> kinds of SOFTMAX_KINDS
    "MUFU": ("MUFU.EX2", "MUFU other"),
    "packed": ("FFMA2", "FADD2", "FMUL2"),
    "F2FP": ("F2FP",),
    "FMNMX": ("FMNMX",),
    "mask": ("mask",),
}
KINDS["rest"] = (*set(SOFTMAX_KINDS).difference(*KINDS.values()),)
MAX_DIFFERENCE = 0.02  # norm over norm, between kernels that round P differently


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

    def inputs(self, seed: int) -> tuple[torch.Tensor, ...]:
        """q, k, v on the GPU: [batch, length, heads, columns], standard normal."""
        generator = torch.Generator("cuda").manual_seed(seed)
        shapes = (
            (self.batch, self.sq, self.q_heads, self.head_dim),
            (self.batch, self.skv, self.kv_heads, self.head_dim),
            (self.batch, self.skv, self.kv_heads, self.v_dim),
        )
        options = {"generator": generator, "device": "cuda", "dtype": DTYPES[self.dtype]}
        return tuple(torch.randn(size, **options) for size in shapes)


def torch_attention(problem: Problem, backend: SDPBackend, *inputs: torch.Tensor) -> torch.Tensor:
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


def contenders(problem: Problem) -> Iterator[tuple[str, Callable]]:
    """Name and call of torch's kernels and, where it runs, of ours; a call takes q, k and v."""
    for name, backend in TORCH.items():
        yield name, partial(torch_attention, problem, backend)
    if why_not_here(ARCHS) is None:
        yield "fmha", partial(attention, causal=problem.causal, backend="cuda")


def time_problem(problem: Problem) -> list[dict]:
    """A row per contender: its times, or why it has none. All agree with the first that ran."""
    first = problem.inputs(0)
    count = sets_here(sum(tensor.nbytes for tensor in first))
    sets = [first, *(problem.inputs(seed) for seed in range(1, count))]
    expected: list[torch.Tensor] = []

    def sampled(call: Callable, _: dict) -> dict[str, Sample]:
        actual = call(*first).float()
        if not expected:
            expected.append(actual)
        difference = ((actual - expected[0]).norm() / expected[0].norm()).item()
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(f"differs by {difference:.1%} from the first kernel that ran")
        return cold_and_warm([partial(call, *inputs) for inputs in sets])

    named = dict(contenders(problem))
    same = {"problem": str(problem), **dataclasses.asdict(problem)}
    rows = [{**same, "kernel": name} for name in named]
    measure(rows, [partial(sampled, call) for call in named.values()])
    for row in rows:
        for when in WHEN if "cold_us" in row else ():
            row[f"{when}_tflops"] = problem.flop / row[f"{when}_us"] * 1e-6
    return rows


def grid(options: argparse.Namespace) -> Iterator[Cell]:
    """Of the static table: head dims x masks."""
    same = {"dtype": options.dtype, "schedule": options.schedule}
    for head_dim, mask in itertools.product(options.head_dim, options.mask):
        v_dim = dict(HEAD_DIMS)[head_dim]
        dims = {"head_dim": head_dim, "v_head_dim": 0 if v_dim == head_dim else v_dim}
        config = AttentionConfig(**dims, **same, **MASKS[mask])
        named = {"mask": mask, "name": describe(config), "config": dataclasses.asdict(config)}
        yield named, partial(figures, config, options.arch)


def figures(config: AttentionConfig, arch: str, folder: Path) -> dict:
    """What `sass.softmax.static` reads of a config."""
    make_plan(config, arch)
    _, cubin, _ = subject_of(config, arch).write(folder)
    return static(cubin).as_dict()


def lines_of(rows: list[dict]) -> Iterator[dict]:
    """A line per softmax loop, or for a config that is refused."""
    for row in rows:
        for loop in row.get("loops", ({},)):
            yield row | loop


def of_kinds(kinds: Sequence[str], line: Row) -> str:
    return f"{sum(line['kinds'][kind] for kind in kinds):g}"


# Positions are shares of the loop's body.
STATIC = (
    ("config", "{name}"), ("regs", "{registers}"), ("stack", "{stack}"), ("spills", "{spills}"),
    ("loop", lambda line: "masked" if line["masked"] else "unmasked"), ("SASS", "{total:g}"),
    *((head, partial(of_kinds, kinds)) for head, kinds in KINDS.items()),
    ("O fix", "{correction}"), ("stats at", lambda line: span(line["publishes"]["statistics"])),
    ("P at", lambda line: span(line["publishes"]["p"])),
    ("P ready", lambda line: span(line["publishes"]["ready"])),
)  # fmt: skip
TIMES = (
    ("problem", "{problem}"), ("kernel", "{kernel}"),
    ("cold us", "{cold_us:.1f}"), ("TFLOP/s", "{cold_tflops:.0f}"),
    ("warm us", "{warm_us:.1f}"), ("TFLOP/s", "{warm_tflops:.0f}"),
    ("spread", lambda row: f"{max(row['cold_spread'], row['warm_spread']):.1%}"),
)  # fmt: skip


def draw(path: Path, document: dict) -> None:
    """A picture: TFLOP/s where there are times, and the SASS of every loop by kind."""
    parts = [
        (draw_times, [row for row in document["timing"] if "refused" not in row]),
        (draw_static, [row for row in document["static"] if "refused" not in row]),
    ]
    parts = [(painter, rows) for painter, rows in parts if rows]
    lengths = [1 + sum(len(row.get("loops", "1")) for row in rows) for _, rows in parts]
    how = {"figsize": (13, 1 + 0.28 * sum(lengths)), "height_ratios": lengths or None}
    with picture(path, max(1, len(parts)), layout="constrained", **how) as (_, axes):
        for axis, (painter, rows) in zip(axes[:, 0], parts, strict=False):
            painter(axis, rows)
            axis.invert_yaxis()


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
    console = Console()
    document: dict = {"setting": setting(), "static": [], "timing": []}
    if options.static and tools_found():
        document["static"] = rows_of(grid(options), console)
        show(*table("", STATIC, lines_of(document["static"])))
    elif options.static:
        console.print(HOW_TO_GET_TOOLS, markup=False)
    if options.timing and torch.cuda.is_available():
        with progress_bar(console) as bar:
            for problem in bar.track(problems_of(options), description="timing"):
                document["timing"] += time_problem(problem)
        document["after"] = setting().get("gpu")
        show(*table("", TIMES, document["timing"]))
    if options.timing and why_not_here(ARCHS):
        console.print(f"fmha is not timed: {why_not_here(ARCHS)}")
    if options.json:
        write_json(options.json, document)
    if options.plot:
        draw(options.plot, document)
    return 0
