"""ptxas' code of the Hopper kernel's products: they overlap, and nothing spills."""

from __future__ import annotations

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, read, tools_found
from fmha.config import HEAD_DIMS, AttentionConfig
from fmha.launch import compile_attention

pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas"),
]

SCALES = {"k_scale": True, "v_scale": True}
KINDS = {
    "bf16": {"right": True},
    "e4m3": {"right": True, "dtype": "e4m3"},
    "bf16 by e4m3": {"right": True, "kv_dtype": "e4m3"},
    "e4m3, scales": {"right": True, "dtype": "e4m3", "q_scale": True, **SCALES},
    "bf16 by e4m3, scales": {"right": True, "kv_dtype": "e4m3", **SCALES},
}
# Too few registers (C7511); a kernel that issues products as they come is not serialised there.
SERIALISED = {(96, "e4m3"), (96, "bf16 by e4m3")}
# (stack, spills) of ptxas 13.4; that of CUDA 12.9 spilled nothing (notes/compilers.md).
SPILLED = {(192, "bf16 by e4m3, scales"): (48, 34)}


@pytest.mark.parametrize(("dims", "kind"), [
    pytest.param(dims, kind, id=f"{dims[0]}-{kind}")
    for kind in KINDS for dims in HEAD_DIMS if kind == "bf16" or dims[0] <= 256
])  # fmt: skip
def test_products_overlap_and_nothing_spills(dims, kind, tmp_path):
    head_dim, v_head_dim = dims
    narrow = {"v_head_dim": v_head_dim} if v_head_dim < head_dim else {}
    config = AttentionConfig(head_dim=head_dim, **narrow, **KINDS[kind])
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_attention(config, "sm_90a").cubin)
    found, _ = read(cubin)
    assert (found["stack"], found["spills"]) == SPILLED.get((head_dim, kind), (0, 0))
    assert found["serialised"] == ((head_dim, kind) in SERIALISED)
