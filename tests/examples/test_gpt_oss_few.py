"""Fused launches of few tokens in the emulator, compared with their definitions in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from examples.gpt_oss.config import named
from examples.gpt_oss.few import launch, reference
from examples.gpt_oss.few.config import (
    NormConfig,
    ProductConfig,
    octets_for,
    parts_for,
    room_for,
    warps_for,
)
from examples.gpt_oss.few.forward import fits
from examples.gpt_oss.few.launch import Heads, Norm
from examples.gpt_oss.model import angle_table
from kernelkit.call.launch import emulation
from kernelkit.numerics.tolerance import compare_output
from kvcache import Cache, Sizes, gqa
from ptxemu import Options

DIM, POSITIONS, PAGE, EPS = 64, 40, 16, 1e-5
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A product. sms: of the GPU, which changes how rows are divided over CTAs."""

    tokens: int
    columns: int
    heads: tuple[int, int]
    sms: int
    adds: bool = True
    arch: str = "sm_90a"

    def __str__(self) -> str:
        added = "-adds" if self.adds else ""
        return f"{self.tokens}x{self.columns}-{self.sms}sms{added}-{self.arch}"


CASES = [
    Case(3, 64, (4, 2), 148),  # 8 octets, since they are short
    Case(1, 352, (2, 1), 7, adds=False),  # 5 octets, the last CTA has 2; 11 steps of one warp
    Case(8, 160, (2, 1), 12),
    Case(19, 160, (4, 2), 13),  # the first product is torch's
    Case(32, 192, (2, 1), 5, adds=False),  # products after attention of many tokens
    Case(35, 64, (3, 2), 148),  # products of torch
    Case(9, 64, (4, 2), 32, arch="sm_100a"),
]


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(BF16)


