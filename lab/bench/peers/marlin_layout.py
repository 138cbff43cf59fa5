"""Marlin's layout of weights in MXFP4: codes in 16 x 64 tiles, scale factors and biases permuted.

A word holds the eight codes that a thread multiplies next. Thread t of a warp has rows
2 (t mod 4) + {0, 1, 8, 9} along K and columns t div 4 + {0, 8} along N. There is a word for each of
the four column blocks of 16 in a tile. The kernel unpacks a word by pairs, so the codes of even
place come first.
"""

from __future__ import annotations

import torch

TILE_K, TILE_N, BLOCK_N = 16, 64, 16
GROUP = 32  # columns along K that share a scale factor
PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, from its lowest bits on
PAIRS = (0, 2, 1, 3)  # order of four neighbouring scale factors


def tile_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, column), int64 [32, 8]: of the codes of a thread's word, from its lowest bits
    on, in a 16 x 16 block."""
    thread, place = torch.arange(32)[:, None], torch.tensor(PLACES)[None]
    element = place % 4
    row = 2 * (thread % 4) + element % 2 + 8 * (element // 2)
    return row, thread // 4 + 8 * (place // 4)


def packed_codes(data: torch.Tensor) -> torch.Tensor:
    """Return the codes of one expert, int32 [K / 16, 2 N].

    data: uint8 [N, K / 2], the code of the lower column in the lower half of a byte; N a multiple
        of 64, K of 16.
    """
    rows, columns = data.shape[0], 2 * data.shape[1]
    codes = torch.stack((data & 15, data >> 4), -1).flatten(1).T.int()  # [K, N]
    tiles = codes.reshape(columns // TILE_K, TILE_K, rows // TILE_N, TILE_N // BLOCK_N, BLOCK_N)
    row, column = (table.to(data.device) for table in tile_tables())
    words = tiles[:, row, :, :, column]  # [32, 8, K / 16, N / 64, 4]
    words = words.permute(2, 3, 0, 4, 1)  # [K / 16, N / 64, 32, 4, 8]
    shifts = 4 * torch.arange(8, device=data.device)
    packed = (words.long() << shifts).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return packed.int().reshape(columns // TILE_K, 2 * rows)


def permuted_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scale factors of one or more experts, uint8 [..., K / 32, N].

    scales: uint8 [..., N, K / 32], N a multiple of 64.
    """
    found = scales.mT.contiguous()
    blocks = found.reshape(-1, 8, 8).mT.reshape(-1, 4)[:, list(PAIRS)]
    return blocks.reshape(found.shape).contiguous()


def permuted_bias(bias: torch.Tensor) -> torch.Tensor:
    """Return biases [..., N] in the order of the accumulators of a warp; N a multiple of 32."""
    order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return bias.reshape(-1, 32)[:, order].reshape(bias.shape).contiguous()


def padded_rows(rows: int, columns: int) -> int:
    """Return N, as far as Marlin needs it larger: 64 divides N and 128 K, or 128 N and 64 K.

    Raises NotImplementedError where K would have to be padded as well.
    """
    if columns % 64:
        raise NotImplementedError(f"K = {columns}: a multiple of 64")
    multiple = 64 if columns % 128 == 0 else 128
    return -(-rows // multiple) * multiple
