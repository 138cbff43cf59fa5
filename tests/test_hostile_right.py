"""Generated wrong calls that are accepted give right results, in every bit."""

from __future__ import annotations

import pytest

from kernelkit.compile import compiler as kernel_compile
from tests.support.hostile.bases import BASES
from tests.support.hostile.generator import calls
from tests.support.hostile.plain import Reached, unlike_plain

OF_A_TEST = 100  # calls, about 20 of which are accepted
COMPUTING = {name: base for name, base in BASES.items() if base.computed}
KERNELS = 8  # compiled by a test; a call that needs one more is skipped


@pytest.fixture
def few_kernels(monkeypatch):
    """Raise `Reached` instead of compiling more than KERNELS kernels."""
    make, left = kernel_compile._make, [KERNELS]

    def limited(*key):
        if not left[0]:
            raise Reached
        left[0] -= 1
        return make(*key)

    monkeypatch.setattr(kernel_compile, "_make", limited)


@pytest.mark.parametrize("seed", range(200))
def test_accepted_calls_end_as_their_plain_forms(seed, few_kernels):
    drawn = zip(calls(COMPUTING, seed, OF_A_TEST), calls(COMPUTING, seed, OF_A_TEST), strict=True)
    judged = [(str(call), unlike_plain(call, twin)) for call, twin in drawn]
    wrong = [f"{call}\n    {words}" for call, words in judged if words]
    run = [words for _, words in judged if words is not None]
    assert not wrong, "\n".join((f"{len(wrong)} of {len(run)} calls:", *wrong))
    assert len(run) >= 5
