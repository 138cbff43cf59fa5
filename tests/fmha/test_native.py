"""The kernel on a GPU of compute capability 9.0 or 10.x: random problems, natively.

Run with --hw. `scripts/soak.py fmha` is the long run of this; each problem runs twice, in a CUDA
graph, through torch.compile and beside others, with equal bits, and is held against fp64.
"""

from __future__ import annotations

import pytest

import soak

pytestmark = pytest.mark.hw


@pytest.mark.parametrize("seed", range(3))
def test_random_problems(seed):
    flags = f"fmha --backend cuda --seed {seed} --configs 12 --problems 240 --graphs --streams"
    assert soak.main(flags.split()) == 0


def test_random_problems_through_torch_compile():
    assert soak.main("fmha --backend cuda --configs 6 --problems 18 --compile".split()) == 0


def test_rows_of_128k_keys():
    assert soak.main("fmha --backend cuda --long --configs 10 --problems 40".split()) == 0
