"""What attention to latent keys refuses before anything compiles, and what it chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelkit.call.launch import Target
from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.plan_names import plan_of, warps_of
from kernelkit.plan import hw
from kvcache.layouts.records import FP8_584, INDEXER_FP8
from kvcache.layouts.rows import Rows
from mla import decode, decode_plan, sparse_decode, sparse_prefill
from mla.attention import choose
from mla.attention.api import sparse_fields
from mla.attention.choose import (
    UMMA,
    WARP,
    WGMMA,
    Load,
    Split,
    Tile,
    decision_for,
    split,
    tile_of,
)
from mla.attention.codec import RECORDS, pack
from mla.attention.config import MAX_CLUSTER, Keys, LatentConfig
from mla.attention.formats import FORMS
from mla.attention.launch import DECODE, SPARSE, check_config, prepare
from mla.attention.portable.plan import PortablePlan
from mla.attention.warm import kernels_for

BF16, INT = torch.bfloat16, torch.int32
Q, KV = torch.zeros(2, 1, 4, 576, dtype=BF16), torch.zeros(3, 16, 576, dtype=BF16)
TABLE = torch.tensor([[0, 1], [2, 0]], dtype=INT)
LENS = torch.tensor([20, 5], dtype=INT)
PAGED = {"page_table": TABLE, "kv_lens": LENS}


def moved(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same numbers at an address `elements` further on."""
    flat = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)[elements:]
    return flat.view(tensor.shape).copy_(tensor)


