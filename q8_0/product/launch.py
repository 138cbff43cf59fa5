"""`product`, and the operator `blackwell_kernels::q8_0_product` behind it: check, choose, launch.

One launch, which a CUDA graph captures. Nothing is split along K, so that the bits of a result
depend neither on the layout of the weights, nor on how many tokens there are, nor on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.call.launch import choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    require_grid,
    require_table,
    require_tensors,
    require_type,
)
from kernelkit.compile.arch import PORTABLE
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.device.param_table import ParamTable
from kernelkit.plan import hw
from q8_0.activations import Activations
from q8_0.product.choose import Shape, Sizes, candidates, fastest, group_of, measured
from q8_0.product.config import ProductConfig
from q8_0.product.params import Matrix, ProductParams, WeightMatrix
from q8_0.weights import Weights, address_of

ARCHS = ("sm_100a", "sm_90a", PORTABLE)
MOST_COLS = 1 << 22  # offsets within the rows of a tile are counted in 32 bits
MOST_CTAS = (1 << 31) - 1


@dataclass(frozen=True)
class Multiplied:
    """The arguments of `product`."""

    weights: Weights
    x: Activations
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    out: torch.Tensor | None = None
    backend: str = "auto"
    arch: str | None = None


def product(
    weights: Weights,
    x: Activations,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """x W^T + bias, [tokens, rows]: of each block of 32 columns the sum I of integer products,
    exactly; t = I d_x, rounded to fp32; y = t d_w + y in fp32, by a fused multiply-add, from 0,
    block by block; at the end y + bias in fp32, rounded to the dtype of the result.
    `q8_0.reference` has the same bits.

    An infinite d_x counts as NaN: all results of that token are. With an infinite d_w they are NaN
    or an infinity, as t d_w is.

    Args:
        weights: [rows, cols], cols up to 4,194,304, of either layout, with the same bits. In 'soa'
            it is faster, and interleaved slower where rows are no multiple of 256 columns.
        x: [tokens, cols], what `q8_0.quantise` makes.
        bias: [rows], in the dtype of the result.
        out_dtype: bfloat16, float16 or float32: that of `out`, or float32, by default.
        out: [tokens, rows] for the result, rows in one piece.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit, before it
            compiles.
    """
    require_type("weights", weights, Weights)
    require_type("x", x, Activations)
    require_type("bias", bias, torch.Tensor, optional=True)
    require_type("out", out, torch.Tensor, optional=True)
    if out_dtype is None:
        out_dtype = torch.float32 if out is None else out.dtype
    given = {
        "weights": weights, "x": x, "out_dtype": out_dtype, "bias": bias, "out": out,
        "backend": backend, "arch": arch,
    }  # fmt: skip
    return PRODUCT({name: value for name, value in given.items() if value is not None})


def run_product(given: Multiplied) -> tuple[torch.Tensor]:
    """[tokens, rows]."""
    weights, x = given.weights, given.x
    _check(given)
    target = choose_target(x.quants.device, given.backend, given.arch, ARCHS)
    out = empty_product(given)[0] if given.out is None else given.out
    if x.tokens:
        config = config_for(weights, out, target.arch, bias=given.bias is not None)
        group, groups = group_of(x.tokens, config.tile_tokens)
        tiles = group * -(-weights.rows // config.tile_rows)
        require_grid(**{"groups of tokens": groups})
        if tiles > MOST_CTAS:
            raise ValueError(f"weights has {weights.rows} rows: {tiles} CTAs, limit {MOST_CTAS}")
        table = ParamTable.of(_params(given, out, group))
        launch(compile_kernel(config, target.arch), (table, tiles, groups), target, out.device)
    return (out,)


def empty_product(given: Multiplied) -> tuple[torch.Tensor]:
    """Allocate the result of `run_product`, or return the given one."""
    if given.out is not None:
        return (given.out,)
    quants = given.x.quants
    return (quants.new_empty((quants.shape[0], given.weights.rows), dtype=given.out_dtype),)


def config_for(weights: Weights, out: torch.Tensor, arch: str, *, bias: bool) -> ProductConfig:
    """The kernel of a call. out: the result, on the device 'meta' one of its own memory."""
    sizes = _sizes(weights, out)
    config = fastest(candidates_for(weights, out, arch, bias=bias), sizes, arch)
    return measured(config, sizes, arch, out.device)


def candidates_for(
    weights: Weights, out: torch.Tensor, arch: str, *, bias: bool
) -> dict[Shape, ProductConfig]:
    """Return the candidates from which the rules choose a call's kernel."""
    unit = hw.SMEM_UNIT_BYTES
    ends = address_of(out) | (out.stride(0) * out.itemsize if len(out) > 1 else 0)
    starts = address_of(weights.data) | weights.row_stride
    places = {"aligned": starts % unit == 0, "vector": ends % unit == 0, "bias": bias}
    names = weights.layout, DTYPE_NAMES[out.dtype]
    return candidates(*names, _sizes(weights, out), arch, **places)


def _sizes(weights: Weights, out: torch.Tensor) -> Sizes:
    return Sizes(len(out), weights.rows, weights.cols)


def compile_kernel(config: ProductConfig, arch: str) -> CompiledKernel | None:
    """The kernel of a config; None while `kernelkit.compile.compiler.collecting`."""
    return compile_once(config, arch, "q8_0.product.kernel")


def _params(given: Multiplied, out: torch.Tensor, group: int) -> ProductParams:
    weights, x = given.weights, given.x
    return ProductParams(
        x=Matrix(address=x.quants, rows=x.tokens),
        x_scales=Matrix(address=x.scales, rows=x.tokens),
        w=WeightMatrix.of(weights),
        out=out,
        out_stride=out.stride(0) * out.itemsize,
        bias=0 if given.bias is None else given.bias,
        blocks=weights.blocks,
        group=group,
    )


def _check(given: Multiplied) -> None:
    weights, x, bias, out = given.weights, given.x, given.bias, given.out
    weights.require_place()
    x.require_place("x")
    parts = {"weights.data": weights.data, "x.quants": x.quants, "x.scales": x.scales}
    require_tensors(**parts)
    if x.cols != weights.cols:
        raise ValueError(f"x has {x.cols} columns, the weights are {weights.rows} x {weights.cols}")
    if weights.cols > MOST_COLS:
        raise NotImplementedError(f"weights has {weights.cols} columns, limit {MOST_COLS}")
    if given.out_dtype not in DTYPE_NAMES:
        raise NotImplementedError(
            f"out_dtype is {given.out_dtype}: supported are {tuple(DTYPE_NAMES)}"
        )
    if bias is not None:
        require_tensors(bias=bias, x=x.quants)
        require_table("bias", bias, given.out_dtype, (weights.rows,))
    if out is not None:
        require_tensors(out=out, x=x.quants)
        require_table("out", out, given.out_dtype, (x.tokens, weights.rows))


PRODUCT = Operator("q8_0_product", Multiplied, run_product, empty_product, results=1)
