"""The indexer over compressed keys: their records, their scores, and the best of them."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from mla.indexer.api import IndexQuery, prepare_query, scores, select

__all__ = ["IndexQuery", "prepare_query", "scores", "select"]

exports(__name__, {
    "mla.indexer.api": "IndexQuery prepare_query scores select",
})  # fmt: skip
