"""Calls of `kvcache.append_rows` and `kvcache.gather`; the definition gives the same bytes."""

from __future__ import annotations

from typing import Any

import torch

from kvcache import Rows, append_rows, gather
from kvcache.layouts.records import BF16_512, FP8_584, FP8_656, INDEXER_FP8, Record
from kvcache.movement import reference
from lab.problems.attention import DTYPES
from lab.support.space import GPU, GPUS, Row, Space

SLOTS, ROWS, TOKENS = 4, 4, 3
DTYPES_OF_ROWS = {**DTYPES, "uint8": torch.uint8}
TABLES = {"int64": torch.int64, "int32": torch.int32}
RECORDS = {
    "bytes": Record("bytes", 96),
    **{record.name: record for record in (BF16_512, FP8_584, FP8_656, INDEXER_FP8)},
}


def _pool(record: Record) -> Rows:
    """Rows of a record in a pool of bytes; their scales lie behind all data."""
    data = -(-ROWS * record.data_bytes // 16) * 16
    size = -(-(data + ROWS * record.scale_bytes) // 16) * 16
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 120, (SLOTS, size), generator=generator, dtype=torch.uint8)
    return Rows(pool, 0, data, ROWS, record)


def _indices(row: Row, name: str) -> torch.Tensor:
    return torch.tensor([0, 5, -1]).to(TABLES[row[name]])


def _appending(row: Row) -> dict[str, Any]:
    """Arguments of `append_rows`."""
    dtype, size = DTYPES_OF_ROWS[row["dtype"]], int(row["bytes of a token"])
    record = Record("bytes", size + (row["record"] == "other bytes"))
    x = [(torch.arange(TOKENS * size) % 100).byte().view(TOKENS, size).view(dtype) for _ in "kv"]
    second = (_pool(record), x[1] if row["second"] == "yes" else x[1][:2])
    return {
        "first": (_pool(record), x[0]),
        "second": None if row["second"] == "none" else second,
        "slots": _indices(row, "slots"),
    }


def _append(row: Row) -> Any:
    return append_rows(**_appending(row), arch=row[GPU])


def _wrong_appending(row: Row) -> list[str]:
    mine, wanted = _appending(row), _appending(row)
    append_rows(**mine, arch=row[GPU])
    pairs = [pair for pair in (wanted["first"], wanted["second"]) if pair]
    reference.append_rows(pairs, wanted["slots"].long())
    found = [pair for pair in (mine["first"], mine["second"]) if pair]
    pools = zip(found, pairs, strict=True)
    return ["other bytes" for one, other in pools if not torch.equal(one[0].pool, other[0].pool)]


APPEND = Space(
    "kvcache.append_rows",
    "dtype is that of the tokens, whose bytes are written as they are. second is another pair of "
    "rows and tokens.",
    {
        GPU: GPUS,
        "dtype": ("bf16", "fp16", "fp32", "e4m3", "uint8"),
        "bytes of a token": ("128", "4", "36", "584", "4096"),
        "record": ("as many bytes", "other bytes"),
        "second": ("none", "yes", "fewer tokens"),
        "slots": tuple(TABLES),
    },
    (GPU, "dtype", "bytes of a token"),
    (GPU,),
    _append,
    _wrong_appending,
)


def _gathering(row: Row) -> dict[str, Any]:
    """Arguments of `gather`."""
    record, dtype = RECORDS[row["record"]], DTYPES_OF_ROWS[row["out"]]
    columns = {"fp8_584": 512, "fp8_656": 576}.get(record.name)
    columns = columns or record.data_bytes // dtype.itemsize
    out = torch.zeros(TOKENS, columns + int(row["columns"]), dtype=dtype)
    return {"rows": _pool(record), "indices": _indices(row, "indices"), "out": out}


def _gather(row: Row) -> Any:
    return gather(**_gathering(row), arch=row[GPU])


def _wrong_gathering(row: Row) -> list[str]:
    mine, wanted = _gathering(row), _gathering(row)
    gather(**mine, arch=row[GPU])
    reference.gather(wanted["rows"], wanted["indices"].long(), wanted["out"])
    bits = (each["out"].view(torch.uint8) for each in (mine, wanted))
    return [] if torch.equal(*bits) else ["other bytes"]


GATHER = Space(
    "kvcache.gather",
    "record is what the rows hold: bytes, or entries of a DeepSeek layer. columns is how many "
    "out has beyond those of a record.",
    {
        GPU: GPUS,
        "record": tuple(RECORDS),
        "out": ("bf16", "fp32", "uint8"),
        "columns": ("0", "8"),
        "indices": tuple(TABLES),
    },
    (GPU, "record", "out"),
    (GPU, "record"),
    _gather,
    _wrong_gathering,
)
SPACES = (APPEND, GATHER)
