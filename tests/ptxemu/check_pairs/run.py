"""Launches of scenarios."""

from __future__ import annotations

from functools import partial

import numpy as np

import ptxemu
from lab.silicon.conformance.ptx_program import aligned_copy
from ptxemu.machine import tensor_map
from ptxemu.report import LaunchReport
from tests.ptxemu.check_pairs.scenario import Scenario

_ROWS, _COLUMNS = 128, 32  # words; a box is one row


def _tensor(buffer: np.ndarray) -> bytes:
    shape, box = (_COLUMNS, _ROWS), (_COLUMNS, 1)
    return bytes(tensor_map.encode(buffer.ctypes.data, shape, (4 * _COLUMNS,), box, "u32", "none"))


def launch(
    scenario: Scenario,
    module: ptxemu.Module,
    policy: str = "round-robin",
    *,
    dependent: bool = True,
    freed: slice = slice(0),
    check: bool = True,
    strict: bool = False,
) -> LaunchReport:
    """freed: which of the two buffers are said to be new when the second launch begins."""
    source, target = (aligned_copy(np.zeros(_ROWS * _COLUMNS, np.uint32)) for _ in range(2))
    launched = partial(
        module.launch,
        grid=(scenario.grid,),
        block=(32 * scenario.warps,),
        cluster=(scenario.cluster, 1, 1),
        params=[
            *(buffer.ctypes.data.to_bytes(8, "little") for buffer in (source, target)),
            *(_tensor(buffer) for buffer in (source, target)),
        ],
        memory=[source, target],
        options=ptxemu.Options(policy=policy, check=check, strict=strict, limit=20),
    )
    report = launched()
    if not scenario.again:
        return report
    ranges = [(b.ctypes.data, b.ctypes.data + b.nbytes, True) for b in (source, target)]
    return launched(dependent=dependent, freed=ranges[freed])
