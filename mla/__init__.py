"""Attention to latent keys, and DeepSeek-V4's sparse attention over the cache.

`decode`, `sparse_decode` and `sparse_prefill` attend to latent entries of 512 or 576 columns.
`norm_rope_append` makes these entries, and queries, from what projections return. For
DeepSeek-V4 there are also compressors, the indexer, the window, and `cached_attention`.
"""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from mla.api import Every, Selected, StepView, cached_attention, step_view
    from mla.attention.api import decode, decode_plan, sparse_decode, sparse_prefill
    from mla.attention.warm import warmup, warmup_sparse
    from mla.compressor.api import Compressor, Tables, compress
    from mla.glue.api import IndexKeys, LatentKeys, LowRank, Queries, norm_rope_append
    from mla.glue.warm import warmup_rows
    from mla.indexer.api import IndexQuery, prepare_query, scores, select
    from mla.prepare.api import Compression, IndexQueries, WindowKeys, prepare_attention
    from mla.prepare.warm import warmup_prepare
    from mla.workspace import Workspace, plan_workspace

__all__ = [
    "Compression",
    "Compressor",
    "Every",
    "IndexKeys",
    "IndexQueries",
    "IndexQuery",
    "LatentKeys",
    "LowRank",
    "Queries",
    "Selected",
    "StepView",
    "Tables",
    "WindowKeys",
    "Workspace",
    "cached_attention",
    "compress",
    "decode",
    "decode_plan",
    "norm_rope_append",
    "plan_workspace",
    "prepare_attention",
    "prepare_query",
    "scores",
    "select",
    "sparse_decode",
    "sparse_prefill",
    "step_view",
    "warmup",
    "warmup_prepare",
    "warmup_rows",
    "warmup_sparse",
]

__version__: str
exports(__name__, {
    "mla.api": "Every Selected StepView cached_attention step_view",
    "mla.attention.api": "decode decode_plan sparse_decode sparse_prefill",
    "mla.attention.warm": "warmup warmup_sparse",
    "mla.compressor.api": "Compressor Tables compress",
    "mla.glue.api": "IndexKeys LatentKeys LowRank Queries norm_rope_append",
    "mla.glue.warm": "warmup_rows",
    "mla.indexer.api": "IndexQuery prepare_query scores select",
    "mla.prepare.api": "Compression IndexQueries WindowKeys prepare_attention",
    "mla.prepare.warm": "warmup_prepare",
    "mla.workspace": "Workspace plan_workspace",
})  # fmt: skip
