"""Rung 0 of the ladder, in the emulator under every policy."""

from __future__ import annotations

import math

import pytest
import torch

import ptxemu
from fmha import reference
from fmha.launch import compile_minimal
from kernelkit import tolerance
from kernelkit.launch import Target, emulation, launch
from workbench.problems.attention import POLICIES, Case, same_bits


@pytest.fixture(scope="module")
def compiled():
    return compile_minimal()


@pytest.mark.parametrize("case", [Case(128, 128), Case(1, 130, (2, 2)), Case(200, 333, (1, 1), 2)])
def test_minimal(compiled, case):
    q, k, v = case.inputs()
    results = []
    for policy in POLICIES:
        o = torch.full(q.shape, math.nan, dtype=q.dtype)
        with emulation(ptxemu.Options(policy=policy)):
            launch(compiled, (q, k, v, o, 0.125), Target("emulate", "sm_100a"), q.device)
        results.append((o,))
    assert all(same_bits(results[0], other) for other in results[1:])
    exact, rounded = reference.definition(q, k, v), reference.rounded(q, k, v)
    report = tolerance.compare_output(results[0][0], exact.o, rounded.o, q.dtype)
    assert report.ok, str(report)
