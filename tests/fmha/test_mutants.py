"""Remove each synchronisation of the kernel in turn: the emulator has to notice every time.

A mutant is killed by wrong bits, a deadlock or a refusal under some policy. The chosen problem uses
every edge: more tiles than ring stages, maxima that move, boundary tiles, NaN past the lengths.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from cuda.bindings.driver import CUstream

from fmha.config import AttentionConfig
from fmha.sm100.compile import compile_attention
from ptxemu import Options
from tests.fmha.cases import Case, same_bits
from tests.fmha.mutants import REMOVALS, mutants, run_text, verdict

CASE = Case(130, 700, batch=2, causal=True, kv_lens=(700, 470), amplitude=4.0)
SCHEDULES = (
    Options(policy="round-robin"),
    *(Options(policy="adversarial", seed=seed) for seed in range(2)),
    *(Options(policy="random", seed=seed) for seed in range(4)),
)
SURVIVORS: dict[str, str] = {}  # name -> why no schedule of the emulator can tell it apart


@pytest.fixture(scope="module")
def compiled():
    return compile_attention(AttentionConfig(mask="causal", kv_lens=True))


def attend(compiled, ptx: str, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = CASE.inputs()
    o = torch.full(q.shape, math.nan, dtype=q.dtype)
    lse = torch.full((CASE.batch, CASE.heads[0], CASE.sq), math.nan)
    lens = torch.tensor(CASE.kv_lens, dtype=torch.int32)
    scale = 1.0 / math.sqrt(q.shape[-1])
    run_text(compiled, ((q, k, v, o), (lse, None), lens, scale, CUstream(0)), ptx, options)
    return o, lse


def test_every_mutant_is_killed(compiled):
    text = compiled.artifacts.PTX
    expected = attend(compiled, text, SCHEDULES[0])
    for options in SCHEDULES[1:]:
        assert same_bits(attend(compiled, text, options), expected), options
    all_mutants = list(mutants(text))
    assert {mutant.kind for mutant in all_mutants} == set(REMOVALS), "a kind is gone"
    survivors = [mutant.name for mutant in all_mutants if survives(compiled, mutant.ptx, expected)]
    assert survivors == list(SURVIVORS)


def survives(compiled, ptx: str, expected: tuple[torch.Tensor, ...]) -> bool:
    """No schedule tells the mutant from the kernel."""

    def right(options: Options) -> bool:
        return same_bits(attend(compiled, ptx, options), expected)

    return all(verdict(partial(right, options)) == "survived" for options in SCHEDULES)
