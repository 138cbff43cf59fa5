"""Numba-CUDA: a product through shared memory and a histogram by atomics, with Numba's launcher."""

import numpy as np
from judged import report
from numba import cuda, float32, int32

TILE = 16


@cuda.jit
def product(a, b, c):
    left = cuda.shared.array((TILE, TILE), float32)
    right = cuda.shared.array((TILE, TILE), float32)
    row, column = cuda.grid(2)
    i, j = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for step in range(a.shape[1] // TILE):
        left[i, j] = a[row, step * TILE + j]
        right[i, j] = b[step * TILE + i, column]
        cuda.syncthreads()
        for inner in range(TILE):
            total += left[i, inner] * right[inner, j]
        cuda.syncthreads()
    c[row, column] = total


@cuda.jit
def histogram(x, bins):
    part = cuda.shared.array(8, int32)
    i = cuda.threadIdx.x
    if i < 8:
        part[i] = 0
    cuda.syncthreads()
    for place in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(part, x[place], 1)
    cuda.syncthreads()
    if i < 8:
        cuda.atomic.add(bins, i, part[i])


generator = np.random.default_rng(0)
a, b = (generator.standard_normal((64, 64), np.float32) for _ in range(2))
x = generator.integers(0, 8, 1000).astype(np.int32)
c, bins = np.zeros((64, 64), np.float32), np.zeros(8, np.int32)
product[(4, 4), (TILE, TILE)](a, b, c)
histogram[2, 128](x, bins)
report((c, a.astype(np.float64) @ b), (bins, np.bincount(x, minlength=8)))
