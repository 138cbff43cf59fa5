"""Bytes of latent entries in plain torch: encode and decode every record of `formats.FORMS`.

`kvcache.movement.reference` defines fp8_584 and fp8_656, bit for bit as kernels write them. The
records of DeepSeek-V4.1 are those of FlashMLA (its V41 and V41_FP4; vLLM's pull request 56893 and
`flashinfer.mla.dsv41_fp4_quantize_pack_sparse_mla_cache` describe them): all 512 columns are
quantised, RoPE too, and a page has the data of all its rows before their scales.

fp8_528   e4m3 of x / s to nearest; every 32 columns have one s = 2^ceil(log2(max(amax / 448,
          1e-4))), stored as its exponent byte
fp4_288   e2m1 of x / s to nearest even; every 16 columns have one s = max(amax / 6, 2^-9), rounded
          to e4m3; the even column is in the low bits of its byte

A group with an infinity or a NaN is lost: its scale is a NaN (0xFF or 0x7F). Read back, an element
is its code times its scale, rounded to bf16 once.
"""

from __future__ import annotations

import math

import torch

from kernelkit.numerics import e2m1
from kvcache.layouts.latent import LATENTS
from kvcache.layouts.models import MLA_BF16
from kvcache.layouts.records import BF16_512, FP4_288, FP8_528, FP8_584, FP8_656, Record
from kvcache.layouts.rows import Rows
from kvcache.movement.reference import (
    LARGEST,
    NAN_ELEMENT,
    NAN_SCALE,
    SCALE_BIAS,
    dequantised,
    quantised,
    scale_exponents,
    to_bf16,
)
from mla.attention.formats import FORMS, Form

RECORDS = {
    record.name: record for record in (BF16_512, MLA_BF16, FP8_584, FP8_656, FP8_528, FP4_288)
}
LEAST_SCALE = 2.0**-9  # the smallest e4m3 above 0
E4M3 = torch.float8_e4m3fn


def encode(values: torch.Tensor, record: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode entries.

    Args:
        values: bf16 [n, columns].
        record: a name of RECORDS.

    Returns:
        (data, scales), uint8 [n, data_bytes] and [n, scale_bytes]; scale_bytes is 0 if the scales
        are in the data, or if there are none.
    """
    form, stored = FORMS[record], RECORDS[record]
    if values.dtype != torch.bfloat16 or values.ndim != 2 or values.shape[1] != form.columns:
        raise ValueError(
            f"values is {values.dtype} {tuple(values.shape)}, expected torch.bfloat16 "
            f"(n, {form.columns}) for {record}"
        )
    if form.plain:
        data = values.contiguous().view(torch.uint8)
        return data, data[:, :0]
    if record in LATENTS:
        return quantised(values, stored)
    groups = values.float().view(-1, form.groups, form.group)
    lost = ~groups.isfinite().all(-1)
    amax = torch.where(lost, 0.0, groups.abs().amax(-1))
    clean = groups.masked_fill(lost[..., None], 0.0)
    coder = _encode_e2m1 if form.code == "e2m1" else _encode_e4m3
    codes, scales = coder(clean, amax)
    if form.code == "e2m1":
        return e2m1.packed(codes.flatten(1)), scales.masked_fill(lost, NAN_ELEMENT)
    codes = codes.masked_fill(lost[..., None], NAN_ELEMENT)
    return codes.flatten(1), scales.masked_fill(lost, NAN_SCALE)


def _encode_e4m3(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exponent = scale_exponents(amax, LARGEST)
    codes = torch.ldexp(x, -exponent[..., None]).to(E4M3).view(torch.uint8)
    return codes, (exponent + SCALE_BIAS).to(torch.uint8)


def _encode_e2m1(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = (amax / e2m1.VALUES[-1]).clamp(LEAST_SCALE, LARGEST)
    scale = wanted.to(E4M3)
    return e2m1.codes_of(x / scale.float()[..., None]), scale.view(torch.uint8)


def decode(data: torch.Tensor, scales: torch.Tensor, record: str) -> torch.Tensor:
    """Decode entries, the inverse of `encode`, to bf16 [n, columns]."""
    form, stored = FORMS[record], RECORDS[record]
    if form.plain:
        return data.contiguous().view(torch.bfloat16)
    if record in LATENTS:
        return dequantised(data, scales, stored)
    if form.code == "e2m1":
        codes, factor = e2m1.unpacked(data), scales.contiguous().view(E4M3).float()
    else:
        codes, factor = data.contiguous().view(E4M3).float(), _of_exponents(scales)
    groups = codes.view(-1, form.groups, form.group) * factor[..., None]
    return to_bf16(groups.flatten(1))


def _of_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Return the powers of two of exponent bytes in fp32; 0xFF is NaN."""
    one = torch.ones(scales.shape, device=scales.device)
    factor = torch.ldexp(one, scales.int() - SCALE_BIAS)
    return torch.where(scales == NAN_SCALE, math.nan, factor)


def pack(values: torch.Tensor, record: str, *, spare_bytes: int = 0) -> Rows:
    """Encode a whole cache into a pool of its own.

    Args:
        values: bf16 [pages, rows, columns].
        record: a name of RECORDS.
        spare_bytes: bytes before the entries of every page, a multiple of 16.

    Returns:
        The rows; entry page * rows + row is values[page, row].
    """
    stored = RECORDS[record]
    pages, rows, _ = values.shape
    data, scales = encode(values.flatten(0, 1), record)
    behind = spare_bytes + rows * stored.data_bytes
    nbytes = spare_bytes + stored.page_bytes(rows)
    pool = torch.zeros(pages, nbytes, dtype=torch.uint8, device=values.device)
    packed = Rows(pool, spare_bytes, behind if stored.scale_bytes else 0, rows, stored)
    packed.data().copy_(data.view(pages, rows, -1))
    if stored.scale_bytes:
        packed.scales().copy_(scales.view(pages, rows, -1))
    return packed


def unpack(rows: Rows, entries: torch.Tensor | None = None) -> torch.Tensor:
    """Decode entries of a cache.

    Args:
        rows: the cache, of a record of RECORDS.
        entries: integers [...], numbers of entries, all of them in the cache; None for all.

    Returns:
        bf16 [..., columns], or [pages, rows, columns] for all entries.
    """
    if entries is None:
        every = torch.arange(rows.entries, device=rows.pool.device)
        entries = every.view(len(rows.pool), rows.rows)
    numbers = entries.reshape(-1).long()
    place = numbers // rows.rows, numbers % rows.rows
    found = decode(rows.data()[place], rows.scales()[place], rows.record.name)
    return found.view(*entries.shape, -1)


def form_of(record: Record) -> Form:
    """Return the form of a record; NotImplementedError for one that attention does not read."""
    form = FORMS.get(record.name)
    if form is None or RECORDS.get(record.name) != record:
        raise NotImplementedError(
            f"record {record.name} of {record.bytes} bytes: attention reads {', '.join(RECORDS)}"
        )
    return form
