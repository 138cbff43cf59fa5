"""What an attention kernel is compiled for: AttentionConfig and every limit on it.

A config is the key of the compile cache. Lengths, heads, batch, strides and the softmax scale are
not in it: one compiled kernel serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS = (64,)
IO_BYTES = {"bf16": 2, "fp16": 2}
MASKS = ("full", "causal")
P_PATHS = ("tmem",)
MAX_KV_STAGES = 6


@dataclass(frozen=True)
class AttentionConfig:
    """One compiled forward kernel.

    head_dim: columns of Q, K, V and O.
    dtype: of Q, K and V, 'bf16' or 'fp16'; P is rounded to it, all sums are fp32.
    mask: 'full', or 'causal' aligned bottom-right: query r sees keys [0, kv_len - Sq + r].
    normalize: True writes O = softmax(..) V in `dtype`; False writes the raw
        sum exp(s - row_max) V in fp32, and row_max.
    kv_lens: the kernel reads the number of valid keys of each batch entry from an int32 [B].
    tile_m, tile_n: query and key rows of a tile.
    kv_stages: depth of the K ring and of the V ring, in tiles.
    p_path: where P waits for the second product: 'tmem', over the tail of its own S columns.
    rescale_log2: O is rescaled only when a row maximum grew by more than 2 ** rescale_log2;
        P then stays below 2 ** rescale_log2, far from the fp16 maximum of 65504.
    """

    head_dim: int = 64
    dtype: str = "bf16"
    mask: str = "full"
    normalize: bool = True
    kv_lens: bool = False
    tile_m: int = 128
    tile_n: int = 128
    kv_stages: int = 3
    p_path: str = "tmem"
    rescale_log2: float = 8.0

    @property
    def out_dtype(self) -> str:
        """dtype of O: the input's when normalised; raw sums need the range of fp32."""
        return self.dtype if self.normalize else "fp32"

    @property
    def io_bytes(self) -> int:
        """Bytes of one element of Q, K, V and P."""
        return IO_BYTES[self.dtype]

    def check(self) -> None:
        """Raise ValueError or NotImplementedError, naming the value and what is possible."""
        if self.dtype not in IO_BYTES:
            raise NotImplementedError(f"dtype {self.dtype!r}: supported are {tuple(IO_BYTES)}")
        if self.head_dim not in HEAD_DIMS:
            raise NotImplementedError(f"head_dim {self.head_dim}: supported are {HEAD_DIMS}")
        if self.mask not in MASKS:
            raise NotImplementedError(f"mask {self.mask!r}: supported are {MASKS}")
        if self.p_path not in P_PATHS:
            raise NotImplementedError(f"p_path {self.p_path!r}: supported are {P_PATHS}")
        if (self.tile_m, self.tile_n) != (128, 128):
            raise NotImplementedError(
                f"tile {self.tile_m} x {self.tile_n}: only 128 x 128, one TMEM lane per query row"
            )
        if not 2 <= self.kv_stages <= MAX_KV_STAGES:
            raise ValueError(f"kv_stages {self.kv_stages}: from 2 to {MAX_KV_STAGES}")
        if not 0.0 <= self.rescale_log2 <= 8.0:
            raise ValueError(
                f"rescale_log2 {self.rescale_log2}: from 0 to 8, or a row of fp16 P overflows"
            )
