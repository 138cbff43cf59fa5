"""The kernels whose mutants are judged, by family, each with a problem that uses all its edges:
shares of several tiles, so that rings come round, maxima that move, boundary tiles, NaN past the
lengths."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from fmha.api import attention
from gqa_lowlatency import DecodeConfig, decode, merge
from kvcache.books.slot_pool import Sizes
from kvcache.layouts.latent import LATENTS, ROPE
from kvcache.layouts.models import CSA, HCA, Options, deepseek_v4
from kvcache.layouts.records import BF16_512, FP8_584, INDEXER_FP4, INDEXER_FP8, Record
from kvcache.layouts.rows import Rows
from kvcache.memory.cache import Cache
from kvcache.movement.api import append_rows, append_swa, checksum, copy_slots, gather
from lab.mutation.few_rows import few_rows
from lab.mutation.latents import LATENT
from lab.mutation.subject import Results, Subject
from lab.problems import mixed_gemm
from lab.problems.attention import Case
from lab.problems.grouped_gemm import Case as Product
from mla.compressor.api import Compressor, Tables, compress
from mla.indexer.api import IndexQuery, prepare_query, scores, select
from mla.indexer.quantised import quantised
from mla.prepare.api import Compression, IndexQueries, WindowKeys, prepare_attention
from moe.api import grouped_gemm
from moe.arguments import Router, RouterLinear
from moe.mixed.launch import write_rows
from moe.quantiser.api import quantise
from moe.quantized import Quantized
from moe.routing import combine, permutation, route, route_tokens

# CTAs, or pairs: each computes several blocks, of five tiles, which no ring divides: else the wait
# for Q would stand in for others.
PLACES = 2
MOVING = {"causal": True, "amplitude": 4.0}  # maxima move from tile to tile
TAIL = {"kv_lens": (550,), **MOVING}
HOPPER = {"batch": 2, "kv_lens": (270, 20), "causal": True}  # many tiles, and one
SHARED = {"tile_n": 64, "k_stages": 0, "v_stages": 0}  # the only ones that fit


def _problem(
    queries: int, keys: int, arch: str = "sm_100a", places: int = PLACES, **options: Any
) -> Subject:
    """places: CTAs, or pairs, that run at the same time."""
    case = Case(queries, keys, **options)
    inputs = functools.cache(case.inputs)  # not yet

    def launched() -> Results:
        with (
            mock.patch("fmha.launch.sms_of", return_value=places),
            mock.patch("fmha.launch.clusters_at_once", return_value=places),
        ):
            return attention(*inputs(), arch=arch, **case.arguments())

    return Subject(launched)


def _dependent(arch: str) -> Results:
    """A launch that reads what the one before it writes."""
    case = Case(130, 130, schedule="base", pdl=True)
    before, _ = attention(*case.inputs(), arch=arch, **case.arguments())
    return attention(before, before, before, arch=arch, **case.arguments())


def _hopper(queries: int, keys: int, **options: Any) -> Subject:
    """Use the narrowest key tiles, which have the fewest instructions, rings short enough to
    wrap, and enough blocks per CTA that a wrong count of arrivals shows."""
    short = {"tile_n": 32, "k_stages": 2, "v_stages": 2, "amplitude": 4.0, "places": 1}
    return _problem(queries, keys, "sm_90a", **{**short, **options})


ATTENTION: dict[str, Subject] = {
    "64 base": _problem(130, 600, heads=(3, 1), schedule="base", **TAIL),
    "64 pingpong": _problem(260, 600, heads=(3, 1), schedule="pingpong", **TAIL),
    "128 pingpong": _problem(260, 600, heads=(2, 1), dims=(128, 128), schedule="pingpong", **TAIL),
    "256 pair": _problem(260, 600, heads=(2, 1), dims=(256, 256), **TAIL),
    "512 pair": _problem(130, 600, heads=(2, 1), dims=(512, 512), **TAIL),
    # No lengths: the fence of zeroed V rows would stand in for that of the rows of Q that are left
    # over. A window, for more than one masked tile, and a walk that does not begin at key 0.
    "64 shared tiles": _problem(
        90, 600, heads=(6, 2), window=(300, None), pack_heads=True, schedule="base", **MOVING
    ),
    "64 dependent launch": Subject(lambda: _dependent("sm_100a"), "depend"),
    # Three query tiles that take turns; O has its own place.
    "sm_90a 64 turns": _hopper(200, 300, heads=(3, 1), schedule="pingpong", **HOPPER),
    # Without turns; the first query tile skips more key tiles than a ring has stages.
    "sm_90a 128 base": _hopper(
        200,
        300,
        heads=(2, 1),
        dims=(128, 128),
        schedule="base",
        tile_m=192,
        pack_heads=False,
        **HOPPER,
    ),
    "sm_90a 128 one warpgroup": _hopper(
        130, 300, heads=(2, 1), dims=(128, 128), tile_m=64, **HOPPER
    ),
    "sm_90a 128 turns, multicast": _hopper(
        260, 300, heads=(3, 1), dims=(128, 128), ctas=2, **HOPPER
    ),
    # O takes the place of Q.
    "sm_90a 256 base": _hopper(140, 300, heads=(3, 1), dims=(256, 256), **HOPPER),
    "sm_90a 256 multicast": _hopper(260, 300, heads=(3, 1), dims=(256, 256), ctas=2, **HOPPER),
    # Two warpgroups share a query tile, and P.
    "sm_90a 512": _hopper(130, 300, heads=(2, 1), dims=(512, 512), **SHARED, **HOPPER),
    "sm_90a 512 latent": _hopper(
        130, 300, heads=(2, 1), dims=(512, 512), k_is_v=True, **SHARED, **HOPPER
    ),
    "sm_90a 512 multicast": _hopper(
        130, 300, heads=(3, 1), dims=(512, 512), ctas=2, **SHARED, **HOPPER
    ),
    # V is turned from one ring to another, Q becomes two terms.
    "sm_90a 64 e4m3": _hopper(
        140, 300, heads=(3, 1), **{**HOPPER, "tile_n": 64, "kv_dtype": "e4m3"}
    ),
    "sm_90a 64 pages": _hopper(
        0,
        300,
        heads=(6, 2),
        batch=3,
        q_lens=(90, 0, 40),
        page_size=16,
        kv_lens=(270, 5, 150),
        causal=True,
        window=(120, None),
        sink_tokens=4,
        pack_heads=True,
    ),
    "sm_90a 64 dependent launch": Subject(lambda: _dependent("sm_90a"), "depend"),
}


LENGTHS, CACHED, HEAD_DIM, Q_HEADS = (700, 0, 130), 768, 64, 4


def _cache(
    page_size: int, dtype: torch.dtype, head_dim: int = HEAD_DIM
) -> tuple[torch.Tensor, ...]:
    """K and V; NaN past the lengths, in pages of so many rows, if any, in reverse."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, len(LENGTHS), CACHED, 1, head_dim, generator=generator).to(dtype)
    for entry, length in enumerate(LENGTHS):
        kv[:, entry, length:] = torch.nan
    if page_size:
        kv = kv.reshape(2, -1, page_size, 1, head_dim).flip(1)
    return kv.unbind()


