"""Rows between the projections of a layer: norm, RoPE, cast to a record, append, in one launch."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from mla.glue.api import IndexKeys, LatentKeys, LowRank, Queries, norm_rope_append

__all__ = ["IndexKeys", "LatentKeys", "LowRank", "Queries", "norm_rope_append"]

exports(__name__, {
    "mla.glue.api": "IndexKeys LatentKeys LowRank Queries norm_rope_append",
})  # fmt: skip
