"""The attention forward kernel for Blackwell: host entry, prologue, dispatch of the warps.

Read `fmha/plan.py` first (who, where, who waits for whom), then this file, `walk.py` (which tiles),
then `roles/` in data-flow order: load, gather, mma, softmax, correction, epilogue.

One CTA, at head_dim 512 a pair, per query block of 128 rows, in the ping-pong schedule of 256;
grid = (query blocks, heads, batch entries).
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fmha.config import AttentionConfig
from fmha.plan import FREE_BARRIER, make_plan
from fmha.sm100.args import (
    Buffers,
    Globals,
    Pipes,
    Prologue,
    Scalars,
    Scope,
    Tables,
    TmaTensors,
    Walk,
    Work,
)
from fmha.sm100.boxes import k_box, o_box, q_box, v_box
from fmha.sm100.products import IO_TYPES, OUT_TYPES
from fmha.sm100.roles.correction import Correction
from fmha.sm100.roles.gather import gather_q
from fmha.sm100.roles.load import Load
from fmha.sm100.roles.mma import Mma
from fmha.sm100.roles.softmax import Softmax
from fmha.sm100.walk import locate, plan_walk
from kernelkit import hw
from kernelkit.boxes import ROWS_FIRST, describe, reorder
from kernelkit.buffers import buffer_at
from kernelkit.pipelines import make_pipelines, meet_before_exit, publish_barriers, tma_group
from kernelkit.warps import Role, RolePlan


class AttentionForward:
    """One config, traced by `cute.compile(AttentionForward(config), ...)`."""

    def __init__(self, config: AttentionConfig) -> None:
        self.plan = make_plan(config)
        self.load, self.mma, self.softmax = Load(self.plan), Mma(self.plan), Softmax(self.plan)
        self.correction = Correction(self.plan) if config.q_tiles == 2 else None
        self.idle = self.plan.roles["idle"] if config.q_tiles == 2 else None
        self.owner = (self.correction or self.softmax).role  # of O: the last to read TMEM

    @cute.jit
    def __call__(
        self,
        tensors: tuple[cute.Tensor, ...],
        arrays: tuple[cute.Tensor | None, ...],
        numbers: tuple[Float32 | Int32, ...],
        stream: CUstream,
    ) -> None:
        """Describe the copies and launch.

        tensors: q [B, Sq, Hq, D], k, v [B, Skv, Hkv, D], o; last dim contiguous, other strides
        multiples of 16 bytes. Packed tensors have B = 1, paged ones [page, row, head, dim].
        arrays: lse [B, Hq, Sq], row_max or None, then the fields of `Tables`.
        numbers: the fields of `Scalars`, then the longest query length.
        """
        q, k, v, o = (reorder(tensor, ROWS_FIRST) for tensor in tensors)
        lse, row_max, *tables = arrays
        every = Globals(
            (q.shape[0], q.shape[2]),
            (k.shape[0], k.shape[2]),
            q,
            o,
            reorder(lse, (2, 1, 0)),
            reorder(row_max, (2, 1, 0)) if cutlass.const_expr(row_max is not None) else None,
            Tables(*tables),
        )
        scalars, longest = Scalars(*numbers[:-1]), numbers[-1]
        config = self.plan.config
        heads, entries = q.shape[2], q.shape[3]
        if cutlass.const_expr(config.pack_heads):
            longest, heads = longest * (heads // k.shape[2]), k.shape[2]
        if cutlass.const_expr(config.varlen_q):
            entries = cute.size(every.tables.cu_seqlens_q) - 1
        blocks = cute.ceil_div(longest, self.plan.layout.block_rows)
        self.kernel(self.describe_copies(q, k, v, o), every, scalars).launch(
            grid=(blocks * config.ctas, heads, entries),
            block=(self.plan.roles.threads, 1, 1),
            cluster=(config.ctas, 1, 1) if config.ctas > 1 else None,
            stream=stream,
            use_pdl=config.pdl,
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg
        )

    @cute.jit
    def describe_copies(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor
    ) -> TmaTensors:
        """TMA descriptions, which carry shapes and strides of this launch."""
        config = self.plan.config
        store = cpasync.CopyBulkTensorTileS2GOp()
        return TmaTensors(
            q=None if config.pack_heads else describe(self.fetch("q"), q, q_box(self.plan)),
            k=describe(self.fetch("k"), k, k_box(self.plan)),
            v=describe(self.fetch("v"), v, v_box(self.plan)),
            tail=describe(self.fetch("tail"), v, v_box(self.plan)) if config.ragged_keys else None,
            o=None if config.pack_heads else describe(store, o, o_box(self.plan)),
        )

    def fetch(self, edge: str) -> cpasync.CopyBulkTensorTileG2SOp:
        """The load whose bytes complete on the barriers of `edge`."""
        return cpasync.CopyBulkTensorTileG2SOp(tma_group(self.plan.edges, edge))

    @cute.kernel
    def kernel(self, tma: TmaTensors, tensors: Globals, scalars: Scalars) -> None:
        """Prologue for all warps, then each warp plays its role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(self.plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        tmem_base = buffer_at(self.plan.smem, smem, "tmem_base", Int32)
        barriers = buffer_at(self.plan.smem, smem, "barriers", Int64)
        pipes = Pipes(**make_pipelines(self.plan.edges, barriers))
        is_two = self.plan.config.ctas == 2
        if warp == self.owner.first_warp:
            cute.arch.alloc_tmem(self.plan.tmem.allocated, tmem_base, is_two_cta=is_two)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=is_two)
        publish_barriers(self.plan.edges)
        if cutlass.const_expr(self.plan.config.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        prologue = Prologue(smem, tma, tensors, scalars, pipes)

        if warp == self.load.role.first_warp:
            scope, work, walk = self.enter(self.load.role, prologue)
            self.load.run(work, walk, scope)
        elif warp == self.mma.role.first_warp:
            scope, work, walk = self.enter(self.mma.role, prologue)
            if work.rank == 0:
                self.mma.run(walk, scope)
        elif warp <= self.softmax.role.last_warp:
            scope, work, walk = self.enter(self.softmax.role, prologue)
            if cutlass.const_expr(self.plan.config.pack_heads):
                gather_q(self.plan, work, scope)
            self.softmax.run(work, walk, scope)
        if cutlass.const_expr(self.correction is not None):
            if warp >= self.idle.first_warp:
                set_registers(self.plan.roles, self.idle)
            elif warp >= self.correction.role.first_warp:
                if warp <= self.correction.role.last_warp:
                    scope, work, walk = self.enter(self.correction.role, prologue)
                    self.correction.run(work, walk, scope)
        if warp >= self.owner.first_warp and warp <= self.owner.last_warp:
            # The last O has been waited for, so no MMA is in flight; all rows have been read.
            cute.arch.barrier(barrier_id=FREE_BARRIER, number_of_threads=self.owner.threads)
        meet_before_exit(self.plan.edges)
        if warp == self.owner.first_warp:
            tmem_pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
            cute.arch.dealloc_tmem(tmem_pointer, self.plan.tmem.allocated, is_two_cta=is_two)

    @cute.jit
    def enter(self, role: Role, prologue: Prologue) -> tuple[Scope, Work, Walk]:
        """What a role that begins works with.

        Each role finds them for itself: none keeps in registers what only others need.
        """
        set_registers(self.plan.roles, role)
        tensors, scalars = prologue.tensors, prologue.scalars
        buffers = self.buffers(prologue.smem)
        scope = Scope(prologue.tma, tensors, scalars, buffers, prologue.pipes)
        work = locate(self.plan, tensors)
        return scope, work, plan_walk(self.plan, work, scalars)

    def buffers(self, smem: cute.Pointer) -> Buffers:
        """All buffers that roles use, None for those that the config does without."""
        plan, config = self.plan.smem, self.plan.config
        io, out = IO_TYPES[config.dtype], OUT_TYPES[config.o_dtype]
        types = {"sQ": io, "sK": io, "sV": io, "sP": io, "sO": out, "statistics": Float32}
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, buffer_at(plan, smem, "tmem_base", Int32))
        pointers = (
            buffer_at(plan, smem, name, dtype) if name in plan.offsets() else None
            for name, dtype in types.items()
        )
        return Buffers(tmem, *pointers)


@cute.jit
def set_registers(roles: RolePlan, role: Role) -> None:
    """Take or give registers, where the plan says how many the role needs."""
    if cutlass.const_expr(role.registers is not None):
        if cutlass.const_expr(role.registers > hw.REGISTERS_PER_SM // roles.threads):
            cute.arch.setmaxregister_increase(role.registers)
        else:
            cute.arch.setmaxregister_decrease(role.registers)
