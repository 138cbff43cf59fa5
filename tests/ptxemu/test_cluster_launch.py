"""try_cancel may fail although clusters are left: they then run as ordinary ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptxemu.kernels import launch
from workbench.conformance import ptx_program

CLUSTERS = 9
_COUNTED = "atom.global.add.u32 %r50, [%rd0+36], 1;\n"


def starts(policy: str, seed: int) -> int:
    """How many CTAs were launched; each piece of work has to be done once, whoever does it."""
    text = (ptx_program.FOLDER / "cluster_cancel.ptx").read_text()
    text = text.replace("NEXT:", f"@%p0 {_COUNTED}NEXT:")
    out = np.zeros(CLUSTERS + 1, np.uint32)
    launch(text, out, grid=(CLUSTERS,), smem_bytes=128, policy=policy, seed=seed, resident=1)
    assert (out[:CLUSTERS] == 1).all()
    return int(out[CLUSTERS])


def test_where_nothing_is_left_to_chance_one_cluster_takes_all_work() -> None:
    assert starts("round-robin", 0) == 1


@pytest.mark.parametrize("policy", ["random", "adversarial"])
def test_a_request_may_fail_while_clusters_are_left(policy: str) -> None:
    counts = {starts(policy, seed) for seed in range(6)}
    assert max(counts) > 1
    assert min(counts) < CLUSTERS