def _decode(
    arch: str, *, page_size: int = 0, fp8: bool = False, head_dim: int = HEAD_DIM, **options: Any
) -> Subject:
    """options: of `decode`."""
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16

    def launched() -> Results:
        generator = torch.Generator().manual_seed(1)
        q = 4 * torch.randn(len(LENGTHS), 2, Q_HEADS, head_dim, generator=generator).bfloat16()
        given = {"kv_lens": torch.tensor(LENGTHS).int(), "return_lse": True, **options}
        if page_size:
            pages = len(LENGTHS) * CACHED // page_size
            given["page_table"] = torch.arange(pages).flip(0).int().view(len(LENGTHS), -1)
        return decode(q, *_cache(page_size, dtype, head_dim), arch=arch, **given)

    return Subject(launched)


def _dependent_step(arch: str, ready: bool = False) -> Results:
    """Launches that read what the one before has written, as queries and, unless keys are `ready`,
    as keys, and write over it."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(len(LENGTHS), 2, Q_HEADS, HEAD_DIM, generator=generator).bfloat16()
    given = {
        "pdl": True, "kv_ready_before_pdl": ready, "return_lse": True, "arch": arch,
        "config": DecodeConfig(cluster=2),
    }  # fmt: skip
    first, _ = decode(q, *_cache(0, q.dtype), kv_lens=torch.tensor(LENGTHS).int(), **given)
    keys = (q if ready else first).reshape(len(LENGTHS), -1, 1, HEAD_DIM)
    second, _ = decode(first, keys, keys, kv_lens=torch.tensor([8, 0, 5]).int(), **given)
    again, _ = decode(q, keys, keys, kv_lens=torch.tensor([8, 0, 1]).int(), out=second, **given)
    return (again,)


def _of(arch: str) -> dict[str, Subject]:
    """Return decode subjects with rings short enough to wrap."""
    tuning = {"stages": 4, "warps": 4} if arch == "sm_90a" else {"stages": 4}
    two, one = DecodeConfig(cluster=2, **tuning), DecodeConfig(cluster=1, **tuning)
    return {
        f"decode {arch}": _decode(arch, config=two),
        f"decode {arch} paged fp8": _decode(
            arch, page_size=32, fp8=True, window=400, sink_tokens=4, softcap=15.0, config=one
        ),
        # Two warps exchange their scores; four pieces of V are in a short ring.
        f"decode {arch} 512": _decode(
            arch, head_dim=512, fp8=True, window=400, sink_tokens=4, config=one
        ),
        f"decode {arch} parts": _decode(arch, sinks=torch.zeros(Q_HEADS), parts=2, config=one),
        f"decode {arch} dependent launch": Subject(lambda: _dependent_step(arch), "depend"),
        f"decode {arch} dependent launch, keys ready": Subject(
            lambda: _dependent_step(arch, ready=True), "depend"
        ),
    }


def _merge(raw: bool) -> Results:
    """Six parts, so that threads share a row; one of them has no keys."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for index in range(6):
        o = torch.randn(2, 1, Q_HEADS, HEAD_DIM, generator=generator).bfloat16()
        lse = torch.randn(2, Q_HEADS, 1, generator=generator)
        lse[0] = -torch.inf if index == 2 else lse[0]
        parts.append((o, lse, lse - 1.0) if raw else (o, lse))
    return merge(parts, sinks=torch.zeros(Q_HEADS), arch="sm_90a")


