"""Reference of the kernels of `kvcache.movement` in plain torch: bit for bit the definition.

An entry of a sliding window is kv with its last ROPE elements rotated. Neighbours (x, y) with angle
index i of the position become x cos[i] - y sin[i] and y cos[i] + x sin[i], in fp32; every product
and sum is rounded by itself. All elements become bf16, to nearest, a NaN 0x7FFF (bf16 that is not
rotated keeps its bits). BF16_512 stores them as they are.

FP8_584 stores groups of 64 NoPE elements as e4m3 of x / s, to nearest. Its exponent byte is that of
s = 2^ceil(log2(max(amax / 448, 1e-4))), so nothing saturates. This is the rule of FlashMLA's
`quant.py` and of vLLM, which round to bf16 first, too. A group with an infinity or a NaN is lost:
its scale is 0xFF, the NaN of UE8M0, and all its elements are 0x7F, the NaN of e4m3. The byte after
the seven scales is 0.

FP8_656 stores 512 NoPE elements in groups of 128 by the same rule, with s itself in fp32
(0x7FFFFFFF for a lost group). Read back, an element is e4m3 times scale in fp32, rounded to bf16; a
NaN is 0x7FFF.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvcache.layouts.latent import LATENTS, NEIGHBOURS, ROPE
from kvcache.layouts.records import FP8_584, Record
from kvcache.layouts.rows import Rows

LARGEST = 448.0  # of e4m3
MIN_SCALE = 1e-4
NAN_SCALE, NAN_ELEMENT = 0xFF, 0x7F
SCALE_BIAS, MANTISSA = 127, 23
NAN_BF16, NAN_FP32 = 0x7FFF, 0x7FFFFFFF
KEYS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)  # of the checksum: position, first and second sum
SHIFTS = (15, 13)
WORD = (1 << 32) - 1


# -- sliding windows ------------------------------------------------------------------------------


def append_swa(
    rows: Rows,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Entries of kv [T, 512] (FP8_656: 576) to where `slots` [T] says; cos and sin are fp32
    [positions, 32]."""
    kept = slots >= 0
    entries = rotated(kv[kept], cos[positions[kept]], sin[positions[kept]])
    if not LATENTS[rows.record.name].group:
        _put(rows.data(), slots[kept], entries.view(torch.uint8))
        return
    data, scales = quantised(entries, rows.record)
    _put(rows.data(), slots[kept], data)
    if rows.record.scale_bytes:
        _put(rows.scales(), slots[kept], scales)


