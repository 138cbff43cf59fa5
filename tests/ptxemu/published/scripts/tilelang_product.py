"""TileLang: a product of fp16 matrices with two stages, by ptxemu.tilelang."""

import sys

import tilelang.language as T
import torch
from judged import report

import ptxemu


def product(m, n, k):
    @T.prim_func
    def main(
        a: T.Tensor((m, k), "float16"),
        b: T.Tensor((k, n), "float16"),
        c: T.Tensor((m, n), "float32"),
    ):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(m, 64), threads=128) as (column, row):
            a_tile = T.alloc_shared((64, 32), "float16")
            b_tile = T.alloc_shared((32, 64), "float16")
            sums = T.alloc_fragment((64, 64), "float32")
            T.clear(sums)
            for step in T.Pipelined(k // 32, num_stages=2):
                T.copy(a[row * 64, step * 32], a_tile)
                T.copy(b[step * 32, column * 64], b_tile)
                T.gemm(a_tile, b_tile, sums)
            T.copy(sums, c[row * 64, column * 64])

    return main


torch.manual_seed(0)
a, b, c = torch.randn(128, 96).half(), torch.randn(96, 64).half(), torch.zeros(128, 64)
kernel = ptxemu.tilelang.compile(product(128, 64, 96), sys.argv[1])
found = kernel.launch(a, b, c, options=ptxemu.Options(check=True))
assert not found.errors, found
report((c, a.double() @ b.double()))
