"""The operator `blackwell_kernels::q8_0_number_product`: check, choose, launch.

One launch, which a CUDA graph captures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernelkit.call.launch import choose_target, clusters_at_once, launch, sms_of
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
    require_type,
    with_plain_strides,
)
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.device.param_table import ParamTable
from kernelkit.plan import hw
from q8_0.blocks import BLOCK, SCALE_BYTES, SOA, scales_offset
from q8_0.numbers.choose import (
    ARCHS,
    Sizes,
    fastest,
    group_of,
    items_of,
    row_tiles,
    shapes,
    with_shape,
)
from q8_0.numbers.config import DTYPES, NumbersConfig
from q8_0.numbers.params import NumbersParams
from q8_0.weights import Weights, address_of

MOST_COLS = 1 << 22  # columns are counted in 32 bits, and bytes of a row
INSTEAD = "; on other GPUs, `quantise` x first"


@dataclass(frozen=True)
class NumbersMultiplied:
    """The arguments of `product` with numbers."""

    weights: Weights
    x: torch.Tensor
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    out: torch.Tensor | None = None
    tile_tokens: int | None = None
    pair: bool | None = None
    split: int | None = None
    backend: str = "auto"
    arch: str | None = None


def product_of_numbers(
    weights: Weights,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    tile_tokens: int | None = None,
    pair: bool | None = None,
    split: int | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """x W^T + bias, [tokens, rows], on Hopper: each weight d q is rounded once to the dtype of x,
    as `q8_0.dequantise` rounds it, products are summed in fp32, the bias is added in fp32, and the
    result is rounded.

    Both layouts give the same bits. They depend on the sizes and on the number of SMs, which decide
    how many CTAs share a sum. A weight above 65504 is an infinity for x in fp16.

    Args:
        weights: [rows, cols], cols up to 4,194,304, of either layout. Interleaved rows that do not
            begin at multiples of 16 bytes, or whose columns are no multiple of 256, are slower.
        x: [tokens, cols], fp16 or bf16; address and row stride are multiples of 16 bytes.
        bias: [rows], in the dtype of the result.
        out_dtype: bfloat16, float16 or float32: that of `out`, or that of x, by default.
        out: [tokens, rows] for the result, rows in one piece.
        tile_tokens, pair, split: tokens of a tile (32, 64, 96, 128, 192 or 256), whether two CTAs
            fetch tokens for each other, and CTAs that share a tile along K (1, 2, 3, 4, 6 or 8):
            chosen by the sizes where none is given, else 128, False and 1.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit, before it
            compiles.
    """
    require_type("weights", weights, Weights)
    require_type("x", x, torch.Tensor)
    require_type("bias", bias, torch.Tensor, optional=True)
    require_type("out", out, torch.Tensor, optional=True)
    if out_dtype is None:
        out_dtype = x.dtype if out is None else out.dtype
    given = {
        "weights": weights, "x": x, "out_dtype": out_dtype, "bias": bias, "out": out,
        "tile_tokens": tile_tokens, "pair": pair, "split": split, "backend": backend, "arch": arch,
    }  # fmt: skip
    return NUMBER_PRODUCT({name: value for name, value in given.items() if value is not None})


def run_numbers(given: NumbersMultiplied) -> tuple[torch.Tensor]:
    """[tokens, rows]."""
    weights, x = given.weights, given.x
    _check(given)
    target = choose_target(x.device, given.backend, given.arch, ARCHS, INSTEAD)
    out = empty_numbers(given)[0] if given.out is None else given.out
    if len(x):
        config = config_for(given, out)
        clusters = items_of(Sizes(len(x), weights.rows, weights.cols), _shape(config))
        if config.split == 1:
            clusters = min(clusters, max(at_once(x.device, config.ctas), 1))
        arguments = _operands(given, config), ParamTable.of(_params(given, config, out))
        ctas = clusters * config.ctas
        launch(compile_kernel(config, target.arch), (*arguments, ctas), target, out.device)
    return (out,)


def empty_numbers(given: NumbersMultiplied) -> tuple[torch.Tensor]:
    """Allocate the result of `run_numbers`, or return the given one."""
    if given.out is not None:
        return (given.out,)
    return (given.x.new_empty((given.x.shape[0], given.weights.rows), dtype=given.out_dtype),)


def config_for(given: NumbersMultiplied, out: torch.Tensor) -> NumbersConfig:
    """The kernel of a call: what is not given follows from the sizes."""
    weights = given.weights
    plain = plain_config(weights, given.x.dtype, out, bias=given.bias is not None)
    sizes = Sizes(len(given.x), weights.rows, weights.cols)
    config = with_shape(plain, fastest(sizes, partial(at_once, given.x.device)))
    names = ("tile_tokens", "pair", "split")
    wanted = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    if wanted:
        config = replace(plain, **{"tile_tokens": 128, "pair": False, "split": 1, **wanted})
    config.check_values()
    return config


def candidates_for(weights: Weights, out: torch.Tensor, *, bias: bool) -> Iterator[NumbersConfig]:
    """Yield the configs that the sizes choose from, for tokens of the dtype of `out`."""
    plain = plain_config(weights, out.dtype, out, bias=bias)
    for shape in shapes(Sizes(len(out), weights.rows, weights.cols)):
        yield with_shape(plain, shape)


def at_once(device: torch.device, ctas: int) -> int:
    """Return the number of clusters of `ctas` CTAs that a device runs at the same time."""
    if ctas == 1 or device.type == "meta":
        return sms_of(device) // ctas
    return clusters_at_once(device, ctas)


def plain_config(
    weights: Weights, dtype: torch.dtype, out: torch.Tensor, *, bias: bool
) -> NumbersConfig:
    """The config of a call, with default tiles. out: the result, or one like it."""
    unit = hw.SMEM_UNIT_BYTES
    address, stride = _source(weights)
    ends = address_of(out) | (out.stride(0) * out.itemsize if len(out) > 1 else 0)
    config = NumbersConfig(
        weights.layout,
        DTYPE_NAMES[dtype],
        DTYPE_NAMES[out.dtype],
        vector=ends % unit == 0 and weights.rows % 8 == 0,
        bias=bias,
    )
    starts = address | stride
    whole = starts % unit == 0 and weights.cols % config.stage_k == 0
    pairs = weights.layout != SOA or weights.cols % (2 * BLOCK) == 0
    return replace(config, whole=whole or weights.layout == SOA, words=starts % 4 == 0 and pairs)


def compile_kernel(config: NumbersConfig, arch: str) -> CompiledKernel | None:
    """The kernel of a config; None while `kernelkit.compile.compiler.collecting`."""
    return compile_once(config, arch, "q8_0.numbers.kernel")


def _shape(config: NumbersConfig) -> tuple[int, bool, int]:
    return config.tile_tokens, config.pair, config.split


def _source(weights: Weights) -> tuple[int, int]:
    """Return address and stride of rows of scales, or of blocks."""
    if weights.layout == SOA:
        begin = scales_offset(weights.rows, weights.cols)
        return address_of(weights.data) + begin, weights.blocks * SCALE_BYTES
    return address_of(weights.data), weights.row_stride if weights.rows > 1 else 0


def _operands(given: NumbersMultiplied, config: NumbersConfig) -> tuple[torch.Tensor, ...]:
    """Return what TMA fetches."""
    x, weights = given.x, given.weights
    tokens, cols = x.shape
    stride = x.stride(0) if tokens > 1 else cols
    shape, strides = (1, tokens, 1, cols), (stride, stride, stride, 1)
    found: tuple[torch.Tensor, ...] = (x.as_strided(shape, strides),)
    if weights.layout == SOA:
        quants = weights.data[: weights.rows * cols].view(1, weights.rows, 1, cols)
        found = (*found, quants)
    elif config.whole:
        found = (*found, weights.data.view(torch.uint16)[None, :, None])
    return tuple(with_plain_strides(each) for each in found)


def _params(given: NumbersMultiplied, config: NumbersConfig, out: torch.Tensor) -> NumbersParams:
    weights = given.weights
    source: tuple[torch.Tensor, int] = (weights.data, 0)
    if weights.layout == SOA:
        source = weights.data, scales_offset(weights.rows, weights.cols)
    tokens = len(given.x)
    return NumbersParams(
        tokens=tokens,
        rows=weights.rows,
        blocks=weights.blocks,
        source=source,
        source_stride=_source(weights)[1],
        out=out,
        out_stride=out.stride(0) * out.itemsize,
        bias=0 if given.bias is None else given.bias,
        token_tiles=-(-tokens // config.tile_tokens),
        row_tiles=row_tiles(weights.rows, config.pair),
        group=group_of(tokens, config.tile_tokens),
    )


def _check(given: NumbersMultiplied) -> None:
    weights, x, bias, out = given.weights, given.x, given.bias, given.out
    weights.require_place()
    require_tensors(**{"weights.data": weights.data, "x": x})
    require_rank("x", x, "[tokens, cols]")
    if DTYPE_NAMES.get(x.dtype) not in DTYPES:
        raise NotImplementedError(f"x is {x.dtype}: one of {DTYPES}, or `quantise` it")
    require_tma("x", x)
    if x.shape[1] != weights.cols:
        raise ValueError(
            f"x has {x.shape[1]} columns, the weights are {weights.rows} x {weights.cols}"
        )
    if weights.cols > MOST_COLS:
        raise NotImplementedError(f"weights has {weights.cols} columns, limit {MOST_COLS}")
    if given.out_dtype not in DTYPE_NAMES:
        raise NotImplementedError(
            f"out_dtype is {given.out_dtype}: supported are {tuple(DTYPE_NAMES)}"
        )
    if bias is not None:
        require_tensors(bias=bias, x=x)
        require_table("bias", bias, given.out_dtype, (weights.rows,))
    if out is not None:
        require_tensors(out=out, x=x)
        require_table("out", out, given.out_dtype, (len(x), weights.rows))


NUMBER_PRODUCT = Operator(
    "q8_0_number_product", NumbersMultiplied, run_numbers, empty_numbers, results=1
)