DECODE: dict[str, Subject] = {
    **_of("sm_100a"),
    **_of("sm_90a"),
    "merge": Subject(lambda: _merge(False)),
    "merge raw": Subject(lambda: _merge(True)),
}


CTAS = 2  # of the grouped GEMM, or a pair


def product(case: Product) -> Subject:
    """A grouped GEMM, all of its results as bytes or numbers."""
    inputs = functools.cache(case.inputs)  # not yet

    def launched() -> Results:
        (x, w), given = inputs(), case.options()
        with mock.patch("moe.launch.sms_of", return_value=CTAS):
            result = grouped_gemm(x, w, case.offsets, **given)
        tensors = _bytes(result) if isinstance(result, Quantized) else (result,)
        return tensors if given["amax"] is None else (*tensors, given["amax"])

    return Subject(launched)


def _dependent_product() -> Results:
    """The launch before writes the offsets."""
    case = Product((9, 0, 5), 320, 64, pdl=True)
    experts = torch.arange(3).repeat_interleave(torch.tensor(case.counts))
    offsets = permutation(experts[:, None].int(), 3, arch="sm_100a").offsets
    return (grouped_gemm(*case.inputs(), offsets, **case.options()),)


def _mixed(stages: int, case: mixed_gemm.Case) -> Subject:
    """Run in one CTA or cluster, with a ring short enough to wrap in every tile."""
    inputs = functools.cache(case.inputs)  # not yet

    def launched() -> Results:
        with (
            mock.patch("moe.mixed.launch.sms_of", return_value=1),
            mock.patch(f"moe.mixed.sm{case.arch[3:-1]}.plan.MAX_STAGES", stages),
        ):
            return (mixed_gemm.call(case, inputs()),)

    return Subject(launched)


def _dependent_mixed() -> Results:
    """The launch before writes the offsets and the rows."""
    case = mixed_gemm.Case((9, 0, 5), 320, 64, slots=1, tile_rows=8, teams=1, pdl=True)
    experts = torch.arange(3).repeat_interleave(torch.tensor(case.counts))
    given = case.inputs()
    sorted_by = permutation(experts[:, None].int(), 3, arch="sm_90a")
    x = given.x[1:-1].nan_to_num().contiguous()
    offsets, rows = sorted_by.offsets, sorted_by.slot_of_row
    return (mixed_gemm.call(case, given, x=x, offsets=offsets, rows=rows),)


