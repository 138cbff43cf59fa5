"""Attention to latent keys in the emulator, against the fp64 definition, under the checker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.problems.attention import same_bits
from lab.problems.latent import Cache, Dense, Sparse
from mla import decode, decode_plan, sparse_decode, sparse_prefill
from mla.attention.portable import attend, finish, kernel
from tests.mla.latent_cases import ADVERSARIAL, CHECKED, RANDOM, check, run

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ADA, BLACKWELL, HOPPER, AMPERE = "sm_89", "sm_120a", "sm_90a", "sm_80"
WARP = (("kernel", "warp"),)
PARTS = (("parts", 3), ("kernel", "warp"))
WINDOW = Cache("fp8_584", 32, 33, counts=(33, 1, 0))
QUICK = (
    (ADA, Dense(heads=20, tokens=2, page=16, lens=(61, 33, 0), sinks=True, options=PARTS)),
    (HOPPER, Sparse(heads=12, cache=WINDOW, extra=Cache("fp4_288", 5, 40), rope=True, sinks=True,
                    options=WARP)),
)  # fmt: skip
MATRIX = (
    (ADA, Dense(heads=16, page=1, lens=(1, 35, 0, 64), options=WARP)),
    (BLACKWELL, Dense(heads=128, page=64, lens=(200, 64), options=PARTS)),
    (BLACKWELL, Dense(heads=3, tokens=9, page=7, lens=(5, 100), options=PARTS)),
    (ADA, Dense(heads=8, tokens=3, page=128, lens=(130,), causal=False, full=True, options=WARP)),
    (ADA, Dense(heads=17, page=16, lens=(90, 5), scaled=True, sinks=True, options=PARTS)),
    (HOPPER, Dense(heads=64, page=64, lens=(130, 7), options=WARP)),
    (AMPERE, Dense(heads=40, page=32, lens=(130, 7), amplitude=30.0, options=PARTS)),
    ("sm_100a", Dense(heads=16, page=16, lens=(40,), options=WARP)),
    (BLACKWELL, Sparse(heads=64, cache=Cache("fp8_656", 64, 70), options=PARTS)),
    (ADA, Sparse(heads=16, cache=Cache("fp8_528", 9, 50, wide=False), rope=True, options=WARP)),
    (AMPERE, Sparse(heads=32, cache=Cache("fp4_288", 16, 33), sinks=True, options=WARP)),
    (AMPERE, Sparse(heads=16, cache=Cache("tensor", 16, 65, counts=(65, 0, 3)), options=PARTS)),
    (ADA, Sparse(heads=16, cache=Cache("bf16_512", 16, 40), extra=Cache("bf16_512", 8, 33),
                 rope=True, options=PARTS)),
    (BLACKWELL, Sparse(heads=128, tokens=2, cache=Cache("bf16_512", 16, 128),
                       extra=Cache("fp8_584", 8, 64), sinks=True, rope=True, options=PARTS)),
    (HOPPER, Sparse(heads=64, tokens=4, batch=2, cache=Cache("fp8_656", 16, 96), options=WARP)),
    (ADA, Sparse(heads=1, tokens=1, cache=Cache("bf16_576", 4, 1), options=WARP)),
)  # fmt: skip


def named(cases: tuple) -> list:
    """Parameters (arch, case)."""
    return [pytest.param(arch, case, id=f"{arch}-{case}") for arch, case in cases]


@pytest.mark.parametrize(("arch", "case"), named(QUICK))
def test_attention_is_right(arch, case):
    check(case, arch, CHECKED, ADVERSARIAL, RANDOM)


@pytest.mark.parametrize(("arch", "case"), named(MATRIX))
def test_every_kind_of_attention(arch, case):
    check(case, arch, CHECKED)


SMALL = Dense(heads=20, tokens=2, page=16, lens=(61, 33, 0), sinks=True, options=PARTS)


def test_a_plan_repeats_a_call():
    given, options = SMALL.inputs()
    options |= dict(SMALL.options) | {"arch": ADA}
    plan = decode_plan(*given, **options)
    assert (plan.cluster, plan.parts, plan.grid) == (1, 3, 3 * 2 * 3)
    assert plan.workspace_bytes == 3 * 2 * (3 * 32 * 514 + 1) * 4
    tables = {name: options[name] for name in ("page_table", "kv_lens")}
    assert same_bits(plan(*given, **tables), run(SMALL, ADA))


def test_a_row_may_have_its_numbers_in_a_wider_table():
    q, rows = torch.randn(3, 1, 4, 512).bfloat16(), torch.randn(1, 16, 512).bfloat16()
    indices, angles = torch.arange(16).int().expand(3, 1, 16), torch.randn(16, 32)
    columns = torch.arange(1, 7).view(3, 2), torch.arange(1, 7).view(3, 2).int()
    options = {"rope": (angles.cos(), angles.sin()), "kernel": "warp", "arch": ADA}
    found, wanted = (
        sparse_decode(q, rows, indices, positions=positions, counts=counts, **options)
        for positions, counts in (
            (column[:, 1:] for column in columns),
            (column[:, 1:].contiguous() for column in columns),
        )
    )
    assert torch.equal(found, wanted)


def test_prefill_and_out():
    """Many tokens are the same attention; O may be given."""
    case = QUICK[1][1]
    given, options = case.inputs()
    options |= {"kernel": "warp", "parts": 1, "arch": HOPPER}
    o, lse = sparse_decode(*given, return_lse=True, **options)
    out = torch.empty_like(o)
    assert sparse_prefill(*given, out=out, **options) is out
    assert torch.equal(out, o)
    assert lse.shape == o.shape[:-1]


def test_an_entry_does_not_know_its_batch():
    case = replace(SMALL, lens=(61, 33, 17), options=(("batch_invariant", True),))
    (q, kv), options = case.inputs()
    options |= {"arch": ADA, "kernel": "warp", "batch_invariant": True, "max_kv_len": 64}
    table, lens = options.pop("page_table"), options.pop("kv_lens")
    o, lse = decode(q, kv, page_table=table, kv_lens=lens, return_lse=True, **options)
    for entry in range(3):
        one = slice(entry, entry + 1)
        alone = decode(
            q[one], kv, page_table=table[one], kv_lens=lens[one], return_lse=True, **options
        )
        assert same_bits(alone, (o[one], lse[one]))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38, -3e38])
def test_a_row_keeps_its_extremes(value):
    """A query head with an extreme element does not touch the others."""
    (q, kv), options = SMALL.inputs()
    options |= dict(SMALL.options) | {"arch": ADA}
    plain = decode(q, kv, **options)
    changed = q.clone()
    changed[0, 1, 7, 100] = value
    found = decode(changed, kv, **options)
    others = torch.ones(q.shape[:3], dtype=torch.bool)
    others[0, 1, 7] = False
    assert torch.equal(found[others], plain[others])


TRAPS = {
    "marks": (attend, "weigh", ("sees = there & (", "sees = (there | True) & (")),
    "causal": (attend, "weigh", ("first_key + lane < ends[index]", "first_key + lane < 1 << 20")),
    "rescaled": (attend, "accumulate", ("o[2 * half, tile, block] *= factor", "pass")),
    "all parts": (
        finish, "finish", ("if is_last(plan, arrived, place, given.tables):",
                           "if is_last(plan, arrived, place, given.tables) | (place.part == 0):"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_a_kernel_without_its_cure_is_noticed(changed, trap):
    module, name, replacement = TRAPS[trap]
    changed(module, [kernel], name, replacement)
    case = QUICK[1][1] if trap == "marks" else replace(SMALL, amplitude=6.0, lens=(161, 40))
    with pytest.raises(AssertionError):
        check(case, HOPPER if trap == "marks" else ADA, CHECKED)
