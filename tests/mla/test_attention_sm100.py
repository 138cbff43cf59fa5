"""The tcgen05 kernel of attention to latent keys in the emulator, under the checker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelkit.plan import hw
from lab.problems.attention import same_bits
from lab.problems.latent import Cache, Dense, Sparse
from mla import decode, decode_plan, sparse_prefill
from mla.attention.config import Keys, LatentConfig
from mla.attention.formats import FORMS
from mla.attention.sm100 import convert, gather4, kernel, listed, load, softmax
from mla.attention.sm100.plan import Plan100
from ptxemu import PtxEmuError
from tests.mla.latent_cases import ADVERSARIAL, CHECKED, RANDOM, check

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

BLACKWELL = "sm_100a"


def umma(cluster: int = 1, parts: int = 1) -> tuple:
    """Options of a call."""
    return (("kernel", "umma"), ("cluster", cluster), ("parts", parts))


QUICK = (
    Dense(heads=20, tokens=2, page=16, lens=(61, 333, 0), sinks=True, options=umma(2)),
    Sparse(heads=12, cache=Cache("bf16_512", 32, 150, counts=(150, 1, 0), spare=0),
           extra=Cache("bf16_512", 5, 40, wide=False, spare=0), rope=True, sinks=True,
           options=umma(1, 2)),
    Sparse(heads=6, tokens=2, cache=Cache("fp8_584", 32, 270, counts=(270, 1)),
           extra=Cache("fp4_288", 5, 20), rope=True, sinks=True, options=umma(2)),
)  # fmt: skip
COPIED = Sparse(
    heads=12, cache=Cache("bf16_512", 32, 150, counts=(150, 1, 0)), extra=Cache("bf16_512", 5, 40),
    rope=True, sinks=True, options=umma(1, 2),
)  # fmt: skip
MATRIX = (
    Dense(heads=16, page=1, lens=(1, 35, 0, 264), options=umma()),
    Dense(heads=128, page=64, lens=(600, 64), options=umma(4)),
    Dense(heads=128, page=128, lens=(1000,), options=umma(3, 2)),
    Dense(heads=3, tokens=9, page=7, lens=(5, 400), options=umma(1, 2)),
    Dense(heads=8, tokens=3, page=128, lens=(330,), causal=False, full=True, options=umma(2)),
    Dense(heads=1, page=64, lens=(650,), sinks=True, options=umma(5)),
    Dense(heads=100, tokens=3, page=16, lens=(300, 129), options=umma()),
    Sparse(heads=128, tokens=2, cache=Cache("bf16_512", 16, 300, spare=0),
           extra=Cache("bf16_512", 8, 164), sinks=True, rope=True, options=umma(3)),
    Sparse(heads=64, tokens=4, batch=2, cache=Cache("bf16_576", 16, 296, spare=0), options=umma()),
    Sparse(heads=128, cache=Cache("fp8_656", 64, 290), options=umma()),
    Sparse(heads=128, tokens=2, cache=Cache("bf16_512", 16, 300),
           extra=Cache("fp8_584", 8, 164), sinks=True, rope=True, options=umma(3)),
    Dense(heads=100, tokens=3, page=7, lens=(300, 129), scaled=True, options=umma()),
)  # fmt: skip
SWEEP = (
    COPIED,
    Dense(heads=64, page=256, lens=(450, 7), options=umma()),
    Dense(heads=40, page=32, lens=(430, 7), amplitude=30.0, options=umma(2)),
    Dense(heads=128, tokens=2, page=8, lens=(65, 200), options=umma(8)),
    Dense(heads=17, page=16, lens=(390, 5), scaled=True, sinks=True, options=umma(2)),
    Sparse(heads=16, cache=Cache("tensor", 16, 265, counts=(265, 0, 3)), options=umma(2)),
    Sparse(heads=1, tokens=1, cache=Cache("bf16_576", 4, 1, spare=0), options=umma(2)),
    Sparse(heads=16, cache=Cache("fp8_528", 9, 150, wide=False), rope=True, options=umma(2)),
    Sparse(heads=66, cache=Cache("fp4_288", 16, 133), sinks=True, options=umma(1, 2)),
    Sparse(heads=64, tokens=2, cache=Cache("fp8_528", 16, 300), extra=Cache("bf16_512", 8, 264),
           options=umma()),
    Sparse(heads=8, tokens=3, cache=Cache("fp8_584", 16, 300, counts=(0, 300, 129)),
           extra=Cache("fp8_528", 8, 264, counts=(64, 0, 264)), options=umma(2, 2)),
    Sparse(heads=64, tokens=4, batch=2, cache=Cache("bf16_576", 16, 296), options=umma()),
    Sparse(heads=128, tokens=2, sinks=True, options=umma(3),
           cache=Cache("bf16_576", 1, 700, counts=(700, 129), pages=90, spare=0),
           extra=Cache("bf16_576", 8, 164, counts=(0, 130), spare=0)),
    Sparse(heads=20, tokens=3, cache=Cache("bf16_512", 64, 129, wide=False, spare=0),
           options=umma(2, 2)),
)  # fmt: skip


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_attention_is_right(case):
    check(case, BLACKWELL, CHECKED, ADVERSARIAL, RANDOM)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_kind_of_attention(case):
    check(case, BLACKWELL, CHECKED)


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_more_kinds_of_attention(case):
    check(case, BLACKWELL, CHECKED, ADVERSARIAL, RANDOM)


@pytest.mark.parametrize("record", ["bf16_576", "bf16_512"])
def test_prefill_fetches_entries(record):
    cache = Cache(record, 16, 270, counts=(270, 0, 128, 3), wide=False, spare=0)
    case = Sparse(heads=128, tokens=4, cache=cache, options=(("kernel", "umma"),))
    check(case, BLACKWELL, CHECKED, function=sparse_prefill)


def test_an_entry_does_not_know_its_batch():
    case = Dense(heads=20, tokens=2, page=16, lens=(61, 133, 17))
    (q, kv), options = case.inputs()
    options |= {"arch": BLACKWELL, "kernel": "umma", "batch_invariant": True, "max_kv_len": 144}
    table, lens = options.pop("page_table"), options.pop("kv_lens")
    o, lse = decode(q, kv, page_table=table, kv_lens=lens, return_lse=True, **options)
    for entry in range(3):
        one = slice(entry, entry + 1)
        alone = decode(
            q[one], kv, page_table=table[one], kv_lens=lens[one], return_lse=True, **options
        )
        assert same_bits(alone, (o[one], lse[one]))


def test_a_grid_has_pairs(monkeypatch):
    """A pair of CTAs takes a row tile of 128 heads, and clusters fill the SMs."""
    monkeypatch.setitem(hw.SMS_OF, BLACKWELL, 8)
    (q, kv), options = Dense(heads=128, page=64, lens=(512, 512)).inputs()
    plan = decode_plan(q, kv, **options, arch=BLACKWELL, parts=1)
    assert plan.grid == 2 * 2 * plan.cluster
    assert plan.grid <= 8


def test_plans_fit():
    """Shared memory has room for one tile of K and of V beside Q and P, for all records."""
    for record, form in FORMS.items():
        plain = form.plain and not form.code
        for rows, is_list in ((64, False), (64, True), (1, True)):
            plan = Plan100(LatentConfig(keys=Keys(record, rows, listed=is_list), cluster=8))
            ways = plan.by_tma, plan.gathers, plan.copies
            wanted = (not is_list, is_list and rows == 1, is_list and rows > 1)
            assert ways == (wanted if plain else (False, False, True))
            plan.check()
            assert plan.smem.bytes <= hw.SMEM_BYTES_PER_CTA
            assert (plan.by_tma, plan.gathers, plan.copies) == ways


TRAPS = {
    "marks of copied entries": (
        listed, convert, "mark", ("vote_ballot_sync(found >= 0)", "vote_ballot_sync(found >= -1)")
    ),
    "marks of fetched entries": (
        gather4, kernel, "Gather", ("_sync(own >= 0)", "_sync(own >= -1)")
    ),
    "a free stage": (gather4, kernel, "Gather", ("ring.wait_free(free(part, number))", "pass")),
    "a free stage of copied entries": (
        convert, kernel, "Convert", ("ring.wait_free(free(stage, number))\n", "pass\n")
    ),
    "values past the end": (
        load, kernel, "LoadV", ("if first + key >= scope.work.keys", "if key < 0")
    ),
    "rescaling": (softmax, kernel, "Softmax", ("part.store(part.load() * factor)", "pass")),
    "O at rest": (
        softmax, kernel, "Softmax", ("pipes.o.wait(consumer_state_at(1, number - 1))", "pass")
    ),
    "half of codes": (
        convert, kernel, "Convert", ("return scope.work.sharer if", "return Int32(0) if")
    ),
    "scale of codes": (
        convert, kernel, "Convert",
        ("numbers, half, own.entries", "numbers, 1 - half, own.entries"),
    ),
    "copies beside codes": (
        convert, kernel, "Convert",
        ("cp_async_wait_group(0)\n        tell", "sync_warp()\n        tell"),
    ),
    "fence of codes": (
        listed, convert, "tell", ('cute.arch.fence_proxy("async.shared", space="cta")', "pass")
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_a_kernel_without_its_cure_is_noticed(changed, trap):
    module, user, name, replacement = TRAPS[trap]
    changed(module, [user], name, replacement)
    case = {gather4: QUICK[1]}.get(module, replace(QUICK[0], amplitude=6.0))
    if "copied" in trap:
        case = COPIED
    if "codes" in trap:
        case = QUICK[2]
    with pytest.raises((AssertionError, PtxEmuError)):
        check(case, BLACKWELL, CHECKED, ADVERSARIAL)