def _beside() -> Results:
    """Both products of three experts, each in two launches that run beside each other."""
    first = mixed_gemm.Case((9, 0, 5), 96, 64, teams=None, pdl=True, split=1)
    second = replace(first, k=64, columns=96, form=None)
    given = first.inputs()
    offsets = given.offsets
    with mock.patch("moe.mixed.launch.choose_tile_rows", return_value=(8, 16)):
        h = mixed_gemm.call(first, given)
        return h, mixed_gemm.call(second, second.inputs(), x=h, offsets=offsets)


def _rows() -> Results:
    """Gather rows unchanged and to e4m3 for a range of experts; some slots have no row."""
    x, ids = _normal(9, 320).bfloat16(), _ids(9, 2, 5)
    sorted_by = permutation(ids, 5, expert_range=(0, 3), arch="sm_90a")
    count = int(sorted_by.offsets[-1])
    results = []
    for out in ("bf16", "e4m3"):
        given = {"row_of_slot": sorted_by.row_of_slot.view(ids.shape), "rows": 18}
        rows, scale = write_rows(x, out, **given, backend="auto", arch="sm_90a")
        results += [rows[:count].float()] + ([] if scale is None else [scale[:count]])
    return tuple(results)


def _bytes(result: Quantized) -> Results:
    return result.data.view(torch.uint8), result.scales.view(torch.uint8)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _ids(tokens: int, choices: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, experts, (tokens, choices), generator=generator).int()


def _permutation(tokens: int) -> Results:
    """More slots than there are threads: warps take turns; of two CTAs, rounds of turns."""
    with mock.patch("moe.routing.config.MAX_CHUNKS", 2):
        found = permutation(_ids(tokens, 4, 40), 40, arch="sm_100a")
    return found.offsets, found.slot_of_row, found.row_of_slot


def _route(scoring: str, **options: Any) -> Results:
    """The first token has the same logit for all experts."""
    logits = _normal(9, 256)
    logits[0] = 1.0
    return route(logits, 8, scoring=scoring, arch="sm_90a", **options)


def _route_tokens(experts: int, hidden: int) -> Results:
    """The launch before writes the tokens, the one behind reads what this one writes."""
    rows = torch.arange(9).int()
    x = combine(_normal(9, hidden).bfloat16(), torch.ones(9, 1), rows, arch="sm_90a")
    weight, bias = _normal(experts + 1, hidden).bfloat16(), _normal(experts).bfloat16()
    layer = RouterLinear(weight[1:] / 16, bias, ready=True)
    ids, weights = route_tokens(x, layer, Router(4, bias=_normal(experts)), arch="sm_90a")
    y = combine(_normal(36, 64).bfloat16(), weights, torch.arange(36).int(), arch="sm_90a")
    return x, ids, weights, y


def _quantise(fmt: str, **options: Any) -> Results:
    offsets = torch.tensor([0, 65, 65, 130]).int()
    given = {"rows": _ids(130, 1, 70)[:, 0], "offsets": offsets, "arch": "sm_100a"}
    return _bytes(quantise(_normal(70, 320).bfloat16(), fmt, **given, **options))


def _combine() -> Results:
    order = torch.randperm(10 * 4, generator=torch.Generator().manual_seed(0))
    rows, weights = order.view(10, 4).int(), _normal(10, 4)
    return (combine(_normal(40, 512).bfloat16(), weights, rows, arch="sm_90a"),)


