"""FlashMLA's functions: caches as rows of the same memory, marked results, and what is refused.

tests/test_guides.py compares their results with FlashMLA's semantics.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from mla import flash_mla, sparse_decode
from mla.attention.codec import RECORDS, pack
from mla.flash_mla import (
    BYTES,
    FORMATS,
    _cache,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

BF16, INT = torch.bfloat16, torch.int32
Q, Q512 = torch.zeros(2, 1, 4, 576, dtype=BF16), torch.zeros(2, 1, 4, 512, dtype=BF16)
KV = torch.zeros(3, 16, 1, 576, dtype=BF16)
TABLE, LENS = torch.tensor([[0, 1], [2, 0]], dtype=INT), torch.tensor([20, 5], dtype=INT)
RECORDS_584 = torch.zeros(3, 16, 1, 584, dtype=torch.uint8)
CHOSEN = torch.zeros(2, 1, 8, dtype=INT)
SCHEDULE, _ = get_mla_metadata(LENS, 4, 1)
DENSE = {"q": Q, "k_cache": KV, "block_table": TABLE, "cache_seqlens": LENS, "head_dim_v": 512,
         "tile_scheduler_metadata": SCHEDULE}  # fmt: skip
SPARSE = DENSE | {"q": Q512, "k_cache": RECORDS_584, "indices": CHOSEN}
PREFILL = {"q": Q[:, 0], "kv": KV.view(48, 1, 576), "indices": CHOSEN, "sm_scale": 0.1}


def as_tokens(rows):
    """Return a cache as FlashMLA takes it."""
    nbytes = rows.record.bytes
    shape = (len(rows.pool), rows.rows, 1, nbytes)
    return rows.pool[:, : rows.rows * nbytes].view(shape)


@pytest.mark.parametrize("record", FORMATS.values())
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_a_cache_is_rows_of_the_same_memory(record, dtype):
    columns = 576 if record == "fp8_656" else 512
    rows = pack(torch.randn(3, 5, columns).bfloat16(), record)
    (kv_format,) = (name for name, stored in FORMATS.items() if stored == record)
    found = _cache("k_cache", as_tokens(rows).view(dtype), kv_format)
    assert found.record == rows.record == RECORDS[BYTES[rows.record.bytes]]
    assert found.data().data_ptr() == rows.data().data_ptr()
    assert torch.equal(found.data(), rows.data())
    assert torch.equal(found.scales(), rows.scales())


def test_results_are_those_of_sparse_decode_with_marked_tokens():
    torch.manual_seed(0)
    cache = pack(torch.randn(2, 16, 512).bfloat16(), "fp8_584")
    q, sinks = torch.randn(2, 2, 4, 512).bfloat16(), torch.linspace(-1, 1, 4)
    indices = torch.randint(-1, 32, (2, 2, 8)).int()
    indices[1, 0] = -1  # this token sees nothing
    lengths = torch.tensor([5, 8], dtype=INT)
    o, lse = flash_mla_with_kvcache(
        q, as_tokens(cache), None, None, 512, SCHEDULE, None, 0.1, False, True, indices, sinks,
        topk_length=lengths,
    )  # fmt: skip
    given = {"scale": 0.1, "sinks": sinks, "counts": lengths[:, None].repeat(1, 2)}
    wanted = sparse_decode(q, cache, indices, return_lse=True, **given)
    assert torch.equal(o, wanted[0])
    assert not o[1, 0].any()
    assert lse[1, :, 0].eq(math.inf).all()
    assert torch.equal(lse, wanted[1].masked_fill(wanted[1] == -math.inf, math.inf))
    assert lse.shape == (2, 4, 2)


def test_dense_attention_takes_the_arguments_under_our_names(monkeypatch):
    calls = []

    def decode(q, kv, **given):
        calls.append(given)
        return torch.zeros(2, 1, 4, 512), torch.zeros(2, 4, 1)

    monkeypatch.setattr(flash_mla, "decode", decode)
    flash_mla_with_kvcache(**DENSE)
    sinks, factor = torch.zeros(4), torch.ones(1)
    flash_mla_with_kvcache(
        **DENSE, softmax_scale=0.1, causal=True, attn_sink=sinks, enable_batch_invariant=True,
        descale_k=factor,
    )  # fmt: skip
    shared = {"page_table": TABLE, "kv_lens": LENS, "return_lse": True}
    plain = {"scale": None, "sinks": None, "batch_invariant": False, "causal": False}
    assert calls[0] == shared | plain | {"kv_scale": None}
    given = {"scale": 0.1, "sinks": sinks, "batch_invariant": True, "causal": True}
    assert calls[1] == shared | given | {"kv_scale": factor}


def test_prefill_returns_the_lse_in_both_bases_or_not_at_all():
    torch.manual_seed(0)
    given = PREFILL | {"q": torch.randn(2, 4, 576).bfloat16(), "indices": CHOSEN + 1}
    given["indices"][1] = 99
    (o, most, lse), two, none = (
        flash_mla_sparse_fwd(**given, return_log2_lse=base) for base in (None, True, False)
    )
    assert most is None
    assert none[1:] == (None, None)
    assert torch.equal(o, two[0])
    assert torch.equal(o, none[0])
    assert torch.allclose(two[2], lse / math.log(2))
    assert lse[1].eq(math.inf).all()


REFUSED = {
    "schedule": (DENSE, {"tile_scheduler_metadata": None}, TypeError, "tile_scheduler_metadata"),
    "splits": (DENSE, {"num_splits": LENS}, ValueError, "num_splits"),
    "head dim": (DENSE, {"head_dim_v": 576}, ValueError, "head_dim_v 576"),
    "table": (DENSE, {"block_table": None}, TypeError, "block_table is None"),
    "lengths": (DENSE, {"cache_seqlens": None}, TypeError, "cache_seqlens is None"),
    "columns": (DENSE, {"q": Q512}, ValueError, "512 columns: 576"),
    "fp16": (DENSE, {"q": Q.half()}, NotImplementedError, "float16 of q"),
    "said fp8": (DENSE, {"is_fp8_kvcache": True}, ValueError, "is_fp8_kvcache=True"),
    "said bf16": (SPARSE, {"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache=False"),
    "rank": (DENSE, {"q": Q[0]}, ValueError, "[B, T, H, columns]"),
    "descale_q": (DENSE, {"descale_q": LENS}, NotImplementedError, "descale_q"),
    "descale_k": (SPARSE, {"descale_k": LENS}, ValueError, "descale_k"),
    "causal": (SPARSE, {"causal": True}, ValueError, "causal=True with indices"),
    "topk_length": (DENSE, {"topk_length": LENS}, ValueError, "topk_length belongs to indices"),
    "extra": (DENSE, {"extra_k_cache": KV}, ValueError, "extra_k_cache belongs to indices"),
    "alone": (SPARSE, {"extra_indices_in_kvcache": CHOSEN}, TypeError, "belong to extra"),
    "missing": (SPARSE, {"extra_k_cache": RECORDS_584}, TypeError, "needs extra_indices"),
    "format of bf16": (
        SPARSE, {"k_cache": KV, "q": Q, "kv_format": "V32"}, ValueError, "kv_format",
    ),
    "format": (SPARSE, {"kv_format": "V41"}, NotImplementedError, "kv_format 'V41'"),
    "no rope": (
        SPARSE, {"k_cache": RECORDS_584[..., :528].contiguous(), "kv_format": "V32_NO_ROPE"},
        NotImplementedError, "V32_NO_ROPE",
    ),
    "bytes": (
        SPARSE, {"k_cache": RECORDS_584[..., :580].contiguous()}, NotImplementedError, "580 bytes",
    ),
    "rows apart": (SPARSE, {"k_cache": RECORDS_584[..., :528]}, ValueError, "contiguous"),
    "heads": (SPARSE, {"k_cache": RECORDS_584.expand(3, 16, 2, 584)}, ValueError, "2 heads"),
    "length": (SPARSE, {"topk_length": LENS}, ValueError, "counts"),
    "sink": (SPARSE, {"attn_sink": torch.full((4,), math.inf)}, ValueError, "below +inf"),
    "d_v": (PREFILL, {"d_v": 64}, ValueError, "d_v 64"),
    "heads of kv": (PREFILL, {"kv": KV.view(24, 2, 576)}, ValueError, "kv has 2 heads"),
    "heads of indices": (PREFILL, {"indices": CHOSEN.expand(2, 2, 8)}, ValueError, "2 heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name):
    given, change, kind, message = REFUSED[name]
    function = flash_mla_sparse_fwd if "kv" in given else flash_mla_with_kvcache
    with pytest.raises(kind) as caught:
        function(**given | change)
    assert message in str(caught.value)


def test_parameters_stand_where_flashmla_has_them():
    """Calls give these by position; sgl-flash-mla 1.0.0 appends the last five."""
    assert " ".join(inspect.signature(flash_mla_with_kvcache).parameters) == (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
        "softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache "
        "extra_indices_in_kvcache topk_length extra_topk_length enable_batch_invariant use_legacy "
        "kv_format descale_q descale_k"
    )
    assert " ".join(inspect.signature(flash_mla_sparse_fwd).parameters) == (
        "q kv indices sm_scale d_v attn_sink topk_length use_legacy return_log2_lse"
    )