def linear(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(rows, columns, scale=columns**-0.5), random(rows, scale=0.1)


@pytest.fixture(params=CASES, ids=str)
def case(request, monkeypatch, poisoned_outputs):
    torch.manual_seed(7)
    monkeypatch.setattr(launch, "sms_of", lambda _: request.param.sms)
    with emulation(arch=request.param.arch):
        yield request.param


def agree(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that a result in bf16 is within the tolerance of its definition."""
    exact = exact.double()
    report = compare_output(found, exact, exact.to(BF16).double(), BF16)
    assert report.ok, str(report)


def heads_of(case: Case) -> tuple[Heads, Cache]:
    """A cache of zeros, and places of new tokens in it; one token has none."""
    q_heads, kv_heads = case.heads
    cache = Cache(gqa(2, kv_heads, DIM, block_tokens=PAGE), Sizes(8))
    for pool in cache.storage.pools.values():
        pool.zero_()
    rows = cache.rows("k", 1).alone, cache.rows("v", 1).alone
    mapping = PAGE + torch.randperm(8 * PAGE)[: case.tokens]
    if case.tokens > 1:
        mapping[case.tokens // 2] = -1
    positions = torch.randint(0, POSITIONS, (case.tokens,))
    angles = angle_table(named("tiny"), POSITIONS, "cpu")
    return Heads(q_heads, kv_heads, DIM, positions, angles, rows, mapping), cache


def test_attention_input(case):
    """Nothing but the entries of the tokens changes in the cache."""
    q_heads, kv_heads = case.heads
    x, weights = (
        random(case.tokens, case.columns),
        linear((q_heads + 2 * kv_heads) * DIM, case.columns),
    )
    more = random(*x.shape) if case.adds else None
    heads, cache = heads_of(case)
    norm = Norm(1 + random(case.columns, scale=0.1), EPS)
    later = random(3, 1032) if case.adds else None  # 6,192 bytes: not all lanes request some
    stream, queries = launch.attention_input(x, more, norm, weights, heads, later)
    expected = reference.exact_input(x, more, norm, weights, heads)
    assert torch.equal(stream, expected[0])
    agree(queries, expected[1])
    kept = heads.mapping >= 0
    place = heads.mapping[kept] // PAGE, heads.mapping[kept] % PAGE
    for rows, exact in zip(heads.rows, expected[2:], strict=True):
        entries = rows.data().view(BF16).unflatten(2, (kv_heads, DIM))
        agree(entries[place], exact[kept])
        entries[place] = 0
    assert not any(pool.any() for pool in cache.storage.pools.values())


def test_copies_that_are_late(monkeypatch):
    """Tokens and norms arrive in shared memory as late as the memory model allows."""
    late = replace(CASES[2], tokens=2)
    monkeypatch.setattr(launch, "sms_of", lambda _: late.sms)
    with emulation(Options(policy="adversarial"), arch=late.arch):
        test_attention_input(late)


def test_attention_output(case):
    width = case.heads[0] * DIM
    o, x = random(case.tokens, width), random(case.tokens, case.columns)
    norm, weights = Norm(1 + random(case.columns, scale=0.1), EPS), linear(case.columns, width)
    stream, normed = launch.attention_output(o, x, norm, weights)
    agree(stream, reference.multiplied(o, weights) + x.double())
    agree(normed, reference.normed(stream, norm))


def test_add_norm(poisoned_outputs):
    """Rows are longer than the threads of a CTA have vectors, and no multiple of them."""
    x, more, norm = random(3, 3104), random(3, 3104), Norm(1 + random(3104, scale=0.1), EPS)
    with emulation(arch="sm_90a"):
        summed, normed = launch.add_norm(x, more, norm)
    assert torch.equal(summed, x + more)
    agree(normed, reference.normed(summed, norm))


@pytest.mark.parametrize("tokens", [1, 3])
def test_most_likely(tokens, poisoned_outputs):
    """Some rows have their largest logit twice, or at an end."""
    torch.manual_seed(1)
    logits, found = random(tokens, 3 * 2048 + 8), torch.empty(tokens, dtype=torch.int64)
    assert parts_for(tokens, logits.shape[1] // 8) == 3
    for row, places in enumerate(((4100, 77), (6151,), (0, 6151))[:tokens]):
        logits[row, list(places)] = 9.0
    with emulation(arch="sm_90a"):
        launch.most_likely(logits, found)
    assert found.tolist() == [77, 6151, 0][:tokens]
    assert [parts_for(tokens, 25136) for tokens in (1, 8, 32)] == [98, 64, 16]
    with pytest.raises(ValueError, match="a multiple of 8 for a token"):
        launch.most_likely(random(2, 12), found)


def test_how_a_product_is_divided():
    """The products of gpt-oss on an H200: almost every SM has a CTA, and none has two."""
    assert [octets_for(*size, 132) for size in ((5120, 2880), (2880, 4096), (512, 64))] == [5, 3, 8]
    assert (warps_for(2880), warps_for(4096), warps_for(64)) == (10, 8, 2)
    config = ProductConfig(2880, 5, 4, 10, head_dim=64, normed=True, adds=True)
    assert (config.threads, config.steps, config.pairs, config.rows) == (320, 9, 3, 40)
    assert (config.blocks, config.staged, config.turns, config.token_bytes) == (1, True, 1, 576)
    assert [room_for(tokens) for tokens in (1, 3, 8, 9, 32)] == [1, 4, 8, 16, 32]
    assert not ProductConfig(4096, 3, 32, 8).staged  # 272 KiB
    # More in flight, and ptxas spills.
    assert config.in_flight == 5
    assert [ProductConfig(4096, 3, room, 8).in_flight for room in (1, 16)] == [14, 13]
    assert ProductConfig(4096, 3, 32, 8).in_flight == 5
    assert NormConfig(2880).vectors == 1


def test_what_does_not_fit(in_bf16):
    config, weights = in_bf16
    assert [fits(config, weights, tokens) for tokens in (0, 1, 256, 257)] == [
        False,
        True,
        True,
        False,
    ]
    wide = type(weights)(weights.embedding, weights.layers, weights.norm, weights.head.float())
    assert not fits(config, wide, 1)
    for x in (random(257, 64), random(2, 64).float(), random(64, 2).T):
        with pytest.raises(ValueError, match="bf16 of 1 to 256 tokens"):
            launch.attention_output(x, x, None, None)
    with pytest.raises(ValueError, match="72 columns: a multiple of 32"):
        launch.attention_output(random(2, 72), random(2, 64), None, None)


@pytest.fixture(scope="module")
def in_bf16():
    from examples.gpt_oss.weights import Drawn, load

    config = named("tiny")
    return config, load(config, Drawn(config, torch.device("cpu")), experts="bf16")
