"""Calls of `mla.norm_rope_append`: rows between the projections of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvcache.layouts.records import FP4_288, Record
from kvcache.layouts.rows import Rows
from lab.problems.attention import DTYPES
from lab.support.space import GPU, GPUS, Row, Space
from mla import IndexKeys, LatentKeys, LowRank, Queries, norm_rope_append
from mla.attention.formats import FORMS
from mla.glue import reference
from mla.glue.config import STORED
from mla.indexer.formats import FORMATS, GLM5, PLAIN, V32, Rotation

TOKENS, PAGES, PAGE, ANGLES, EPS = 3, 2, 4, 8, 1e-6
TABLES = {"int64": torch.int64, "int32": torch.int32, "int16": torch.int16}
RECORDS = {**STORED, FP4_288.name: FP4_288}
ROTATIONS = {
    "V4": PLAIN, "V3.2": V32, "GLM-5": GLM5,
    "halves, no Hadamard": Rotation("halves", hadamard=False),
}  # fmt: skip
QUERIES = {  # name -> (columns, normed)
    "none": None, "192": (192, False), "64": (64, False), "32": (32, False),
    "512, normed": (512, True), "576, normed": (576, True),
}  # fmt: skip


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rows(record: Record) -> Rows:
    size = -(-PAGE * record.bytes // 16) * 16
    pool = torch.zeros(PAGES, size, dtype=torch.uint8)
    return Rows(pool, 0, PAGE * record.data_bytes, PAGE, record)


def _cache(record: str) -> Rows | torch.Tensor:
    if record != "e4m3_576":
        return _rows(RECORDS[record])
    return torch.zeros(PAGES, PAGE, FORMS[record].columns).to(torch.float8_e4m3fn)


def given_of(row: Row) -> dict[str, Any]:
    """Return the arguments of a row."""
    angles, table = _normal(1, ANGLES, 32), TABLES[row["tables"]]
    given: dict[str, Any] = {
        "positions": torch.tensor([5, 0, 3]).to(table), "rope": (angles.cos(), angles.sin()),
        "pairs": row["pairs"], "pdl": row["pdl"] == "yes", "arch": row[GPU],
    }  # fmt: skip
    weight, slots = DTYPES[row["weights"]], torch.tensor([6, -1, 0]).to(table)
    x = _normal(2, TOKENS, FORMS[row["keys"]].columns).to(DTYPES[row["rows"]])
    scale = torch.tensor([0.5]) if row["scale"] == "yes" else None
    norm = _normal(3, 512).to(weight), EPS, scale
    given["keys"] = LatentKeys(x, _cache(row["keys"]), slots, *norm)
    if row["index_keys"] != "none":
        norm = _normal(4, 2, 128).to(weight)
        rows, rotation = _rows(FORMATS[row["index_keys"]].record), ROTATIONS[row["rotation"]]
        x = _normal(5, TOKENS, 128).bfloat16()
        given["index_keys"] = IndexKeys(x, rows, slots, *norm, EPS, rotation)
    if (kind := QUERIES[row["queries"]]) is not None:
        q = _normal(6, TOKENS, 2, kind[0]).bfloat16()
        given["queries"] = Queries(q, None, EPS if kind[1] else None)
    if row["low_rank"] != "none":
        rank = int(row["low_rank"])
        x = _normal(7, TOKENS, rank).bfloat16()
        given["low_rank"] = LowRank(x, _normal(8, rank).to(weight), torch.zeros_like(x), EPS)
    return given


def _call(row: Row) -> None:
    norm_rope_append(**given_of(row))


def _wrong(row: Row) -> list[str]:
    """Compare every part with the definition, bit for bit."""
    given, old = given_of(row), given_of(row)
    norm_rope_append(**given)
    return [
        f"other bytes of {name}" for name, *pair in _parts(given, old) if not torch.equal(*pair)
    ]


def _parts(given: dict[str, Any], old: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield names, what was written, and what should have been."""
    rope = tuple(table[old["positions"].long()] for table in old["rope"])
    keys = old["keys"]
    record = keys.rows.record.name if isinstance(keys.rows, Rows) else "e4m3_576"
    found = reference.latent_keys(keys.x, keys.weight, EPS, rope, old["pairs"])
    _put(keys.rows, keys.slots, *reference.encode(found, record, keys.scale))
    yield "keys", *map(_bytes, (given["keys"].rows, keys.rows))
    if index := old.get("index_keys"):
        norm, record = (index.weight, index.bias, EPS), index.rows.record.name
        found = reference.index_keys(index.x, norm, rope, record, index.rotation)
        _put(index.rows, index.slots, *found)
        yield "index_keys", *map(_bytes, (given["index_keys"].rows, index.rows))
    if queries := old.get("queries"):
        found = reference.queries(queries.q, rope, queries.eps, old["pairs"])
        yield "queries", given["queries"].q[..., -found.shape[-1] :], found
    if low := old.get("low_rank"):
        found = reference.low_rank(low.x, low.weight, EPS)
        yield "low_rank", given["low_rank"].out, found


def _put(
    rows: Rows | torch.Tensor, slots: torch.Tensor, data: torch.Tensor, scales: torch.Tensor
) -> None:
    kept = (slots >= 0).nonzero().flatten()
    place = slots[kept].long() // PAGE, slots[kept].long() % PAGE
    view = rows.data() if isinstance(rows, Rows) else rows.view(torch.uint8)
    view[place] = data[kept]
    if isinstance(rows, Rows) and rows.record.scale_bytes:
        rows.scales()[place] = scales[kept]


def _bytes(rows: Rows | torch.Tensor) -> torch.Tensor:
    return (rows.pool if isinstance(rows, Rows) else rows).view(torch.uint8)


SPACE = Space(
    "mla.norm_rope_append",
    "keys and index_keys are records of caches, e4m3_576 entries with one scale. rows is the dtype "
    "of keys before the norm, weights that of all norms, tables that of positions and slots. "
    "queries are columns of a head, low_rank elements of a row. The calls have three tokens.",
    {
        GPU: GPUS,
        "keys": ("fp8_656", *(name for name in RECORDS if name != "fp8_656")),
        "index_keys": ("none", *FORMATS),
        "queries": tuple(QUERIES),
        "low_rank": ("none", "1536", "64", "60", "4096", "4104"),
        "rows": ("bf16", "fp16", "fp32"),
        "weights": ("bf16", "fp32", "fp16"),
        "tables": tuple(TABLES),
        "pairs": ("neighbours", "halves"),
        "rotation": tuple(ROTATIONS),
        "scale": ("no", "yes"),
        "pdl": ("no", "yes"),
    },
    (GPU, "keys", "index_keys"),
    (GPU, "keys"),
    _call,
    _wrong,
)  # fmt: skip
SPACES = (SPACE,)
