"""ptxas' code of the loop over keys: no spills, and the cycles of its control words."""

from __future__ import annotations

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.launch import compile_for
from lab.sass import loops

pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas"),
]
# arch, head_dim, query heads of a KV head; most cycles of a step or tile; cycles from one
# exponential to the next, where 8 would be enough (notes/cycle_model.md, 2026-11-24). Code after a
# loop changes its cycles by up to 4 %; maxima of three instructions cost 4 to 30 % more than these.
BOUNDS = (
    ("sm_90a", 64, 8, 500, 10),
    ("sm_90a", 64, 16, 620, 10),
    ("sm_90a", 64, 32, 930, 10),
    ("sm_90a", 128, 8, 655, 10),
    ("sm_90a", 128, 16, 910, 10),
    ("sm_90a", 128, 32, 1150, 10),
    ("sm_90a", 256, 8, 1010, 10),
    ("sm_90a", 256, 16, 1230, 10),
    ("sm_100a", 64, 16, 630, 8),
    ("sm_100a", 128, 8, 445, 8),
)


@pytest.mark.parametrize(("arch", "head_dim", "group", "stalls", "distance"), BOUNDS)
def test_loop(arch, head_dim, group, stalls, distance, tmp_path):
    """No warp can be faster than its control words say."""
    config, path = DecodeConfig(head_dim=head_dim, group=group), tmp_path / "decode.cubin"
    path.write_bytes(compile_for(config, arch).cubin)
    found = loops.decode_figures(path, config, arch)
    assert (found["stack"], found["spills"]) == (0, 0)
    assert found["stalls"] <= stalls
    assert found["mufu_distance"] <= distance
