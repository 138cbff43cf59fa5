"""CuPy: a raw kernel, a histogram of a raw module on a stream, and kernels that CuPy writes."""

import cupy
import numpy as np
from judged import report

scale = cupy.RawKernel(
    """extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
        int i = blockDim.x * blockIdx.x + threadIdx.x;
        if (i < n) y[i] = factor * x[i];
    }""",
    "scale",
)
module = cupy.RawModule(
    code="""extern "C" __global__ void histogram(const int* x, int* bins, int n) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(bins + x[i], 1);
    }"""
)
square = cupy.ElementwiseKernel("T a, T b", "T c", "c = (a - b) * (a - b)", "square")

generator = np.random.default_rng(0)
values = generator.standard_normal(1000).astype(np.float32)
places = generator.integers(0, 8, 1000).astype(np.int32)

x, y = cupy.asarray(values), cupy.empty(1000, cupy.float32)
scale((8,), (128,), (x, y, np.float32(3), np.int32(1000)))
with cupy.cuda.Stream() as stream:
    bins = cupy.zeros(8, cupy.int32)
    module.get_function("histogram")((1,), (256,), (cupy.asarray(places), bins, np.int32(1000)))
    stream.synchronize()
double = values.astype(np.float64)
report(
    (y.get(), 3 * double),
    (bins.get(), np.bincount(places, minlength=8)),
    (square(y, x).get(), 4 * double * double),
    (x.sum().get(), double.sum()),
)
