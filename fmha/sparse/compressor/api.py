"""`compress`, and the torch operator `blackwell_kernels::kv_compress` behind it: tracers see it
whole, and its schema says what it writes to.

A tensor on a CUDA GPU of compute capability 9.0 or 10.x runs there, one on the CPU in the emulator;
`backend` and `arch`: see `kernelkit.launch.choose_target`. Everything is checked before it
compiles, and refused by TypeError, ValueError or NotImplementedError. On a GPU nobody looks at
values of tables: what is out of range is passed over. One or two launches, which a graph captures.
"""

from __future__ import annotations

from typing import Any

import torch

from fmha.sparse.compressor.arguments import Compressor, Job, Tables
from fmha.sparse.compressor.config import RECORDS
from fmha.sparse.compressor.forward import run_compress
from fmha.sparse.indexer.formats import FORMATS
from kernelkit.schema import register_mutating_operator
from kernelkit.tensors import require_no_grad
from kvcache.layouts.latent import LATENTS
from kvcache.layouts.layout import Tail
from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows, TailRows

TABLES = tuple(Tables.__dataclass_fields__)
COMPRESS = (
    "(Tensor(a!) tail_pool, Tensor(b!) pool, Tensor values, Tensor scores, Tensor ape, "
    f"Tensor weight, Tensor cos, Tensor sin, {', '.join(f'Tensor {name}' for name in TABLES)}, *, "
    "float eps, int tail_offset, int tail_slot_rows, int ratio, int overlap, bool online, "
    "int data_offset, int scale_offset, int rows, str record, SymInt? longest=None, "
    "str backend='auto', str? arch=None) -> ()"
)

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
    """Entries that the tokens of a step complete, and what the tail keeps of these tokens, as
    `fmha.sparse.compressor.reference` defines them; the same bytes for every cut of tokens into
    steps.

    tail, out: of a layer: `Cache.tail` and `Cache.rows`. out: of FP8_584, BF16_512 or FP8_656, or
        of index keys (INDEXER_FP4, INDEXER_FP8, INDEXER_BF16), with the tail's width.
    values, scores: fp32 [T, overlap * width]; the last dimension is contiguous, the other stride a
        multiple of 16 bytes. The last `width` columns are for the window of a token.
    tables: `Tables.of(step.tensors(device), stream, tail)`.
    cos, sin: fp32 [P, 32], angles of every position, of which the first of a window is looked up.
    longest: the most tokens of a request, `Step.longest`, where it is known: steps of few tokens
        take one launch instead of two.
    """
    require_no_grad(values=values, scores=scores)
    layer = tail.tail
    compress_op(
        tail.pool, out.pool, values, scores, compressor.ape, compressor.weight, cos, sin,
        *tables.named.values(),
        eps=compressor.eps, tail_offset=tail.offset, tail_slot_rows=tail.rows, ratio=layer.ratio,
        overlap=layer.overlap, online=layer.online, data_offset=out.data_offset,
        scale_offset=out.scale_offset, rows=out.rows, record=out.record.name, longest=longest,
        backend=backend, arch=arch,
    )  # fmt: skip


def _compress(
    tail_pool: torch.Tensor,
    pool: torch.Tensor,
    values: torch.Tensor,
    scores: torch.Tensor,
    *tensors: torch.Tensor,
    **options: Any,
) -> None:
    ape, weight, cos, sin, *tables = tensors
    place = {name: options[name] for name in ("backend", "arch") if name in options}
    width = len(weight) if weight.ndim else 0
    names = ("ratio", "overlap", "online")
    layer = Tail("tail", width=width, copies=1, **{name: options.pop(name) for name in names})
    tail = TailRows(tail_pool, options["tail_offset"], options["tail_slot_rows"], layer)
    where = (options[name] for name in ("data_offset", "scale_offset", "rows"))
    out = Rows(pool, *where, record_of(options["record"]))
    job = Job(
        Compressor(ape, weight, options["eps"]), tail, out, values, scores, Tables(*tables),
        cos, sin, options.get("longest"),
    )  # fmt: skip
    run_compress(job, **place)


def record_of(name: str) -> Record:
    """NotImplementedError for a record that no compressor makes."""
    if name not in RECORDS:
        raise NotImplementedError(f"record {name}: supported are {[*RECORDS]}")
    return LATENTS[name].record if name in LATENTS else FORMATS[name].record


compress_op = register_mutating_operator("kv_compress", COMPRESS, _compress)
