"""A measuring kernel in the emulator: that it runs and ends, and what it would leave on a GPU."""

from __future__ import annotations

import numpy as np

import ptxemu
from ptxemu.machine.tensor_map import encode
from workbench.units.ptx import NEVER, RECORD, WARP, Kernel

SMS = 2
MOST = 1 << 20  # bytes of a buffer here, however many the GPU has


def run(kernel: Kernel, count: int) -> np.ndarray:
    """The records of a launch, uint64 (CTA, warp, RECORD)."""
    grid = kernel.grid * (SMS if kernel.per_sm else 1)
    grid = -(-grid // kernel.cluster) * kernel.cluster
    out = np.zeros((grid, kernel.block // WARP, RECORD), np.uint64)
    memory = _buffer(kernel)
    params = [_bytes(out.ctypes.data, 8), _bytes(memory.ctypes.data, 8)]
    params += [_bytes(count, 4), _bytes(NEVER, 4)]
    if kernel.map:
        shape = kernel.map
        dims = (shape.pitch, memory.nbytes // shape.pitch)
        box = (shape.width, shape.height)
        params.append(encode(
            memory.ctypes.data, dims, (shape.pitch,), box, "u8", shape.swizzle, False
        ))  # fmt: skip
    ptxemu.load(kernel.text()).launch(
        "bench", grid=(grid, 1, 1), block=(kernel.block, 1, 1), cluster=(kernel.cluster, 1, 1),
        smem_bytes=kernel.smem, params=params, memory=[out, memory],
    )  # fmt: skip
    return out


def _buffer(kernel: Kernel) -> np.ndarray:
    """At 256 bytes; a cycle of pointers where one is asked for."""
    nbytes = min(kernel.memory.nbytes, MOST)
    words = np.zeros(nbytes // 8 + 32, np.uint64)
    words = words[-words.ctypes.data % 256 // 8 :][: nbytes // 8]
    if kernel.memory.chase:
        apart = kernel.memory.chase // 8
        places = np.arange(0, words.size, apart)
        words[places] = words.ctypes.data + np.roll(places, 1) * 8
    return words


def _bytes(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")
