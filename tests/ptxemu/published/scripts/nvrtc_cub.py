"""CUDA C++ by NVRTC: CUB's radix sort and scan of a block, by ptxemu.nvrtc."""

import sys

import numpy as np
from judged import report

import ptxemu

SOURCE = """
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

template <int Threads>
__global__ void __launch_bounds__(Threads) rows(const float* x, float* ordered, float* sums) {
    using Sort = cub::BlockRadixSort<float, Threads, 2>;
    using Scan = cub::BlockScan<float, Threads>;
    __shared__ union { typename Sort::TempStorage sort; typename Scan::TempStorage scan; } storage;
    int place = (blockIdx.x * Threads + threadIdx.x) * 2;
    float values[2] = {x[place], x[place + 1]};
    Sort(storage.sort).Sort(values);
    ordered[place] = values[0];
    ordered[place + 1] = values[1];
    __syncthreads();
    Scan(storage.scan).InclusiveSum(values, values);
    sums[place] = values[0];
    sums[place + 1] = values[1];
}
"""

x = np.random.default_rng(0).standard_normal((4, 256), np.float32)
ordered, sums = np.zeros_like(x), np.zeros_like(x)
module = ptxemu.nvrtc.compile(SOURCE, sys.argv[1], names=["rows<128>"])
found = module.launch(
    "rows<128>",
    grid=4,
    block=128,
    args=[x, ordered, sums],
    options=ptxemu.Options(check=True),
)
assert not found.errors, found
right = np.sort(x, axis=-1)
report((ordered, right), (sums, right.astype(np.float64).cumsum(-1)))
