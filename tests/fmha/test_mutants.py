"""Remove each synchronisation of the kernel in turn: the emulator has to notice every time.

A mutant is killed by wrong bits, a finding, a deadlock or a refusal under some schedule. The
problems use every edge: more tiles than ring stages, maxima that move, boundary tiles, NaN past the
lengths. The ping-pong schedule is no subject: there many edges imply each other, and what is left
shows only where a warp is slow (test_traps.py).

No kinds: tcgen05.wait::ld, because the emulator interlocks the registers of a load, and every load
here is used before its columns are given away; cp.async.bulk.wait_group, because the emulator keeps
the shared memory of a CTA that has exited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from tests.fmha import cases
from tests.fmha.cases import Case, same_bits
from tests.fmha.mutants import REMOVALS, changed_launches, mutants, verdict

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

SCHEDULES = (  # the one that notices most comes first
    *(("adversarial", seed) for seed in range(2)),
    ("round-robin", 0),
    *(("random", seed) for seed in range(4)),
)
CLUSTER_KINDS = frozenset({"cluster arrival", "cluster wait"})
LENS = {"causal": True, "kv_lens": (1500, 1270), "amplitude": 4.0}


@dataclass(frozen=True)
class Subject:
    """A problem that uses all edges of its kernel, the kinds of its mutants, and those mutants that
    no schedule can tell."""

    case: Case
    kinds: frozenset[str] = frozenset(REMOVALS) - CLUSTER_KINDS
    survivors: dict[str, str] = field(default_factory=dict)  # name -> reason


SUBJECTS = {
    "base, tmem": Subject(Case(130, 1500, batch=2, schedule="base", **LENS)),
    "base, smem": Subject(
        Case(130, 1500, batch=2, schedule="base", p_path="smem", **LENS),
        survivors={"proxy fence 0": "of zeroed V rows: the thread fences its P again, later"},
    ),
    # No lengths: the fence of zeroed V rows would stand in for that of the gathered Q. A window,
    # for more than one masked tile.
    "packed heads": Subject(
        Case(50, 1900, (6, 2), 2, causal=True, window=(1500, None), amplitude=4.0, pack_heads=True,
             schedule="base"),
    ),
    "pair": Subject(
        Case(130, 1100, causal=True, kv_lens=(1000,), amplitude=4.0, dims=(512, 512)),
        CLUSTER_KINDS | {"named barrier"},  # a single CTA has the other kinds, too, and runs faster
        {
            "named barrier 0": "the cluster barrier waits for more; relaxed, it orders no memory",
            "named barrier 4": "before TMEM is freed: the cluster barrier that follows waits, too",
            "cluster arrival 0": "the emulator lets a thread wait that has not arrived",
            "cluster arrival 1": "the same",
            "cluster wait 1": "the load warps have waited for all that reaches the other CTA",
        },
    ),
}  # fmt: skip
QUICK = "base, tmem"


def attend(case: Case, ptx: str, schedule: tuple[str, int]) -> tuple[torch.Tensor, ...]:
    """The results of the kernel whose text is `ptx`; none where something was found."""
    with changed_launches(lambda _: ptx):
        results, reports = cases.run_reported(case, *schedule)
    found = any(launch.findings for report in reports for launch in report.launches)
    return () if found else results


def text_of(case: Case) -> str:
    texts = []
    with changed_launches(lambda ptx: texts.append(ptx) or ptx):
        cases.run(case, "round-robin")
    return texts[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.xdist_group(f"fmha-mutants-{name}"),
                *([] if name == QUICK else [pytest.mark.matrix]),
            ],
        )
        for name in SUBJECTS
    ],
)
def test_every_mutant_is_killed(name):
    subject = SUBJECTS[name]
    text = text_of(subject.case)
    expected = attend(subject.case, text, SCHEDULES[0])
    assert expected
    for schedule in SCHEDULES[1:]:
        assert same_bits(attend(subject.case, text, schedule), expected), schedule
    all_mutants = [mutant for mutant in mutants(text) if mutant.kind in subject.kinds]
    assert {mutant.kind for mutant in all_mutants} == subject.kinds, "a kind is gone"
    survivors = [
        mutant.name for mutant in all_mutants if survives(subject.case, mutant.ptx, expected)
    ]
    assert survivors == list(subject.survivors)


def survives(case: Case, ptx: str, expected: Sequence[torch.Tensor]) -> bool:
    """No schedule tells the mutant from the kernel."""

    def right(schedule: tuple[str, int]) -> bool:
        results = attend(case, ptx, schedule)
        return bool(results) and same_bits(results, expected)

    return all(verdict(partial(right, schedule)) == "survived" for schedule in SCHEDULES)
