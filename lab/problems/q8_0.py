"""Q8_0 as the commands know it: an operation on a matrix, its calls, its plan, and a check."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kernelkit.call.launch import emulation
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.plan import hw
from lab.problems import family
from lab.problems.family import Family
from lab.problems.sections import (
    Rows,
    Section,
    byte_range,
    lines_of,
    plural,
    shared_memory,
    smem_title,
)
from lab.sass.kernel import Subject, subject_of
from lab.tools.common import describe
from lab.tools.place import Place
from lab.tools.tables import show, table
from q8_0 import Activations, Weights, dequantise, matvec, quantise, reference, repack
from q8_0.blocks import BLOCK, BLOCK_BYTES, INTERLEAVED, SOA, blocks_of
from q8_0.config import (
    INTEGERS,
    MOST_TOKENS,
    PIECE,
    BatchConfig,
    DequantiseConfig,
    MatvecConfig,
    QuantiseConfig,
    RepackConfig,
)
from q8_0.launch import ARCHS
from q8_0.numbers.config import TILE_ROWS, UNIT, NumbersConfig
from q8_0.numbers.launch import product_of_numbers
from q8_0.numbers.plan import make_plan
from q8_0.product.choose import group_of
from q8_0.product.config import BLOCKS_OF_STAGE, HALVES, ProductConfig
from q8_0.product.launch import product
from q8_0.weights import empty

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OURS = "q8_0"  # the peer of an operation that reads no weights
PRODUCTS = ("matvec", "integer", "product", "numbers")
LARGE = ("product", "numbers")  # of more tokens than share a read of the weights
OF_NUMBERS = ("matvec", "numbers")
LARGEST_ERROR = 2.0**-8  # of a product, over the largest result: half a step of bf16 is 2^-9
Calls = dict[str, Callable[[], Any]]
COLUMNS = (
    ("problem", "{problem}"), ("weights", "{peer}"), ("bytes", "{nbytes:,}"),
    ("run as", "{backend} {arch}"), ("launches", "{launches}"),
    ("warp-instr.", "{instructions:,}"), ("seconds", "{seconds:.1f}"), ("error", "{error:.1e}"),
    ("", lambda row: row["wrong"] or "ok"),
)  # fmt: skip
ERROR = "error: largest error of a product over its largest result, against fp64; limit 3.9e-03"
ADDING = {
    "apart": "one by one, each independent of the one before",
    "near": "one by one, few at a time",
    "pairs": "two per instruction",
}


@dataclass(frozen=True)
class Problem(family.Problem):
    """An operation on a matrix.

    tokens: 0 if there are none.
    dtype: dtype of numbers, x and results alike.
    bias: whether a product has a bias."""

    gap: ClassVar[str] = "\n"
    operation: str
    rows: int
    cols: int
    tokens: int
    layouts: tuple[str, ...]
    dtype: str = "bf16"
    bias: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in Q8_0."""
        return self.rows * self.cols // BLOCK * 34

    @property
    def nbytes(self) -> int:
        """Bytes that have to be read and written, each once."""
        size = DTYPES[self.dtype].itemsize
        numbers = size * self.tokens * self.cols
        if self.operation == "repack":
            return 2 * self.weight_bytes
        if self.operation == "dequantise":
            return self.weight_bytes + size * self.rows * self.cols
        if self.operation == "quantise":
            return numbers + self.tokens * self.cols // BLOCK * 34
        if self.operation in ("integer", "product"):
            numbers = self.tokens * self.cols // BLOCK * 34
        results = size * (self.tokens + self.bias) * self.rows
        return self.weight_bytes + numbers + results

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.cols * self.tokens * (self.operation in PRODUCTS)

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of the problem in a row."""
        names = ("operation", "rows", "cols", "tokens", "nbytes", "operations")
        return {"problem": str(self), **{name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        tokens = f", {self.tokens} token{'s' * (self.tokens != 1)}" if self.tokens else ""
        return f"{self.operation} {self.rows} x {self.cols}{tokens}"

    @property
    def alike(self) -> bool:
        """Whether both layouts have the same bits."""
        return self.operation not in ("quantise", "repack")

    def draw(self, seed: int, device: str) -> Inputs:
        return Inputs.drawn(self, seed, device)

    def calls(self, drawn: Inputs, place: Place) -> Calls:
        """Return the calls by layout of the weights, or OURS."""
        return drawn.calls(self, **place.given)

    def judge(self, drawn: Inputs, name: str, results: Any, slack: float) -> dict[str, Any]:
        return {"wrong": "", "error": check(self, drawn, name, results)}

    def keys(self, arch: str) -> list[KernelKey]:
        """Keys of all kernels, on a GPU of that architecture."""
        with emulation(arch=arch), collecting() as keys:
            for call in Inputs.empty(self).calls(self, arch=arch).values():
                call()
        return list(dict.fromkeys(keys))

    def plan(self, arch: str) -> Iterator[str]:
        yield f"{self}, {self.nbytes:,} bytes"
        for key in self.keys(arch):
            yield f"\n{key.source} for {key.arch}: {describe(key.config)}"
            yield from lines_of(sections_of(self, key.config, key.arch))

    def kernels(self, arch: str) -> Iterator[Subject]:
        return map(subject_of, self.keys(arch))


def problems_of(options: argparse.Namespace) -> Iterator[Problem]:
    """All that the options ask for."""
    kind = {name: getattr(options, name) for name in ("dtype", "bias") if hasattr(options, name)}
    layouts = tuple(options.layouts)
    for operation, (rows, cols) in itertools.product(options.operations, options.shapes):
        for tokens in options.tokens if operation not in ("repack", "dequantise") else (0,):
            few = tokens <= MOST_TOKENS
            if operation == "quantise" or few == (operation not in LARGE) or not tokens:
                own = kind | {"bias": kind.get("bias", False) and operation in PRODUCTS}
                yield Problem(operation, rows, cols, tokens, layouts, **own)


def some_of(options: argparse.Namespace) -> list[Problem]:
    """Return the selected problems; raise ValueError for none, and for unsupported columns."""
    found = [*problems_of(options)]
    for problem in found:
        blocks_of(problem.cols)
    if not found:
        asked = " ".join(options.operations)
        raise ValueError(f"no problem of {asked}: a product needs more than {MOST_TOKENS} tokens")
    return found


@dataclass(frozen=True)
class Inputs:
    """A buffer set: weights by layout, activations as numbers and in Q8_1, a bias."""

    weights: dict[str, Weights]
    x: torch.Tensor
    rounded: Activations
    bias: torch.Tensor | None

    @classmethod
    def drawn(cls, problem: Problem, seed: int, device: str) -> Inputs:
        """Uniform quants, x standard normal."""
        generator = torch.Generator(device).manual_seed(seed)
        how: dict[str, Any] = {"generator": generator, "device": device}
        quants = torch.randint(-127, 128, (problem.rows, problem.cols), **how).char()
        scales = torch.rand(problem.rows, problem.cols // BLOCK, **how)
        scales = (scales * 0.01 + 0.001).half()
        weights = {layout: reference.packed(quants, scales, layout) for layout in problem.layouts}
        dtype = DTYPES[problem.dtype]
        x = torch.randn(max(problem.tokens, 1), problem.cols, **how).to(dtype)
        bias = torch.randn(problem.rows, **how).to(dtype) if problem.bias else None
        return cls(weights, x, reference.quantise(x), bias)

    @classmethod
    def empty(cls, problem: Problem) -> Inputs:
        """Without contents, to ask which kernels there are; on the CPU, since on the device 'meta'
        no operator gets as far as its kernel."""
        tokens, rows, cols = max(problem.tokens, 1), problem.rows, problem.cols
        dtype = DTYPES[problem.dtype]
        weights = {layout: empty(rows, cols, layout) for layout in problem.layouts}
        scales = torch.empty(tokens, cols // BLOCK, dtype=torch.float16)
        rounded = Activations(torch.empty(tokens, cols, dtype=torch.int8), scales)
        bias = torch.empty(rows, dtype=dtype) if problem.bias else None
        return cls(weights, torch.empty(tokens, cols, dtype=dtype), rounded, bias)

    def calls(self, problem: Problem, **place: str | None) -> Calls:
        """Our calls, by layout, or OURS. place: backend and arch."""
        out = DTYPES[problem.dtype]
        of_integers: dict[str, Any] = {"out_dtype": out, **place}
        one: dict[str, Callable[[Weights], Any]] = {
            "repack": lambda w: repack(w, other_than(w.layout), **place).data,
            "dequantise": lambda w: dequantise(w, out, **place),
            "matvec": lambda w: matvec(w, self.x, self.bias, **place),
            "integer": lambda w: matvec(w, self.rounded, self.bias, **of_integers),
            "product": lambda w: product(w, self.rounded, self.bias, **of_integers),
            "numbers": lambda w: product_of_numbers(w, self.x, self.bias, **place),
        }
        if problem.operation == "quantise":
            return {OURS: lambda: quantise(self.x, **place)}
        run = one[problem.operation]
        return {layout: lambda w=w: run(w) for layout, w in self.weights.items()}


def other_than(layout: str) -> str:
    """The other layout."""
    return INTERLEAVED if layout == SOA else SOA


def check(problem: Problem, inputs: Inputs, peer: str, result: Any) -> float:
    """The largest error of a product of ours, over the largest result of fp64; 0 of what has the
    bits of the reference. ValueError where a result is wrong."""
    if problem.operation in PRODUCTS:
        x = inputs.x if problem.operation in OF_NUMBERS else inputs.rounded
        exact = reference.matvec(inputs.weights[peer], x, inputs.bias)
        error = ((result.double() - exact).abs().amax() / exact.abs().amax()).item()
        if not error < LARGEST_ERROR:
            raise ValueError(f"wrong: {error:.1e} of the largest result off fp64")
        return error
    if problem.operation == "quantise":
        expected = reference.quantise(inputs.x)
        pairs = [(result.quants, expected.quants), (result.scales, expected.scales)]
    elif problem.operation == "repack":
        weights = inputs.weights[peer]
        pairs = [(result, reference.repack(weights, other_than(peer)).data)]
    else:
        pairs = [(result, reference.dequantise(inputs.weights[peer], DTYPES[problem.dtype]))]
    if not all(torch.equal(mine, theirs) for mine, theirs in pairs):
        raise ValueError("wrong: other bits than the reference's")
    return 0.0


def tell(
    rows: Sequence[dict[str, Any]], options: argparse.Namespace, place: Place
) -> dict[str, Any]:
    """A line for each layout: what it took, how exact it is, and what is wrong if something is."""
    show(*table("", COLUMNS, rows))
    print(ERROR)
    return {"rows": rows}


# -- the plan -------------------------------------------------------------------------------------


def sections_of(problem: Problem, config: Any, arch: str) -> Iterator[Section]:
    """Sections of a kernel."""
    sharing = "How the CTAs share the work"
    if isinstance(config, ProductConfig):
        yield sharing, tiles(problem, config)
        yield smem_title(config.smem_bytes, hw.smem_bytes_per_cta(arch)), memory(config)
    elif isinstance(config, NumbersConfig):
        yield sharing, tiles_of_numbers(problem, config)
        yield shared_memory(make_plan(config).smem)
    elif isinstance(config, MatvecConfig | BatchConfig):
        yield sharing, warps(problem, config, arch)
    else:
        yield sharing, movers(problem, config)


# -- the product ----------------------------------------------------------------------------------


def tiles(problem: Problem, config: ProductConfig) -> Rows:
    """Describe the tiles, and a warp's part of one."""
    group, groups = group_of(problem.tokens, config.tile_tokens)
    rows = -(-problem.rows // config.tile_rows)
    stages = -(-problem.cols // (BLOCK * BLOCKS_OF_STAGE))
    shape = f"{config.warps_of_tokens} x {config.warps_of_rows} warps"
    registers = hw.REGISTERS_PER_SM // (config.ctas_per_sm * config.threads) // 8 * 8
    most = min(registers, hw.REGISTERS_PER_THREAD)
    return [
        ("grid", f"{group * rows} x {groups} CTAs: tiles of tokens, {group} next to each other, "
                 f"by {rows} of rows"),
        ("tile", f"{config.tile_tokens} tokens x {config.tile_rows} rows: {shape} of "
                 f"{config.warp_tokens} x {config.warp_rows}"),
        ("K", f"{plural(stages, 'stage')} of {BLOCKS_OF_STAGE} blocks, {config.stages} in rings"),
        ("sums", f"mma.sync m16n8k32 in int8, exact; added in fp32 {ADDING[config.adding]}"),
        ("CTAs of an SM", f"{config.ctas_per_sm}, if a thread uses at most {most} registers"),
    ]  # fmt: skip


def tiles_of_numbers(problem: Problem, config: NumbersConfig) -> Rows:
    """Describe the tiles of the product of numbers, and the CTAs of a cluster."""
    tokens = -(-problem.tokens // config.tile_tokens)
    rows, (stages, of_weights) = -(-problem.rows // TILE_ROWS), make_plan(config).stages
    pair = "each fetches half of the tokens for both" if config.pair else "none shares tokens"
    return [
        ("tiles", f"{tokens} of {config.tile_tokens} tokens, {rows} of {TILE_ROWS} rows"),
        ("cluster", f"{plural(config.ctas, 'CTA')}: {pair}; {config.split} share K of a tile"),
        ("K", f"{stages} stages of {UNIT} columns of tokens, {of_weights} of {config.stage_k} "
              "columns of weights"),
        ("sums", f"wgmma m64n{config.tile_tokens}k16 of weights in {config.dtype} from registers"),
    ]  # fmt: skip


def memory(config: ProductConfig) -> Rows:
    """A row per range."""
    splits = HALVES if config.interleaved else config.stages
    ranges = (
        ("tokens", config.x_bytes, config.stages, "quants"),
        ("rows", config.w_bytes, splits, "quants"),
        ("blocks", config.raw_bytes, config.stages, "of rows, as loaded"),
        ("scales", config.scale_bytes, HALVES, "of both, fp32"),
    )
    found, begin = [], 0
    for name, nbytes, count, words in ranges:
        end = begin + nbytes * count
        if end > begin:
            found.append((byte_range(begin, end), name, f"{count} x {nbytes:,} bytes", words))
        begin = end
    return found


# -- the others -----------------------------------------------------------------------------------


def warps(problem: Problem, config: MatvecConfig | BatchConfig, arch: str) -> Rows:
    """Describe which rows and columns a warp reads, and how much at a time."""
    ctas, sms = -(-problem.rows // config.cta_rows), hw.SMS_OF[arch]
    columns = BLOCK if isinstance(config, BatchConfig) else PIECE * hw.WARP_THREADS
    reads = config.rows * config.unrolled * columns // BLOCK * BLOCK_BYTES
    columns_of = f"{config.splits} warps share" if config.splits > 1 else "it reads alone"
    sums = f"{4 * config.warps * config.sums:,} bytes of shared memory"
    return [
        ("grid", f"{plural(ctas, 'CTA')} for {sms} SMs"),
        ("CTA", f"{plural(config.warps, 'warp')}, {plural(config.cta_rows, 'row')}"),
        ("warp", f"{plural(config.rows, 'row')}, whose columns {columns_of}"),
        ("step", f"{config.unrolled} x {columns} columns of each row, {reads:,} bytes at a time"),
        ("tokens", f"{problem.tokens}, computed {config.tokens}"),
        ("products", instruction(config)),
        ("sums", f"of a warp's rows and tokens in fp32, combined at the end in {sums}"),
    ]  # fmt: skip


def instruction(config: MatvecConfig | BatchConfig) -> str:
    """Instruction that multiplies."""
    if isinstance(config, BatchConfig):
        depth = "k32 in int8" if config.dtype == INTEGERS else f"k16 in {config.dtype}"
        return f"mma.sync m16n8{depth}"
    return "dp4a" if config.dtype == INTEGERS else "fused multiply-adds in fp32"


def movers(problem: Problem, config: RepackConfig | DequantiseConfig | QuantiseConfig) -> Rows:
    """Describe steps without sums: tiles of a row, or of all rows as one line."""
    if isinstance(config, QuantiseConfig):
        lines, columns, tile = problem.tokens, problem.cols, config.tile
    else:
        lines, columns, tile = 1, problem.rows * problem.cols, config.tile
    tile *= BLOCK if isinstance(config, RepackConfig) else 1
    ctas = lines * -(-columns // tile)
    rows = [
        ("grid", f"{plural(ctas, 'CTA')} of {config.threads} threads"),
        ("CTA", f"{tile:,} columns, of {plural(lines, 'row')} of {columns:,}"),
    ]
    if isinstance(config, RepackConfig):
        rows.append(("memory", f"{config.tile_bytes:,} bytes of shared memory: blocks in transit"))
    return rows


FAMILY = Family(lambda options: ARCHS, lambda options, place: some_of(options), tell)
