"""What `bench.py fmha` does: times beside torch's kernels, and what ptxas made of ours."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from fmha import AttentionConfig, attention
from fmha.config import HEAD_DIMS
from fmha.plan import make_plan
from workbench.common import describe, progress_bar, write_json
from workbench.dump.fmha import span, subject_of
from workbench.flags.bench import MASKS
from workbench.place import why_not_here
from workbench.problems.attention import DTYPES
from workbench.sass.listing import HOW_TO_GET_TOOLS, tools_found
from workbench.sass.softmax import static
from workbench.tables import Table, picture, show
from workbench.timing import WHEN, cold_and_warm, sets_here, setting, spreads

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


def contenders(problem: Problem, p_paths: Sequence[str]) -> Iterator[tuple[str, Callable]]:
    """Name and call of torch's kernels and, where they run, of ours on every P path; a call takes
    q, k and v."""
    for name, backend in TORCH.items():
        yield name, partial(torch_attention, problem, backend)
    given = {"causal": problem.causal, "backend": "cuda"}
    for p_path in p_paths if why_not_here() is None else ():
        yield f"fmha {p_path}", partial(attention, config=AttentionConfig(p_path=p_path), **given)


def time_problem(problem: Problem, p_paths: Sequence[str]) -> list[dict]:
    """A row per contender: its times, or why it has none. All agree with the first that ran."""
    rows, expected, samples = [], None, {}
    first = problem.inputs(0)
    count = sets_here(sum(tensor.nbytes for tensor in first))
    sets = [first, *(problem.inputs(seed) for seed in range(1, count))]
    for name, call in contenders(problem, p_paths):
        row = {"problem": str(problem), **dataclasses.asdict(problem), "kernel": name}
        rows.append(row)
        try:
            actual = call(*first).float()
            expected = actual if expected is None else expected
            difference = ((actual - expected).norm() / expected.norm()).item()
            if not difference <= MAX_DIFFERENCE:
                raise ValueError(f"differs by {difference:.1%} from the first kernel that ran")
            found = cold_and_warm([partial(call, *inputs) for inputs in sets])
        except (RuntimeError, ValueError, NotImplementedError) as refusal:
            row["refused"] = str(refusal).strip().partition("\n")[0]
        else:
            samples |= {(len(rows) - 1, when): sample for when, sample in found.items()}
    for (place, when), spread in zip(samples, spreads([*samples.values()]), strict=True):
        rows[place] |= {f"{when}_us": spread.median, f"{when}_spread": spread.spread}
        rows[place][f"{when}_tflops"] = problem.flop / spread.median * 1e-6
    return rows


def time_all(problems: list[Problem], p_paths: Sequence[str], console: Console) -> list[dict]:
    """All rows, under a progress bar."""
    rows = []
    with progress_bar(console) as progress:
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
    """A row per config: what `sass.softmax.static` reads, or why it cannot be compiled."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, progress_bar(console) as progress:
        for mask, config in progress.track(configs, description="compiling"):
            row = {"mask": mask, "name": describe(config), "config": dataclasses.asdict(config)}
            try:
                make_plan(config)
            except (ValueError, NotImplementedError) as refusal:
                rows.append({**row, "refused": str(refusal)})
                continue
            _, cubin, _ = subject_of(config, arch).write(Path(folder))
            rows.append({**row, **static(cubin).as_dict()})
    return rows


def static_table(rows: list[dict]) -> Table:
    """A line per softmax loop; positions are shares of its body."""
    heads = ["config", "regs", "stack", "spills", "loop", "SASS", *COLUMNS, "rest", "O fix"]
    heads += ["stats at", "P at", "P ready"]
    lines = []
    for row in rows:
        if "refused" in row:
            lines.append([row["name"], *[""] * 3, "refused"])
            continue
        head = [row["name"], *(str(row[name]) for name in ("registers", "stack", "spills"))]
        for loop in row["loops"]:
            lines.append([*head, *loop_cells(loop)])
            head = [""] * len(head)
    return "", heads, [line + [""] * (len(heads) - len(line)) for line in lines]


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
    heads = ["problem", "kernel", "cold us", "TFLOP/s", "warm us", "TFLOP/s", "spread"]
    lines = []
    for row in rows:
        cells = [row["problem"], row["kernel"]]
        if "refused" in row:
            lines.append([*cells, "-", "", "-", "", ""])
            continue
        for when in WHEN:
            cells += [f"{row[f'{when}_us']:.1f}", f"{row[f'{when}_tflops']:.0f}"]
        spread = max(row[f"{when}_spread"] for when in WHEN)
        lines.append([*cells, f"{spread:.1%}"])
    return "", heads, lines


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
    """What the flags ask for; returns the exit code."""
    console = Console()
    document: dict = {"setting": setting(), "static": [], "timing": []}
    if options.static and tools_found():
        document["static"] = read_static(grid(options), options.arch, console)
        show(*static_table(document["static"]))
    elif options.static:
        console.print(HOW_TO_GET_TOOLS, markup=False)
    if options.timing and torch.cuda.is_available():
        document["timing"] = time_all(problems_of(options), options.p_path, console)
        document["after"] = setting().get("gpu")
        show(*timing_table(document["timing"]))
    if options.timing and why_not_here():
        console.print(f"fmha is not timed: {why_not_here()}")
    if options.json:
        write_json(options.json, document)
    if options.plot:
        draw(options.plot, document)
    return 0
