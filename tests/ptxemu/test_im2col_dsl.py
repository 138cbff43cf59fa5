"""The activations of a convolution, loaded as a matrix by a kernel of the DSL in im2col mode: its
atom, its tensor maps and its coordinates, compared with the same matrix in numpy.
"""

import itertools

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

import ptxemu

ROWS, CHANNELS = 64, 32  # of a tile
FILTER = (3, 2)  # R, S
PADDING, STRIDE, DILATION = (1, 2), (2, 1), (1, 2)  # of H and W


@cute.kernel
def kernel(atom: cute.CopyAtom, pixels: cute.Tensor, out: cute.Tensor):
    """Copy tile (rows, K) of the matrix to `out`."""
    row_tile, k_tile, _ = cute.arch.block_idx()
    lane, _, _ = cute.arch.thread_idx()
    memory = cutlass.memory.SmemAllocator()
    tile = memory.allocate_tensor(
        cutlass.Float16,
        cute.make_layout((ROWS, CHANNELS), stride=(CHANNELS, 1)),
        byte_alignment=1024,
        swizzle=cute.make_swizzle(2, 4, 3),
    )
    full = memory.allocate_array(cutlass.Int64, 1)
    source = cute.local_tile(pixels, (ROWS, CHANNELS), (None, None))
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(source, 0, 2)
    )
    if lane == 0:
        cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(full, ROWS * CHANNELS * 2)
    cute.arch.sync_threads()
    cute.copy(atom, source[None, row_tile, k_tile], target, tma_bar_ptr=full)
    cute.arch.mbarrier_wait(full, 0)
    for row in range(ROWS):
        out[row_tile * ROWS + row, k_tile * CHANNELS + lane] = tile[row, lane]


@cute.jit
def host(images: cute.Tensor, out: cute.Tensor):
    """Launch the kernel.

    images: N, H, W, C.
    out: rows (N, P, Q) by K (R, S, C).
    """
    n, h, w, c = images.shape
    by_n, by_h, by_w, _ = images.stride
    layout = cute.make_layout(((w, h, n), c), stride=((by_w, by_h, by_n), 1))
    reach = tuple(d * (f - 1) for d, f in zip(DILATION[::-1], FILTER[::-1], strict=True))
    lower = tuple(-pad for pad in PADDING[::-1])
    upper = tuple(pad - r for pad, r in zip(PADDING[::-1], reach, strict=True))
    atom, pixels, *_ = cpasync.make_im2col_tma_atom(
        cpasync.CopyBulkTensorIm2ColG2SOp(),
        cute.make_tensor(images.iterator, layout),
        cute.make_composed_layout(
            cute.make_swizzle(2, 4, 3), 0, cute.make_layout((ROWS, CHANNELS), stride=(CHANNELS, 1))
        ),
        (ROWS, CHANNELS),
        lower,
        upper,
        lower_padding_whd=PADDING[::-1],
        upper_padding_whd=PADDING[::-1],
        stride_whd=STRIDE[::-1],
        lower_srt=(0, 0),
        stride_srt=DILATION[::-1],
    )
    grid = (out.shape[0] // ROWS, out.shape[1] // CHANNELS, 1)
    kernel(atom, pixels, out).launch(grid=grid, block=(CHANNELS, 1, 1))


def matrix(images: np.ndarray) -> np.ndarray:
    """Rows (N, P, Q) by K (R, S, C), with zeros outside the images."""
    (top, left), (down, right), (r_step, s_step) = PADDING, STRIDE, DILATION
    padded = np.pad(images, ((0, 0), (top, top), (left, left), (0, 0)))
    reach = [d * (f - 1) for d, f in zip(DILATION, FILTER, strict=True)]
    parts = []
    for r, s in itertools.product(*map(range, FILTER)):
        last = [padded.shape[1] - reach[0], padded.shape[2] - reach[1]]
        rows = slice(r * r_step, r * r_step + last[0], down)
        columns = slice(s * s_step, s * s_step + last[1], right)
        parts.append(padded[:, rows, columns].reshape(-1, images.shape[-1]))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
def test_a_convolution_sees_its_pixels(policy):
    images = torch.arange(2 * 7 * 8 * 64).reshape(2, 7, 8, 64).remainder(2000).to(torch.float16)
    expected = matrix(images.numpy())
    rows = -(-len(expected) // ROWS) * ROWS
    out = torch.full((rows, expected.shape[1]), torch.nan, dtype=torch.float16)
    compiled = ptxemu.compile(host, from_dlpack(images, assumed_align=16), from_dlpack(out))
    report = ptxemu.run(
        compiled, from_dlpack(images, assumed_align=16), from_dlpack(out),
        options=ptxemu.Options(policy=policy, check=True),
    )  # fmt: skip
    assert (out.numpy()[: len(expected)] == expected).all()
    assert not out.numpy()[len(expected) :].any()
    assert not report.launches[0].findings
