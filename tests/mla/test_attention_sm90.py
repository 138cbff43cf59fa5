"""The wgmma kernel of attention to latent keys in the emulator, under the checker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelkit.numerics.tolerance import compare_output
from kernelkit.plan import hw
from lab.problems.attention import same_bits
from lab.problems.latent import Cache, Dense, Sparse
from mla import decode, decode_plan, sparse_decode
from mla.attention import launch, reference
from mla.attention.choose import WGMMA, Load, decide, decision_for
from mla.attention.config import Keys, LatentConfig, Ways
from mla.attention.shared import entries
from mla.attention.sm90 import finish, gather, halves, kernel, math, plan, query
from ptxemu import Options, PtxEmuError
from tests.mla.latent_cases import ADVERSARIAL, CHECKED, RANDOM, check, run

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

HOPPER = "sm_90a"


def wgmma(cluster: int = 1, parts: int = 1) -> tuple:
    """Options of a call."""
    return (("kernel", "wgmma"), ("cluster", cluster), ("parts", parts))


QUICK = (
    Dense(heads=20, tokens=2, page=16, lens=(61, 133, 0), sinks=True, options=wgmma(3)),
    Sparse(heads=12, cache=Cache("fp8_584", 32, 90, counts=(90, 1, 0)),
           extra=Cache("fp4_288", 5, 40), rope=True, sinks=True, options=wgmma(1, 2)),
)  # fmt: skip
MATRIX = (
    Dense(heads=16, page=1, lens=(1, 35, 0, 64), options=wgmma()),
    Dense(heads=128, page=64, lens=(300, 64), options=wgmma(4)),
    Dense(heads=128, page=128, lens=(700,), options=wgmma(3, 2)),
    Dense(heads=3, tokens=9, page=7, lens=(5, 100), options=wgmma(1, 2)),
    Dense(heads=8, tokens=3, page=128, lens=(130,), causal=False, full=True, options=wgmma(2)),
    Dense(heads=17, page=16, lens=(190, 5), scaled=True, sinks=True, options=wgmma(3)),
    Dense(heads=64, page=256, lens=(450, 7), options=wgmma()),
    Dense(heads=40, page=32, lens=(130, 7), amplitude=30.0, options=wgmma(2)),
    Dense(heads=128, tokens=2, page=8, lens=(65, 200), options=wgmma(16)),
    Dense(heads=64, page=64, lens=(513, 70), options=wgmma(4, 2)),
    Dense(heads=16, page=64, lens=(650,), sinks=True, options=wgmma(5, 2)),
    Sparse(heads=64, cache=Cache("fp8_656", 64, 170), options=wgmma(3)),
    Sparse(heads=16, cache=Cache("fp8_528", 9, 150, wide=False), rope=True, options=wgmma()),
    Sparse(heads=32, cache=Cache("fp4_288", 16, 133), sinks=True, options=wgmma(1, 3)),
    Sparse(heads=16, cache=Cache("tensor", 16, 165, counts=(165, 0, 3)), options=wgmma(2)),
    Sparse(heads=16, cache=Cache("bf16_512", 16, 140), extra=Cache("bf16_512", 8, 133), rope=True,
           options=wgmma()),
    Sparse(heads=128, tokens=2, cache=Cache("bf16_512", 16, 128), extra=Cache("fp8_584", 8, 164),
           sinks=True, rope=True, options=wgmma(5)),
    Sparse(heads=8, tokens=1, cache=Cache("bf16_512", 16, 150), extra=Cache("bf16_512", 8, 20),
           options=wgmma(3)),
    Sparse(heads=64, tokens=4, batch=2, cache=Cache("fp8_656", 16, 96), options=wgmma()),
    Sparse(heads=1, tokens=1, cache=Cache("bf16_576", 4, 1), options=wgmma(2)),
)  # fmt: skip


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_attention_is_right(case):
    check(case, HOPPER, CHECKED, ADVERSARIAL, RANDOM)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_kind_of_attention(case):
    check(case, HOPPER, CHECKED)


def cancelling(keys=128):
    """Return q, kv and options of `decode`: weights are all 1, and sums of two CTAs cancel."""
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(2, keys // 2, 576, generator=generator).bfloat16()
    kv[1] = -kv[0].roll(1, 0)
    kv[1, 0] += 0.25
    table, lens = torch.tensor([[0, 1]]).int(), torch.tensor([keys]).int()
    return (torch.zeros(1, 1, 16, 576).bfloat16(), kv), {"page_table": table, "kv_lens": lens}


def report_of(o, senders):
    """Return the report of O, or of the reference itself."""
    (q, kv), options = cancelling()
    source = reference.of_pages(kv, options["page_table"], options["kv_lens"])
    exact = reference.definition(q, [source]).o
    rounded = reference.rounded(q, [source], senders=senders).o
    return compare_output(rounded if o is None else o, exact, rounded, torch.bfloat16)


def test_the_reference_rounds_what_ctas_send():
    """With two senders the sums are rounded before they cancel; with one, and in fp32, they are
    exact."""
    errors = [report_of(None, senders).reference_error for senders in (0, 2)]
    assert errors[1] > 20 * errors[0]


def test_what_ctas_send_is_within_a_computed_limit():
    """Where their sums cancel, the rounding of what they send is most of the error."""
    given, options = cancelling()
    o = decode(*given, **options, kernel="wgmma", cluster=2, parts=1, arch=HOPPER)
    assert report_of(o, 2).ok
    assert not report_of(o, 0).ok


TWO_TILES = Sparse(heads=66, tokens=1, cache=Cache("fp8_584", 32, 200),
                   extra=Cache("fp4_288", 5, 40), sinks=True, options=wgmma())  # fmt: skip
CROSSING = Ways(crosses=True)
WIDER = Sparse(heads=66, tokens=2, cache=Cache("fp8_656", 8, 140), options=wgmma(2))
CROSSED = (
    (WIDER, CROSSING),
    (Sparse(heads=128, cache=Cache("fp8_656", 16, 200), options=wgmma(2, 2)), CROSSING),
    (Sparse(heads=128, cache=Cache("fp8_528", 16, 70), extra=Cache("fp4_288", 8, 164), rope=True,
            options=wgmma(3)), CROSSING),
    (Dense(heads=80, page=7, lens=(5, 200), scaled=True, options=wgmma()), CROSSING),
)  # fmt: skip


@pytest.fixture
def other_ways(monkeypatch):
    """Return a function: launches from now on use these ways, and CTAs that cross share keys."""

    def use(ways: Ways, slices: int = 1) -> None:
        def decision(*given: Any) -> Any:
            found = decide(*given)
            sharers = 2 if ways.crosses else found.config.sharers
            config = replace(found.config, ways=ways, sharers=sharers, slices=slices)
            return replace(found, config=config)

        monkeypatch.setattr(launch, "decide", decision)

    return use


def check_ways(
    case, ways: Ways, other_ways: Callable, *schedules: Options, slices: int = 1
) -> None:
    """Check that other ways give the same bits."""
    other_ways(Ways())
    usual = run(case, HOPPER)
    other_ways(ways, slices)
    assert same_bits(check(case, HOPPER, *schedules), usual)


def test_two_ctas_cross(other_ways):
    check_ways(TWO_TILES, CROSSING, other_ways, CHECKED, ADVERSARIAL)


@pytest.mark.parametrize(("case", "ways"), CROSSED, ids=str)
def test_ctas_cross_in_every_way(case, ways, other_ways):
    check_ways(case, ways, other_ways, CHECKED, RANDOM)


STAYING = (
    (Dense(heads=70, page=32, lens=(150, 0, 0, 70, 10), options=wgmma()), Ways(resident=3)),
    (Sparse(heads=70, tokens=5, cache=Cache("fp8_584", 16, 150, counts=(140, 0, 70, 150, 64)),
            extra=Cache("fp4_288", 8, 70), options=wgmma()), replace(CROSSING, resident=2)),
    (Sparse(heads=70, cache=Cache("bf16_576", 16, 150), options=wgmma()), Ways(resident=4)),
)  # fmt: skip


@pytest.mark.parametrize(("case", "ways"), STAYING, ids=str)
def test_clusters_stay(case, ways, other_ways):
    check_ways(case, ways, other_ways, CHECKED, RANDOM)


SLICED = (
    (QUICK[1], 2),
    (Dense(heads=128, page=64, lens=(300, 0, 64), options=wgmma(3, 2)), 4),
    (Sparse(heads=70, tokens=2, cache=Cache("fp8_656", 8, 140), options=wgmma(3)), 4),
    (Sparse(heads=64, cache=Cache("fp8_528", 16, 165), extra=Cache("fp4_288", 8, 70), rope=True,
            options=wgmma(5)), 2),
    (Sparse(heads=16, cache=Cache("bf16_512", 16, 140), rope=True, options=wgmma()), 2),
    (Dense(heads=8, tokens=3, page=16, lens=(130, 7), options=wgmma(1, 2)), 2),
)  # fmt: skip


@pytest.mark.parametrize(("case", "slices"), SLICED, ids=str)
def test_slices_of_v_are_attended_to_alone(case, slices, other_ways):
    check_ways(case, Ways(), other_ways, CHECKED, RANDOM, slices=slices)


HALVES = Ways(halves=True)
HALVED = (
    (Sparse(heads=12, cache=Cache("fp8_656", 8, 140, counts=(140, 70, 0), spread=24),
            sinks=True, amplitude=20.0, options=wgmma(2)), HALVES),
    (Sparse(heads=66, tokens=2, cache=Cache("fp8_528", 32, 200, spread=24),
            extra=Cache("fp4_288", 5, 70), rope=True, sinks=True, options=wgmma()), HALVES),
    (Dense(heads=17, page=16, lens=(190, 5), scaled=True, sinks=True, options=wgmma(3)), HALVES),
    (Sparse(heads=70, tokens=3, cache=Cache("fp8_656", 16, 200), options=wgmma()),
     replace(HALVES, resident=4)),
    (Dense(heads=64, page=64, lens=(300, 0, 70), scaled=True, options=wgmma(1, 2)), HALVES),
)  # fmt: skip


@pytest.mark.parametrize(("case", "ways"), HALVED, ids=str)
def test_codes_become_fp16(case, ways, other_ways):
    """Entries that differ by up to 2^24, and scales that are no powers of two."""
    other_ways(ways)
    check(case, HOPPER, CHECKED, RANDOM)


def test_codes_become_fp16_where_a_cta_has_tiles_enough():
    config = LatentConfig(heads=64, keys=Keys("fp8_656", 64, listed=True))
    found = {keys: decision_for(config, WGMMA, Load(32, keys, 132)).config for keys in (256, 2048)}
    assert [each.ways.halves for each in found.values()] == [False, True]
    load = Load(32, 2048, 132, batch_invariant=True)
    assert not decision_for(config, WGMMA, load).config.ways.halves
    v4 = replace(config, keys=Keys("fp8_584", 64, listed=True))
    assert not decision_for(v4, WGMMA, Load(32, 2048, 132)).config.ways.halves


@pytest.mark.parametrize(
    ("ways", "options", "text"),
    [
        (HALVES, {"sharers": 1, "slices": 2}, "with slices 1"),
        (HALVES, {"sharers": 1, "keys": Keys("fp8_584", 64, listed=True)}, "columns of V"),
        (replace(HALVES, crosses=True), {}, "fp16 is for"),
        (CROSSING, {"sharers": 1}, "CTAs share"),
        (CROSSING, {"keys": Keys("bf16_576", 64, listed=True)}, "codes alone"),
        (CROSSING, {"parts": True}, "parts of one CTA"),
        (Ways(crosses=True, resident=4), {"cluster": 2}, "clusters that stay"),
        (Ways(), {"slices": 3, "sharers": 1}, "slices 3"),
        (CROSSING, {"slices": 2}, "1 with sharers"),
        (Ways(resident=4), {"slices": 2, "sharers": 1}, "no slices"),
    ],
)
def test_ways_that_do_not_fit_are_refused(ways, options, text):
    given = {"keys": Keys("fp8_656", 64, listed=True), "sharers": 2} | options
    with pytest.raises(ValueError, match=text):
        plan.Plan90(LatentConfig(ways=ways, **given)).check()


def test_row_tiles_share_keys(monkeypatch):
    """Two tiles of rows get their keys by multicast where there are as many as SMs."""
    monkeypatch.setitem(hw.SMS_OF, HOPPER, 2)
    case = Dense(heads=40, tokens=2, page=32, lens=(200,), options=(("kernel", "wgmma"),))
    given, options = case.inputs()
    made = decode_plan(*given, **options, kernel="wgmma", arch=HOPPER)
    assert (made.cluster, made.parts, made.grid) == (1, 1, 2)
    check(case, HOPPER, CHECKED, ADVERSARIAL)


@pytest.mark.parametrize(
    ("entries", "keys", "expected"),
    [(1, 4096, (8, 3, 2)), (1, 65536, (8, 7, 1)), (8, 8192, (6, 1, 1)), (32, 8192, (2, 1, 1))],
)
def test_splits_of_an_h200(entries, keys, expected):
    """Clusters of a split run at once; what the H200 takes for them is in notes/mla.md."""
    at_once = {1: 132, 2: 66, 3: 42, 4: 31, 5: 24, 6: 18, 7: 15, 8: 15, 9: 11}
    config = LatentConfig(heads=128, keys=Keys("bf16_576", 64, counts=True))
    load = Load(entries, keys, 132)
    found = decision_for(config, WGMMA, load, lambda width: at_once.get(width, 7))
    assert (found.config.cluster, found.parts, found.config.slices) == expected


def test_clusters_that_stay_are_as_many_as_run_at_once():
    config = LatentConfig(heads=128, keys=Keys("fp8_656", 64, listed=True))
    found = decision_for(config, WGMMA, Load(4096, 2048, 132, many=True))
    assert found.config.ways == Ways(crosses=True, resident=66)
    assert (found.config.sharers, found.grid) == (2, 132)


def test_slices_of_a_batch_do_not_change_its_division():
    """With `batch_invariant` one entry has slices, and a full batch has none."""
    config = LatentConfig(heads=64, keys=Keys("fp8_584", 64, listed=True))
    found = [
        decision_for(config, WGMMA, Load(entries, 640, 132, batch_invariant=True))
        for entries in (1, 128)
    ]
    assert [(each.config.cluster, each.parts) for each in found] == [(10, 1)] * 2
    assert [each.config.slices for each in found] == [4, 1]


def test_an_entry_does_not_know_its_batch():
    case = Dense(heads=20, tokens=2, page=16, lens=(61, 133, 17))
    (q, kv), options = case.inputs()
    options |= {"arch": HOPPER, "kernel": "wgmma", "batch_invariant": True, "max_kv_len": 144}
    table, lens = options.pop("page_table"), options.pop("kv_lens")
    o, lse = decode(q, kv, page_table=table, kv_lens=lens, return_lse=True, **options)
    for entry in range(3):
        one = slice(entry, entry + 1)
        alone = decode(
            q[one], kv, page_table=table[one], kv_lens=lens[one], return_lse=True, **options
        )
        assert same_bits(alone, (o[one], lse[one]))


def test_a_code_that_is_nan_stays_nan():
    """A key with a NaN makes the rows that see it NaN, and no others."""
    case = Sparse(heads=4, tokens=2, cache=Cache("fp8_584", 8, 40), options=wgmma())
    (q, rows, indices), options = case.inputs()
    indices[0, 0] = 3
    indices[1][indices[1] == 3] = -1
    rows.data()[0, 3, 300] = 0x7F
    options |= {"kernel": "wgmma", "arch": HOPPER}
    o, lse = sparse_decode(q, rows, indices, return_lse=True, **options)
    assert o[0].isnan().all()
    assert lse[0].isnan().all()
    assert not o[1].isnan().any()


TRAPS = {
    "marks": (math, kernel, "Math", ("(bits >> bit) & 1 != 0", "bits == bits")),
    "published": (math, kernel, "Math", ("maxima[lane.row + 8 * half, team] = tops[half]", "pass")),
    "ninth panel": (
        math, kernel, "Math",
        ('meet(self.plan.barriers, "team", Int32(team))  # all warps have read the ninth panel',
         "pass"),
    ),
    "scales": (
        entries, entries, "find_entries",
        ("begin = address + half * (HALF * PANEL // form.group)", "begin = address"),
    ),
    "bytes of a peer": (gather, kernel, "Gather", ("panels + (half ^ buffer)", "panels")),
    "exit of a peer": (
        gather, kernel, "Gather", ("range_constexpr(BUFFERS)", "range_constexpr(0)")
    ),
    "rows of Q": (query, math, "halve_rows", ('meet(plan.barriers, "math")', "pass")),
    "rounded scales": (
        halves, halves, "has_odd_scales", ("(1 << MANTISSA) - 1) != 0", "0) != 0")
    ),
    "mail over keys of a peer": (
        finish, math, "finish_together", ("copied = plan.crosses", "copied = False")
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_a_kernel_without_its_cure_is_noticed(changed, other_ways, trap):
    module, user, name, replacement = TRAPS[trap]
    changed(module, [user], name, replacement)
    case = QUICK[1] if trap in ("marks", "scales") else replace(QUICK[0], amplitude=6.0)
    if trap in ("rows of Q", "rounded scales"):
        other_ways(HALVES)
        case = HALVED[0][0]
    if trap.endswith("peer"):
        other_ways(CROSSING)
        case = WIDER if "mail" in trap else replace(WIDER, options=wgmma())
    with pytest.raises((AssertionError, PtxEmuError)):
        check(case, HOPPER, CHECKED, ADVERSARIAL)
