"""Every public function of an operator gives the bits of the plain call within `torch.compile`,
without a graph break.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.hostile.bases import BASES
from tests.support.hostile.plain import ending, unlike

NAMES = (
    "attention", "attention of pages", "decode", "merge", "prepare_query", "scores", "select",
    "norm_rope_append", "norm_rope_append in place", "compress", "prepare_attention",
    "append_pages", "append_pages in e4m3", "gather_pages", "append_rows", "append_swa", "gather",
    "gather of records", "copy_slots", "checksum", "q8_0.quantise", "matvec",
    "matvec of integers", "product",
    "Q8Linear of tokens", "route", "route_tokens", "permutation", "combine", "moe.quantise",
    "grouped_gemm", "grouped_gemm, activated", "grouped_gemm_swiglu", "mixed_gemm", "fused_moe",
    "fused_moe, arranged",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_compiled(name):
    base = BASES[name]

    def step(**given):
        return base.function(**given)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    wanted = ending(base, base.function, base.arguments())
    assert unlike(ending(base, compiled, base.arguments()), wanted) == ""
