"""What `explain.py q8_0` says: the kernel of each operation, who takes what of the weights, and
what lies in shared memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from kernelkit.call.launch import emulation
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.plan import hw
from lab.cases.q8_0 import Inputs, Problem, some_of
from lab.tools.common import describe
from lab.verbs.explain.plans import (
    Rows,
    Section,
    byte_range,
    lines_of,
    plural,
    print_plan,
    smem_title,
)
from q8_0.blocks import BLOCK, BLOCK_BYTES
from q8_0.config import (
    INTEGERS,
    PIECE,
    BatchConfig,
    DequantiseConfig,
    MatvecConfig,
    QuantiseConfig,
    RepackConfig,
)
from q8_0.product.choose import group_of
from q8_0.product.config import BLOCKS_OF_STAGE, HALVES, ProductConfig

ADDING = {
    "apart": "one by one, none waits for the one before it",
    "near": "one by one, few at a time",
    "pairs": "two by one instruction",
}


def kernels_of(options: argparse.Namespace) -> list[tuple[Problem, list[KernelKey]]]:
    """Of every problem that the flags name, for --arch and a GPU of it; ValueError for none."""
    found = []
    for problem in some_of(options):
        calls = Inputs.empty(problem).calls(problem, arch=options.arch)
        with emulation(arch=options.arch), collecting() as keys:
            for call in calls.values():
                call()
        found.append((problem, list(dict.fromkeys(keys))))
    return found


def explain(options: argparse.Namespace) -> Iterator[str]:
    """Line by line."""
    for number, (problem, keys) in enumerate(kernels_of(options)):
        yield "\n" * (number > 0) + f"{problem}, {problem.nbytes:,} bytes"
        for key in keys:
            yield f"\n{key.source} for {key.arch}: {describe(key.config)}"
            yield from lines_of(sections_of(problem, key.config, key.arch))


def sections_of(problem: Problem, config: Any, arch: str) -> Iterator[Section]:
    """Of a kernel."""
    sharing = "How the CTAs share the work"
    if isinstance(config, ProductConfig):
        yield sharing, tiles(problem, config)
        yield smem_title(config.smem_bytes, hw.smem_bytes_per_cta(arch)), memory(config)
    elif isinstance(config, MatvecConfig | BatchConfig):
        yield sharing, warps(problem, config, arch)
    else:
        yield sharing, movers(problem, config)


# -- the product ----------------------------------------------------------------------------------


def tiles(problem: Problem, config: ProductConfig) -> Rows:
    """Which tiles there are, and what of one a warp has."""
    group, groups = group_of(problem.tokens, config.tile_tokens)
    rows = -(-problem.rows // config.tile_rows)
    stages = -(-problem.cols // (BLOCK * BLOCKS_OF_STAGE))
    shape = f"{config.warps_of_tokens} x {config.warps_of_rows} warps"
    registers = hw.REGISTERS_PER_SM // (config.ctas_per_sm * config.threads) // 8 * 8
    most = min(registers, hw.REGISTERS_PER_THREAD)
    return [
        ("grid", f"{group * rows} x {groups} CTAs: tiles of tokens, {group} beside each other, "
                 f"by {rows} of rows"),
        ("tile", f"{config.tile_tokens} tokens x {config.tile_rows} rows: {shape} of "
                 f"{config.warp_tokens} x {config.warp_rows}"),
        ("K", f"{plural(stages, 'stage')} of {BLOCKS_OF_STAGE} blocks, {config.stages} in rings"),
        ("sums", f"by mma.sync m16n8k32 of int8, exact; added in fp32 {ADDING[config.adding]}"),
        ("CTAs of an SM", f"{config.ctas_per_sm}, if a thread takes at most {most} registers"),
    ]  # fmt: skip


def memory(config: ProductConfig) -> Rows:
    """A row per range."""
    splits = HALVES if config.interleaved else config.stages
    ranges = (
        ("tokens", config.x_bytes, config.stages, "quants"),
        ("rows", config.w_bytes, splits, "quants"),
        ("blocks", config.raw_bytes, config.stages, "of rows, as they come"),
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
    """Which rows and columns a warp reads, and how much of it at a time."""
    ctas, sms = -(-problem.rows // config.cta_rows), hw.SMS_OF[arch]
    columns = BLOCK if isinstance(config, BatchConfig) else PIECE * hw.WARP_THREADS
    reads = config.rows * config.unrolled * columns // BLOCK * BLOCK_BYTES
    columns_of = f"{config.splits} warps share" if config.splits > 1 else "it has alone"
    sums = f"{4 * config.warps * config.sums:,} bytes of shared memory"
    return [
        ("grid", f"{plural(ctas, 'CTA')} for {sms} SMs"),
        ("CTA", f"{plural(config.warps, 'warp')}, {plural(config.cta_rows, 'row')}"),
        ("warp", f"{plural(config.rows, 'row')}, whose columns {columns_of}"),
        ("a turn", f"{config.unrolled} x {columns} columns of each row, {reads:,} bytes at a time"),
        ("tokens", f"{problem.tokens}, computed {config.tokens}"),
        ("products", instruction(config)),
        ("sums", f"of a warp's rows and tokens in fp32, at the end through {sums}"),
    ]  # fmt: skip


def instruction(config: MatvecConfig | BatchConfig) -> str:
    """That multiplies."""
    if isinstance(config, BatchConfig):
        depth = "k32 of int8" if config.dtype == INTEGERS else f"k16 of {config.dtype}"
        return f"mma.sync m16n8{depth}"
    return "dp4a" if config.dtype == INTEGERS else "fused multiply-adds of fp32"


def movers(problem: Problem, config: RepackConfig | DequantiseConfig | QuantiseConfig) -> Rows:
    """What has no sums: tiles of a row, or of all rows in one piece."""
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
        rows.append(
            ("memory", f"{config.tile_bytes:,} bytes of shared memory: blocks on their way")
        )
    return rows


def perform(options: argparse.Namespace) -> int:
    return print_plan(lambda: explain(options))
