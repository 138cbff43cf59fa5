"""What scores refuse before anything compiles, naming value and limit; and their operator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fmha.sparse.indexer.api import scores
from fmha.sparse.indexer.scores_launch import SCORES
from kvcache.layouts.records import FP8_584
from tests.fmha.sparse.scores_cases import Scored

CASE = Scored(tokens=((0, 40), (1, 3)))
NAMES = ("owners", "counts", "block_tables")


def call(**changes):
    """scores with some arguments changed; functions change what there is."""
    rows, query, tables, out = CASE.build()
    arguments = dict(zip(NAMES, tables, strict=True)) | {"rows": rows, "query": query, "out": out}
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    scores(**arguments)


def at(**changes):
    return {"rows": lambda rows: replace(rows, **changes)}


def query(index, change):
    """One of data, scales and weights changed."""
    return {"query": lambda old: (*old[:index], change(old[index]), *old[index + 1 :])}


def shifted(x):
    """The same numbers where addresses are odd."""
    wide = torch.zeros((*x.shape[:-1], x.shape[-1] + 32), dtype=x.dtype)[..., 1:]
    return wide[..., : x.shape[-1]]


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (at(record=FP8_584), NotImplementedError, "record fp8_584: index keys are of"),
        (at(rows=12), NotImplementedError, "pages of 12 rows: a multiple of 8"),
        (at(data_offset=8), ValueError, "data of indexer_fp4 at 8"),
        (at(scale_offset=2 + 16 * 130), ValueError, "scales at offset 2082 of a slot"),
        (query(0, lambda q: q[:, :24]), NotImplementedError, "24 heads: one of"),
        (query(0, lambda q: q.float()), ValueError, "q is torch.float32"),
        (query(0, lambda q: q[..., :32]), ValueError, r"\[T, H, 64\]"),
        (query(0, lambda q: q[0]), ValueError, "q has shape"),
        (query(0, shifted), ValueError, "q starts at address"),
        (query(0, lambda q: q[:, :1].expand(-1, 64, -1)), ValueError, "stride"),
        (query(1, lambda s: s[..., :2]), ValueError, "q_scales is"),
        (query(1, shifted), ValueError, "q_scales at address"),
        (query(2, lambda w: w.bfloat16()), ValueError, "weights is torch.bfloat16"),
        (query(2, lambda w: w[:, :1].expand(-1, 64)), ValueError, "last stride"),
        ({"owners": torch.zeros(2, dtype=torch.int64)}, ValueError, "owners is torch.int64"),
        ({"owners": lambda x: x + 2}, ValueError, "owners has numbers from 2 to 3: there are 3"),
        ({"counts": lambda x: x[:1]}, ValueError, "counts is"),
        ({"counts": lambda x: x + 1}, ValueError, "out has 40 columns, 2 blocks have 64 keys"),
        ({"counts": lambda x: x - 50}, ValueError, "counts has numbers from -47"),
        ({"block_tables": lambda x: x - 100}, ValueError, "the pool has slots 0 to"),
        ({"block_tables": lambda x: x[0]}, ValueError, "block_tables is"),
        ({"block_tables": lambda x: x[:, :1]}, ValueError, "1 blocks have 32 keys"),
        ({"out": lambda x: x.double()}, ValueError, "out is torch.float64"),
        ({"out": lambda x: x[:1]}, ValueError, "out is"),
        ({"out": lambda x: x[:1].expand(2, -1)}, ValueError, "no broadcast"),
        ({"longest": -1}, ValueError, "longest -1"),
        ({"kernel": "fast"}, ValueError, "kernel 'fast': one of"),
        ({"kernel": "tcgen05", "arch": "sm_90a"}, NotImplementedError, "on sm_90a"),
        ({"arch": "sm_80"}, NotImplementedError, "arch 'sm_80'"),
        ({"backend": "cuda"}, ValueError, "backend 'cuda' needs CUDA"),
    ],
)  # fmt: skip
def test_refused(changes, error, match):
    with pytest.raises(error, match=match):
        call(**changes)


def test_other_records():
    """Queries have to be of the record of the keys."""
    rows, q, tables, out = Scored("indexer_fp8", tokens=((0, 40), (1, 3))).build()
    with pytest.raises(ValueError, match=r"q is torch.uint8 .*: torch.float8_e4m3fn"):
        scores(rows, (q[0].view(torch.uint8), *q[1:]), *tables, out)
    with pytest.raises(NotImplementedError, match="tcgen05' with record indexer_fp8"):
        scores(rows, q, *tables, out, kernel="tcgen05", arch="sm_100a")


def test_grad_is_refused():
    rows, (data, scales, weights), tables, out = CASE.build()
    with pytest.raises(NotImplementedError, match="weights requires grad"):
        scores(rows, (data, scales, weights.requires_grad_()), *tables, out)


def test_operator():
    """Tracers see that it writes to the result, and nothing else."""
    written = [a.name for a in SCORES.default._schema.arguments if a.alias_info]
    assert written == ["out"]
    rows, query, tables, out = CASE.build()
    mode = FakeTensorMode()
    fake = mode.from_tensor
    with mode:
        scores(
            replace(rows, pool=fake(rows.pool)), tuple(map(fake, query)), *map(fake, tables),
            fake(out),
        )  # fmt: skip
