"""Calls of `mla.decode` and `mla.sparse_decode`: attention to latent keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernelkit.call.launch import emulation
from kvcache.layouts.records import INDEXER_FP8
from lab.problems.attention import PATIENCE
from lab.problems.latent import MANY, Cache, Case, Dense, Sparse, senders_of
from lab.support.space import GPU, GPUS, Row, Space
from mla import decode, sparse_decode, sparse_prefill
from mla.attention.config import MAX_TOKENS
from ptxemu import Options
from ptxemu.check.text import render

FLAT = "1, no dimension"
LENS = (70, 33)
KERNELS: dict[str, dict[str, Any]] = {
    "auto": {}, "warp": {"kernel": "warp"}, "wgmma": {"kernel": "wgmma"},
    "wgmma, cluster 2": {"kernel": "wgmma", "cluster": 2},
    "warp, cluster 2": {"kernel": "warp", "cluster": 2}, "cluster 17": {"cluster": 17},
}  # fmt: skip
KEYS = {"bf16": (False, False), "e4m3": (True, False), "e4m3, kv_scale": (True, True),
        "bf16, kv_scale": (False, True), "fp16": (False, False)}  # fmt: skip
SHARED = {
    "sinks": ("none", "fp32 [H]", "bf16 [H]"),
    "scale": ("none", "0.1", "1e-20"),
    "heads": ("16", "1", "64", "65", "128", "129"),
    "parts": ("0", "1", "3", "65"),
    "kernel": tuple(KERNELS),
    "batch_invariant": ("no", "yes"),
    "pdl": ("no", "yes"),
}


def _shared(row: Row) -> dict[str, Any]:
    """Return arguments that both functions have."""
    found: dict[str, Any] = {"parts": int(row["parts"]), "arch": row[GPU], **KERNELS[row["kernel"]]}
    found |= {"batch_invariant": row["batch_invariant"] == "yes", "pdl": row["pdl"] == "yes"}
    return found | {"return_lse": True}


def _fields(row: Row) -> dict[str, Any]:
    """Return fields of a case that both functions have."""
    scale = None if row["scale"] == "none" else float(row["scale"])
    return {"heads": int(row["heads"]), "sinks": row["sinks"] != "none", "scale": scale}


def _dense(row: Row) -> Dense:
    tokens = 1 if row["tokens"] == FLAT else int(row["tokens"])
    return Dense(
        lens=LENS,
        tokens=tokens,
        page=int(row["page size"]),
        causal=row["causal"] == "yes",
        full=row["kv_lens"] == "no",
        scaled=KEYS[row["keys"]] == (True, True),
        **_fields(row),
    )


def _attend(row: Row) -> Any:
    """Make the call of a row of `decode`."""
    (q, kv), given = _dense(row).inputs()
    given |= _shared(row)
    is_e4m3, is_scaled = KEYS[row["keys"]]
    if is_scaled:
        given["kv_scale"] = torch.tensor([0.75])
    if is_e4m3:
        kv = kv.to(torch.float8_e4m3fn)
    elif row["keys"] == "fp16":
        kv = kv.half()
    if row["columns"] == "512":
        q, kv = q[..., :512], kv[..., :512]
    if row["max_kv_len"] != "none":
        given["max_kv_len"] = 72 if row["max_kv_len"] == "72" else 1 << 20
    if row["sinks"] == "bf16 [H]":
        given["sinks"] = given["sinks"].bfloat16()
    o, lse = decode(q[:, 0] if row["tokens"] == FLAT else q, kv, **given)
    return (o.unsqueeze(1), lse.unsqueeze(2)) if row["tokens"] == FLAT else (o, lse)


def _wrong_dense(row: Row) -> list[str]:
    case = _dense(row)
    if row["keys"] == "e4m3":  # a scale of one
        return _reported(row, _attend, None)
    return _reported(row, _attend, case)


def _reported(row: Row, call: Any, case: Case | None) -> list[str]:
    """Run a call in the emulator; return what is out of tolerance."""
    with emulation(Options(policy="round-robin", limit=PATIENCE)) as active:
        results = call(row)
    found = [render(report) for report in active.reports if report.findings]
    if case is None:
        return found + ["NaN"] * bool(results[0].isnan().any())
    given = {name: value for name, value in _shared(row).items() if name != "return_lse"}
    many = ((MANY, row["function"] == "sparse_prefill"),) if isinstance(case, Sparse) else ()
    senders = senders_of(replace(case, options=many), given)
    return found + [str(each) for each in case.judge(results, senders=senders) if not each.ok]


DENSE = Space(
    "mla.decode",
    "keys is the dtype of kv. The calls have two entries of 70 and 33 keys.",
    {
        GPU: GPUS,
        "keys": tuple(KEYS),
        "page size": ("64", *map(str, (1, 2, 7, 16, 128, 256, 257))),
        "tokens": ("1", FLAT, "2", "9", str(MAX_TOKENS), str(MAX_TOKENS + 1)),
        "columns": ("576", "512"),
        "kv_lens": ("yes", "no"),
        "max_kv_len": ("none", "72", "2^20"),
        "causal": ("yes", "no"),
        **SHARED,
    },
    (GPU, "keys", "page size"),
    (GPU,),
    _attend,
    _wrong_dense,
)

NO_RECORD = "indexer_fp8"
RECORDS = ("fp8_584", "fp8_656", "fp8_528", "fp4_288", "bf16_512", "bf16_576", "tensor", NO_RECORD)
FUNCTIONS = {"sparse_decode": sparse_decode, "sparse_prefill": sparse_prefill}
INDICES = {"int64": torch.int64, "int32": torch.int32, "int16": torch.int16}


def _sparse(row: Row) -> Sparse:
    record = row["record"] if row["record"] != NO_RECORD else "fp8_584"
    counts = (40, 3) if row["counts"] == "yes" else None
    cache = Cache(record, int(row["page size"]), 40, counts)
    extra = None if row["extra"] == "none" else Cache(row["extra"], 16, 20)
    lead = 2 if row["tokens"] == "[2, 1]" else 0
    case = Sparse(tokens=2, batch=lead, cache=cache, rope=row["rope"] == "yes", **_fields(row))
    return replace(case, extra=extra)


def _list(row: Row) -> Any:
    """Make the call of a row of `sparse_decode`."""
    (q, rows, indices), given = _sparse(row).inputs()
    given |= _shared(row)
    if row["record"] == NO_RECORD:
        rows = replace(rows, record=INDEXER_FP8)
    if row["rope"] == "positions alone":
        given["positions"] = torch.zeros(q.shape[:-2], dtype=torch.int64)
    if row["sinks"] == "bf16 [H]":
        given["sinks"] = given["sinks"].bfloat16()
    indices = indices.clamp(-(2**15), 2**15 - 1).to(INDICES[row["indices"]])
    return FUNCTIONS[row["function"]](q, rows, indices, **given)


LISTED = Space(
    "mla.sparse_decode",
    "record is that of the cache, tensor bf16 entries of 576 columns; extra is the record of a "
    "second cache. Two tokens list 40 entries of the cache, and 20 of a second one.",
    {
        GPU: GPUS,
        "record": RECORDS,
        "extra": ("none", "fp8_584", "bf16_512", "fp8_656"),
        "page size": ("16", "1", "7", "512"),
        "tokens": ("[2]", "[2, 1]"),
        "indices": tuple(INDICES),
        "counts": ("no", "yes"),
        "rope": ("no", "yes", "positions alone"),
        "function": tuple(FUNCTIONS),
        **SHARED,
    },
    (GPU, "record", "extra"),
    (GPU,),
    _list,
    lambda row: _reported(row, _list, _sparse(row)),
)
SPACES = (DENSE, LISTED)
