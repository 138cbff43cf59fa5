"""The operators `blackwell_kernels::q8_0_...`: check, allocate, describe the launch. One each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernelkit.call.launch import Target, choose_target, launch, sms_of
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    require_no_grad,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
)
from kernelkit.compile.arch import PORTABLE
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.device.param_table import ParamTable
from q8_0.activations import Activations
from q8_0.blocks import BLOCK, INTERLEAVED, LAYOUTS, SOA, blocks_of
from q8_0.choose import measured, product_config, width_of
from q8_0.config import (
    INTEGERS,
    MOST_TOKENS,
    BatchConfig,
    DequantiseConfig,
    MatvecConfig,
    QuantiseConfig,
    RepackConfig,
)
from q8_0.params import DequantiseParams, MatvecParams, QuantiseParams, RepackParams, WeightWords
from q8_0.weights import Weights, address_of, empty

ARCHS = ("sm_100a", "sm_90a", PORTABLE)
MOST_FLAT = 1 << 33  # fewer weights than this are processed as one row: 32 bits count pieces of 4
MOST_CTAS = (1 << 31) - 1
# The module of `q8_0` that has the kernel of a config.
KERNELS = {
    RepackConfig: "repack_kernel",
    DequantiseConfig: "dequantise_kernel",
    QuantiseConfig: "quantise_kernel",
    MatvecConfig: "matvec_kernel",
    BatchConfig: "batch_kernel",
}
Config = RepackConfig | DequantiseConfig | QuantiseConfig | MatvecConfig | BatchConfig


@dataclass(frozen=True)
class Repacked:
    """The arguments of `q8_0.repack`."""

    weights: Weights
    layout: str
    backend: str = "auto"
    arch: str | None = None


@dataclass(frozen=True)
class Dequantised:
    """The arguments of `q8_0.dequantise`."""

    weights: Weights
    dtype: torch.dtype
    backend: str = "auto"
    arch: str | None = None


@dataclass(frozen=True)
class Quantised:
    """The arguments of `q8_0.quantise`."""

    x: torch.Tensor
    backend: str = "auto"
    arch: str | None = None


@dataclass(frozen=True)
class Multiplied:
    """The arguments of `q8_0.matvec` with numbers."""

    weights: Weights
    x: torch.Tensor
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    backend: str = "auto"
    arch: str | None = None


@dataclass(frozen=True)
class IntegersMultiplied:
    """The arguments of `q8_0.matvec` with activations in Q8_1."""

    weights: Weights
    x: Activations
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    backend: str = "auto"
    arch: str | None = None


def run_repack(given: Repacked) -> tuple[torch.Tensor]:
    """The bytes of the weights in the other layout."""
    weights = given.weights
    weights.require_place()
    require_layout(given.layout)
    if given.layout == weights.layout:
        raise ValueError(f"layout {given.layout!r}: the weights have it already")
    target = choose_target(weights.data.device, given.backend, given.arch, ARCHS)
    made = empty(weights.rows, weights.cols, given.layout, weights.data.device)
    to_soa = given.layout == SOA
    blocks, arrays = (weights, made) if to_soa else (made, weights)
    flat = _is_flat(blocks)
    numbers = [address_of(blocks.data)] + [blocks.row_stride] * (not flat)
    config = RepackConfig(to_soa, width_of(*numbers))
    rows, cols = _rows(weights, flat)
    tiles = -(-cols // (BLOCK * config.tile))
    words = {"blocks": blocks, "arrays": arrays}
    params = RepackParams(
        **{name: WeightWords.of(each, flat=flat) for name, each in words.items()}, tiles=tiles
    )
    _launch(config, params, rows * tiles, target, weights.data.device)
    return (made.data,)


def empty_repack(given: Repacked) -> tuple[torch.Tensor]:
    """Allocate the result of `run_repack`."""
    weights = given.weights
    return (empty(weights.rows, weights.cols, given.layout, weights.data.device).data,)


def run_dequantise(given: Dequantised) -> tuple[torch.Tensor]:
    """[rows, cols]."""
    weights = given.weights
    weights.require_place()
    config = DequantiseConfig(weights.layout, _name("dtype", given.dtype))
    target = choose_target(weights.data.device, given.backend, given.arch, ARCHS)
    (out,) = empty_dequantise(given)
    flat = _is_flat(weights)
    rows, cols = _rows(weights, flat)
    tiles = -(-cols // config.tile)
    params = DequantiseParams(
        weights=WeightWords.of(weights, flat=flat),
        out=out,
        out_stride=out.stride(0) * out.itemsize,
        tiles=tiles,
    )
    _launch(config, params, rows * tiles, target, out.device)
    return (out,)


def empty_dequantise(given: Dequantised) -> tuple[torch.Tensor]:
    """Allocate the result of `run_dequantise`."""
    weights = given.weights
    return (weights.data.new_empty((weights.rows, weights.cols), dtype=given.dtype),)


def run_quantise(given: Quantised) -> tuple[torch.Tensor, torch.Tensor]:
    """Quants and scales."""
    x = given.x
    _check_numbers(x)
    blocks_of(x.shape[1])
    config = QuantiseConfig(_name("x", x.dtype))
    target = choose_target(x.device, given.backend, given.arch, ARCHS)
    quants, scales = empty_quantise(given)
    tiles = -(-x.shape[1] // config.tile)
    params = QuantiseParams(
        x=x, x_stride=x.stride(0) * x.itemsize, quants=quants, scales=scales, cols=x.shape[1],
        tiles=tiles,
    )  # fmt: skip
    _launch(config, params, len(x) * tiles, target, x.device)
    return quants, scales


def empty_quantise(given: Quantised) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of `run_quantise`."""
    tokens, cols = given.x.shape
    quants = given.x.new_empty((tokens, cols), dtype=torch.int8)
    return quants, given.x.new_empty((tokens, cols // BLOCK), dtype=torch.float16)


def run_matvec(given: Multiplied) -> tuple[torch.Tensor]:
    """[tokens, rows]."""
    x = given.x
    _check_numbers(x)
    words = {"x": x, "x_stride": x.stride(0) * x.itemsize, "x_scales": 0, "x_scale_stride": 0}
    return _multiply(given, _name("x", x.dtype), words)


def run_integer_matvec(given: IntegersMultiplied) -> tuple[torch.Tensor]:
    """[tokens, rows]."""
    x = given.x
    x.require_place("x")
    words = {
        "x": x.quants, "x_stride": x.cols, "x_scales": x.scales,
        "x_scale_stride": x.scales.shape[1] * x.scales.itemsize,
    }  # fmt: skip
    return _multiply(given, INTEGERS, words)


def empty_matvec(given: Multiplied | IntegersMultiplied) -> tuple[torch.Tensor]:
    """Allocate the result of either matrix-vector product."""
    x = given.x.quants if isinstance(given.x, Activations) else given.x
    return (x.new_empty((x.shape[0], given.weights.rows), dtype=given.out_dtype),)


def _multiply(
    given: Multiplied | IntegersMultiplied, dtype: str, words: dict[str, Any]
) -> tuple[torch.Tensor]:
    weights, x, bias = given.weights, words["x"], given.bias
    weights.require_place()
    require_tensors(**{"weights.data": weights.data, "x": x})
    tokens, cols = x.shape
    if cols != weights.cols:
        raise ValueError(f"x has {cols} columns, the weights are {weights.rows} x {weights.cols}")
    if tokens > MOST_TOKENS:
        raise NotImplementedError(
            f"x has {tokens} tokens: at most {MOST_TOKENS} share a read of the weights"
        )
    name = _name("out_dtype", given.out_dtype)
    if bias is not None:
        require_tensors(x=x, bias=bias)
        require_table("bias", bias, given.out_dtype, (weights.rows,))
    target = choose_target(x.device, given.backend, given.arch, ARCHS)
    (out,) = empty_matvec(given)
    if not tokens:
        return (out,)
    config = product_config(
        weights.layout, dtype, name, sizes=(tokens, weights.rows, cols), bias=bias is not None,
        sms=sms_of(x.device),
    )  # fmt: skip
    config = measured(config, (tokens, weights.rows, cols), x.device)
    params = MatvecParams(
        weights=WeightWords.of(weights),
        **words,
        tokens=tokens,
        out=out,
        out_stride=out.stride(0) * out.itemsize,
        bias=0 if bias is None else bias,
    )
    _launch(config, params, -(-weights.rows // config.cta_rows), target, x.device)
    return (out,)


def require_layout(layout: str) -> None:
    """ValueError for a word that names none."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: one of {LAYOUTS}")


def _check_numbers(x: torch.Tensor) -> None:
    """ValueError or NotImplementedError for an x that kernels do not read."""
    require_no_grad(x=x)
    require_rank("x", x, "[tokens, cols]")
    _name("x", x.dtype)
    require_tma("x", x)


def _name(what: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise NotImplementedError(f"{what} is {dtype}: supported are {tuple(DTYPE_NAMES)}")
    return DTYPE_NAMES[dtype]


def _is_flat(weights: Weights) -> bool:
    """Whether all rows are one long row, for who takes blocks one by one."""
    if weights.rows == 1:
        return True  # whatever the stride, which torch leaves as it is
    apart = weights.layout == INTERLEAVED and weights.row_stride != weights.data.shape[1]
    return not apart and weights.rows * weights.cols < MOST_FLAT


def _rows(weights: Weights, flat: bool) -> tuple[int, int]:
    """(rows, columns) as a kernel takes them."""
    return (1, weights.rows * weights.cols) if flat else (weights.rows, weights.cols)


def _launch(config: Config, params: Any, ctas: int, target: Target, device: torch.device) -> None:
    """Launch `ctas` CTAs of the kernel of a config with a dataclass of its parameters."""
    if ctas > MOST_CTAS:
        raise ValueError(f"{ctas} CTAs: at most {MOST_CTAS}")
    if ctas:
        launch(compile_kernel(config, target.arch), (ParamTable.of(params), ctas), target, device)


def compile_kernel(config: Config, arch: str) -> CompiledKernel | None:
    """The kernel of a config; None while `kernelkit.compile.compiler.collecting`."""
    return compile_once(config, arch, f"q8_0.{KERNELS[type(config)]}")


REPACK = Operator("q8_0_repack", Repacked, run_repack, empty_repack, results=1)
DEQUANTISE = Operator("q8_0_dequantise", Dequantised, run_dequantise, empty_dequantise, results=1)
QUANTISE = Operator("q8_0_quantise", Quantised, run_quantise, empty_quantise, results=2)
MATVEC = Operator("q8_0_matvec", Multiplied, run_matvec, empty_matvec, results=1)
INTEGER_MATVEC = Operator(
    "q8_0_integer_matvec", IntegersMultiplied, run_integer_matvec, empty_matvec, results=1
)
