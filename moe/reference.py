"""The layer and its numbers in plain torch: the definition that every kernel of `moe` agrees with.

Quantising is defined to the bit, in IEEE fp32 without flushed subnormals or fused operations. With
a block of elements x, amax = max |x| and the tensor's (row's, expert's) global scale g:

    nvfp4         s = e4m3((amax fp32(1/6)) g)        inv = min(g / s, FLT_MAX), 0 where s = 0
    mxfp4, mxfp8  s = ue8m0(amax fp32(1/6 or 1/448))  inv = 1 / s, exactly
    element       q = e2m1 or e4m3 (x inv)

e4m3 and e2m1 round to nearest even and saturate, infinities too. ue8m0 is the smallest power of two
that is not below, within 2^-127 .. 2^127 (cvt.rp.satfinite.ue8m0x2.f32). One NaN makes its block
NaN: the scale factor is the NaN of its format (0x7f, 0xff), inv is NaN, and every element becomes
what cvt makes of NaN (e2m1 0x7, e4m3 0x7f). An infinity becomes the largest element with the
largest scale factor. A g computed from an infinity is 0, and then 1 / g and all values are not
finite. Zeros keep their sign.

The functions run on any device. They read values back on the host only where documented.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from kernelkit.numerics import e2m1
from moe.formats import (
    E4M3_LARGEST,
    SCALE_ATOM_BYTES,
    SCALE_COLUMNS,
    SCALE_ROWS,
    BlockFormat,
    format_of,
    row_blocks,
    scale_atoms,
    scale_blocks,
    scale_bytes,
)
from moe.quantized import ELEMENT_DTYPES, SCALE_DTYPES, Quantized, of_bytes
from moe.reference_routing import combine, permutation

FLT_MAX = torch.finfo(torch.float32).max
NAN_CODE = {"e2m1": e2m1.NAN_CODE, "e4m3": 0x7F, "ue8m0": 0xFF}


def quantise(
    x: torch.Tensor,
    fmt: str,
    *,
    global_scale: str | torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> Quantized:
    """Quantise x [T, K] of any float dtype to the format `fmt`.

    Args:
        global_scale: g as fp32 [1] or [rows of the result], or the source of g. 'token': one for
            each row of x (default if the format has a global scale). 'tensor': one for all rows.
        rows: int [R]; result row r is row rows[r] of x.
        offsets: int [E + 1]; result rows are sorted by expert. The layout of scale factors is
            described in `moe.formats`, with room for `scale_blocks`.
    """
    form = format_of(fmt)
    encode = _encode_scale_of(x, form, global_scale)
    x = x.float()
    if rows is not None:
        x = x[rows.long()]
        if encode is not None and global_scale in (None, "token"):
            encode = encode[rows.long()]
    data, codes = quantise_blocks(x, form, encode)
    return of_bytes(data, swizzle_scales(codes, offsets), fmt, encode)


def encode_scale(amax: torch.Tensor, fmt: str) -> torch.Tensor:
    """Return fp32 g = min(2688 / amax, FLT_MAX), 1 where amax is 0. It maps amax to the largest
    number."""
    target = torch.full_like(amax, format_of(fmt).amax_target, dtype=torch.float32)
    g = (target / amax.float()).clamp(max=FLT_MAX)
    return torch.where(amax == 0, 1.0, g)


def quantise_blocks(
    x: torch.Tensor, form: BlockFormat, encode: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed elements of x fp32 [rows, K], and unswizzled scales [rows, K / block]."""
    blocks = x.reshape(len(x), form.columns(x.shape[-1]), form.block)
    wanted = blocks.abs().amax(-1) * (1 / form.largest)
    if encode is not None:
        g = encode[:, None]
        scale = _to_e4m3(wanted * g)
        inverse = torch.where(scale.float() == 0, 0.0, (g / scale.float()).clamp(max=FLT_MAX))
    else:
        scale = _to_ue8m0(wanted)
        inverse = scale.float().reciprocal()
    elements = (blocks * inverse[..., None]).reshape(x.shape)
    if form.element == "e4m3":
        return _to_e4m3(elements), scale
    return e2m1.packed(e2m1.codes_of(elements)).view(ELEMENT_DTYPES["e2m1"]), scale


