"""Attention forward kernel for every GPU with mma.sync: prologue, and the dispatch of all warps.

Read `layout.py` first (rows and columns of each warp), then `math.py`. Then, in the order of the
data, `fetch.py`, `products.py` and `epilogue.py`; for warps that share rows `teams.py`. The kernel
uses mma.sync, ldmatrix and cp.async, available from sm_80. A CTA computes query blocks one after
another (`fmha/shared/walk.py`).
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from fmha.portable.args import Buffers, Scope
from fmha.portable.math import RowMath
from fmha.portable.plan import PortablePlan
from fmha.portable.teams import KeyMath, SliceMath
from fmha.shared.args import Globals, Inputs, Scalars
from fmha.shared.host import Forward, example_arguments
from kernelkit.device.dependent import follow
from kernelkit.plan import hw


class AttentionSm80(Forward):
    """Kernel of one config, traced by `cute.compile(AttentionSm80(config, arch), ...)`."""

    plan: PortablePlan

    def __init__(self, config: AttentionConfig, arch: str) -> None:
        super().__init__(make_plan(config, arch))
        shape = self.plan.layout.shape
        shared = KeyMath if shape.shares_keys else SliceMath
        self.math = (shared if shape.slices > 1 else RowMath)(self.plan)

    @cute.kernel
    def kernel(self, inputs: Inputs, tensors: Globals, scalars: Scalars) -> None:
        """Run the math in all warps alike."""
        smem = SmemAllocator().allocate(self.plan.smem.bytes, byte_alignment=16).toint()
        if cutlass.const_expr(self.plan.config.pdl):
            follow()
        self.math.run(Scope(inputs, tensors, scalars, self.buffers(smem)))

    @cute.jit
    def buffers(self, smem: cutlass.Int32) -> Buffers:
        """Return all buffers; buffers of teams are those of this warp's team."""
        sized = self.plan.layout.sized
        begins = {name: begin for name, (begin, _) in self.plan.smem.offsets().items()}
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // hw.WARP_THREADS)
        team, rows = warp // self.plan.layout.shape.slices, self.plan.layout.rows
        return Buffers(
            *(smem + begins[name] for name in ("sQ", "sK", "sV")),
            sums=smem + begins["sSums"] + team * sized.sums_bytes,
            p=smem + begins["sP"] + team * (rows * sized.p_row_bytes),
            factors=smem + begins["sFactors"] + team * (rows * 4),
            moved=smem + begins["sMoved"] + team * 16,
        )

    @cute.jit
    def describe_copies(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor
    ) -> Inputs:
        """Return the tensors, since threads fetch them without TMA."""
        return Inputs(q, k, v)


def host_function(config: AttentionConfig, arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return AttentionSm80(config, arch), *example_arguments(config)
