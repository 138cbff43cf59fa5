"""What the compiler made of the kernel: read from the PTX, nothing is run."""

from __future__ import annotations

import re

import pytest
import torch
from cuda.bindings.driver import CUstream

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from fmha.sm100.compile import compile_attention
from ptxemu.host import cutedsl
from tests.fmha.cases import Case


@pytest.fixture(scope="module")
def ptx():
    # Causal: where at most one tile is masked the compiler peels that loop and drops what is dead.
    return compile_attention(AttentionConfig(mask="causal")).artifacts.PTX


def count(text: str, pattern: str) -> int:
    return len(re.findall(pattern, text))


def test_products_are_issued_once_in_the_text(ptx):
    # K = 64 and K = 128 in blocks of 16: 4 MMAs for S with A from shared memory (a descriptor),
    # 8 for O with A from TMEM (an address in brackets).
    assert count(ptx, r"tcgen05\.mma\S+\s+\[%r\d+\], %rd") == 4
    assert count(ptx, r"tcgen05\.mma\S+\s+\[%r\d+\], \[%r") == 8


def test_two_copies_of_the_softmax_loop(ptx):
    # Masked and unmasked: 4 loads of S, 4 stores of P, 128 exponentials each, and the shrink.
    assert count(ptx, r"tcgen05\.ld\S+32x32b\.x32\.") == 2 * 4
    assert count(ptx, r"ex2\.approx") == 2 * (128 + 1)
    assert count(ptx, r"fma\.rn\.f32x2") == 2 * 64


def test_every_barrier_of_the_plan_is_initialised(ptx):
    plan = make_plan(AttentionConfig(mask="causal"))
    assert count(ptx, r"mbarrier\.init") == sum(edge.barriers for edge in plan.edges.edges)


def test_no_registers_are_moved_and_none_spill(ptx):
    assert "setmaxnreg" not in ptx  # 192 threads are not whole warpgroups
    assert ".local" not in ptx


def test_p_is_published_before_the_row_sum(ptx):
    """The additions of the row sum (packed, 64 a tile) come after the arrival that signals P."""
    arrivals = [match.start() for match in re.finditer(r"mbarrier\.arrive\.shared", ptx)]
    assert len(arrivals) == 2
    for arrival in arrivals:
        loop_end = ptx.index("@%p", arrival)
        assert count(ptx[arrival:loop_end], r"add\.(rn\.)?f32x2") >= 64


def test_the_kernel_asks_for_the_shared_memory_of_the_plan():
    case = Case(3, 5, (2, 2), 2)
    config = AttentionConfig()
    q, k, v = case.inputs()
    arguments = ((q, k, v, q.contiguous()), (torch.empty(2, 2, 3), None), None, 1.0, CUstream(0))
    requests = []
    cutedsl.run(compile_attention(config), *arguments, launcher=requests.append)
    assert [request.smem_bytes for request in requests] == [make_plan(config).smem.bytes]
    assert requests[0].block == (make_plan(config).roles.threads, 1, 1)
