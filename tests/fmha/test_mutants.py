"""Mutants of the kernels: the emulator and its checker have to notice nearly every one.

`scripts/mutate.py` judges all mutants of every kernel; this is a sample.
"""

from __future__ import annotations

import pytest

from lab.mutation.subject import assert_noticed
from lab.mutation.subjects import ATTENTION

SAMPLES = {  # kernel -> mutants
    "64 base": 9, "128 pingpong": 6, "256 pair": 4, "512 pair": 4, "64 dependent launch": 2,
    "sm_90a 64 turns": 8, "sm_90a 512": 6, "sm_90a 256 multicast": 5, "sm_90a 64 pages": 6,
    "sm_90a 64 dependent launch": 2,
}  # fmt: skip
PARAMETERS = [
    pytest.param(name, count, marks=pytest.mark.xdist_group(f"fmha-mutants-{name}"))
    for name, count in SAMPLES.items()
]


@pytest.mark.parametrize(("name", "count"), PARAMETERS)
def test_mutants_are_noticed(name, count):
    assert_noticed(ATTENTION[name], count)
