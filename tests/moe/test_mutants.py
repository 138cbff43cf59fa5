"""Mutants of the kernels of moe: the emulator and its checker have to notice nearly every one.

`scripts/mutate.py --subject moe` judges all of them; this is a sample.
"""

from __future__ import annotations

import pytest

from lab.mutation.subject import assert_noticed
from lab.mutation.subjects import EXPERTS

SAMPLES = {"moe 128 quantised": 5, "moe pair x 256": 5, "moe swapped": 5, "moe permutation": 7}
SAMPLES |= {"moe dependent launch": 2, "moe bias": 5, "moe mxfp8 by mxfp4": 5}
SAMPLES |= {"moe mixed": 5, "moe mixed gathered": 5}
SAMPLES |= {
    "moe mixed, a stage in flight": 3,
    "moe mixed, one step": 3,
    "moe mixed, shares of K": 3,
    "moe mixed rows": 5,
    "moe few rows": 3,
    "moe few rows of a warp": 3,
    "moe route tokens": 5,
}


@pytest.mark.parametrize(("name", "count"), SAMPLES.items(), ids=str)
def test_mutants_are_noticed(name, count):
    assert_noticed(EXPERTS[name], count)