def dequantise(
    quantized: Quantized,
    *,
    offsets: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the values of `data`, [rows, K] or [E, rows, K]: exact in fp64, then rounded to
    `dtype`.

    offsets: those that the rows were quantised with.
    """
    form, data = quantized.format, quantized.data
    columns = form.columns(quantized.k)
    if data.ndim == 3:
        per_expert = quantized.scales.reshape(len(data), -1)
        scale = torch.stack([unswizzle_scales(s, quantized.rows, columns) for s in per_expert])
    else:
        scale = unswizzle_scales(quantized.scales, quantized.rows, columns, offsets)
    if form.element == "e4m3":
        elements = data.float()
    else:
        elements = e2m1.unpacked(data.view(torch.uint8))
    values = elements.double().unflatten(-1, (columns, form.block)) * scale.float()[..., None]
    values = values.flatten(-2)
    if quantized.decode_scale is not None:
        decode = quantized.decode_scale.double()
        if quantized.has_pairs:
            decode = _of_rows(decode, quantized)
        else:
            decode = decode.reshape(-1, *[1] * (data.ndim - 1))
        values = values * decode
    return values.to(dtype)


def _of_rows(decode: torch.Tensor, quantized: Quantized) -> torch.Tensor:
    """[E, rows, 1] of the global scales [E, 2] of gate and of up."""
    width = quantized.granularity
    if width is None:
        raise ValueError(
            "gate and up have global scales, but the granularity of their rows is unknown: "
            "set it by moe.formats.laid_out, or pass PackedExperts"
        )
    half = torch.arange(quantized.rows, device=decode.device) // width % 2
    return decode[:, half, None]


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """(u + beta) g sigmoid(alpha g) with g = min(gate, limit), u = up within -limit .. limit.

    In the dtype of gate and up. Plain: (1, 0, None); DeepSeek-V4: (1, 0, 10); gpt-oss: (1.702, 1,
    7). A NaN stays one.
    """
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + beta) * gate * torch.sigmoid(alpha * gate)


def grouped_gemm(
    x: torch.Tensor | Quantized,
    w: torch.Tensor | Quantized,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows x [R, K], sorted by expert, by the transposed matrix of w [E, N, K], and add
    the expert's row of bias [E, N]: fp64 [R, N].

    offsets: int [E + 1], read on the host. Experts may have no rows.
    """
    x = dequantise(x, offsets=offsets) if isinstance(x, Quantized) else x.double()
    w = dequantise(w) if isinstance(w, Quantized) else w.double()
    added = w.new_zeros(w.shape[:2]) if bias is None else bias.double()
    starts = offsets.tolist()
    return torch.cat([x[a:b] @ w[e].T + added[e] for e, (a, b) in enumerate(pairwise(starts))])


def layer(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    routed: tuple[torch.Tensor, torch.Tensor],
    *,
    fmt: str | None = None,
    x_scale: str | torch.Tensor | None = None,
    h_scale: str | torch.Tensor | None = None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    **activation: Any,
) -> torch.Tensor:
    """Compute a whole MoE layer: [T, H].

    Without `fmt`, this is the definition, in fp64. With it, values are rounded as in the kernels:
    x and h = swiglu (fp32) to fmt; the rows of both products to fp32;
    the rows of the second product to the dtype of x; y after a sum in fp32.

    Args:
        x: [T, H].
        w13: [E, 2I, H], gate rows first; plain or dequantised.
        w2: [E, H, I]; plain or dequantised.
        routed: (ids, weights) [T, k].
        fmt: a format, or 'e4m3' for x and h by `in_e4m3`, as Hopper multiplies by 4-bit weights.
        x_scale, h_scale: global scales of x and h, as of `quantise` or `in_e4m3`.
        biases: [E, 2I], gate first, and [E, H], added to the rows of both products; None for none.
        activation: keywords of `swiglu`.
    """
    ids, weights = routed
    rows = permutation(ids, len(w13))

    def rounded(values: torch.Tensor, scale: str | torch.Tensor | None) -> torch.Tensor:
        if fmt is None:
            return values
        if fmt == "e4m3":
            return in_e4m3(values, scale)
        return dequantise(quantise(values, fmt, global_scale=scale))

    experts = torch.arange(len(w13), device=ids.device).repeat_interleave(rows.offsets.diff())

    def product(values: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        sums = grouped_gemm(values, w, rows.offsets)
        return sums if bias is None else sums + bias.double()[experts]

    values = rounded(x, x_scale)[rows.slot_of_row.long() // ids.shape[1]]
    inner = torch.float64 if fmt is None else torch.float32
    gate, up = product(values, w13, biases[0]).to(inner).chunk(2, dim=-1)
    h = rounded(swiglu(gate, up, **activation), h_scale)
    y = product(h, w2, biases[1])
    if fmt is None:
        return combine(y, weights, rows.row_of_slot, dtype=torch.float64)
    return combine(y.float().to(x.dtype), weights, rows.row_of_slot).to(x.dtype)


def in_e4m3(x: torch.Tensor, scale: str | torch.Tensor | None = None) -> torch.Tensor:
    """Round x [rows, K] times a scale to e4m3 with saturation, and divide by the scale again: fp64.
    The scale is fp32 [1], or 448 over the largest magnitude of each row. Raise ValueError for a
    scale that is a string."""
    if isinstance(scale, str):
        raise ValueError(f"scale {scale!r} in e4m3: None for one scale per row, or a tensor")
    if scale is None:
        amax = x.float().abs().amax(-1, keepdim=True)
        scale = torch.where(amax > 0, E4M3_LARGEST / amax, 1.0)
    return _to_e4m3(x.float() * scale).double() / scale.double()


def swizzle_scales(codes: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """Scale factors [rows, columns] of one byte in the layout of `moe.formats`, 1-D, padded with 0.

    offsets: int [E + 1] of rows sorted by expert; every expert begins at a fresh 128 rows.
    """
    rows, columns = codes.shape
    blocks = row_blocks(rows) if offsets is None else scale_blocks(rows, len(offsets) - 1)
    swizzled = torch.zeros(scale_bytes(blocks, columns), dtype=torch.uint8, device=codes.device)
    swizzled[_scale_index((rows, columns), offsets, codes.device)] = codes.view(torch.uint8)
    return swizzled.view(codes.dtype)


def unswizzle_scales(
    scales: torch.Tensor, rows: int, columns: int, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """The inverse of `swizzle_scales`: [rows, columns]."""
    index = _scale_index((rows, columns), offsets, scales.device)
    return scales.view(torch.uint8)[index].view(scales.dtype)


def _encode_scale_of(
    x: torch.Tensor, form: BlockFormat, global_scale: str | torch.Tensor | None
) -> torch.Tensor | None:
    if not form.has_global:
        if global_scale is not None:
            raise ValueError(f"global_scale with {form.name}, which has none")
        return None
    if isinstance(global_scale, torch.Tensor):
        return global_scale.float()
    magnitude = x.float().abs()
    if global_scale in (None, "token"):
        amax = magnitude.amax(-1)
    elif global_scale == "tensor":
        amax = magnitude.amax().reshape(1) if x.numel() else magnitude.new_zeros(1)
    else:
        raise ValueError(f"global_scale {global_scale!r}: 'token', 'tensor' or a tensor")
    return encode_scale(amax, form.name)


def _scale_index(
    shape: tuple[int, int], offsets: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return int64 [rows, columns]: the byte position of each scale factor."""
    rows, columns = shape
    row = torch.arange(rows, device=device)
    column = torch.arange(columns, device=device)
    if offsets is not None:
        offsets = offsets.long()
        expert = torch.searchsorted(offsets[1:], row, right=True)
        blocks = -(-offsets.diff() // SCALE_ROWS)
        row = (blocks.cumsum(0) - blocks)[expert] * SCALE_ROWS + row - offsets[expert]
    atom = row // SCALE_ROWS * scale_atoms(columns)
    in_atom = row % 32 * 16 + row % SCALE_ROWS // 32 * SCALE_COLUMNS
    of_row = atom * SCALE_ATOM_BYTES + in_atom
    of_column = column // SCALE_COLUMNS * SCALE_ATOM_BYTES + column % SCALE_COLUMNS
    return of_row[:, None] + of_column


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """cvt.rn.satfinite.e4m3x2.f32."""
    codes = x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(ELEMENT_DTYPES["e4m3"]).view(torch.uint8)
    return codes.masked_fill(x.isnan(), NAN_CODE["e4m3"]).view(ELEMENT_DTYPES["e4m3"])


def _to_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """cvt.rp.satfinite.ue8m0x2.f32 of x >= 0: its exponent, one more where a mantissa follows."""
    bits = x.view(torch.int32).long()
    code = (bits + 0x7FFFFF >> 23).clamp(max=254)
    code = torch.where(bits <= 0x400000, 0, code)  # 2^-127 and below
    code = torch.where(x.isnan(), NAN_CODE["ue8m0"], code)
    return code.to(torch.uint8).view(SCALE_DTYPES["ue8m0"])
