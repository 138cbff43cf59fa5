"""The kernels, through the API and the emulator, compared with the fp64 definition.

One list of problems serves every architecture. The checker is on, the bits must not depend on the
schedule, and elements that the kernel leaves unwritten would be NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from gqa_lowlatency import choose, decode, decode_plan, launch, reference
from gqa_lowlatency.choose import MACHINES
from lab.problems.attention import PATIENCE
from lab.problems.decode import Case, verdicts
from ptxemu import Options
from tests.gqa_lowlatency import cases
from tests.gqa_lowlatency.space import BORDERS, EDGES, GROUPS, MATRIX, QUICK, SECOND

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ARCHS = ("sm_100a", "sm_90a")  # with clusters; test_portable.py has the others
CHECKED = Options(policy="round-robin", check=True, limit=PATIENCE)
ADVERSARIAL = Options(policy="adversarial", seed=1, limit=PATIENCE)
SAMPLED = slice(2, None, 13)  # of many cases: under the adversarial schedule, too


def on_every_arch(chosen: Sequence[Case]) -> list:
    """(arch, case) with ids; those that share a compiled kernel share a worker."""
    return [
        pytest.param(
            arch, case, id=f"{arch}-{case}",
            marks=pytest.mark.xdist_group(f"gqa-{arch}-{case.group}"),
        )
        for arch in ARCHS
        for case in chosen
    ]  # fmt: skip


each_arch = pytest.mark.parametrize("arch", ARCHS)


def check(case: Case, arch: str) -> None:
    cases.check(case, arch, CHECKED, ADVERSARIAL)


def check_once(case: Case, arch: str) -> None:
    cases.check(case, arch, CHECKED)


@pytest.mark.parametrize(("arch", "case"), on_every_arch(QUICK))
def test_every_value_of_many_factors(arch, case):
    check(case, arch)


@pytest.mark.parametrize(("arch", "case"), on_every_arch(MATRIX))
def test_every_pair_of_values(arch, case):
    """Round-robin is enough for the checker; the adversarial schedule costs up to fifty times as
    much."""
    check_once(case, arch)


@pytest.mark.parametrize(("arch", "case"), on_every_arch((*MATRIX[SAMPLED], *GROUPS[SAMPLED])))
def test_pairs_in_two_schedules(arch, case):
    check(case, arch)


@pytest.mark.parametrize(("arch", "case"), on_every_arch(SECOND))
def test_another_problem_for_each_kernel(arch, case):
    check_once(case, arch)


@pytest.mark.parametrize(("arch", "case"), on_every_arch(GROUPS))
def test_rows_of_a_kv_head(arch, case):
    check_once(case, arch)


@pytest.mark.parametrize(("arch", "case"), on_every_arch((*BORDERS[:4], *EDGES[:4])))
def test_borders_of_tiles_and_edges_of_masks(arch, case):
    check_once(case, arch)


@pytest.mark.parametrize(("arch", "case"), on_every_arch((*BORDERS[4:], *EDGES[4:])))
def test_more_borders_and_edges(arch, case):
    check_once(case, arch)


STEADY = Case((700, 130, 0), (8, 2), 2, head_dim=64, cluster=4, sinks=True, window=300)


@each_arch
@pytest.mark.parametrize("policy", ["random", "adversarial"])
def test_the_same_bits_every_time(arch, policy):
    schedules = (Options(policy=policy, seed=seed, limit=PATIENCE) for seed in (3, 3, 4))
    results = [cases.run(STEADY, arch, schedule) for schedule in schedules]
    assert cases.same_bits(results[0], results[1])
    assert cases.same_bits(results[0], results[2])


INVARIANT = Case((700, 77, 300, 0, 128), (8, 2), 2, head_dim=64, batch_invariant=True)


@each_arch
def test_an_entry_does_not_know_its_batch(arch, monkeypatch):
    """Alone, in another order, or with longer entries: the bits are the same for one max_kv_len."""
    small = dataclasses.replace(MACHINES[arch], sms=16)  # a batch leaves fewer CTAs per entry
    monkeypatch.setitem(MACHINES, arch, small)
    q, k, v = INVARIANT.inputs()
    options = INVARIANT.options() | INVARIANT.launch_options(arch) | {"max_kv_len": 730}
    lens = options.pop("kv_lens")

    def step(*entries, **changes):
        chosen = torch.tensor(entries)
        tensors = (tensor[chosen] for tensor in (q, k, v))
        return decode(*tensors, kv_lens=lens[chosen], return_lse=True, **(options | changes))

    o, lse = step(0, 1, 2, 3, 4)
    for entries in ((0,), (1,), (3,), (4, 2), (2, 1, 0)):
        expected = (o[list(entries)], lse[list(entries)])
        assert cases.same_bits(step(*entries), expected), entries
    others, _ = step(0, 1, 2, 3, 4, batch_invariant=False)
    assert not torch.equal(others, o), "the batch makes no difference, so this shows nothing"


@each_arch
def test_the_cluster_changes_rounding_alone(arch):
    """Every number of CTAs and owners gives the same result, and every owner writes its part."""
    for cluster, owners in ((1, 0), (2, 1), (4, 2), (8, 0), (16, 4)):
        tuning = (("owners", owners),)
        check(dataclasses.replace(STEADY, cluster=cluster, tuning=tuning), arch)


SHARED = Case((1300, 130, 0), (8, 2), 2, head_dim=64, cluster=2, sinks=True, parts=3)


@each_arch
def test_clusters_that_share_a_head_leave_their_workspace_as_they_found_it(arch, monkeypatch):
    """Some entries have fewer tiles than parts, or none; every launch gives the same bits."""
    made = []

    def remembered(*given):
        made.append(make_workspace(*given))
        return made[-1]

    make_workspace = launch.make_workspace
    monkeypatch.setattr(launch, "make_workspace", remembered)
    tensors, options = SHARED.inputs(), SHARED.options() | SHARED.launch_options(arch)
    plan, moving = decode_plan(*tensors, **options), {"kv_lens": options["kv_lens"]}
    ((partial, counts),) = made
    assert partial.shape[1] == SHARED.parts
    results = []
    for schedule in (CHECKED, CHECKED, ADVERSARIAL):
        with cases.watched(schedule):
            results.append(plan(*tensors, **moving))
        assert not counts.any()
    for result in results:
        assert cases.same_bits(result, results[0])
        cases.expect(cases.judge(SHARED, arch, result))


@each_arch
@pytest.mark.parametrize(("sink", "heads"), [(-math.inf, 1), (-200.0, 1), (90.0, 1), (90.0, 8)])
def test_extreme_sinks(arch, sink, heads):
    """-inf is no sink at all; with a sink far above every score O keeps its relative precision,
    until the remaining weight is subnormal."""
    sinks = torch.full((8,), 0.5)
    sinks[-heads:] = sink
    results = cases.run(STEADY, arch, sinks=sinks)
    cases.expect(cases.judge(STEADY, arch, results, sinks=sinks))


@each_arch
def test_keys_may_be_values_and_heads_may_come_last(arch):
    """K and V are one tensor, with tokens before heads; q is a slice of a wider one."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn((2, 3, 24, 64), generator=generator).bfloat16()
    cache = torch.randn((2, 200, 2, 64), generator=generator).bfloat16()
    q = wide[:, :, 8:16]
    results = decode(q, cache, cache, arch=arch, return_lse=True)
    cases.expect(verdicts((q, cache, cache), {}, results, q.dtype))


