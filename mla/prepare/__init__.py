"""Everything that scores and attention of a layer read, prepared in one launch."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from mla.prepare.api import Compression, IndexQueries, WindowKeys, prepare_attention

__all__ = ["Compression", "IndexQueries", "WindowKeys", "prepare_attention"]

exports(__name__, {
    "mla.prepare.api": "Compression IndexQueries WindowKeys prepare_attention",
})  # fmt: skip
