"""The indexer over compressed keys: their records, their scores, and the best of them."""

from kvcache.indexer.api import IndexQuery, prepare_query, scores, select

__all__ = ["IndexQuery", "prepare_query", "scores", "select"]
