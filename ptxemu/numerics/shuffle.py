"""`shfl.sync`: which lane's value each lane gets."""

from __future__ import annotations

import numpy as np

from ptxemu.numerics.lanes import PerLane

_LANES = np.arange(32, dtype=np.int64)


def shuffle_lanes(
    value: PerLane, mode: str, lane: PerLane, clamp: PerLane, mb: int
) -> tuple[np.ndarray, np.ndarray]:
    """(value, in range?) after the manual's pseudocode; a source out of range yields the own
    value.
    """
    value, lanes = np.broadcast_to(value, 32), _LANES
    lane, clamp = (
        np.broadcast_to(lane, 32).astype(np.int64),
        np.broadcast_to(clamp, 32).astype(np.int64),
    )
    step, bound, segment = lane & 31, clamp & 31, clamp >> 8 & 31
    low = lanes & segment
    high = low | bound & ~segment
    if mode == "up":
        source = lanes - step
        valid = source >= high
    elif mode == "down":
        source = lanes + step
        valid = source <= high
    elif mode == "bfly":
        source = lanes ^ step
        valid = source <= high
    else:
        source = low | step & ~segment
        valid = source <= high
    source = np.where(valid, source, lanes) & 31
    return np.asarray(value, np.uint32)[source], valid
