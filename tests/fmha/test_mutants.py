"""Remove each synchronisation of the kernel in turn: the emulator has to notice every time.

A mutant is killed by wrong bits, a deadlock or a refusal under some policy. The chosen problem uses
every edge: more tiles than ring stages, maxima that move, boundary tiles, NaN past the lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from cuda.bindings.driver import CUstream

from fmha.config import AttentionConfig
from fmha.sm100.compile import compile_attention
from ptxemu import Options
from tests.fmha.cases import Case, same_bits
from tests.fmha.mutants import REMOVALS, mutants, run_text, verdict

SCHEDULES = (
    Options(policy="round-robin"),
    *(Options(policy="adversarial", seed=seed) for seed in range(2)),
    *(Options(policy="random", seed=seed) for seed in range(4)),
)


@dataclass(frozen=True)
class Subject:
    """A kernel, a problem that uses all of its edges, and the mutants that no schedule can tell."""

    config: AttentionConfig
    case: Case
    kinds: frozenset[str] = frozenset(REMOVALS)
    survivors: dict[str, str] = field(default_factory=dict)  # name -> reason


SUBJECTS = {
    "causal-lens": Subject(
        AttentionConfig(mask="causal", kv_lens=True),
        Case(130, 700, batch=2, causal=True, kv_lens=(700, 470), amplitude=4.0),
    ),
    "full": Subject(
        AttentionConfig(),
        Case(130, 700, batch=2, amplitude=4.0),
        frozenset(REMOVALS) - {"proxy fence"},  # written and fenced only for kv_lens
        {
            "mbarrier wait 10": "O before its first tile: free from the start, so it never waits; "
            "the compiler peels the one masked tile of this config out of its loop",
        },
    ),
}


@pytest.fixture(params=SUBJECTS)
def subject(request) -> Subject:
    return SUBJECTS[request.param]


def attend(subject: Subject, ptx: str, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    case = subject.case
    q, k, v = case.inputs()
    o = torch.full(q.shape, math.nan, dtype=q.dtype)
    lse = torch.full((case.batch, case.heads[0], case.sq), math.nan)
    lens = None if case.kv_lens is None else torch.tensor(case.kv_lens, dtype=torch.int32)
    arguments = ((q, k, v, o), (lse, None), lens, 1.0 / math.sqrt(q.shape[-1]), CUstream(0))
    run_text(compile_attention(subject.config), arguments, ptx, options)
    return o, lse


def test_every_mutant_is_killed(subject):
    text = compile_attention(subject.config).artifacts.PTX
    expected = attend(subject, text, SCHEDULES[0])
    for options in SCHEDULES[1:]:
        assert same_bits(attend(subject, text, options), expected), options
    all_mutants = list(mutants(text))
    assert {mutant.kind for mutant in all_mutants} == subject.kinds, "a kind is gone"
    survivors = [mutant.name for mutant in all_mutants if survives(subject, mutant.ptx, expected)]
    assert survivors == list(subject.survivors)


def survives(subject: Subject, ptx: str, expected: tuple[torch.Tensor, ...]) -> bool:
    """No schedule tells the mutant from the kernel."""

    def right(options: Options) -> bool:
        return same_bits(attend(subject, ptx, options), expected)

    return all(verdict(partial(right, options)) == "survived" for options in SCHEDULES)
