"""`quantise`: rows of a matrix in a block-scaled format."""

from __future__ import annotations

import torch

from moe.formats import format_of
from moe.quantiser.launch import QUANTISE, quantised
from moe.quantized import Quantized, laid_out


def quantise(
    x: torch.Tensor,
    fmt: str,
    *,
    global_scale: str | torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    choices: int = 1,
    offsets: torch.Tensor | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> Quantized:
    """Quantise x to the format `fmt`, bit for bit as `moe.reference.quantise` defines it.

    It is one launch, with another before it for the scale of the tensor. Rows are independent,
    except with a scale of the tensor.

    Args:
        x: [T, K], bfloat16 or float16, K a multiple of the format's block; the last dimension is
            contiguous, the other stride a multiple of 16 bytes.
        fmt: 'nvfp4', 'mxfp4' or 'mxfp8'.
        global_scale: for nvfp4 only. 'token', the default: one for each row, from its largest
            magnitude. 'tensor': one from the largest magnitude of x, which a single NaN makes NaN.
            Or fp32 [1] or [R], one for each row of the result; given scales have to be positive and
            finite (checked on the CPU).
        rows: int32 [R], row r of the result is row rows[r] // choices of x, from 0 to T - 1;
            without it R = T.
        choices: choices of a token, if rows are slots (`Permutation.slot_of_row`).
        offsets: int32 [E + 1], ascending from 0 to at most R. Rows offsets[e] .. offsets[e + 1] - 1
            belong to expert e, whose scale factors begin a new block of 128 rows. Rows past
            offsets[E] are neither read nor written.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Returns:
        data [R, K]; scale factors with room for any counts (those past the last block of the last
            expert are not written); in nvfp4 both global scales, fp32 [1] or [R].

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit, before it
            compiles. On a GPU, values of rows and offsets are not checked: no wait.
    """
    given = {
        "x": x, "fmt": fmt, "global_scale": global_scale, "rows": rows, "offsets": offsets,
        "choices": choices, "backend": backend, "arch": arch,
    }  # fmt: skip
    format_of(fmt)
    return laid_out(quantised(fmt, QUANTISE(given)), offsets=offsets)