def rotated(kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """kv [T, ...] in bf16, the last 64 elements rotated by the angles [T, 32] of their token."""
    nope, turned = kv[:, :-ROPE], rotated_rope(kv[:, -ROPE:].float(), cos, sin)
    return torch.cat((nope if kv.dtype == torch.bfloat16 else to_bf16(nope), to_bf16(turned)), 1)


def rotated_rope(
    rope: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: str = NEIGHBOURS
) -> torch.Tensor:
    """fp32 [..., 64], neighbours or halves rotated by the angles [..., 32]."""
    at = -1 if pairs == NEIGHBOURS else -2
    x, y = rope.unflatten(-1, (-1, 2) if pairs == NEIGHBOURS else (2, -1)).unbind(at)
    return torch.stack((x * cos - y * sin, y * cos + x * sin), at).flatten(-2)


def quantised(entries: torch.Tensor, record: Record = FP8_584) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [T, 512] (FP8_656: 576) -> (data, scales), the bytes of the record."""
    latent = LATENTS[record.name]
    x = entries[:, : latent.nope].float().unflatten(-1, (latent.groups, latent.group))
    lost = ~x.isfinite().all(-1)
    amax = torch.where(lost, 0.0, x.abs().amax(-1))
    exponent = scale_exponents(amax)
    scaled = torch.ldexp(x, -exponent[..., None])
    elements = scaled.nan_to_num(0.0, 0.0, 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    elements = torch.where(lost[..., None], NAN_ELEMENT, elements).to(torch.uint8).flatten(1)
    rope = entries[:, latent.nope :].contiguous().view(torch.uint8)
    codes = torch.where(lost, NAN_SCALE, exponent + SCALE_BIAS)
    if not latent.inline:
        scales = torch.nn.functional.pad(codes.to(torch.uint8), (0, 1))
        return torch.cat((elements, rope), 1), scales
    bits = torch.where(lost, NAN_FP32, codes << MANTISSA).to(torch.int32)
    return torch.cat((elements, bits.view(torch.uint8), rope), 1), codes[:, :0].to(torch.uint8)


def scale_exponents(
    amax: torch.Tensor, largest: float = LARGEST, least: float = MIN_SCALE
) -> torch.Tensor:
    """ceil(log2(max(amax / largest, least))), exactly."""
    mantissa, exponent = torch.frexp((amax.double() / largest).clamp(min=least))
    return exponent - (mantissa == 0.5).int()  # frexp's mantissa is from 0.5 up to 1


def dequantised(data: torch.Tensor, scales: torch.Tensor, record: Record = FP8_584) -> torch.Tensor:
    """(data, scales) of a record -> bf16 [T, 512] (FP8_656: 576)."""
    latent = LATENTS[record.name]
    elements = data[:, : latent.nope].contiguous().view(torch.float8_e4m3fn).float()
    if latent.inline:
        factor = data[:, latent.nope : latent.rope_offset].contiguous().view(torch.float32)
    else:
        codes = scales[:, : latent.groups].int()
        factor = torch.ldexp(torch.ones(codes.shape, device=codes.device), codes - SCALE_BIAS)
        factor = torch.where(codes == NAN_SCALE, math.nan, factor)
    groups = elements.unflatten(-1, (latent.groups, latent.group))
    nope = to_bf16((groups * factor[..., None]).flatten(1))
    return torch.cat((nope, data[:, latent.rope_offset :].contiguous().view(torch.bfloat16)), 1)


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to nearest; any NaN becomes 0x7FFF, as the hardware's conversion has it."""
    found = values.bfloat16()
    bits = torch.where(values.isnan(), NAN_BF16, found.view(torch.int16))
    return bits.to(torch.int16).view(torch.bfloat16)


# -- rows, slots ----------------------------------------------------------------------------------


def append_rows(pairs: Sequence[tuple[Rows, torch.Tensor]], slots: torch.Tensor) -> None:
    """Bytes of x [T, ...] of every pair (rows, x) to its rows."""
    for rows, x in pairs:
        kept = slots >= 0
        _put(rows.data(), slots[kept], x[kept].contiguous().flatten(1).view(torch.uint8))


def append_pages(
    pages: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Heads of x [T, heads, D] to rows of pages [pages, page_size, heads, D]; K or V."""
    kept = slots >= 0
    place = slots[kept] // pages.shape[1], slots[kept] % pages.shape[1]
    rows = x[: len(slots)][kept]
    if x.dtype != pages.dtype:
        inverse = 1.0 if scale is None else 1.0 / scale.reshape(())
        rows = (rows.float() * inverse).clamp(-LARGEST, LARGEST).to(pages.dtype)
    pages[place] = rows


def gather_pages(pages: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Rows of pages to x [T, heads, D], zeros for -1; K or V."""
    kept = slots >= 0
    x[: len(slots)] = 0
    place = slots[kept] // pages.shape[1], slots[kept] % pages.shape[1]
    x[: len(slots)][kept] = pages[place]


def gather(rows: Rows, indices: torch.Tensor, out: torch.Tensor) -> None:
    """Entries [N] to out: bf16 of FP8_584 and FP8_656, of other records their bytes."""
    kept = indices >= 0
    place = indices[kept] // rows.rows, indices[kept] % rows.rows
    out.zero_()
    if rows.record.name in LATENTS and LATENTS[rows.record.name].group:
        out[kept] = dequantised(rows.data()[place], rows.scales()[place], rows.record)
        return
    out.view(torch.uint8).flatten(1)[kept] = rows.data()[place]


def copy_slots(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    segments: torch.Tensor | None = None,
) -> None:
    """Slot a of source to slot b of target for every pair (a, b); with segments only those bytes:
    (offset in the source, in the target, bytes)."""
    whole = [(0, 0, source.shape[1])]
    parts = whole if segments is None else segments.tolist()
    for mine, other in pairs.tolist():
        if mine < 0 or other < 0:
            continue
        for begin, place, size in parts:
            target[other, place : place + size] = source[mine, begin : begin + size]


def checksum(pool: torch.Tensor, slots: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """int64 [n] over bytes begin to end of slots, 0 for slot -1; see `mixed`."""
    found = torch.zeros(len(slots), dtype=torch.int64)
    for index, slot in enumerate(slots.tolist()):
        if slot >= 0:
            words = pool[slot, begin:end].contiguous().view(torch.int32).long() & WORD
            first, second = (int(sums.sum()) & WORD for sums in mixed(words))
            both = second << 32 | first
            found[index] = both - (1 << 64 if both >> 63 else 0)
    return found


def mixed(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms of both checksums, modulo 2^32 each, of int64 words below 2^32 in order.

    Word i of the range goes through two bijections that depend on i. Changing one word changes both
    sums; swapping two words changes the terms.
    """
    places = torch.arange(1, len(words) + 1, device=words.device)
    first = (words ^ (places * KEYS[0] & WORD)) * KEYS[1] & WORD
    first ^= first >> SHIFTS[0]
    second = first * KEYS[2] & WORD
    return first, second ^ second >> SHIFTS[1]


def _put(view: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """values [T, bytes] into view [slots, rows, bytes]."""
    view[slots // view.shape[1], slots % view.shape[1]] = values
