"""Arguments that adaptors of engines pass to the kernels, over the whole range of a layer's
numbers: decoding and prompts over pages, compared with the definition in fp64.
"""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch

from blackwell_engines.engines.attend import Scores, attend, cache_scales
from blackwell_engines.engines.step import Step
from kernelkit.call.launch import emulation
from lab.problems import extremes
from lab.problems.attention import Case, references
from lab.tools.place import poisoned_outputs
from tests.support.extremes import ROUNDS, wrong

KINDS = {
    "decode": ("sm_90a", (1, 1), {"kv_dtype": "e4m3", "scales": True, "sinks": True}),
    "prompts": ("sm_100a", (5, 3), {"window": (20, None), "softcap": 1.0}),
}


def drawn(lengths, fields, pick):
    keys = tuple(pick.choice((5, 17, 40, 70)) for _ in lengths)
    return Case(
        1, max(keys), (4, 2), len(lengths), causal=True, q_lens=lengths, kv_lens=keys,
        page_size=16, tokens_first=True, **fields,
    )  # fmt: skip


def step_of(case):
    """Build a step in which all requests decode, or none does."""
    options, alike = case.options(), max(case.q_lens) == 1
    starts = torch.tensor([0, *accumulate(case.q_lens)], dtype=torch.int32)
    return Step(
        requests=len(case.q_lens) if alike else 0,
        tokens=1 if alike else 0,
        rest=0 if alike else sum(case.q_lens),
        longest=0 if alike else max(case.q_lens),
        starts=None if alike else starts,
        seq_lens=options["kv_lens"],
        table=options["page_table"],
        bound=max(case.keys),
    )


def scores_of(case):
    """Scores of a layer, as engines load them."""
    options = case.options()
    given = {name: options.get(name) for name in ("sinks", "k_scale", "v_scale")}
    scale = 1 / math.sqrt(case.dims[0]) if case.scale is None else case.scale
    return Scores(scale, window=case.window[0], softcap=case.softcap, **given)


def judged(case, arch):
    q, k, v = case.inputs()
    with poisoned_outputs(), emulation(arch=arch):
        out = torch.empty(q.shape, dtype=q.dtype)
        attend(step_of(case), q, (k, v), out, scores_of(case))
    exact, rounded = references(case, (q, k, v))
    return [extremes.judge_output(out, exact.o, rounded.o, case.coarsest, packed=True)]


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kind, number):
    arch, lengths, fields = KINDS[kind]
    found = wrong(
        lambda case: judged(case, arch),
        lambda pick: drawn(lengths, fields, pick),
        f"{kind}.{number}",
    )
    assert not found, "\n".join(found)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_no_checkpoint_means_are_refused(scale):
    """The kernels accept 0 and negative scales; in an engine these mark scales that were not
    loaded."""
    with pytest.raises(ValueError, match="expected a positive finite number"):
        cache_scales("layer 3", k_scale=1.0, v_scale=scale)
