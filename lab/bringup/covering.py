"""Small problems that together launch every kernel module of an architecture, with every shape of
MMA that one of its configs can have: what `lab.bringup.table` records.

The kernels whose mutants are judged come first, since those problems use every edge of a plan.
Problems for the config fields that decide a tensor core's instructions follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from fmha.api import attention
from fmha.config import HEAD_DIMS, SCHEDULES
from fmha.sm100.layout import TILE_N
from gqa_lowlatency import DecodeConfig, decode
from gqa_lowlatency.config import CLUSTERS, COLUMNS
from gqa_lowlatency.config import HEAD_DIMS as DECODE_DIMS
from kernelkit.compile.arch import PORTABLE, written_for
from kvcache.layouts.rows import Rows
from kvcache.movement.api import append_pages, gather_pages
from lab.flags.steps import FAMILIES, NATIVE_ONLY, SMALL_HIDDEN
from lab.mutation import subjects
from lab.problems import attention as attention_problems
from lab.problems import grouped_gemm as grouped
from lab.problems import latent, q8_0
from lab.problems import mixed_gemm as mixed
from lab.problems.steps import problems_of
from mla import decode as mla_decode
from mla import sparse_decode
from mla.attention import codec
from mla.indexer.api import IndexQuery, scores
from mla.indexer.quantised import quantised
from mla.indexer.scores_config import HEADS, RECORDS
from moe import Router, arrange, fused_moe, pack
from moe.choose import FEW
from moe.config import SWAPPED_ROWS, TILE_ROWS
from moe.config import TILE_N as TILE_COLUMNS
from moe.mixed.config import ROWS_OF

MUTATED = {
    **subjects.ATTENTION,
    **subjects.DECODE,
    **subjects.EXPERTS,
    **subjects.CACHE,
}
_OTHER = {"sm_100a": ("sm_90a",), "sm_90a": ("sm_100a", "Blackwell", "tcgen05", "moe 128")}
_PLACES = 2  # CTAs or pairs that run at the same time: each has several tiles
NARROW = ((64, 64), (96, 96))  # head dims by the swizzles of their rows
STEPS = {"bf16": 16, "fp16": 16, "e4m3": 32}  # keys of a tile are a multiple of it
_KEYS = 1024  # of a decode, several tiles in each of 16 CTAs or fewer
_INTEGER_TOKENS = (1, 5, 40)  # by dp4a, by mma.sync of few tokens, by the product's kernel


@dataclass(frozen=True)
class Problem:
    """launch: in the emulator, of kernels for the architecture or, where they are written for all
    of them, of another one. It may refuse what the architecture has not."""

    name: str
    launch: Callable[[], Any]


def problems(arch: str) -> Iterator[Problem]:
    """Yield the problems for sm_100a, sm_103a or sm_90a."""
    own = written_for(arch)
    for name, subject in MUTATED.items():
        if not any(word in name for word in _OTHER[own]):
            yield Problem(name, subject.launch)
    yield from _attention(own)
    yield from _portable_attention()
    yield from _decode(own)
    yield from _latent(own)
    if own == "sm_100a":
        yield from _grouped()
    yield from _mixed(own)
    yield from _few_rows(own)
    yield from _index_scores(own)
    yield from _pages()
    yield from _steps()
    yield from _q8_0(own)


def _case(name: str, arch: str, case: attention_problems.Case) -> Problem:
    def launched() -> Any:
        with (
            mock.patch("fmha.launch.sms_of", return_value=_PLACES),
            mock.patch("fmha.launch.clusters_at_once", return_value=_PLACES),
        ):
            return attention(*case.inputs(), arch=arch, **case.arguments())

    return Problem(name, launched)


def _attention(arch: str) -> Iterator[Problem]:
    """Head dims by types and schedules; outputs; pages, ragged queries, a latent cache."""
    kinds: tuple[dict[str, str], ...] = (
        *({"dtype": "bf16", "schedule": schedule} for schedule in SCHEDULES),
        {"dtype": "fp16"},
        {"dtype": "bf16", "kv_dtype": "e4m3"},
        {"dtype": "e4m3"},
    )
    for dims, kind in itertools.product(HEAD_DIMS, kinds):
        words = " ".join([*map(str, dims), *kind.values()])
        case = attention_problems.Case(130, 300, dims=dims, causal=True, kv_lens=(290,), **kind)
        yield _case(f"attention {words}", arch, case)
    for dims, keys, (dtype, step) in itertools.product(NARROW, TILE_N[:-1], STEPS.items()):
        if keys % step == 0:
            options = {"dims": dims, "dtype": dtype, "tile_n": keys}
            words = f"{dims[0]} {dtype} {keys} keys"
            yield _case(f"attention {words}", arch, attention_problems.Case(130, 300, **options))
    more: dict[str, dict[str, Any]] = {
        "raw": {"normalize": False, "out_dtype": "fp32"},
        "out fp16": {"dtype": "fp16", "normalize": False, "out_dtype": "fp16"},
        "pages": {"batch": 2, "q_lens": (90, 40), "page_size": 128, "kv_lens": (270, 5)},
        "small pages": {"batch": 2, "q_lens": (90, 40), "page_size": 16, "kv_lens": (270, 5)},
        "ragged": {"batch": 2, "q_lens": (90, 0), "k_lens": (200, 100), "sinks": True},
        "no keys": {"batch": 2, "kv_lens": (0, 130), "softcap": 20.0},
        "rope": {"rope_dim": 32, "window": (90, 0), "sink_tokens": 4},
        "pdl": {"pdl": True},
        "mask_mod": {"mask": "document", "causal": True, "softcap": 20.0},
        "score_mod": {"mask": "alibi", "batch": 2, "kv_lens": (270, 5)},
        "block_mask": {"mask": "prefix", "blocks": 128, "dims": (128, 128)},
        "tree": {"tree": "branches", "window": (90, None), "batch": 2, "q_lens": (64, 5)},
    }
    for name, options in more.items():
        queries = 0 if "q_lens" in options else 130
        keys = 0 if "k_lens" in options else 300
        case = attention_problems.Case(queries, keys, heads=(2, 1), **options)
        yield _case(f"attention {name}", arch, case)


def _portable_attention() -> Iterator[Problem]:
    """Yield attention problems with mma.sync, compiled for the oldest architecture."""
    for dims, dtype in itertools.product(((64, 64), (128, 128)), ("bf16", "fp16")):
        case = attention_problems.Case(
            70, 150, dims=dims, dtype=dtype, causal=True, instructions="mma.sync"
        )
        yield _case(f"attention by mma.sync {dims[0]} {dtype}", PORTABLE, case)


def _decode(arch: str) -> Iterator[Problem]:
    """Head dims by types and columns; clusters of every size."""
    types = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    every = itertools.product(DECODE_DIMS, types, COLUMNS)
    for (head_dim, dtype, columns), ctas in zip(every, itertools.cycle(CLUSTERS)):
        short = str(dtype).removeprefix("torch.")
        name = f"decode {head_dim} {short} {columns} columns, {ctas} CTAs"
        yield Problem(name, partial(_decoded, arch, head_dim, dtype, columns, ctas))


def _decoded(arch: str, head_dim: int, dtype: torch.dtype, columns: int, ctas: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, columns, head_dim, generator=generator)
    q = q.to(torch.bfloat16 if dtype.itemsize == 1 else dtype)
    k, v = torch.randn(2, 1, _KEYS, 1, head_dim, generator=generator).to(dtype)
    return decode(q, k, v, arch=arch, config=DecodeConfig(cluster=ctas))


_LATENT_KERNELS: dict[str, dict[str, dict[str, Any]]] = {
    "sm_90a": {
        "wgmma": {"cluster": 1, "parts": 1},
        "wgmma in a cluster": {"cluster": 2, "parts": 1},
        "wgmma in parts": {"cluster": 2, "parts": 2},
    },
    "sm_100a": {
        "warp": {"parts": 1},
        "warp in parts": {"parts": 2},
        "umma": {"cluster": 1, "parts": 1},
        "umma in a cluster": {"cluster": 2, "parts": 1},
        "umma in parts": {"cluster": 2, "parts": 2},
    },
}
_OF_UMMA = ("pages", "small pages", "bf16_576", "bf16_512", "of a tensor")  # no codes


def _latent(arch: str) -> Iterator[Problem]:
    """Attention to latent keys: pages and lists of every record, divided and not; two caches."""
    listed = {"heads": 20, "tokens": 3}
    cases: dict[str, latent.Case] = {
        "pages": latent.Dense(heads=64, lens=(150, 33)),
        "small pages": latent.Dense(heads=20, tokens=2, page=7, lens=(150, 33), sinks=True),
        "pages e4m3": latent.Dense(heads=5, lens=(150, 33), scaled=True),
        **{record: latent.Sparse(cache=latent.Cache(record, k=150), **listed)
           for record in codec.RECORDS},
        "of a tensor": latent.Sparse(cache=latent.Cache("tensor", k=150, wide=False), **listed),
        "two caches": latent.Sparse(
            cache=latent.Cache("fp8_528", k=70, counts=(70, 0, 9)), extra=latent.Cache("fp4_288"),
            rope=True, sinks=True, **listed,
        ),
    }  # fmt: skip
    longer = {  # of which the wgmma kernel converts codes to fp16
        "long pages e4m3": latent.Dense(heads=5, lens=(330, 33), scaled=True),
        **{f"long {record}": latent.Sparse(cache=latent.Cache(record, k=330, spread=6), **listed)
           for record in ("fp8_656", "fp8_528", "fp4_288")},
    }  # fmt: skip
    for kernel, division in _LATENT_KERNELS[arch].items():
        options = division | {"kernel": kernel.partition(" ")[0], "arch": arch, "pdl": True}
        for name, case in (cases | longer if kernel == "wgmma" else cases).items():
            if kernel.startswith("umma") and name not in _OF_UMMA:
                continue
            yield Problem(f"latent {name}, {kernel}", partial(_attended, case, options))


def _attended(case: latent.Case, options: dict[str, Any]) -> Any:
    given, own = case.inputs()
    function = mla_decode if isinstance(case, latent.Dense) else sparse_decode
    return function(*given, return_lse=True, **own, **options)


def _grouped() -> Iterator[Problem]:
    """Formats by tiles, quantised or not, with paths of the epilogue for other granularities."""
    formats = (("nvfp4", ""), ("mxfp4", ""), ("mxfp8", ""), ("mxfp4", "mxfp8"))
    tiles = [
        (rows, n) for rows, n in itertools.product(TILE_ROWS, TILE_COLUMNS) if min(rows, n) >= 128
    ]
    tiles += [(rows, TILE_COLUMNS[0]) for rows in SWAPPED_ROWS]
    for (fmt, x_fmt), (rows, tile_n) in itertools.product(formats, tiles):
        given = {"fmt": fmt, "x_fmt": x_fmt, "tile_rows": rows, "tile_n": tile_n, "form": None}
        most = rows if rows in FEW else rows + 2  # rows of an expert
        case = grouped.Case((most, 5), 320, tile_n + 32, **given)
        name = f"product {x_fmt or fmt} by {fmt} {rows} x {tile_n}"
        yield Problem(name, subjects.product(case).launch)
    for fmt, granularity, carry in itertools.product(("nvfp4", "mxfp8"), (8, 64), (False, True)):
        case = grouped.Case(
            (130, 5), 320, 256, fmt=fmt, out=fmt, granularity=granularity, carry=carry,
            tile_rows=128, amax=fmt == "nvfp4", per_token=fmt == "nvfp4",
        )  # fmt: skip
        name = f"product {fmt} of {granularity}{' carried' * carry}"
        yield Problem(name, subjects.product(case).launch)


def _mixed(arch: str) -> Iterator[Problem]:
    kinds = (("nvfp4", 0), ("mxfp4", 2))
    for (fmt, gather), rows in itertools.product(kinds, ROWS_OF[arch]):
        for teams, parts in ((2, 1), (2, 2)) if arch == "sm_100a" else ((2, 1),):
            case = mixed.Case(
                (rows + 1, 5), 256, 136, fmt, slots=gather, bias=not gather, tile_rows=rows,
                teams=teams, parts=parts, arch=arch,
            )  # fmt: skip
            words = f"{fmt} {rows} rows, {teams} x {parts} teams{', gathered' * bool(gather)}"
            yield Problem(f"mixed {words}", lambda case=case: mixed.call(case, case.inputs()))


def _few_rows(arch: str) -> Iterator[Problem]:
    for fmt, biased in (("mxfp4", True), ("nvfp4", False)):
        yield Problem(f"few rows {fmt}", partial(_few_rows_calls, arch, fmt, biased))


def _few_rows_calls(arch: str, fmt: str, biased: bool) -> Any:
    """Compute a layer of five experts for seven tokens."""
    generator = torch.Generator().manual_seed(0)
    x, w13, w2, b13, b2, logits = (
        torch.randn(shape, generator=generator)
        for shape in ((7, 160), (5, 192, 160), (5, 160, 96), (5, 192), (5, 160), (7, 5))
    )
    experts = arrange(pack(w13, w2, fmt, biases=(b13, b2) if biased else None))
    return fused_moe(x.bfloat16(), experts, logits, Router(2), few_rows=True, arch=arch)


def _index_scores(arch: str) -> Iterator[Problem]:
    for name, heads in itertools.product(RECORDS, HEADS):
        own = f"index scores {name} {heads} heads"
        yield Problem(own, partial(_scores, arch, name, heads))
        if (arch, name) == ("sm_90a", "indexer_fp8"):
            yield Problem(f"{own}, shared", partial(_scores, arch, name, heads, longest=9))
            yield Problem(f"{own}, mma.sync", partial(_scores, arch, name, heads, kernel="warp"))


def _scores(arch: str, name: str, heads: int, longest: int = 1, kernel: str = "auto") -> Any:
    """Three tokens of two requests; keys are any codes but NaN."""
    generator = torch.Generator().manual_seed(0)
    record, keys, block = RECORDS[name], 300, 32
    q = torch.randn(3, heads, 128, generator=generator).bfloat16()
    data, scales = quantised(q, record)
    if name != "indexer_fp4":  # a scale is part of the weight
        data = q if name == "indexer_bf16" else data.view(torch.float8_e4m3fn)
        scales = scales[..., :0]
    query = IndexQuery(data, scales, torch.randn(3, heads, generator=generator))
    blocks = -(-keys // block)
    pool = torch.randint(0, 120, (2 * blocks, record.page_bytes(block)), generator=generator)
    rows = Rows(pool.byte(), 0, block * record.data_bytes, block, record)
    tables = torch.randperm(2 * blocks, generator=generator).view(2, blocks).int()
    owners, counts = torch.tensor([0, 1, 1]).int(), torch.tensor([70, 33, keys]).int()
    with mock.patch("mla.indexer.scores_launch.grid_for", return_value=(1, len(q))):
        options = {"longest": longest, "kernel": kernel, "arch": arch}
        return scores(rows, query, owners, counts, tables, torch.zeros(3, keys + 2), **options)


def _pages() -> Iterator[Problem]:
    """Rows of numbers as they are, and made e4m3; heads within rows, or pages of each."""
    for heads_apart, fp8 in itertools.product((False, True), (False, True)):
        name = f"pages{', heads apart' * heads_apart}{', e4m3' * fp8}"
        yield Problem(name, partial(_moved_pages, heads_apart, fp8))


def _moved_pages(heads_apart: bool, fp8: bool) -> None:
    shape = (4, 2, 16, 64) if heads_apart else (4, 16, 2, 64)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    pages = torch.zeros(2, *shape).to(dtype)
    k_pages, v_pages = pages.transpose(2, 3) if heads_apart else pages
    slots = torch.tensor([9, 40, -1, 3, 22])
    k, v = torch.randn(2, len(slots), 2, 64).bfloat16()
    scale = torch.ones(1) if fp8 else None
    append_pages(k_pages, v_pages, k, v, slots, k_scale=scale, v_scale=scale)
    gather_pages(k_pages, v_pages, slots, k.to(dtype), v.to(dtype))


def _steps() -> Iterator[Problem]:
    """Yield the problems of steps that are written for all architectures."""
    for family, (steps, *_) in FAMILIES.items():
        for step in steps:
            if step in NATIVE_ONLY:
                continue
            for problem in problems_of(family, [step], [5], SMALL_HIDDEN):
                yield Problem(str(problem), partial(_step, problem))


def _step(problem: Any) -> Any:
    return problem.peers[problem.ours](*problem.draw(0, "cpu"))


def _q8_0(arch: str) -> Iterator[Problem]:
    for operation in ("repack", "dequantise", "quantise", *q8_0.PRODUCTS):
        for tokens, dtype in itertools.product(_INTEGER_TOKENS, ("bf16", "fp16")):
            few = tokens <= q8_0.MOST_TOKENS
            if operation in q8_0.PRODUCTS and few == (operation == "product"):
                continue
            problem = q8_0.Problem(operation, 48, 256, tokens, ("soa", "interleaved"), dtype, True)
            yield Problem(f"q8_0 {problem} {dtype}", partial(_q8_0_calls, problem, arch))


def _q8_0_calls(problem: q8_0.Problem, arch: str) -> Any:
    calls = q8_0.Inputs.drawn(problem, 0, "cpu").calls(problem, arch=arch)
    return [call() for call in calls.values()]