JUDGED = Case(
    (300, 140), (8, 2), 3, head_dim=64, window=60, sink_tokens=5, softcap=5.0, sinks=True,
    kv_dtype="e4m3", scales="heads",
)  # fmt: skip
WRONG = {
    "window by one": {"window": 59},
    "sink tokens by one": {"sink_tokens": 4},
    "length by one": {"kv_lens": torch.tensor([300, 139])},
    "not causal": {"causal": False},
    "no softcap": {"softcap": 0.0},
    "softcap of another size": {"softcap": 5.5},
    "no sinks": {"sinks": None},
    "scale": {"scale": 0.16},
    "scales of the wrong head": {"k_scale": torch.tensor([1.5, 0.5])},
    "values not scaled": {"v_scale": None},
}


@each_arch
@pytest.mark.parametrize("name", WRONG)
def test_the_judge_tells_another_problem_from_this_one(arch, name):
    """Judge the result that a kernel with one mistake would return; nothing is compiled."""
    q, k, v = JUDGED.inputs()
    k, v = (torch.where(t.float().isnan(), torch.zeros(()), t.float()).to(t.dtype) for t in (k, v))
    for change, expected in (({}, True), (WRONG[name], False)):
        options = JUDGED.options() | change | {"arch": arch}
        result = reference.rounded(q, k, v, **options)
        reports = cases.judge(JUDGED, arch, (result.o, result.lse))
        assert all(report.ok for report in reports) == expected


@each_arch
@pytest.mark.parametrize(("pdl", "full"), [("pdl", False), ("ready", False), ("ready", True)])
def test_a_dependent_launch_does_not_overtake_the_one_before(arch, pdl, full, monkeypatch):
    """Two steps write the same outputs: an entry without keys must wait, too.

    full: launch as if the grid took most SMs.
    """
    monkeypatch.setattr(choose, "most_sms", lambda *_: full)
    case = Case((140, 0), (8, 1), head_dim=64, pdl=pdl)
    tensors, options = case.inputs(), case.options() | case.launch_options(arch)
    plan, moving = decode_plan(*tensors, **options), {"kv_lens": options["kv_lens"]}
    assert plan.config.cluster == 2
    assert plan.config.early == (full and arch == "sm_90a")
    out, lse = plan(*tensors, **moving)
    with cases.watched(CHECKED):
        for _ in range(2):
            plan(*tensors, **moving, out=out, lse=lse)
    cases.expect(cases.judge(case, arch, (out, lse)))
