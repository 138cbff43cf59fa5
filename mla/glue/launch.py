"""The operator `blackwell_kernels::mla_norm_rope_append`: check, choose a config, launch once."""

from __future__ import annotations

import torch

from kernelkit.call.launch import Target, choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import DTYPE_NAMES
from kernelkit.compile.arch import PORTABLE, WITHOUT_E4M3, require_pdl
from kernelkit.compile.compiler import compile_once
from kernelkit.device.param_table import ParamTable
from kernelkit.device.param_words import fp32_bits, nothing
from kvcache.movement.config import Angles, Entries, TokenRows, ctas_for
from mla.attention.formats import FORMS
from mla.glue.arguments import Arguments, Index, Keys, LowRankRows, QueryHeads
from mla.glue.config import (
    GlueConfig,
    GlueParams,
    IndexConfig,
    IndexWords,
    KeysConfig,
    KeyWords,
    LowRankConfig,
    LowRankWords,
    NormWords,
    QueriesConfig,
    QueryWords,
)
from mla.indexer.formats import FORMATS
from mla.indexer.params import HeadRows

ARCHS = ("sm_100a", "sm_90a", PORTABLE)
KERNEL = "mla.glue.kernel"
MAX_ITEMS = 1 << 31


def run(given: Arguments) -> tuple[()]:
    """Write all parts."""
    given.check()
    target = choose_target(given.positions.device, given.backend, given.arch, ARCHS)
    check_arch(given, target)
    config, params, ctas = plan(given)
    if ctas:
        compiled = compile_once(config, target.arch, KERNEL)
        launch(compiled, (ParamTable.of(params), ctas), target, given.positions.device)
    return ()


def plan(given: Arguments) -> tuple[GlueConfig, GlueParams, int]:
    """Return the config, the parameters and the number of CTAs, 0 if there are no rows."""
    config = config_of(given)
    items = config.items(given.tokens, given.heads)
    if items >= MAX_ITEMS:
        raise ValueError(f"{items} rows of all parts: fewer than {MAX_ITEMS}")
    return config, params_of(given, items), ctas_for(items, config.warps)


def config_of(given: Arguments) -> GlueConfig:
    """Return what the kernel is compiled for."""
    keys, index, queries, low_rank = given.keys, given.index, given.queries, given.low_rank
    return GlueConfig(
        low_rank=None if low_rank is None else LowRankConfig(
            low_rank.out.shape[1], DTYPE_NAMES[low_rank.weight.dtype]
        ),
        keys=None if keys is None else KeysConfig(
            keys.stored, DTYPE_NAMES[keys.weight.dtype], given.pairs, _is_wide(keys.slots),
            keys.scale is not None,
        ),
        index=None if index is None else IndexConfig(
            index.record, DTYPE_NAMES[index.weight.dtype], index.rotation, _is_wide(index.slots)
        ),
        queries=None if queries is None else QueriesConfig(queries.eps is not None, given.pairs),
        wide_positions=_is_wide(given.positions),
        pdl=given.pdl,
    )  # fmt: skip


def params_of(given: Arguments, items: int) -> GlueParams:
    """Return the words of a launch."""
    keys, index, queries, low_rank = given.keys, given.index, given.queries, given.low_rank
    return GlueParams(
        tokens=given.tokens,
        items=items,
        positions=given.positions,
        angles=Angles.of(given.cos, given.sin),
        low_rank=nothing(LowRankWords) if low_rank is None else _low_rank(low_rank),
        keys=nothing(KeyWords) if keys is None else _keys(keys),
        index=nothing(IndexWords) if index is None else _index(index, given),
        queries=nothing(QueryWords) if queries is None else _queries(queries),
    )


def _low_rank(part: LowRankRows) -> LowRankWords:
    norm = NormWords(weight=part.weight, eps_bits=fp32_bits(part.eps))
    return LowRankWords(x=TokenRows.of(part.read), out=TokenRows.of(part.out), norm=norm)


def _keys(part: Keys) -> KeyWords:
    entries = Entries(
        data=(part.pool, part.data_offset),
        scales=(part.pool, part.scale_offset),
        slot_stride=part.stride,
        rows=part.page,
        count=part.entries,
    )
    return KeyWords(
        x=TokenRows.of(part.x),
        norm=NormWords(weight=part.weight, eps_bits=fp32_bits(part.eps)),
        slots=part.slots,
        entries=entries,
        scale=0 if part.scale is None else part.scale,
    )


def _index(part: Index, given: Arguments) -> IndexWords:
    return IndexWords(
        x=TokenRows.of(part.x),
        norm=NormWords(weight=part.weight, eps_bits=fp32_bits(part.eps)),
        bias=part.bias,
        slots=part.slots,
        entries=Entries.of(part.as_rows(given.keys_pool)),
    )


def _queries(part: QueryHeads) -> QueryWords:
    return QueryWords(
        x=_heads(part.read, part.columns),
        out=_heads(part.out, part.columns),
        heads=part.out.shape[1],
        eps_bits=0 if part.eps is None else fp32_bits(part.eps),
    )


def _heads(x: torch.Tensor, columns: int) -> HeadRows:
    """Describe the last columns of x [T, H, ...]."""
    found = HeadRows.of(x)
    skipped = (x.shape[2] - columns) * x.itemsize
    return HeadRows(
        address=(x, skipped), token_stride=found.token_stride, head_stride=found.head_stride
    )


def _is_wide(table: torch.Tensor) -> bool:
    return table.dtype == torch.int64


def check_arch(given: Arguments, target: Target) -> None:
    """Raise NotImplementedError for what an architecture cannot do."""
    if given.pdl:
        require_pdl(target.arch)
    if target.arch not in WITHOUT_E4M3:
        return
    records = {}
    if given.keys is not None and FORMS[given.keys.stored].code == "e4m3":
        records["keys"] = given.keys.stored
    if given.index is not None and FORMATS[given.index.record].element == "e4m3":
        records["index_keys"] = given.index.record
    for name, record in records.items():
        raise NotImplementedError(
            f"{name} of {record} on {target.arch}: e4m3 needs compute capability 8.9"
        )


NORM_ROPE_APPEND = Operator(
    "mla_norm_rope_append", Arguments, run, lambda _: (), results=0,
    writes=("keys_pool", "index_pool", "queries_out", "low_rank_out"), pools=True,
)  # fmt: skip
