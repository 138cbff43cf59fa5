"""Arguments that kernels of the cache refuse before anything compiles, naming value and limit;
schemas of the operators, and what tracers see.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kvcache.layouts.records import FP8_528, FP8_584, INDEXER_FP4, Record, plain
from kvcache.layouts.rows import MAX_ENTRIES, Rows
from kvcache.movement import api, launch
from tests.kvcache.movement.rows_cases import Movement, poisoned

CASE = Movement(FP8_584, 4, slots=3, rows=5)


def swa(**changes):
    """Call append_swa with some arguments changed."""
    positions, cos, sin = CASE.rope()
    arguments = {"rows": CASE.build_rows(), "kv": CASE.latents(), "positions": positions,
                 "slots": CASE.mapping(), "cos": cos, "sin": sin} | changes  # fmt: skip
    return api.append_swa(**arguments)


def at(**changes):
    return {"rows": replace(CASE.build_rows(), **changes)}


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (at(record=FP8_528), NotImplementedError, "record fp8_528: supported are"),
        (at(data_offset=8), ValueError, "data of fp8_584 at 8, 5 rows of 576"),
        (at(data_offset=-16), ValueError, "at -16"),
        (at(scale_offset=1 << 20), ValueError, "scales of fp8_584 at 1048576"),
        (at(rows=0), ValueError, "3 slots of 0 rows"),
        (at(rows=MAX_ENTRIES), ValueError, f"{MAX_ENTRIES} entries"),
        (at(pool=torch.zeros(3, 8000)), ValueError, "pool is torch.float32"),
        (at(pool=torch.zeros(3, 8001, dtype=torch.uint8)), ValueError, "every 8001 bytes"),
        ({"kv": torch.zeros(4, 512, dtype=torch.float16)}, ValueError, "kv is torch.float16"),
        ({"kv": torch.zeros(4, 576, dtype=torch.bfloat16)}, ValueError, "576"),
        ({"kv": torch.zeros(4, 516).bfloat16()[:, 4:]}, ValueError, "kv starts at address"),
        ({"kv": torch.zeros(512, 4).bfloat16().T}, ValueError, "last stride"),
        ({"positions": torch.zeros(4, dtype=torch.int32)}, ValueError, "positions is torch.int32"),
        ({"positions": torch.zeros(5, dtype=torch.int64)}, ValueError, r"expected .*\(4\)"),
        ({"slots": torch.tensor([0, 15, 1, 2])}, ValueError, "from 0 to 15: -1, or 3 slots of 5"),
        ({"slots": torch.tensor([0, -2, 1, 2])}, ValueError, "slots has numbers from -2"),
        ({"slots": torch.arange(4), "positions": torch.full((4,), 37)}, ValueError, "0 to 36"),
        ({"slots": torch.arange(4), "positions": torch.full((4,), -1)}, ValueError, "from -1"),
        ({"cos": torch.zeros(37, 64)}, ValueError, "cos is"),
        ({"sin": torch.zeros(36, 32)}, ValueError, "sin is"),
        ({"cos": torch.zeros(0, 32), "sin": torch.zeros(0, 32)}, ValueError, "a row for every"),
        ({"backend": "cuda"}, ValueError, "backend 'cuda' needs CUDA"),
        ({"arch": "sm_80"}, NotImplementedError, "fp8_584 on sm_80: e4m3 needs sm_89"),
        ({"arch": "sm_75"}, NotImplementedError, "arch 'sm_75'"),
    ],
)  # fmt: skip
def test_append_swa_refuses(changes, error, match):
    with pytest.raises(error, match=match):
        swa(**changes)


@pytest.mark.usefixtures("no_launches")
def test_append_rows_refuses():
    pool, record = poisoned(3, 4096), plain("k", 2, 8)
    rows, slots, x = Rows(pool, 0, 0, 5, record), torch.arange(4), torch.zeros(4, 2, 8).bfloat16()
    for changes, match in (
        ({"x": x[:, :1]}, "16 bytes for a token, record k has 32"),
        ({"x": x.transpose(1, 2)}, "elements of a token not contiguous"),
        ({"x": x[:3]}, r"slots is .*\(4,\), expected"),
        ({"x": x[0, 0].expand(4, 2, 8)}, "not contiguous"),
        ({"rows": replace(rows, data_offset=4096)}, "data of k at 4096"),
        ({"slots": slots + 12}, "from 12 to 15"),
        ({"rows": replace(rows, pool=pool[:, ::2])}, "strides"),
    ):
        given = {"rows": rows, "x": x, "slots": slots} | changes
        with pytest.raises(ValueError, match=match):
            api.append_rows((given["rows"], given["x"]), None, given["slots"])
    with pytest.raises(ValueError, match=r"pools of \[15, 12\] entries"):
        api.append_rows((rows, x), (replace(rows, rows=4), x), slots)
    with pytest.raises(NotImplementedError, match="indexer_fp4 has 4 bytes of scales"):
        api.append_rows((replace(rows, record=INDEXER_FP4), x), None, slots)
    with pytest.raises(NotImplementedError, match="x requires grad"):
        api.append_rows((rows, x.requires_grad_()), None, slots)


def test_rows_that_cannot_be_alone():
    rows = Rows(poisoned(3, 4096), 16, 0, 5, plain("k", 8, 64))
    for changes, match in (
        ({"data_offset": 3100}, "data of k at 3100, 5 rows of 1024"),
        ({"record": INDEXER_FP4}, "scales are stored apart"),
        ({"pool": torch.zeros(3, 4096)}, "pool is torch.float32"),
    ):
        with pytest.raises(ValueError, match=match):
            _ = replace(rows, **changes).alone


@pytest.mark.usefixtures("no_launches")
def test_gather_refuses():
    rows, indices = CASE.build_rows(), torch.arange(4)
    out = torch.zeros(4, 512, dtype=torch.bfloat16)
    for changes, error, match in (
        ({"out": out.float()}, ValueError, "out is torch.float32"),
        ({"out": out[:3]}, ValueError, "indices is"),
        ({"indices": indices.int()}, ValueError, "torch.int32"),
        ({"indices": indices + 12}, ValueError, "from 12 to 15"),
        ({"rows": replace(rows, record=INDEXER_FP4)}, NotImplementedError, "indexer_fp4 has scale"),
        ({"rows": replace(rows, record=plain("k", 1, 9))}, ValueError, "1024 bytes for a token"),
    ):
        with pytest.raises(error, match=match):
            api.gather(**{"rows": rows, "indices": indices, "out": out} | changes)


@pytest.mark.usefixtures("no_launches")
def test_copy_slots_refuses():
    source, target, pairs = poisoned(3, 4096), poisoned(2, 8192), torch.tensor([[0, 1]])
    parts = torch.tensor([[0, 16, 64]])
    for changes, match in (
        ({}, "slots of 4096 and 8192 bytes differ"),
        ({"segments": parts + 1}, r"segment \(1, 17, 65\)"),
        ({"segments": parts + 4096}, "within slots of 4096 and 8192"),
        ({"segments": parts - 16}, r"segment \(-16, 0, 48\)"),
        ({"segments": parts[:, :2]}, "segments is"),
        ({"segments": parts, "pairs": pairs + 2}, "pairs of the target has numbers from 3 to 3"),
        ({"segments": parts, "pairs": pairs - 3}, "pairs of the source has numbers from -3"),
        ({"segments": parts, "pairs": pairs.int()}, "pairs is torch.int32"),
        ({"segments": parts, "pairs": torch.zeros(4, 4).long()[:, :2]}, "contiguous"),
        ({"source": poisoned(3, 4088)}, "source at address|source has slots of 4088"),
        ({"source": source[:, :0]}, "slots of 0 and 8192"),
        ({"source": source.expand(3, 4096)[0].expand(3, 4096)}, "overlap"),
    ):
        given = {"source": source, "target": target, "pairs": pairs} | changes
        with pytest.raises(ValueError, match=match):
            api.copy_slots(**given)


@pytest.mark.usefixtures("no_launches")
def test_checksum_refuses():
    pool, slots = poisoned(3, 4096), torch.arange(3)
    for begin, end in ((8, 64), (0, 60), (-16, 64), (64, 48), (0, 4112)):
        with pytest.raises(ValueError, match=f"bytes {begin} to {end}"):
            api.checksum(pool, slots, begin, end)
    with pytest.raises(ValueError, match="slots has numbers from 1 to 3"):
        api.checksum(pool, slots + 1, 0, 64)
    with pytest.raises(TypeError, match="slots is list"):
        api.checksum(pool, [1], 0, 64)


def test_schemas_say_what_is_written():
    written = {}
    operators = launch.APPEND_SWA, launch.APPEND_ROWS, launch.GATHER, launch.COPY_SLOTS
    for operator in (*operators, launch.CHECKSUM):
        schema = operator.default._schema
        names = [argument.name for argument in schema.arguments if argument.alias_info is not None]
        written[schema.name.partition("::")[2]] = names
    assert written == {
        "kv_append_swa": ["rows_pool"],
        "kv_append_rows": ["pool", "other_pool"],
        "kv_gather": ["out"],
        "kv_copy_slots": ["target"],
        "kv_checksum": [],
    }


@pytest.mark.usefixtures("no_launches")
def test_tracers_see_operators():
    with FakeTensorMode():
        pool = torch.empty(4, 8192, dtype=torch.uint8)
        rows = Rows(pool, 0, 8000, 2, Record("row", 64))
        slots, x = torch.empty(3, dtype=torch.int64), torch.empty(3, 2, 16).bfloat16()
        assert api.append_rows((rows, x), (rows, x), slots) is None
        assert api.gather(rows, slots, x) is None
        assert api.copy_slots(pool, pool, slots.view(-1, 1).expand(3, 2)) is None
        assert api.checksum(pool, slots, 0, 64).shape == (3,)


def test_both_pools_of_a_copy_may_be_in_memory_of_the_host(monkeypatch):
    """Tensors on meta simulate those on a GPU; tests on GPUs copy to and from pinned memory."""
    monkeypatch.setattr("kernelkit.call.operator.require_memory", lambda **tensors: None)
    pairs = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    host = CASE.build_rows().pool
    for source, target in ((host, host.to("meta")), (host.to("meta"), host), (host, host)):
        launch.COPY_SLOTS.require_usable({"source": source, "target": target, "pairs": pairs})
    segments = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"different devices.*segments"):
        launch.COPY_SLOTS.require_usable({"target": host, "pairs": pairs, "segments": segments})
