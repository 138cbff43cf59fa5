"""Definition of `mla.norm_rope_append` in plain torch, bit for bit.

Everything is fp32, and every product, sum, root and quotient is rounded by itself.

- A sum over a row has the order of the kernel. Lane l of 32 (of 16 for keys of the indexer) has
  elements 8 l to 8 l + 7, and those a multiple of 256 after them. It adds its own, the first one
  first. Then sums of neighbouring lanes are added in pairs, up to one.
- RMSNorm: x * f * weight with f = 1 / sqrt(sum(x^2) * (1 / width) + eps).
- LayerNorm: d * f * weight + bias with d = x - sum(x) * (1 / width), and f of d.
- RoPE follows in fp32 (`kvcache.movement.reference.rotated_rope`), for keys of the indexer also the
  Hadamard transform. The result is rounded to bf16 once; a NaN is 0x7FFF.
- Records are encoded from bf16 (`mla.attention.codec`, `mla.indexer.quantised`). e4m3 with one
  scale is x * (1 / scale), rounded to nearest even and saturated; a NaN is 0x7F.
"""

from __future__ import annotations

import torch

from kvcache.layouts.latent import NEIGHBOURS, ROPE
from kvcache.movement.reference import LARGEST, NAN_ELEMENT, rotated_rope, to_bf16
from mla.attention import codec
from mla.attention.formats import LATENT
from mla.indexer import quantised as index_records
from mla.indexer.formats import PLAIN, WIDTH, Rotation, index_format

PIECE, LANES, INDEX_LANES = 8, 32, 16


def row_sum(values: torch.Tensor, lanes: int = LANES) -> torch.Tensor:
    """Sum of fp32 [..., width] over the last dimension, in the kernel's order; [..., 1]."""
    step = PIECE * lanes
    padding = -values.shape[-1] % step
    pieces = torch.nn.functional.pad(values, (0, padding)).unflatten(-1, (-1, lanes, PIECE))
    total = torch.zeros_like(pieces[..., 0, :, 0])
    for piece in pieces.unbind(-3):
        for element in piece.unbind(-1):
            total = total + element
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total


def factor(squares: torch.Tensor, width: int, eps: float) -> torch.Tensor:
    """1 / sqrt(squares / width + eps)."""
    share = torch.tensor(1.0 / width, dtype=torch.float32, device=squares.device)
    return 1.0 / (squares * share + torch.tensor(eps, dtype=torch.float32)).sqrt()


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """fp32 of x [..., width], normalised."""
    x = x.float()
    found = x * factor(row_sum(x * x), x.shape[-1], eps)
    return found if weight is None else found * weight.float()


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """fp32 of x [..., 128], centred and normalised."""
    x = x.float()
    share = torch.tensor(1.0 / WIDTH, dtype=torch.float32, device=x.device)
    x = x - row_sum(x, INDEX_LANES) * share
    squares = row_sum(x * x, INDEX_LANES)
    return x * factor(squares, WIDTH, eps) * weight.float() + bias.float()


def latent_keys(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rope: tuple[torch.Tensor, torch.Tensor],
    pairs: str = NEIGHBOURS,
) -> torch.Tensor:
    """Keys in bf16, as records are encoded from.

    x: [T, 576] or [T, 512].
    rope: angles [T, 32].
    """
    found = torch.cat((rms_norm(x[:, :LATENT], weight, eps), x[:, LATENT:].float()), 1)
    return to_bf16(_rotated(found, rope, pairs))


def encode(
    keys: torch.Tensor, record: str, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scales) of keys in bf16, uint8 [T, bytes]. record: a name of `config.STORED`."""
    if record != "e4m3_576":
        return codec.encode(keys, record)
    inverse = 1.0 if scale is None else 1.0 / scale
    scaled = (keys.float() * inverse).clamp(-LARGEST, LARGEST)
    data = scaled.nan_to_num(0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(keys.isnan(), NAN_ELEMENT, data).to(torch.uint8), data[:, :0]


def index_keys(
    x: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float],
    rope: tuple[torch.Tensor, torch.Tensor],
    record: str,
    rotation: Rotation = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scales) of keys of the indexer.

    norm: weight, bias and eps.
    rope: angles [T, 32].
    """
    rows = index_records.prepared(layer_norm(x, *norm), *rope, rotation)
    return index_records.quantised(rows, index_format(record).record)


def queries(
    q: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float | None = None,
    pairs: str = NEIGHBOURS,
) -> torch.Tensor:
    """The columns that are written, bf16 [T, H, 64], or 512 with eps. rope: angles [T, 32]."""
    rows = q[..., -ROPE:].float() if eps is None else rms_norm(q, None, eps)
    cos, sin = (table[:, None] for table in rope)
    return to_bf16(_rotated(rows, (cos, sin), pairs))


def low_rank(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """bf16 of x [T, rank], normalised."""
    return to_bf16(rms_norm(x, weight, eps))


def _rotated(
    rows: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], pairs: str
) -> torch.Tensor:
    """Rows with their last 64 elements rotated."""
    turned = rotated_rope(rows[..., -ROPE:], *rope, pairs)
    return torch.cat((rows[..., :-ROPE], turned), -1)