DENSE = {
    "no table": ((Q, KV), {}, TypeError, "needs page_table="),
    "dtype of q": ((Q.half(), KV), PAGED, NotImplementedError, "float16"),
    "columns": ((Q[..., :512].contiguous(), KV), PAGED, ValueError, "512 columns: 576"),
    "rank": ((Q[0, 0], KV), PAGED, ValueError, "[B, T, H, 576]"),
    "heads": ((torch.zeros(2, 129, 576, dtype=BF16), KV), PAGED, ValueError, "129 heads"),
    "tokens": ((torch.zeros(2, 65, 1, 576, dtype=BF16), KV), PAGED, ValueError, "65 query tokens"),
    "address of q": ((moved(Q), KV), PAGED, ValueError, "multiple of 16"),
    "dtype of kv": ((Q, KV.half()), PAGED, NotImplementedError, "float16"),
    "columns of kv": ((Q, KV[..., :512].contiguous()), PAGED, ValueError, "kv has 512"),
    "heads of kv": ((Q, KV[:, :, None].expand(3, 16, 2, 576)), PAGED, ValueError, "2 heads"),
    "page size": ((Q, torch.zeros(1, 257, 576, dtype=BF16)), PAGED, ValueError, "257 rows: from 1"),
    "table": ((Q, KV), PAGED | {"page_table": TABLE.long()}, ValueError, "page_table.int()"),
    "batch": ((Q, KV), PAGED | {"page_table": TABLE[:1]}, ValueError, "(2, any)"),
    "length": ((Q, KV), PAGED | {"kv_lens": LENS + 13}, ValueError, "kv_lens 33 of entry 0"),
    "bound": ((Q, KV), PAGED | {"max_kv_len": 19}, ValueError, "max_kv_len = 19"),
    "no bound": ((Q, KV), PAGED | {"max_kv_len": 33}, ValueError, "max_kv_len 33: from 0 to 32"),
    "page": ((Q, KV), PAGED | {"page_table": TABLE + 1}, ValueError, "pages 0 to 2"),
    "scale": ((Q, KV), PAGED | {"scale": 0.0}, ValueError, "scale 0.0"),
    "kv_scale": ((Q, KV), PAGED | {"kv_scale": torch.ones(1)}, ValueError, "only e4m3 is scaled"),
    "zero kv_scale": (
        (Q, KV.to(torch.float8_e4m3fn)), PAGED | {"kv_scale": torch.zeros(1)}, ValueError, "scale",
    ),
    "sinks": ((Q, KV), PAGED | {"sinks": torch.zeros(5)}, ValueError, "expected torch.float32 (4)"),
    "infinite sink": (
        (Q, KV), PAGED | {"sinks": torch.full((4,), torch.inf)}, ValueError, "inf of head 0",
    ),
    "out": ((Q, KV), PAGED | {"out": Q}, ValueError, "(2, 1, 4, 512)"),
    "softcap": ((Q, KV), PAGED | {"softcap": 3.0}, TypeError, "has no softcap"),
    "parts": ((Q, KV), PAGED | {"parts": 65}, ValueError, "65 parts"),
    "cluster": ((Q, KV), PAGED | {"cluster": 17}, ValueError, "cluster 17"),
    "kernel": ((Q, KV), PAGED | {"kernel": "fast"}, ValueError, "'auto', 'warp', 'wgmma'"),
    "no kernel": (
        (Q, KV), PAGED | {"kernel": "wgmma", "arch": "sm_89"}, NotImplementedError, "'wgmma' on",
    ),
    "cluster of warps": (
        (Q, KV), PAGED | {"cluster": 2, "arch": "sm_89"}, NotImplementedError, "use `parts`",
    ),
    "e4m3": (
        (Q, KV.to(torch.float8_e4m3fn)), PAGED | {"arch": "sm_86"}, NotImplementedError, "8.9",
    ),
    "pdl": ((Q, KV), PAGED | {"pdl": True, "arch": "sm_86"}, NotImplementedError, "pdl=True"),
    "return_lse": ((Q, KV), PAGED | {"return_lse": 1}, TypeError, "return_lse is 1"),
    "gradients": ((Q.clone().requires_grad_(), KV), PAGED, NotImplementedError, "requires grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_decode_refuses(name, no_compile):
    given, options, error, words = DENSE[name]
    with pytest.raises(error) as caught:
        decode(*given, **options)
    assert words in str(caught.value)
    if {"out", "return_lse"} & options.keys():
        words = "does not accept"
        error = TypeError
    with pytest.raises(error) as caught:
        decode_plan(*given, **options)
    assert words in str(caught.value)


P, R584 = torch.zeros(3, 4, 512, dtype=BF16), pack(torch.zeros(2, 16, 512, dtype=BF16), "fp8_584")
IND = torch.zeros(3, 8, dtype=torch.int64)
ANGLES = torch.zeros(5, 32)
ROPE = {"rope": (ANGLES, ANGLES), "positions": torch.zeros(3, dtype=torch.int64)}
LISTED = {
    "indices": ((P, R584, IND.float()), {}, ValueError, "indices is torch.float32"),
    "shape of indices": ((P, R584, IND[:2]), {}, ValueError, "(3, any)"),
    "no indices": ((P, R584, None), {}, TypeError, "indices is NoneType"),
    "counts": ((P, R584, IND), {"counts": torch.zeros(3)}, ValueError, "counts is torch.float32"),
    "count": (
        (P, R584, IND), {"counts": torch.tensor([8, 9, 0], dtype=INT)}, ValueError, "from 0 to 9",
    ),
    "columns": ((P, KV, IND), {}, ValueError, "q has 512 columns, entries of rows have 576"),
    "record": (
        (P, Rows(R584.pool, 0, 2048, 16, INDEXER_FP8), IND), {}, NotImplementedError,
        "indexer_fp8 of 132 bytes",
    ),
    "places": ((P, replace(R584, scale_offset=9720), IND), {}, ValueError, "scales of fp8_584"),
    "unit of scales": ((P, replace(R584, scale_offset=9217), IND), {}, ValueError, "multiple of 8"),
    "kind of rows": ((P, R584.pool.numpy(), IND), {}, TypeError, "expected kvcache.Rows"),
    "bytes": ((P, R584.pool, IND), {}, NotImplementedError, "torch.uint8"),
    "extra alone": ((P, R584, IND), {"extra_indices": IND}, TypeError, "belong to extra"),
    "extra without": ((P, R584, IND), {"extra": R584}, TypeError, "needs extra_indices"),
    "extra columns": (
        (P, R584, IND), {"extra": KV, "extra_indices": IND}, ValueError, "extra_rows have 576",
    ),
    "rope": ((P, R584, IND), ROPE | {"positions": None}, ValueError, "both or neither"),
    "rope of one": ((P, R584, IND), {"rope": ANGLES}, TypeError, "two tables"),
    "angles": ((P, R584, IND), ROPE | {"rope": (ANGLES[:, :16],) * 2}, ValueError, "cos"),
    "position": (
        (P, R584, IND), ROPE | {"positions": torch.tensor([0, 5, 1])}, ValueError, "0 to 4",
    ),
    "topk_length": ((P, R584, IND), {"topk_length": IND}, TypeError, "it is called counts here"),
    "e4m3": ((P, R584, IND), {"arch": "sm_80"}, NotImplementedError, "fp8_584 on sm_80"),
}  # fmt: skip


@pytest.mark.parametrize("function", [sparse_decode, sparse_prefill])
@pytest.mark.parametrize("name", LISTED)
def test_sparse_attention_refuses(name, function, no_compile):
    given, options, error, words = LISTED[name]
    with pytest.raises(error) as caught:
        function(*given, **options)
    assert words in str(caught.value)


def test_out_of_a_batch_lies_evenly(no_compile):
    q, indices = torch.zeros(2, 3, 4, 512, dtype=BF16), torch.zeros(2, 3, 8, dtype=torch.int64)
    out = torch.zeros(2, 4, 4, 512, dtype=BF16)[:, :3]
    with pytest.raises(ValueError, match="one distance"):
        sparse_decode(q, R584, indices, out=out)


def test_any_number_may_be_no_entry(no_compile):
    indices = torch.tensor([[-1, -9, 1 << 40], [5, 1 << 31, -(1 << 31)], [0, 1, 2]])
    with pytest.raises(AssertionError, match="compiled"):
        sparse_decode(P, R584, indices)


def test_without_keys_nothing_is_launched(no_compile):
    o, lse = sparse_decode(P, P[:0], IND, return_lse=True)
    assert not o.any()
    assert (lse == -torch.inf).all()
    o, lse = decode(Q, KV, page_table=TABLE[:, :0], return_lse=True)
    assert not o.any()
    assert lse.shape == (2, 4, 1)
    assert (lse == -torch.inf).all()
    assert decode(Q[:0], KV, page_table=TABLE[:0]).shape == (0, 1, 4, 512)


# ---- choices


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("record", [name for name in FORMS if name != "e4m3_576"])
def test_every_record_fits(arch, record):
    """Both sizes of a CTA, alone and with a second cache, fit into shared memory."""
    wide = FORMS[record].columns
    others = [name for name in FORMS if FORMS[name].columns == wide]
    for heads in (1, 16, 17, 128):
        for other in (None, *others):
            extra = None if other is None else Keys(other, 16, listed=True)
            config = LatentConfig(heads=heads, keys=Keys(record, 64, listed=True), extra=extra)
            plan = PortablePlan(config, arch)
            assert plan.smem.bytes <= hw.smem_bytes_per_cta(arch)
            assert plan.rows == (16 if heads <= 16 else 32)


HOPPER = tile_of(WGMMA, LatentConfig(heads=64))
BLACKWELL = tile_of(UMMA, LatentConfig(heads=128))
AMPERE = Tile(32, 32, 1)


@pytest.mark.parametrize("tile", [HOPPER, BLACKWELL, AMPERE])
@pytest.mark.parametrize("entries", [1, 2, 7, 33, 132, 1000])
@pytest.mark.parametrize("keys", [0, 1, 65, 640, 4096, 65536])
def test_a_grid_is_about_one_wave(tile, entries, keys):
    for row_tiles in (1, 2, 4):
        tile = replace(tile, count=row_tiles)
        load = Load(entries, keys, 132)
        found = split(tile, load)
        cluster, parts = found.cluster, found.parts
        units, tiles = entries * row_tiles, max(-(-keys // tile.keys), 1)
        assert found.whole or units * cluster * parts * found.slices * tile.pair <= 132
        assert cluster * parts <= tiles
        assert choose.fits(tile, cluster)
        assert cluster == 1 or tile.costs is not None
        assert cluster * tile.pair <= MAX_CLUSTER
        fixed = replace(load, batch_invariant=True)
        alone = split(tile, replace(fixed, entries=1))
        assert replace(split(tile, fixed), slices=1) == replace(alone, slices=1)
        assert split(tile, replace(load, many=True)).whole


def test_wishes_are_kept():
    load, two = Load(4, 4096, 132, cluster=3, parts=5), replace(HOPPER, count=2)
    assert split(two, load) == Split(3, 5)
    assert split(replace(AMPERE, count=2), replace(load, cluster=1)) == Split(1, 5)
    assert split(two, replace(load, cluster=0)) == Split(3, 5)  # 132 SMs for 8 units of 5 parts


def test_clusters_run_at_once():
    """A GPU that runs few wide clusters gets narrower ones."""
    load = Load(8, 65536, 132)
    assert split(HOPPER, load).cluster == 16
    assert split(HOPPER, load, limit=lambda width: 64 // width).cluster == 8


def test_a_workspace_has_a_place_for_every_sum():
    decision = decision_for(LatentConfig(heads=128), WARP, Load(2, 4096, 108))
    assert (decision.parts, decision.row_tiles, decision.grid) == (13, 4, 2 * 4 * 13)
    assert decision.workspace == (8, 13, PortablePlan(decision.config).partial_words)
    for kernel, sms in ((WGMMA, 132), (UMMA, 148)):
        wide = decision_for(LatentConfig(heads=128), kernel, Load(1, 1 << 16, sms))
        units, parts, words = wide.workspace
        assert parts == wide.parts > 1
        assert units * words >= 128 * 514


def test_a_plan_names_what_it_launches():
    fields = {"q": Q, "kv": KV, "page_table": TABLE, "arch": "sm_89", "parts": 2}
    target, decision = prepare(DECODE.arguments(fields))
    assert target == Target("emulate", "sm_89")
    assert (decision.parts, decision.config.parts, decision.grid) == (2, True, 4)
    check_config(decision.config, "sm_89", WARP)
    assert RECORDS[FP8_584.name] is FP8_584


@pytest.mark.parametrize(
    ("kernel", "arch"), [("warp", "sm_89"), ("wgmma", "sm_90a"), ("auto", "sm_100a")]
)
def test_a_warm_up_has_what_steps_choose(kernel, arch):
    """On the device meta, for the decisions of steps of other sizes, dense and sparse."""
    meta = {"arch": arch, "kernel": kernel}
    q, kv = torch.empty(4, 2, 128, 576, device="meta", dtype=BF16), KV.to("meta")
    dense = {"q": q, "kv": kv, "page_table": torch.empty(4, 9, device="meta", dtype=INT)} | meta
    keys = kernels_for(DECODE.arguments(dense), range(1, 40), range(1, 20_000, 97))
    assert len(keys) < 64  # for any GPU; for one H200 half as many
    for batch, pages in ((1, 1), (3, 700), (33, 1000), (9, 64)):
        table = torch.empty(batch, pages, device="meta", dtype=INT)
        step = dense | {"q": q[:1].expand(batch, 2, 128, 576).contiguous(), "page_table": table}
        _, decision = prepare(DECODE.arguments(step))
        assert decision.config in [key.config for key in keys]
    rows = replace(R584, pool=R584.pool.to("meta"))
    indices = torch.empty(5, 640, device="meta", dtype=torch.int64)
    q = torch.empty(5, 64, 512, device="meta", dtype=BF16)
    fields = sparse_fields(q, rows, indices, meta)
    keys = kernels_for(SPARSE.arguments(fields), range(1, 600), [640])
    for tokens in (1, 2, 13, 40, 599):
        q = torch.empty(tokens, 64, 512, device="meta", dtype=BF16)
        indices = torch.empty(tokens, 640, device="meta", dtype=torch.int64)
        step = SPARSE.arguments(sparse_fields(q, rows, indices, meta))
        assert prepare(step)[1].config in [key.config for key in keys]


@pytest.mark.parametrize(("kernel", "arch"), [(WGMMA, "sm_90a"), (WARP, "sm_120a")])
def test_reports_name_the_roles(kernel, arch):
    config = LatentConfig(keys=Keys("fp8_584", 64, listed=True), pdl=True)
    plan, roles = plan_of(KernelKey(kernel, config, arch))
    assert roles is plan.roles
    named = {*warps_of(roles).values()}
    assert named == {"math", "gather", "gather_right"} or kernel == WARP
