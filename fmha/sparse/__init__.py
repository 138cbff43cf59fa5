"""DeepSeek-V4's sparse attention over the cache: compressors, indexer, window, cached attention."""

from typing import TYPE_CHECKING

from kernelkit.exports import exports

if TYPE_CHECKING:
    from fmha.sparse.api import Every, Selected, StepView, cached_attention, step_view
    from fmha.sparse.compressor.api import Compressor, Tables, compress
    from fmha.sparse.indexer.api import IndexQuery, prepare_query, scores, select
    from fmha.sparse.workspace import Workspace, plan_workspace

__all__ = [
    "Compressor",
    "Every",
    "IndexQuery",
    "Selected",
    "StepView",
    "Tables",
    "Workspace",
    "cached_attention",
    "compress",
    "plan_workspace",
    "prepare_query",
    "scores",
    "select",
    "step_view",
]

__getattr__, __dir__ = exports(__name__, {
    "fmha.sparse.api": "Every Selected StepView cached_attention step_view",
    "fmha.sparse.compressor.api": "Compressor Tables compress",
    "fmha.sparse.indexer.api": "IndexQuery prepare_query scores select",
    "fmha.sparse.workspace": "Workspace plan_workspace",
})  # fmt: skip
