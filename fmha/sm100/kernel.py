"""The attention forward kernel for Blackwell: host entry, prologue, dispatch of the warps.

Read `fmha/plan.py` first (who, where, who waits for whom), then this file, `walk.py` (which tiles),
then `roles/` in data-flow order: load, mma, softmax, correction, epilogue, store.

A CTA, from head_dim 256 on a pair, computes query blocks one after another (`order.py`): products,
loads and stores of neighbouring blocks overlap.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fmha.config import AttentionConfig
from fmha.plan import FREE_BARRIER, AttentionPlan, make_plan
from fmha.sm100.args import (
    Buffers,
    Globals,
    Pipes,
    Prologue,
    Scalars,
    Scope,
    Tables,
    TmaTensors,
)
from fmha.sm100.boxes import k_box, o_box, q_box, v_box
from fmha.sm100.order import make_order
from fmha.sm100.products import IO_TYPES, OUT_TYPES
from fmha.sm100.roles.correction import Correction
from fmha.sm100.roles.load import LoadQK, LoadV
from fmha.sm100.roles.mma import Mma
from fmha.sm100.roles.softmax import Softmax
from fmha.sm100.roles.store import Store
from kernelkit import hw
from kernelkit.boxes import ROWS_FIRST, describe, group_heads, reorder
from kernelkit.buffers import buffer_at
from kernelkit.pipelines import (
    in_leader,
    make_pipelines,
    meet_before_exit,
    publish_barriers,
    tma_group,
)
from kernelkit.warps import Role, RolePlan


class AttentionForward:
    """One config, traced by `cute.compile(AttentionForward(config), ...)`."""

    def __init__(self, config: AttentionConfig) -> None:
        self.plan = make_plan(config)
        self.load_qk, self.load_v = LoadQK(self.plan), LoadV(self.plan)
        self.mma, self.store = Mma(self.plan), Store(self.plan)
        self.softmax, self.correction = Softmax(self.plan), Correction(self.plan)

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
        numbers: the fields of `Scalars`, then the longest query length, the heads of a section
            (see `Order`), and how many CTAs or pairs are there.
        """
        q, k, v, o = (reorder(tensor, ROWS_FIRST) for tensor in tensors)
        lse, row_max, *tables = arrays
        config = self.plan.config
        *factors, longest, near, most = numbers
        scalars, heads, entries = Scalars(*factors), q.shape[2], q.shape[3]
        tables, rows, every_o = Tables(*tables), q.shape[0], o
        q, o = (group_heads(tensor, config.group) for tensor in (q, o))
        heads = heads // config.group
        if cutlass.const_expr(config.varlen_q):
            entries = cute.size(tables.cu_seqlens_q) - 1
        layout = self.plan.layout
        tiles = cute.ceil_div(longest, layout.box_tokens) * layout.head_parts
        blocks = cute.ceil_div(tiles, layout.block_tiles)
        places = cutlass.min(most, blocks * heads * entries)
        every = Globals(
            rows,
            k.shape[0],
            every_o,
            reorder(lse, (2, 1, 0)),
            reorder(row_max, (2, 1, 0)) if cutlass.const_expr(row_max is not None) else None,
            tables,
            make_order(blocks, heads, heads // k.shape[2], entries, near, places),
        )
        self.kernel(self.describe_copies(q, k, v, o), every, scalars).launch(
            grid=(places * config.ctas, 1, 1),
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
        ragged, store = self.plan.config.ragged_keys, cpasync.CopyBulkTensorTileS2GOp()
        return TmaTensors(
            q=describe(self.fetch("q"), q, q_box(self.plan)),
            k=describe(self.fetch("k"), k, k_box(self.plan)),
            v=describe(self.fetch("v"), v, v_box(self.plan)),
            tail=describe(self.fetch("tail"), v, v_box(self.plan)) if ragged else None,
            o=describe(store, o, o_box(self.plan)),
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
        owner = self.correction.role  # of O: the last to read tensor memory
        if warp == owner.first_warp:
            cute.arch.alloc_tmem(self.plan.tmem.allocated, tmem_base, is_two_cta=is_two)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=is_two)
        if warp <= self.softmax.role.last_warp:
            self.softmax.clear_rows_left_over(smem)
        publish_barriers(self.plan.edges)
        if cutlass.const_expr(self.plan.config.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        prologue = Prologue(smem, tma, tensors, scalars, pipes)

        if warp <= self.softmax.role.last_warp:
            self.softmax.run(self.enter(self.softmax.role, prologue))
        elif warp <= self.correction.role.last_warp:
            self.correction.run(self.enter(self.correction.role, prologue))
            # The last O has been waited for, so no MMA is in flight; all rows have been read.
            cute.arch.barrier(barrier_id=FREE_BARRIER, number_of_threads=owner.threads)
        elif warp == self.mma.role.first_warp:
            scope = self.enter(self.mma.role, prologue)
            if leads(self.plan):
                self.mma.run(scope)
        elif warp == self.load_qk.role.first_warp:
            self.load_qk.run(self.enter(self.load_qk.role, prologue))
        elif warp == self.load_v.role.first_warp:
            self.load_v.run(self.enter(self.load_v.role, prologue))
        else:
            self.store.run(self.enter(self.store.role, prologue))
        meet_before_exit(self.plan.edges)
        if warp == owner.first_warp:
            tmem_pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
            cute.arch.dealloc_tmem(tmem_pointer, self.plan.tmem.allocated, is_two_cta=is_two)

    @cute.jit
    def enter(self, role: Role, prologue: Prologue) -> Scope:
        """What a role that begins works with.

        Each role finds it for itself: none keeps in registers what only others need.
        """
        set_registers(self.plan.roles, role)
        buffers = self.buffers(prologue.smem)
        return Scope(prologue.tma, prologue.tensors, prologue.scalars, buffers, prologue.pipes)

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
def leads(plan: AttentionPlan) -> Boolean:
    """Whether this CTA issues the MMAs: the only one, or the leader of its pair."""
    alone = Boolean(True)
    if cutlass.const_expr(plan.config.ctas == 2):
        alone = in_leader()
    return alone


@cute.jit
def set_registers(roles: RolePlan, role: Role) -> None:
    """Take or give registers, where the plan says how many the role needs."""
    if cutlass.const_expr(role.registers is not None):
        if cutlass.const_expr(role.registers > hw.REGISTERS_PER_SM // roles.threads):
            cute.arch.setmaxregister_increase(role.registers)
        else:
            cute.arch.setmaxregister_decrease(role.registers)
