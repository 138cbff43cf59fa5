"""Formats of one cache entry, in bytes, and how the entries of a page lie.

A page holds the data bytes of all its rows and behind them their scale bytes, row by row: row r has
its data at `r * data_bytes` and its scales at `rows * data_bytes + r * scale_bytes`. Sources of the
byte counts: FlashMLA's `quant.py` (584, 656, 528, 288), DeepGEMM's paged MQA logits (132, 68).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.checks import require, whole

TMA_ALIGN = 16  # bytes that a tensor map wants of every address and stride
MAX_BYTES = (1 << 31) - 1  # of an entry


@dataclass(frozen=True)
class Record:
    """Format of one entry: data_bytes and, apart from them, scale_bytes.

    page_align: alignment of offsets and strides of pages, in bytes.
    """

    name: str
    data_bytes: int
    scale_bytes: int = 0
    page_align: int = TMA_ALIGN

    def __post_init__(self) -> None:
        require("name", self.name, str)
        for field in ("data_bytes", "scale_bytes", "page_align"):
            size = whole(f"{self.name}: {field}", getattr(self, field), None, MAX_BYTES)
            object.__setattr__(self, field, size)  # an int, of an integer of numpy too
        if self.data_bytes < 1 or self.scale_bytes < 0:
            raise ValueError(
                f"{self.name}: {self.data_bytes} data bytes and {self.scale_bytes} scale bytes, "
                "at least 1 and 0"
            )
        if self.page_align < 1 or self.page_align % TMA_ALIGN:
            raise ValueError(
                f"{self.name}: pages aligned to {self.page_align} bytes, a multiple of {TMA_ALIGN}"
            )

    @property
    def bytes(self) -> int:
        """Payload of an entry."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, rows: int) -> int:
        """Return the bytes of a page of `rows` entries, padding included."""
        return round_up(rows * self.bytes, self.page_align)


# DeepSeek-V4's main entry: 448 e4m3 NoPE elements in groups of 64 with a UE8M0 scale each (and one
# byte of padding behind the seven), 64 bf16 RoPE elements. FlashMLA reads it by TMA in rows of 576.
FP8_584 = Record("fp8_584", 448 + 2 * 64, 7 + 1, page_align=576)
BF16_512 = Record("bf16_512", 2 * 512)
# DeepSeek-V3.2: 512 e4m3 with four fp32 scales, 64 bf16 RoPE elements, all in one row.
FP8_656 = Record("fp8_656", 512 + 4 * 4 + 2 * 64)
# DeepSeek-V4.1: all 512 elements quantised, RoPE too, in groups of 32 (e4m3) or 16 (e2m1).
FP8_528 = Record("fp8_528", 512, 16)
FP4_288 = Record("fp4_288", 512 // 2, 32)
# Keys of the indexer: 128 elements with one fp32 scale, or four UE8M0 scales (MXFP4), or neither.
INDEXER_FP8 = Record("indexer_fp8", 128, 4)
INDEXER_FP4 = Record("indexer_fp4", 128 // 2, 4)
INDEXER_BF16 = Record("indexer_bf16", 2 * 128)


def plain(name: str, heads: int, head_dim: int, element_bytes: int = 2) -> Record:
    """K or V of a token as it is: [heads, head_dim]."""
    sizes = {"heads": heads, "head_dim": head_dim, "element_bytes": element_bytes}
    for field, size in sizes.items():
        whole(f"{name}: {field}", size, None)
    if heads < 1 or head_dim < 1 or element_bytes not in (1, 2, 4):
        raise ValueError(
            f"{name}: heads {heads} and head_dim {head_dim} at least 1, elements of "
            f"{element_bytes} bytes: 1, 2 or 4"
        )
    return Record(name, heads * head_dim * element_bytes)


def round_up(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not less than `number`."""
    return -(-number // unit) * unit
