"""Definition of the stored bytes of index keys and queries, in plain torch.

A row is 128 elements in fp32. The last ROPE are rotated as `kvcache.movement.reference` rotates
them; `Rotation` has other ways. Then the whole row goes through a Hadamard transform of Sylvester's
natural order times 128^-0.5, in fp32, with every sum rounded by itself. Pairs (x, y) become
(x + y, x - y), at distance 1 first, then 2, 4, up to 64; the factor is applied last. The result is
rounded to bf16, and quantised from bf16:

INDEXER_FP4   e2m1 of x / s, to nearest even; every 32 neighbours have one
              s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)), stored as its exponent byte
INDEXER_FP8   e4m3 of x / s, one s = 2^ceil(log2(max(amax / 448, 1e-4))), in fp32
INDEXER_BF16  x itself, a NaN as 0x7FFF

If a group has an infinity or a NaN, its scale is a NaN, 0xFF or 0x7FFFFFFF, and its elements are
what conversions make of NaN, 7 (6.0) or 0x7F. The transform is orthogonal, so q . k keeps its value
if both the key and the query are rotated and transformed; otherwise they must not be compared.
"""

from __future__ import annotations

import math

import torch

from kernelkit.numerics import e2m1
from kvcache.layouts.latent import ROPE
from kvcache.layouts.records import Record
from kvcache.movement.reference import (
    LARGEST,
    MANTISSA,
    MIN_SCALE,
    NAN_ELEMENT,
    NAN_FP32,
    NAN_SCALE,
    SCALE_BIAS,
    rotated_rope,
    scale_exponents,
    to_bf16,
)
from mla.indexer.formats import PLAIN, WIDTH, IndexFormat, Rotation, index_format

# element -> (largest number, smallest scale that is not rounded up, code of an element of a group
# with a NaN)
LIMITS = {
    "e2m1": (e2m1.VALUES[-1], 2.0**-126, e2m1.NAN_CODE),
    "e4m3": (LARGEST, MIN_SCALE, NAN_ELEMENT),
}
NORM = WIDTH**-0.5


def prepared(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation = PLAIN
) -> torch.Tensor:
    """Return rows [..., 128] rotated by angles [..., 32] and transformed, in bf16."""
    parts = [*x.float().split(ROPE, -1)]
    place = 0 if rotation.rope_first else -1
    parts[place] = rotated_rope(parts[place], cos, sin, rotation.pairs)
    turned = torch.cat(parts, -1)
    return to_bf16(hadamard(turned) if rotation.hadamard else turned)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return fp32 [..., 128] times H_128 / 128^0.5, rounded as the module docstring says."""
    for step in (1 << bit for bit in range(WIDTH.bit_length() - 1)):
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
    return x * NORM


def quantised(rows: torch.Tensor, record: Record) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data, scales), the bytes of the record for bf16 [..., 128]."""
    form = index_format(record.name)
    if not form.group:
        data = to_bf16(rows.float()).view(torch.uint8)
        return data, data[..., :0]
    largest, least, nan = LIMITS[form.element]
    x = rows.float().unflatten(-1, (form.groups, form.group))
    lost = ~x.isfinite().all(-1)
    exponent = scale_exponents(torch.where(lost, 0.0, x.abs().amax(-1)), largest, least)
    scaled = torch.ldexp(x.double(), -exponent[..., None]).float().nan_to_num(0.0, 0.0, 0.0)
    if form.element == "e2m1":
        codes = e2m1.codes_of(scaled)
    else:
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(lost[..., None], nan, codes).to(torch.uint8).flatten(-2)
    data = e2m1.packed(codes) if form.element == "e2m1" else codes
    return data, _scales(form, torch.where(lost, NAN_SCALE, exponent + SCALE_BIAS))


def _scales(form: IndexFormat, codes: torch.Tensor) -> torch.Tensor:
    """Convert exponent bytes [..., groups] to scale bytes: unchanged, or as fp32."""
    if form.scale_size == 1:
        return codes.to(torch.uint8)
    bits = torch.where(codes == NAN_SCALE, NAN_FP32, codes << MANTISSA)
    return bits.to(torch.int32).view(torch.uint8)


def dequantised(data: torch.Tensor, scales: torch.Tensor, record: Record) -> torch.Tensor:
    """Convert bytes [..., data_bytes] and [..., scale_bytes] of a record to fp32 [..., 128].

    The result is exact, except that values beyond fp32 become infinite.
    """
    form, data = index_format(record.name), data.contiguous()
    if not form.group:
        return data.view(torch.bfloat16).float()
    values = e2m1.unpacked(data) if form.element == "e2m1" else data.view(torch.float8_e4m3fn)
    groups = values.float().unflatten(-1, (form.groups, form.group))
    return (groups * scale_values(scales, record)[..., None]).flatten(-2)


def scale_values(scales: torch.Tensor, record: Record) -> torch.Tensor:
    """Convert scale bytes [..., scale_bytes] of a record with scales to fp32 [..., groups]."""
    if index_format(record.name).scale_size > 1:
        return scales.contiguous().view(torch.float32)
    ones = torch.ones(scales.shape, dtype=torch.float64, device=scales.device)
    found = torch.ldexp(ones, scales.int() - SCALE_BIAS).float()
    return torch.where(scales == NAN_SCALE, math.nan, found)