QUANTISED = {"out": "nvfp4", "amax": True}
BIASED = {"tile_rows": 128, "out": "nvfp4"}  # and columns behind the last one
EXPERTS: dict[str, Subject] = {
    "moe 128": product(Product((130, 0, 129, 5), 320, 192, tile_rows=128)),
    "moe 128 quantised": product(Product((130, 0, 129, 5), 320, 192, tile_rows=128, **QUANTISED)),
    "moe 128 x 256": product(Product((130, 0, 129, 5), 320, 384, tile_rows=128, tile_n=256)),
    "moe 128 mxfp8": product(
        Product((130, 0, 129, 5), 320, 192, fmt="mxfp8", tile_rows=128, out="mxfp8")
    ),
    "moe 128 mxfp4 plain": product(
        Product((130, 0, 129, 5), 320, 192, fmt="mxfp4", form=None, tile_rows=128)
    ),
    "moe pair": product(Product((260, 0, 129, 5), 320, 256, tile_rows=256, **QUANTISED)),
    "moe pair x 256": product(Product((260, 0, 129, 5), 320, 512, tile_rows=256, tile_n=256)),
    "moe swapped": product(Product((65, 0, 64, 5), 320, 192, tile_rows=64, **QUANTISED)),
    "moe bias": product(Product((130, 0, 129, 5), 320, 160, granularity=8, bias=True, **BIASED)),
    "moe swapped bias": product(
        Product((65, 0, 64, 5), 320, 136, form=None, bias=True, tile_rows=64)
    ),
    "moe mxfp8 by mxfp4": product(
        Product((65, 0, 64), 2880, 96, "mxfp4", x_fmt="mxfp8", tile_rows=128)
    ),
    "moe dependent launch": Subject(_dependent_product, "depend"),
    # Narrow tiles have fewest instructions; the last step of K has one unit.
    "moe mixed": _mixed(
        3,
        mixed_gemm.Case((9, 0, 17), 704, 136, form=None, bias=True, room=3, tile_rows=8, teams=2),
    ),
    "moe mixed gathered": _mixed(
        4, mixed_gemm.Case((9, 0, 17), 704, 72, "nvfp4", slots=2, tile_rows=8, teams=2)
    ),
    "moe mixed, a stage in flight": _mixed(
        3,
        mixed_gemm.Case(
            (34, 0, 5), 1024, 40, form=(1.702, 1.0, 7.0), slots=2, tile_rows=64, teams=3, parts=1
        ),
    ),
    "moe mixed, one step": _mixed(
        5, mixed_gemm.Case((9, 9, 9, 9, 9), 96, 24, slots=2, tile_rows=8, teams=1)
    ),
    "moe mixed, shares of K": _mixed(
        3,
        mixed_gemm.Case(
            (9, 0, 17), 704, 136, form=None, room=3, tile_rows=8, teams=3, parts=1, split=2
        ),
    ),
    "moe mixed on Blackwell": _mixed(
        3,
        mixed_gemm.Case(
            (9, 0, 17),
            704,
            136,
            form=None,
            bias=True,
            room=3,
            tile_rows=16,
            teams=2,
            parts=1,
            arch="sm_100a",
        ),
    ),
    "moe mixed on Blackwell gathered": _mixed(
        4,
        mixed_gemm.Case(
            (34, 0, 5, 70),
            512,
            72,
            "nvfp4",
            slots=2,
            tile_rows=64,
            teams=2,
            parts=1,
            arch="sm_100a",
        ),
    ),
    "moe mixed dependent launch": Subject(_dependent_mixed, "depend"),
    "moe mixed beside each other": Subject(_beside, "depend"),
    "moe mixed rows": Subject(_rows),
    "moe few rows": Subject(few_rows),
    "moe few rows of a warp": Subject(functools.partial(few_rows, 11)),
    "moe permutation": Subject(lambda: _permutation(450)),
    "moe permutation in two": Subject(lambda: _permutation(1100)),
    "moe route softmax": Subject(lambda: _route("softmax")),
    "moe route sigmoid": Subject(lambda: _route("sigmoid", n_group=8, topk_group=4)),
    "moe route tokens": Subject(lambda: _route_tokens(32, 2880)),
    "moe route tokens, many experts": Subject(lambda: _route_tokens(160, 520)),
    "moe quantise nvfp4": Subject(lambda: _quantise("nvfp4", global_scale="tensor")),
    "moe quantise mxfp8": Subject(lambda: _quantise("mxfp8")),
    "moe combine": Subject(_combine),
}


SLOTS, ROWS, TOKENS = 5, 8, 9
# Of the indexer; one CTA comes round the ring of 8 stages and waits for each of them to be free.
HEADS, KEYS, BLOCK = 64, 17 * 128 + 90, 32
POSITIONS = 256
# Tokens in groups of two: request 0 has both groups of a warpgroup and one of the other, request 1
# one group; the ring comes round.
SHARED = (*((0, 1300 + token) for token in range(5)), (1, 1200))


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _pool(slot_bytes: int, slots: int = SLOTS) -> torch.Tensor:
    return torch.randint(0, 120, (slots, slot_bytes), dtype=torch.uint8, generator=_random())


def _rows_of(record: Record, rows: int = ROWS, slots: int = SLOTS) -> Rows:
    scales = 16 + rows * record.data_bytes
    scales += -scales % 16
    size = scales + rows * record.scale_bytes + 16
    return Rows(_pool(size + -size % 16, slots), 16, scales, rows, record)


