"""A layer of gpt-oss-20b in the emulator, all its experts, from a checkpoint's mxfp4 (make sweep).

Its time is part of the test, so that the emulator stays fast enough for model sizes. The reference
goes expert by expert: all weights in fp64 would be 6 GB.
"""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from kernelkit.call.launch import emulation
from kernelkit.numerics import e2m1
from lab.flags.moe import ACTIVATIONS
from lab.measure.accuracy import EXTRA
from lab.problems.grouped_gemm import SAME_BYTES
from moe import CheckpointWeight, Router, SwiGLU, fused_moe, pack_quantised, reference
from moe.formats import format_of
from moe.reference_routing import combine, permutation, route
from ptxemu import Options

TOKENS, TOP_K, EXPERTS = 64, 4, 32
HIDDEN = INTERMEDIATE = 2880
FORMAT = "mxfp4"
BIASES = 119, 121  # exponents of scale factors lie between: products are about as large as x
CPU_SECONDS = 120.0  # of this process, including the kernels' compilation
# An element of h at a tie may round to its neighbour, a step of at most half its size: the share
# that SAME_BYTES allows gives this error in the norm.
OF_TIES = 0.5 * (1 - SAME_BYTES) ** 0.5


def weight(rows: int, columns: int, generator: torch.Generator) -> CheckpointWeight:
    """Random codes of all experts."""
    block = format_of(FORMAT).block

    def integers(low: int, high: int, width: int) -> torch.Tensor:
        shape = (EXPERTS, rows, width)
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    return CheckpointWeight(integers(0, 256, columns // 2), integers(*BIASES, columns // block))


def values(w: CheckpointWeight, expert: int) -> torch.Tensor:
    """Exact values of an expert's codes, fp32 [rows, columns], which are neither packed nor
    swizzled."""
    elements = e2m1.unpacked(w.data[expert]).unflatten(-1, (w.scales.shape[-1], -1))
    return torch.ldexp(elements, w.scales[expert, :, :, None].int() - 127).flatten(-2)


def references(
    x: torch.Tensor,
    w13: CheckpointWeight,
    w2: CheckpointWeight,
    routed: tuple[torch.Tensor, torch.Tensor],
    form: SwiGLU,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the definition with these weights, and a version rounded like the kernels, fp64 [T,
    H]."""
    ids, weights = routed
    rows = permutation(ids, EXPERTS)
    tokens = rows.slot_of_row.long() // TOP_K
    parts = []
    for expert, own in enumerate(tokens.tensor_split(rows.offsets[1:-1].long())):
        both = values(w13, expert)
        matrices = torch.cat((both[::2], both[1::2]))[None], values(w2, expert)[None]
        alone = torch.zeros(len(own), 1, dtype=torch.int32), torch.ones(len(own), 1)
        given = partial(reference.layer, x[own], *matrices, alone, **vars(form))
        parts.append((given(), given(fmt=FORMAT)))
    exact, rounded = (torch.cat(each) for each in zip(*parts, strict=True))
    y = combine(rounded, weights, rows.row_of_slot).to(x.dtype)
    return combine(exact, weights, rows.row_of_slot, dtype=torch.float64), y.double()


@pytest.mark.usefixtures("poisoned_outputs")
def test_a_layer_of_gpt_oss_20b():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    w13 = weight(2 * INTERMEDIATE, HIDDEN, generator)
    w2 = weight(HIDDEN, INTERMEDIATE, generator)
    router, form = Router(TOP_K), SwiGLU(**ACTIVATIONS["gpt-oss"])
    routed = route(logits, **vars(router))
    assert routed[0].unique().numel() == EXPERTS
    experts = pack_quantised(w13, w2, FORMAT, order="alternating")

    begin = time.process_time()
    with emulation(Options(limit=None)) as active:
        y = fused_moe(x, experts, logits, router, activation=form).double()
    seconds = time.process_time() - begin
    count = sum(report.warp_instructions for report in active.reports)
    print(f"{count:,} warp-instructions, {seconds:.1f} s")

    exact, rounded = references(x, w13, w2, routed, form)
    own, of_format = ((each - exact).norm() / exact.norm() for each in (y, rounded))
    apart = (y - rounded).norm() / rounded.norm()
    print(f"relative error {own:.4f}, of quantising alone {of_format:.4f}, apart {apart:.1e}")
    assert own <= EXTRA * of_format
    assert apart <= OF_TIES
    assert seconds <= CPU_SECONDS
