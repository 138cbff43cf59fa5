"""`grouped_gemm`: rows sorted by expert times the matrix of their expert, SwiGLU behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernelkit import hw
from kernelkit.dtypes import ITEM_BYTES
from kernelkit.launch import Target, choose_target, launch, written_for
from kernelkit.tensors import DTYPE_NAMES, require_table, require_tensors, with_plain_strides
from moe.config import GroupedConfig
from moe.formats import (
    FORMATS,
    SCALE_ATOM_BYTES,
    row_blocks,
    scale_atoms,
    scale_blocks,
    scale_bytes,
)
from moe.quantized import ELEMENT_DTYPES, SCALE_DTYPES, Quantized

ARCHS = ("sm_100a",)


@dataclass(frozen=True)
class Activation:
    """h = (up + beta) gate sigmoid(alpha gate); gate is clamped above by limit, up on both sides.

    Plain SwiGLU is (1, 0, None), DeepSeek-V4's (1, 0, 10), that of gpt-oss (1.702, 1, 7).
    granularity: rows of gate, then of up, that alternate in the packed weights.
    """

    granularity: int
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None


def grouped_gemm(
    x: Quantized,
    w: Quantized,
    offsets: torch.Tensor,
    *,
    activation: Activation | None = None,
    out: torch.dtype | str = torch.bfloat16,
    encode_scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor | Quantized:
    """Y_e = X_e W_e^T for every expert e, in one launch, and the activation of pairs of columns.

    x: data [R, K], rows sorted by expert, scale factors of each expert from a fresh 128 rows on
        (`quantise(..., offsets=offsets)`). w: data [E, N, K], in the same format; with an
        activation N = 2 I, packed as it says (`moe.packing`).
    offsets: int32 [E + 1], ascending from 0 to R; experts may have no rows.
    out: dtype of the result [R, N] or [R, I], or the format that it is quantised to in the same
        kernel: then a `Quantized` with scale factors by expert as those of x. encode_scale: fp32
        [1], the global scale of an output in nvfp4.
    amax: fp32 [1], becomes max(amax, the largest magnitude of the output), what calibrates the next
        encode_scale.

    Raises TypeError, ValueError or NotImplementedError, naming the value and the limit, before
    anything is compiled. No wait and no read of the device, so that a CUDA graph can capture it.
    """
    config = _config(x, activation, out, amax is not None)
    _check(x, w, offsets, config)
    _check_scalars(config, x, encode_scale, amax)
    target = choose_target(x.data.device, backend, arch, ARCHS)
    columns = w.rows // config.inputs_of_output
    result, memory = _empty(config, x, len(offsets) - 1, columns, encode_scale)
    if x.rows and columns:
        _run(config, (x, w, offsets), activation, (*memory, encode_scale, amax), target)
    return result


def _config(
    x: Quantized, activation: Activation | None, out: torch.dtype | str, amax: bool
) -> GroupedConfig:
    if isinstance(out, torch.dtype):
        if out not in DTYPE_NAMES:
            raise NotImplementedError(f"out {out}: supported are {tuple(DTYPE_NAMES)}")
        out = DTYPE_NAMES[out]
    elif out not in FORMATS:
        raise NotImplementedError(f"out {out!r}: a dtype or one of {tuple(FORMATS)}")
    limit = activation is not None and activation.limit is not None
    if limit and not activation.limit > 0:
        raise ValueError(f"limit {activation.limit}: a positive number, None for no limit")
    config = GroupedConfig(
        fmt=x.fmt,
        row_scale=x.decode_scale is not None and len(x.decode_scale) > 1,
        granularity=0 if activation is None else activation.granularity,
        limit=limit,
        out=out,
        amax=amax,
    )
    config.check_values()
    return config


def _check(x: Quantized, w: Quantized, offsets: torch.Tensor, config: GroupedConfig) -> None:
    require_tensors(x=x.data, w=w.data, offsets=offsets)
    if w.data.ndim != 3 or x.data.ndim != 2:
        raise ValueError(
            f"x {tuple(x.data.shape)} and w {tuple(w.data.shape)}: [R, K] and [E, N, K]"
        )
    if (x.fmt, x.k) != (w.fmt, w.k):
        raise ValueError(f"x is {x.fmt} with K = {x.k}, w is {w.fmt} with K = {w.k}")
    experts = len(w.data)
    require_table("offsets", offsets, torch.int32, (experts + 1,))
    line = x.data.shape[-1]
    if line % hw.TMA_ALIGN_BYTES:
        unit = hw.TMA_ALIGN_BYTES * x.format.per_byte
        raise NotImplementedError(f"K = {x.k} in {x.fmt}: a multiple of {unit}, for TMA")
    for name, tensor in (("x", x.data), ("w", w.data)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}.data has strides {tensor.stride()}: it has to be contiguous")
    wanted = scale_bytes(scale_blocks(x.rows, experts), x.format.columns(x.k))
    if x.rows and x.scales.numel() != wanted:
        raise ValueError(
            f"x has {x.scales.numel()} bytes of scale factors, {wanted} for {x.rows} rows of "
            f"{experts} experts: quantise it with offsets"
        )
    if x.format.has_global and len(w.decode_scale) != experts:
        raise ValueError(f"w has {len(w.decode_scale)} global scales for {experts} experts")
    _check_columns(w.rows, config)
    if offsets.device.type == "cpu":
        _check_offsets(offsets.tolist(), x.rows)


def _check_columns(n: int, config: GroupedConfig) -> None:
    pairs = config.inputs_of_output
    if n % (2 * config.granularity if config.swiglu else 1):
        raise ValueError(f"N = {n}: a multiple of {2 * config.granularity}, gate and up in turn")
    columns, form = n // pairs, config.out_format
    if form is not None:
        unit, what = hw.TMA_ALIGN_BYTES * form.per_byte, form.name
    else:
        unit = hw.TMA_ALIGN_BYTES // ITEM_BYTES[config.out]
        what = config.out
    if columns % unit:
        raise NotImplementedError(
            f"{columns} columns of output in {what}: a multiple of {unit}, 16 bytes"
        )


def _check_offsets(offsets: list[int], rows: int) -> None:
    """What a GPU takes as it is."""
    if offsets[0] != 0 or offsets[-1] != rows or offsets != sorted(offsets):
        raise ValueError(f"offsets {offsets}: ascending from 0 to the {rows} rows of x")


def _check_scalars(
    config: GroupedConfig,
    x: Quantized,
    encode_scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    wanted = config.out_format is not None and config.out_format.has_global
    if (encode_scale is not None) != wanted:
        raise ValueError(f"out {config.out}: {'an' if wanted else 'no'} encode_scale")
    for name, tensor in (("encode_scale", encode_scale), ("amax", amax)):
        if tensor is not None:
            require_table(name, tensor, torch.float32, (1,))
            require_tensors(x=x.data, **{name: tensor})


def _empty(
    config: GroupedConfig,
    x: Quantized,
    experts: int,
    columns: int,
    encode_scale: torch.Tensor | None,
) -> tuple:
    """(the result, the memory of its elements, that of its scale factors or None)."""
    form = config.out_format
    if form is None:
        dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == config.out)
        result = x.data.new_empty((x.rows, columns), dtype=dtype)
        return result, (result, None)
    blocks = scale_blocks(x.rows, experts)
    data = x.data.new_empty((x.rows, columns // form.per_byte), dtype=torch.uint8)
    scales = x.data.new_empty(scale_bytes(blocks, form.columns(columns)), dtype=torch.uint8)
    result = Quantized(
        data.view(ELEMENT_DTYPES[form.element]),
        scales.view(SCALE_DTYPES[form.scale]),
        encode_scale,
        None if encode_scale is None else encode_scale.reciprocal(),
        form.name,
    )
    return result, (data, scales)


def _run(
    config: GroupedConfig,
    operands: tuple,
    activation: Activation | None,
    outputs: tuple,
    target: Target,
) -> None:
    """One launch of as many CTAs as there are SMs, or tiles for any counts."""
    from moe.sm100.compile import compile_grouped

    x, w, offsets = operands
    data, scales, encode_scale, amax = outputs
    experts = len(w.data)
    blocks = scale_blocks(x.rows, experts)
    tiles = blocks * math.ceil(w.rows / config.tile_n)
    moved = (
        _lines(x.data[None]),
        _lines(w.data),
        _atoms(x.scales, 1, blocks, x),
        _atoms(w.scales, experts, row_blocks(w.rows), w),
    )
    tensors = (offsets, data, x.decode_scale, w.decode_scale, scales, encode_scale, amax)
    act = activation or Activation(0)
    numbers = (float(act.alpha), float(act.beta), float(act.limit or 0.0))
    arguments = [moved, tensors, numbers, x.k, min(tiles, _sms(x.data.device))]
    compiled = compile_grouped(config, written_for(target.arch))
    launch(compiled, arguments, target, x.data.device)


def _lines(data: torch.Tensor) -> torch.Tensor:
    """uint8 [experts, rows, 1, bytes of K]."""
    return with_plain_strides(data.view(torch.uint8)[:, :, None])


def _atoms(scales: torch.Tensor, experts: int, blocks: int, of: Quantized) -> torch.Tensor:
    """uint16 [experts, atoms along K, blocks of 128 rows, words of an atom]."""
    atoms = scale_atoms(of.format.columns(of.k))
    words = scales.view(torch.uint8).view(torch.uint16)
    words = words.view(experts, blocks, atoms, SCALE_ATOM_BYTES // 2)
    return with_plain_strides(words.transpose(1, 2))


def _sms(device: torch.device) -> int:
    if device.type != "cuda":
        return hw.SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