def _angles() -> tuple[torch.Tensor, torch.Tensor]:
    inverse = 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    angles = torch.arange(POSITIONS)[:, None] * inverse
    return angles.cos(), angles.sin()


def _mapping(count: int = TOKENS) -> torch.Tensor:
    """Entries in any order, one of them none."""
    found = torch.randperm(SLOTS * ROWS, generator=_random())[:count]
    found[3] = -1
    return found


def _append(record: Record) -> Results:
    rows, kv = _rows_of(record), torch.randn(TOKENS, LATENTS[record.name].elements).bfloat16()
    append_swa(rows, kv, torch.arange(TOKENS), _mapping(), *_angles(), arch="sm_90a")
    return (rows.pool,)


def _append_plain() -> Results:
    rows = _rows_of(Record("plain", 8 * 64 * 2))
    x = torch.randn(TOKENS, 8, 64, generator=_random()).bfloat16()
    append_rows((rows, x), None, _mapping(), arch="sm_90a")
    return (rows.pool,)


def _gather(record: Record) -> Results:
    out = torch.empty(TOKENS, LATENTS[record.name].elements, dtype=torch.bfloat16)
    gather(_rows_of(record), _mapping(), out, arch="sm_90a")
    return (out,)


def _copy() -> Results:
    pool = _pool(8208)
    copy_slots(pool, pool, torch.tensor([[0, 3], [1, 4]]), arch="sm_90a")
    return (pool,)


def _checksum() -> Results:
    """More pieces than CTAs, so that they take turns."""
    with mock.patch("kvcache.movement.config.CTAS", 2):
        return (checksum(_pool(12288), torch.tensor([3, 0, 1]), 16, 8240, arch="sm_90a"),)


