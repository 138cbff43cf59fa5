"""Formats of a latent entry, as kernels read them. Plain data.

K of an entry has 576 columns (512 and 64 of RoPE) or 512, V is its first 512. Sources of the byte
counts: FlashMLA's `quant.py` and its README (656, 584); vLLM's pull request 56893 and FlashInfer's
`dsv41_fp8_quantize_pack_sparse_mla_cache` and `dsv41_fp4_...` (528, 288). Where scales lie apart,
they are behind the data of all rows of a page. `kvcache.layouts.records` has the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

LATENT = 512  # columns of V and of O


@dataclass(frozen=True)
class Form:
    """Format of one entry: quantised columns from column 0 on, then columns in bf16.

    columns: columns of K.
    code: 'e4m3' or 'e2m1' (the even element in the low nibble); '' without quantised columns.
    group: columns that share a scale; 0 without scales in the entry.
    scale: 'fp32', 'ue8m0' or 'e4m3', the dtype of a scale.
    wide: columns in bf16, the last ones.
    data_bytes: bytes from the data of one entry to those of the next one.
    wide_at: byte of the data where the bf16 columns begin.
    scale_at: byte of the data where the scales begin; -1 if they lie apart from the data.
    scale_bytes: bytes from the scales of one entry to those of the next one, if they lie apart.
    """

    columns: int
    code: str = ""
    group: int = 0
    scale: str = ""
    wide: int = 0
    data_bytes: int = 0
    wide_at: int = 0
    scale_at: int = -1
    scale_bytes: int = 0

    @property
    def coded(self) -> int:
        """Quantised columns."""
        return self.columns - self.wide

    @property
    def plain(self) -> bool:
        """Whether an entry is one dtype without scales, so that TMA can bring it as it is."""
        return not self.group

    @property
    def groups(self) -> int:
        """Scales of an entry, without padding."""
        return self.coded // self.group if self.group else 0


FORMS = {
    "bf16_576": Form(576, wide=576, data_bytes=1152),
    "bf16_512": Form(512, wide=512, data_bytes=1024),
    # One scale for the whole tensor, given by the caller.
    "e4m3_576": Form(576, "e4m3", data_bytes=576),
    "fp8_656": Form(
        576, "e4m3", 128, "fp32", wide=64, data_bytes=656, wide_at=528, scale_at=512
    ),
    "fp8_584": Form(
        512, "e4m3", 64, "ue8m0", wide=64, data_bytes=576, wide_at=448, scale_bytes=8
    ),
    "fp8_528": Form(512, "e4m3", 32, "ue8m0", data_bytes=512, scale_bytes=16),
    "fp4_288": Form(512, "e2m1", 16, "e4m3", data_bytes=256, scale_bytes=32),
}  # fmt: skip
