"""Calls of q8_0's functions, whose bits are those of their definition, or within its tolerance."""

from __future__ import annotations

from typing import Any

import torch

from kernelkit.call.tensors import DTYPE_NAMES
from kernelkit.numerics.tolerance import compare_output
from lab.problems.attention import DTYPES
from lab.support.space import GPU, GPUS, Row, Space
from q8_0 import Activations, Weights, dequantise, matvec, quantise, reference, repack
from q8_0.blocks import LAYOUTS
from q8_0.product.launch import product

ROWS = 40
KINDS = ("bf16", "fp16", "fp32", "Activations", "e4m3")
SHAPES = {"cols": ("96", "128", "256", "100"), "tokens": ("2", "1", "16", "17", "40")}


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _weights(row: Row) -> Weights:
    """Weights of a row; raises what `Weights` raises for such columns."""
    cols = int(row["cols"])
    if cols % 32:
        return Weights(torch.empty(ROWS * cols, dtype=torch.uint8), ROWS, cols, row["layout"])
    return reference.rounded(_numbers(ROWS, cols), row["layout"])


def _given(row: Row) -> dict[str, Any]:
    """Arguments of both products."""
    weights, x = _weights(row), _numbers(int(row["tokens"]), int(row["cols"]))
    kind = row["x"]
    out = DTYPES[row["out_dtype"]] if row["out_dtype"] != "none" else None
    own = torch.float32 if kind == "Activations" else DTYPES[kind]
    given = x if kind == "Activations" else x.to(DTYPES[kind])
    bias = {"none": None, "as the result": out or own, "fp64": torch.float64}[row["bias"]]
    return {
        "weights": weights,
        "x": reference.quantise(x) if kind == "Activations" else given,
        "bias": None if bias is None else _numbers(ROWS).to(bias),
        "out_dtype": out,
    }


def _wrong_matvec(row: Row) -> list[str]:
    """Compare with the sum in fp64, and with one in fp32."""
    y, given = _matvec(row), _given(row)
    weights, x, bias = given["weights"], given["x"], given["bias"]
    exact = reference.matvec(weights, x, bias)
    numbers = reference.numbers_of(x) if isinstance(x, Activations) else x
    rounded = numbers.float() @ reference.dequantise(weights, torch.float32).T
    rounded = rounded if bias is None else rounded + bias.float()
    report = compare_output(y, exact, rounded.to(y.dtype), y.dtype)
    return [] if report.ok else [str(report)]


def _wrong_product(row: Row) -> list[str]:
    y, given = _product(row), _given(row)
    wanted = reference.product(given["weights"], given["x"], y.dtype, given["bias"])
    return [] if torch.equal(y, wanted) else ["other bits"]


def _matvec(row: Row) -> torch.Tensor:
    return matvec(**_given(row), arch=row[GPU])


def _product(row: Row) -> torch.Tensor:
    return product(**_given(row), arch=row[GPU])


_OPTIONS = {
    **SHAPES,
    "bias": ("none", "as the result", "fp64"),
    "out_dtype": ("none", "bf16", "fp16", "fp32", "e4m3"),
}
MATVEC = Space(
    "q8_0.matvec",
    "x is the dtype of the tokens, or what `quantise` makes of them.",
    {GPU: GPUS, "layout": LAYOUTS, "x": KINDS, **_OPTIONS},
    (GPU, "layout", "x"),
    (GPU, "x"),
    _matvec,
    _wrong_matvec,
)
PRODUCT = Space(
    "q8_0.product.launch.product",
    "`Q8Linear` uses it for more than 16 tokens.",
    {GPU: GPUS, "layout": LAYOUTS, "x": ("Activations", "bf16"), **_OPTIONS},
    (GPU, "layout", "x"),
    (GPU, "x"),
    _product,
    _wrong_product,
)


def _convert(row: Row) -> Any:
    """One of the functions that convert."""
    kind, arch = row["function"], row[GPU]
    if kind == "quantise":
        return quantise(_numbers(2, int(row["cols"])).to(DTYPES[row["dtype"]]), arch=arch)
    weights = _weights(row)
    if kind == "dequantise":
        return dequantise(weights, DTYPES[row["dtype"]], arch=arch)
    (other,) = (layout for layout in LAYOUTS if layout != row["layout"])
    return repack(weights, other, arch=arch)


def _wrong_converting(row: Row) -> list[str]:
    found, kind = _convert(row), row["function"]
    if kind == "quantise":
        x = _numbers(2, int(row["cols"])).to(DTYPES[row["dtype"]])
        wanted = reference.quantise(x)
        same = all(map(torch.equal, vars(found).values(), vars(wanted).values()))
    elif kind == "dequantise":
        same = torch.equal(found, reference.dequantise(_weights(row), DTYPES[row["dtype"]]))
    else:
        same = torch.equal(found.data, reference.repack(_weights(row), found.layout).data)
    return [] if same else ["other bits"]


CONVERT = Space(
    "q8_0.quantise, q8_0.dequantise, q8_0.repack",
    "dtype is that of x for `quantise`, and of the result for `dequantise`.",
    {
        GPU: GPUS,
        "function": ("quantise", "dequantise", "repack"),
        "dtype": (*DTYPE_NAMES.values(), "e4m3"),
        "layout": LAYOUTS,
        "cols": SHAPES["cols"],
    },
    (GPU, "function", "dtype"),
    (GPU, "function"),
    _convert,
    _wrong_converting,
)
SPACES = (MATVEC, PRODUCT, CONVERT)
