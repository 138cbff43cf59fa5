"""DeepSeek-V4's sparse attention over the cache: compressors, indexer, window, cached attention."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from mla.api import Every, Selected, StepView, cached_attention, step_view
    from mla.compressor.api import Compressor, Tables, compress
    from mla.indexer.api import IndexQuery, prepare_query, scores, select
    from mla.workspace import Workspace, plan_workspace

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

__version__: str
exports(__name__, {
    "mla.api": "Every Selected StepView cached_attention step_view",
    "mla.compressor.api": "Compressor Tables compress",
    "mla.indexer.api": "IndexQuery prepare_query scores select",
    "mla.workspace": "Workspace plan_workspace",
})  # fmt: skip