def _queries(tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and weights."""
    q = torch.randn(tokens, HEADS, 128, generator=_random()).bfloat16()
    return q, torch.randn(tokens, HEADS, generator=_random())


def _prepare(record: str) -> Results:
    found = prepare_query(*_queries(), torch.arange(3), *_angles(), record=record, arch="sm_100a")
    return tuple(each.view(torch.uint8) for each in found)


def _scores(
    record: Record,
    arch: str,
    kernel: str = "warp",
    seen: tuple[tuple[int, int], ...] = ((0, 70), (1, 33), (1, KEYS)),
    longest: int = 1,
) -> Results:
    """seen: the request of each token, and the number of its keys."""
    q, weights = _queries(len(seen))
    data, scales = quantised(q, record)
    if record is INDEXER_FP8:  # its scale is part of the weight
        data, scales = data.view(torch.float8_e4m3fn), scales[..., :0]
    blocks = -(-KEYS // BLOCK)
    query, rows = IndexQuery(data, scales, weights), _rows_of(record, BLOCK, 2 * blocks)
    tables = torch.randperm(2 * blocks, generator=_random()).view(2, blocks).int()
    out = torch.full((len(seen), KEYS + 2), 7.0)
    owners, counts = torch.tensor(seen).int().T.contiguous()
    with mock.patch("mla.indexer.scores_launch.grid_for", return_value=(1, len(q))):
        options = {"longest": longest, "kernel": kernel, "arch": arch}
        scores(rows, query, owners, counts, tables, out, **options)
    return (out,)


def _select(k: int, candidates: int) -> Results:
    """Few different scores, so that many are equal."""
    found = torch.randint(-9, 9, (3, candidates), generator=_random()).float()
    return select(found, torch.tensor([candidates, k, 0]).int(), k, arch="sm_90a")


def _compress(
    kind: str, counts: tuple[int, ...], more: tuple[int, ...] = (5,), online: bool = False
) -> Results:
    """Steps that complete windows: one of so many tokens of each request, then `more` of all. They
    read tails, and write what they have read there."""
    layout = deepseek_v4("v4", [HCA, CSA, 0], 128, Options(record="bf16", online_hca=online))
    cache = Cache(layout, Sizes(blocks=24, states=6, checkpoints=8))
    tail = cache.tail(f"{kind}_tail", 0)
    columns = tail.tail.overlap * tail.tail.width
    ape = torch.randn(tail.tail.ratio, columns, generator=_random())
    weights = Compressor(ape, torch.ones(tail.tail.width), 1e-6)
    requests = [cache.admit(str(index), [index] * count).request
                for index, count in enumerate(counts)]  # fmt: skip
    for step_counts in (counts, *((count,) * len(counts) for count in more)):
        batch = {
            request: [index] * count
            for index, (request, count) in enumerate(zip(requests, step_counts, strict=True))
        }
        cos, sin = _angles()
        with cache.step(batch) as step:
            tables = Tables.of(step.tensors("cpu"), kind, f"{kind}_tail")
            values, ranks = torch.randn(2, len(tables.positions), columns, generator=_random())
            compress(weights, tail, cache.rows(kind, 0), values, ranks, tables, cos=cos, sin=sin,
                     longest=step.longest, arch="sm_90a")  # fmt: skip
    return tuple(pool.clone() for pool in cache.storage.pools.values())


def _before_scores() -> Results:
    """Rows of a step of a CSA layer: both compressors, queries of the indexer, the window."""
    layout = deepseek_v4("v4", [CSA], 128, Options(record="fp8-index8"))
    cache = Cache(layout, Sizes(blocks=24, states=6, checkpoints=8))
    request, (q, weights) = cache.admit("one", [1] * TOKENS).request, _queries(TOKENS)
    with cache.step({request: [1] * TOKENS}) as step:
        arrays, kv = step.tensors("cpu"), _random_rows(TOKENS, 512).bfloat16()
        found = prepare_attention(
            arrays,
            _angles(),
            entries=_compression(cache, "csa"),
            index_keys=_compression(cache, "index"),
            index_queries=IndexQueries(q, weights, INDEXER_FP8.name, 0.5),
            window=WindowKeys(cache.rows("swa", 0), kv, arrays["rows_of.swa"]),
            longest=step.longest,
            arch="sm_90a",
        )
    assert found is not None
    return *found, *(pool.clone() for pool in cache.storage.pools.values())


def _compression(cache: Cache, stream: str) -> Compression:
    """Random rows of a compressor for all tokens of a step."""
    tail, out = cache.tail(f"{stream}_tail", 0), cache.rows(stream, 0)
    columns, width = tail.tail.overlap * tail.tail.width, tail.tail.width
    weights = Compressor(_random_rows(tail.tail.ratio, columns), torch.ones(width), 1e-6)
    values, ranks = _random_rows(2 * TOKENS, columns).chunk(2)
    return Compression(weights, tail, out, values, ranks, stream)


def _random_rows(count: int, columns: int) -> torch.Tensor:
    return torch.randn(count, columns, generator=_random())


CACHE: dict[str, Subject] = {
    "cache append": Subject(lambda: _append(FP8_584)),
    "cache append bf16": Subject(lambda: _append(BF16_512)),
    "cache append rows": Subject(_append_plain),
    "cache gather": Subject(lambda: _gather(FP8_584)),
    "cache copy": Subject(_copy),
    "cache checksum": Subject(_checksum),
    "index query": Subject(lambda: _prepare("indexer_fp4")),
    "index scores warps": Subject(lambda: _scores(INDEXER_FP8, "sm_90a")),
    "index scores wgmma": Subject(lambda: _scores(INDEXER_FP8, "sm_90a", "wgmma", SHARED, 9)),
    "index scores wgmma, one group": Subject(lambda: _scores(INDEXER_FP8, "sm_90a", "wgmma")),
    "index scores tcgen05": Subject(lambda: _scores(INDEXER_FP4, "sm_100a", "tcgen05")),
    "index select": Subject(lambda: _select(40, 600)),
    "compressor csa": Subject(lambda: _compress("csa", (11, 6))),
    # More tokens in front of a step's window, and behind it, than a thread has rows.
    "compressor hca": Subject(lambda: _compress("hca", (130, 125), (14, 130))),
    "compressor online": Subject(lambda: _compress("hca", (130, 125), online=True)),
    "rows before scores": Subject(_before_scores),
}


SUBJECTS: dict[str, Subject] = {**ATTENTION, **DECODE, **LATENT, **EXPERTS, **CACHE}


# -- why mutants survive ---------------------------------------------------------------------------

EDGE = "ordered by another edge"
NAME = "a name and nothing else"
UNREAD = "nobody reads what it writes"
HARDWARE = "shows in the timing of hardware alone"
NOT_REACHED = "not reached by this problem"
UNEXPLAINED = "unexplained"
CATEGORIES = (EDGE, NAME, UNREAD, HARDWARE, NOT_REACHED)


@dataclass(frozen=True)
class Reason:
    """Reason for the mutants of a class, all three by a part of their text, '' for any."""

    category: str
    argument: str
    kind: str
    instruction: str = ""
    subject: str = ""

    def holds(self, subject: str, kind: str, instruction: str) -> bool:
        return self.subject in subject and self.kind in kind and self.instruction in instruction


REASONS: tuple[Reason, ...] = (
    Reason(
        EDGE,
        "the mbarrier beside it completes later than the right one in every order of this problem: "
        "the checker finds all accesses ordered",
        "misdirect wait",
    ),
    Reason(
        EDGE,
        "every warp has waited in the prologue, as keys are not ready before",
        "dependency wait",
        subject="decode sm_100a dependent launch",
    ),
    Reason(
        EDGE,
        "behind a branch of one thread, whose own arrival at the next barrier publishes what it "
        "wrote; or in front of copies into what ldmatrix, an instruction of the whole warp, has "
        "read",
        "remove warp barrier",
        subject="decode",
    ),
    Reason(
        HARDWARE,
        "it keeps ptxas from moving loads behind it; lanes read what they brought themselves",
        "remove warp barrier",
        subject="compressor",
    ),
    Reason(
        UNREAD,
        "the copy is of the last row of a window, which no later token replaces: no bytes of it",
        "cp.async behind commit_group",
        subject="compressor csa",
    ),
    Reason(
        EDGE,
        "fence.proxy.async of the thread that initialises, behind it and before the same barrier, "
        "for the scale factors: it makes the inits visible to the async proxy, too",
        "init",
        "fence.mbarrier_init",
        subject="index scores tcgen05",
    ),
    Reason(
        EDGE,
        "fence.proxy.async of the thread that initialises, behind it and before the same barrier, "
        "for the scale factors: it makes the inits visible to the async proxy, too",
        "init fence behind barrier",
        subject="index scores tcgen05",
    ),
    Reason(
        EDGE,
        "a proxy fence of the same thread shows the inits to the async proxy; peers wait for the "
        "cluster's barrier, which is behind it",
        "init fence behind barrier",
        subject="latent wgmma, cluster",
    ),
    Reason(
        EDGE,
        "who meets behind it fences P before any product reads V: the first warpgroup for both",
        "proxy fence",
        subject="sm_90a 512",
    ),
    Reason(
        NAME,
        "all threads that meet there execute this instruction, and nobody stands at the other "
        "barrier then",
        "change barrier id",
    ),
    Reason(
        NOT_REACHED,
        "the ring does not come round to this stage, so nobody waits for it to be free",
        "init count +1",
    ),
    Reason(
        NOT_REACHED,
        "the ring does not come round to this stage, so nobody waits for it to be free",
        "misdirect commit",
    ),
    Reason(
        EDGE,
        "tiles have one step, and the queue holds fewer of them than the ring has stages: the tile "
        "that fills a stage again was published when all warps were done with the one before it",
        "change init count -1",
        "mbarrier.init",
        subject="moe mixed, one step",
    ),
    Reason(
        EDGE,
        "the products of a warpgroup complete together, and so do the copies of a warp: the last "
        "arrival for them announces nothing new, and the ring does not come round often enough for "
        "a whole round to be missing",
        "change init count -1",
        "mbarrier.init",
        subject="wgmma",
    ),
    Reason(
        NOT_REACHED,
        "nothing stands in front of the first launch of this problem, and a later one follows one "
        "that has waited for the same",
        "dependency wait",
        subject="moe mixed rows",
    ),
    Reason(
        NOT_REACHED,
        "nothing stands in front of the first launch of this problem",
        "dependency wait",
        subject="moe permutation",
    ),
    Reason(
        EDGE,
        "nothing stands in front of the first launch of this problem; the warp that routes reads "
        "nothing of the launch in front, and writes when it has sums of warps that have waited",
        "dependency wait",
        subject="moe route tokens",
    ),
    Reason(
        EDGE,
        "the relaxed cluster barrier orders the allocation, by which its address is known (as "
        "NVIDIA's fmha_bwd.py has it), and mbarriers have a fence of their own",
        "remove named barrier",
        "bar.sync 0",
        subject="pair",
    ),
)


def reason_of(subject: str, kind: str, instruction: str) -> Reason | None:
    """The first reason that holds."""
    return next((each for each in REASONS if each.holds(subject, kind, instruction)), None)
