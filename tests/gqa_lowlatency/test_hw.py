"""The Hopper kernel on the GPU itself: thousands of random problems, captured graphs, equal bits.

`python -m pytest --hw -m hw tests/gqa_lowlatency` on a machine of compute capability 9.0.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gqa_lowlatency import decode, decode_plan
from gqa_lowlatency.reference import definition, rounded
from kernelkit.tolerance import compare_lse, compare_output

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("gqa-hw")]

KERNELS = 60  # drawn configs, each compiled once,
PROBLEMS = 40  # and random problems of each
CAPACITY = 9000


def _draw(seed: int) -> dict[str, Any]:
    """What a kernel is compiled for."""
    pick = random.Random(seed)
    tokens = pick.choice((1, 1, 1, 2, 3, 4, 8))
    window = pick.random() < 0.3
    return {
        "dim": pick.choice((64, 128, 128, 256)),
        "heads": pick.choice(((1, 1), (3, 1), (8, 1), (10, 2), (16, 2), (64, 8), (32, 2))),
        "tokens": tokens,
        "dtype": pick.choice((torch.bfloat16, torch.float16)),
        "fp8": pick.random() < 0.3,
        "causal": pick.random() < 0.7,
        "window": window,
        "sink_tokens": window and pick.random() < 0.5,
        "softcap": pick.choice((0.0, 0.0, 5.0)),
        "sinks": pick.random() < 0.3,
        "page_size": pick.choice((0, 0, 0, 1, 8, 16, 64, 128)),
        "lens": pick.random() < 0.8,
        "out_dtype": pick.choice((None, None, torch.float32)),
    }


def _problem(kernel: dict[str, Any], pick: random.Random) -> tuple[tuple, dict[str, Any]]:
    """(q, k, v) and the keyword arguments of `decode`: NaN wherever nothing may be read."""
    torch.manual_seed(pick.randrange(1 << 30))
    q_heads, kv_heads = kernel["heads"]
    batch, size = pick.choice((1, 2, 5)), pick.choice((1, 17, 128, 129, 700, 3000))
    lens = [pick.choice((0, 1, size // 2, size - 1, size)) for _ in range(batch)]
    has_lens = kernel["lens"] or kernel["page_size"] > 0
    q = torch.randn(batch, kernel["tokens"], q_heads, kernel["dim"], device="cuda")
    k, v = torch.randn(2, batch, size, kv_heads, kernel["dim"], device="cuda")
    k, v = (x.to(torch.float8_e4m3fn if kernel["fp8"] else kernel["dtype"]) for x in (k, v))
    if has_lens:
        for entry, length in enumerate(lens):
            k[entry, length:], v[entry, length:] = float("nan"), float("nan")
    options: dict[str, Any] = {
        "causal": kernel["causal"],
        "window": pick.choice((0, 5, 130, 600)) if kernel["window"] else None,
        "sink_tokens": pick.choice((1, 64, 200)) if kernel["sink_tokens"] else 0,
        "softcap": kernel["softcap"],
        "sinks": torch.randn(q_heads, device="cuda") if kernel["sinks"] else None,
        "kv_lens": torch.tensor(lens, dtype=torch.int32, device="cuda") if has_lens else None,
        "out_dtype": kernel["out_dtype"],
    }
    if kernel["fp8"]:
        options |= {name: torch.rand(kv_heads, device="cuda") + 0.5
                    for name in ("k_scale", "v_scale")}  # fmt: skip
    if kernel["page_size"]:
        k, v, options["page_table"] = _paged(k, v, kernel["page_size"])
    return (q.to(kernel["dtype"]), k, v), options


def _paged(k: torch.Tensor, v: torch.Tensor, page: int) -> tuple[torch.Tensor, ...]:
    """The same keys in pages of a shuffled pool."""
    batch, size, heads, dim = k.shape
    count = -(-size // page)
    order = torch.randperm(batch * count, device="cuda")
    pools = []
    for keys in (k, v):
        padded = torch.full((batch, count * page, heads, dim), float("nan"), device="cuda")
        padded[:, :size] = keys.float()
        pool = torch.empty(batch * count, page, heads, dim, device="cuda", dtype=keys.dtype)
        pool[order] = padded.view(-1, page, heads, dim).to(keys.dtype)
        pools.append(pool)
    return *pools, order.view(batch, count).int()


def _check(tensors: tuple, options: dict[str, Any], results: tuple) -> None:
    """Within the calibrated tolerance of the definition."""
    given = {name: value for name, value in options.items() if name != "max_kv_len"}
    exact, near = definition(*tensors, **given), rounded(*tensors, **given)
    dtype = results[0].dtype
    for report in (
        compare_output(results[0].double(), exact.o, near.o, dtype),
        compare_lse(results[1].double(), exact.lse, near.lse),
    ):
        assert report.ok, (str(report), [tuple(t.shape) for t in tensors], options)


@pytest.mark.parametrize("seed", range(KERNELS))
def test_random_problems(seed):
    kernel, pick = _draw(seed), random.Random(seed)
    for _ in range(PROBLEMS):
        tensors, options = _problem(kernel, pick)
        _check(tensors, options, decode(*tensors, return_lse=True, **options))


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_a_captured_graph_is_right_at_any_length(paged):
    torch.manual_seed(0)
    q = torch.randn(2, 1, 16, 128, device="cuda").bfloat16()
    k, v = torch.randn(2, 2, CAPACITY, 2, 128, device="cuda").bfloat16()
    lens = torch.full((2,), 500, dtype=torch.int32, device="cuda")
    options = {"kv_lens": lens}
    if paged:
        k, v, options["page_table"] = _paged(k, v, 64)
    plan = decode_plan(q, k, v, **options)
    plan(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = plan(q, k, v, **options)
        again = decode(q, k, v, return_lse=True, **options)
    for length in (0, 1, 127, 128, 8192, CAPACITY, 300):
        lens.copy_(torch.tensor([length, length // 2]))
        graph.replay()
        torch.cuda.synchronize()
        _check((q, k, v), options, results)
        assert torch.equal(results[0], again[0])


def test_bits_do_not_change():
    """From run to run, and with what else is in the batch."""
    torch.manual_seed(1)
    q = torch.randn(7, 1, 64, 128, device="cuda").bfloat16()
    k, v = torch.randn(2, 7, 5000, 8, 128, device="cuda").bfloat16()
    lens = torch.tensor([5000, 1, 4999, 0, 129, 2500, 700], dtype=torch.int32, device="cuda")
    first, lse = decode(q, k, v, kv_lens=lens, batch_invariant=True, return_lse=True)
    for _ in range(50):
        again = decode(q, k, v, kv_lens=lens, batch_invariant=True, return_lse=True)
        assert torch.equal(first, again[0])
        assert torch.equal(lse, again[1])
    for entry in range(7):
        one = slice(entry, entry + 1)
        alone = decode(q[one], k[one], v[one], kv_lens=lens[one], batch_invariant=True)
        assert torch.equal(alone, first[one])
