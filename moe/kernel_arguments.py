"""Launch arguments of the grouped products, by name from the host to traced code.

`moe.launch` and `moe.mixed.launch` fill the fields with torch tensors and numbers.
`example_arguments` fills them with those that a kernel is compiled for. Host functions read them as
types of the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tensor = Any  # torch.Tensor on the host, cute.Tensor in traced code
Number = Any  # int or float on the host, Int32 or Float32 in traced code


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Coefficients of h = (up + beta) gate sigmoid(alpha gate), after both are clamped by limit."""

    alpha: Number
    beta: Number
    limit: Number


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Operands that TMA reads, before they are tensor maps."""

    x: Tensor  # uint8 [1, rows, 1, bytes of K]
    w: Tensor  # uint8 [E, N, 1, bytes of K], or [E, N, windows, bytes of a window]
    x_scales: Tensor  # uint16 [1, atoms along K, blocks of 128 rows, words of an atom]
    w_scales: Tensor  # the same of each expert


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Other tensors of a block-scaled product; None where the config has no use for them."""

    offsets: Tensor  # int32 [E + 1]
    out: Tensor  # [rows, columns], in bytes if it is quantised
    x_scale: Tensor | None = None  # fp32 [1] or [rows]: decodes x, in a format with global scales
    w_scale: Tensor | None = None  # fp32 [E], or [E, 2] for gate and up
    out_scales: Tensor | None = None  # 1-D: scale factors of a quantised output
    encode_scale: Tensor | None = None  # fp32 [1]: global scale of a quantised output
    amax: Tensor | None = None  # fp32 [1]: the largest magnitude of the output
    bias: Tensor | None = None  # fp32 [E, N], in the order of the rows of w


@dataclass(frozen=True, kw_only=True)
class GroupedArguments:
    """Arguments of one launch of `moe.sm100.kernel.GroupedGemm`."""

    operands: Moved
    tensors: Tensors
    numbers: Numbers
    k: Number  # elements of K
    ctas: Number  # of the grid: a multiple of those that share a tile


@dataclass(frozen=True, kw_only=True)
class MixedTensors:
    """Tensors of a product with weights in four bits and activations in bf16 or e4m3."""

    weights: Tensor  # uint8 [E, bytes], as `moe.mixed.fragments` arranges them
    factor: Tensor  # fp32 [E], [E, 2] for gate and up, or [E, rows of weights]
    offsets: Tensor  # int32 [E + 1]
    out: Tensor  # [rows, columns]
    bias: Tensor | None = None  # fp32 [E, rows of weights]
    rows: Tensor | None = None  # int32 [rows]: the slot of each row, if x is gathered
    x_scale: Tensor | None = None  # fp32 [1] or [rows], of x in e4m3
    out_scale: Tensor | None = None  # fp32 [1]: outputs are multiplied by it before e4m3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a product with weights in four bits."""

    units: Number  # of K
    tall: Number  # 64 rows of an expert's weights make one
    experts: Number
    n_tiles: Number  # of an expert
    slots: Number  # of a token


@dataclass(frozen=True, kw_only=True)
class MixedKernelArguments:
    """Arguments of one launch of `MixedGemm` of either architecture."""

    x: Tensor  # [1, rows, 1, K], or [tokens, K] if it is gathered
    tensors: MixedTensors
    numbers: Numbers
    sizes: Sizes
    ctas: Number  # of the grid


@dataclass(frozen=True, kw_only=True)
class FewTensors:
    """Tensors of a layer with few rows. A row of h and y is a slot of a token."""

    x: Tensor  # bf16 [tokens, H]
    w13: Tensor  # uint8 [E, bytes], as `moe.mixed.fragments` arranges them
    w2: Tensor
    factor13: Tensor  # fp32 [E], or [E, 2] for gate and up
    factor2: Tensor  # fp32 [E]
    ids: Tensor  # int32 [tokens * slots]
    weights: Tensor  # fp32 [tokens * slots]
    h: Tensor  # bf16 [tokens * slots, I]
    y: Tensor  # fp32 [tokens * slots, H]
    out: Tensor  # bf16 [tokens, H]
    counts: Tensor  # int32, zeros before the launch
    bias13: Tensor | None = None  # fp32 [E, rows of w13]
    bias2: Tensor | None = None  # fp32 [E, rows of w2]


@dataclass(frozen=True, kw_only=True)
class FewSizes:
    """Sizes of a layer with few rows."""

    tall13: Number  # 64 rows of an expert's weights of the first product make one
    tall2: Number  # the same of the second product
    first_expert: Number  # number of the first expert that is here
    experts: Number  # experts that are here
    inner: Number  # I


@dataclass(frozen=True, kw_only=True)
class FewKernelArguments:
    """Arguments of one launch of `moe.mixed.few.kernel.FewRows`."""

    tensors: FewTensors
    numbers: Numbers
    sizes: FewSizes
    ctas: Number  # of the grid, all of which run at the same time
