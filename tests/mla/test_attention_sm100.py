"""The tcgen05 kernel of attention to latent keys in the emulator, under the checker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelkit.plan import hw
from lab.problems.attention import same_bits
from lab.problems.latent import Cache, Dense, Sparse
from mla import decode, decode_plan, sparse_prefill
from mla.attention.choose import UMMA, WARP, kernel_of
from mla.attention.config import Keys, LatentConfig
from mla.attention.sm100 import copy, gather4, kernel, load, softmax
from mla.attention.sm100.plan import Plan100
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
    Sparse(heads=6, tokens=2, cache=Cache("fp8_584", 32, 140, counts=(140, 1)),
           extra=Cache("fp4_288", 5, 20), rope=True, sinks=True, options=umma(2)),
)  # fmt: skip
COPIED = Sparse(
    heads=12, cache=Cache("bf16_512", 32, 150, counts=(150, 1, 0)), extra=Cache("bf16_512", 5, 40),
    rope=True, sinks=True, options=umma(1, 2),
)  # fmt: skip
CODED = (
    Sparse(heads=128, cache=Cache("fp8_656", 64, 290), options=umma()),
    Sparse(heads=128, tokens=2, cache=Cache("bf16_512", 16, 300),
           extra=Cache("fp8_584", 8, 164), sinks=True, rope=True, options=umma(3)),
    Dense(heads=100, tokens=3, page=7, lens=(300, 129), scaled=True, options=umma()),
    Sparse(heads=16, cache=Cache("fp8_528", 9, 150, wide=False), rope=True, options=umma(2)),
    Sparse(heads=66, cache=Cache("fp4_288", 16, 133), sinks=True, options=umma(1, 2)),
    Sparse(heads=64, tokens=2, cache=Cache("fp8_528", 16, 300), extra=Cache("bf16_512", 8, 264),
           options=umma()),
    Sparse(heads=8, tokens=3, cache=Cache("fp8_584", 16, 300, counts=(0, 300, 129)),
           extra=Cache("fp8_528", 8, 264, counts=(64, 0, 264)), options=umma(2, 2)),
    Dense(heads=17, page=16, lens=(390, 5), scaled=True, sinks=True, options=umma(2)),
)  # fmt: skip
MATRIX = (
    Dense(heads=16, page=1, lens=(1, 35, 0, 264), options=umma()),
    Dense(heads=128, page=64, lens=(600, 64), options=umma(4)),
    Dense(heads=128, page=128, lens=(1000,), options=umma(3, 2)),
    Dense(heads=3, tokens=9, page=7, lens=(5, 400), options=umma(1, 2)),
    Dense(heads=8, tokens=3, page=128, lens=(330,), causal=False, full=True, options=umma(2)),
    Dense(heads=64, page=256, lens=(450, 7), options=umma()),
    Dense(heads=40, page=32, lens=(430, 7), amplitude=30.0, options=umma(2)),
    Dense(heads=128, tokens=2, page=8, lens=(65, 200), options=umma(8)),
    Dense(heads=1, page=64, lens=(650,), sinks=True, options=umma(5)),
    Dense(heads=100, tokens=3, page=16, lens=(300, 129), options=umma()),
    Sparse(heads=16, cache=Cache("tensor", 16, 265, counts=(265, 0, 3)), options=umma(2)),
    Sparse(heads=128, tokens=2, cache=Cache("bf16_512", 16, 300, spare=0),
           extra=Cache("bf16_512", 8, 164), sinks=True, rope=True, options=umma(3)),
    Sparse(heads=64, tokens=4, batch=2, cache=Cache("bf16_576", 16, 296, spare=0), options=umma()),
    Sparse(heads=1, tokens=1, cache=Cache("bf16_576", 4, 1, spare=0), options=umma(2)),
    *CODED,
)  # fmt: skip
SWEEP = (
    COPIED,
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
def test_every_kind_of_entries(case):
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


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        (Keys("bf16_576", 64, counts=True), UMMA),
        (Keys("bf16_512", 3, listed=True), UMMA),
        (Keys("fp8_584", 64, listed=True), WARP),
        (Keys("e4m3_576", 64), WARP),
    ],
)
def test_codes_go_to_the_other_kernel(keys, chosen):
    assert kernel_of("auto", BLACKWELL, LatentConfig(keys=keys)) == chosen


def test_plans_fit():
    """Shared memory has room for one tile of K and of V beside Q and P, for both widths."""
    for record in ("bf16_576", "bf16_512"):
        for rows, listed, ways in (
            (64, False, (True, False, False)),
            (64, True, (False, False, True)),
            (1, True, (False, True, False)),
        ):
            plan = Plan100(LatentConfig(keys=Keys(record, rows, listed=listed), cluster=8))
            plan.check()
            assert plan.smem.bytes <= hw.SMEM_BYTES_PER_CTA
            assert (plan.by_tma, plan.gathers, plan.copies) == ways


TRAPS = {
    "marks of fetched entries": (gather4, "Gather", ("_sync(own >= 0)", "_sync(own >= -1)")),
    "a free stage": (gather4, "Gather", ("ring.wait_free(free(part, number))", "pass")),
    "a free stage of copies": (copy, "Copy", ("ring.wait_free(free(part, number))", "pass")),
    "values past the end": (load, "LoadV", ("if first + key >= scope.work.keys", "if key < 0")),
    "rescaling": (softmax, "Softmax", ("part.store(part.load() * factor)", "pass")),
    "O at rest": (softmax, "Softmax", ("pipes.o.wait(consumer_state_at(1, number - 1))", "pass")),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_kernel_without_its_cure_is_noticed(changed, trap):
    module, name, replacement = TRAPS[trap]
    changed(module, [kernel], name, replacement)
    case = {copy: COPIED, gather4: QUICK[1]}.get(module, replace(QUICK[0], amplitude=6.0))
    with pytest.raises(Exception, match=r"."):
        check(case, BLACKWELL, CHECKED, ADVERSARIAL)
