"""`compress`: write the entries that the tokens of a step complete.

A tensor on a CUDA GPU of compute capability 9.0 or 10.x is processed there, one on the CPU in the
emulator; for `backend` and `arch` see `kernelkit.call.launch.choose_target`. Everything is checked
before a kernel is compiled. On a GPU the call does not wait for the numbers in tables: the kernel
skips those out of range. A call is one launch, which a graph can capture.
"""

from __future__ import annotations

import torch

from kvcache.checks import require
from kvcache.layouts.layout import Tail
from kvcache.layouts.rows import Rows, TailRows
from mla.compressor.arguments import Compressor, Tables
from mla.compressor.launch import COMPRESS

__all__ = ["Compressor", "Tables", "compress"]


def compress(
    compressor: Compressor,
    tail: TailRows,
    out: Rows,
    values: torch.Tensor,
    scores: torch.Tensor,
    tables: Tables,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    longest: int | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Write the entries that the tokens of a step complete, and the rows of the tail for these
    tokens.

    `mla.compressor.reference` is the definition; the bytes do not depend on the division of tokens
    into steps.

    Args:
        compressor: the weights.
        tail: the tail of a layer, `Cache.tail`; read, and written in place.
        out: the entries of the layer, `Cache.rows`, of FP8_584, BF16_512 or FP8_656, or of index
            keys (INDEXER_FP4, INDEXER_FP8, INDEXER_BF16), with the tail's width; written in place.
        values, scores: fp32 [T, overlap * width]; the last dimension is contiguous, the other
            stride a multiple of 16 bytes. The last `width` columns are for the window of a token.
        tables: `Tables.of(step.tensors(device), stream, tail)`.
        cos, sin: fp32 [P, 32], the angles of every position; an entry uses those of the first
            position of its window.
        longest: the largest number of tokens of a request, `Step.longest`, if it is known. A kernel
            for few tokens is chosen by it.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Raises:
        NotImplementedError: for a record or a shape of windows that has no kernel, and for tensors
            that require grad.
        TypeError, ValueError: for arguments that do not fit, naming the value and the limit.
    """
    require("tail", tail, TailRows)
    require("tail.tail", tail.tail, Tail)
    layer = tail.tail
    COMPRESS({
        "compressor": compressor, "tail_pool": tail.pool, "tail_offset": tail.offset,
        "tail_rows": tail.rows, "ratio": layer.ratio, "width": layer.width,
        "overlap": layer.overlap, "online": layer.online, "out": out, "values": values,
        "scores": scores, "tables": tables, "cos": cos, "sin": sin, "longest": longest,
        "backend": backend, "arch": arch,
    })  # fmt: skip
