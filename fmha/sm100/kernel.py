"""Attention forward kernel for Blackwell: host entry, prologue, dispatch of the warps.

Read `plan.py` first (roles, memory, barriers), then this file, `fmha/shared/walk.py` (which
tiles), then the roles in data-flow order: `fmha/shared/load.py`, and in `roles/` mma, softmax,
correction, epilogue. The host work before the launch is in `fmha/shared/host.py`.

A CTA, or a pair from head_dim 256 on, computes query blocks one after another
(`fmha/shared/walk.py`): products, loads and stores of neighbouring blocks overlap.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from fmha.shared.args import (
    IO_TYPES,
    OUT_TYPES,
    Buffers,
    Globals,
    Pipes,
    Prologue,
    Scalars,
    Scope,
    TmaTensors,
)
from fmha.shared.host import Forward, example_arguments
from fmha.shared.load import LoadQK, LoadV
from fmha.sm100.plan import Plan
from fmha.sm100.roles.correction import Correction
from fmha.sm100.roles.epilogue import Store
from fmha.sm100.roles.mma import Mma
from fmha.sm100.roles.softmax import Softmax
from kernelkit.device.barriers import meet
from kernelkit.device.buffers import buffer_at
from kernelkit.device.control import set_registers
from kernelkit.device.dependent import follow
from kernelkit.device.pipelines import (
    announce_barriers,
    in_leader,
    make_pipelines,
    meet_before_exit,
    meet_peer,
)
from kernelkit.device.tmem import order_after_wait, order_before_signal
from kernelkit.plan import hw
from kernelkit.plan.warps import Role


class AttentionSm100(Forward):
    """Kernel of one config, traced by `cute.compile(AttentionSm100(config), ...)`."""

    plan: Plan

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(make_plan(config, "sm_100a"))
        self.load_qk, self.load_v = LoadQK(self.plan), LoadV(self.plan)
        self.mma, self.store = Mma(self.plan), Store(self.plan)
        self.softmax, self.correction = Softmax(self.plan), Correction(self.plan)

    @cute.kernel
    def kernel(self, tma: TmaTensors, tensors: Globals, scalars: Scalars) -> None:
        """Run the prologue in all warps, then each warp's role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(self.plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        tmem_base = buffer_at(self.plan.smem, smem, "tmem_base", Int32)
        barriers = buffer_at(self.plan.smem, smem, "barriers", Int64)
        pipes = Pipes(**make_pipelines(self.plan.edges, barriers))
        is_two = self.plan.layout.ctas == 2
        owner = self.correction.role  # the last role to read tensor memory
        if cutlass.const_expr(self.plan.config.q_terms == 1):
            if warp <= self.softmax.role.last_warp:
                self.softmax.clear_rows_left_over(smem)
        announce_barriers(self.plan.edges)
        meet_peer(self.plan.edges)
        if warp == owner.first_warp:
            cute.arch.alloc_tmem(self.plan.tmem.allocated, tmem_base, is_two_cta=is_two)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=is_two)
            order_before_signal()
        cute.arch.sync_threads()
        order_after_wait()
        if cutlass.const_expr(self.plan.config.pdl):
            follow()
        prologue = Prologue(smem, tma, tensors, scalars, pipes)

        if warp <= self.softmax.role.last_warp:
            self.softmax.run(self.enter(self.softmax.role, prologue))
        elif warp <= self.correction.role.last_warp:
            self.correction.run(self.enter(self.correction.role, prologue))
            # All warps waited for the last O, so no MMA is in flight; all rows have been read.
            order_before_signal()
            meet(self.plan.barriers, "read")
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
        """Set the registers of a role and return its scope.

        Each role makes its scope itself, so that none keeps in registers what only other roles
        need.
        """
        set_registers(self.plan.roles, role)
        buffers = self.buffers(prologue.smem)
        return Scope(prologue.tma, prologue.tensors, prologue.scalars, buffers, prologue.pipes)

    def buffers(self, smem: cute.Pointer) -> Buffers:
        """Return the buffers of all roles; None for a buffer that the config does not use."""
        plan, config = self.plan.smem, self.plan.config
        q, io = IO_TYPES[config.dtype], IO_TYPES[config.keys_dtype]
        out = OUT_TYPES[config.o_dtype]
        types = {"sQ": q, "sK": io, "sV": io, "sO": out, "sP": io, "statistics": Float32}
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, buffer_at(plan, smem, "tmem_base", Int32))
        pointers = (
            buffer_at(plan, smem, name, dtype) if name in plan.offsets() else None
            for name, dtype in types.items()
        )
        return Buffers(*pointers, tmem)


@cute.jit
def leads(plan: Plan) -> Boolean:
    """Return whether this CTA issues the MMAs: the only CTA, or the leader of its pair."""
    alone = Boolean(True)
    if cutlass.const_expr(plan.layout.ctas == 2):
        alone = in_leader()
    return alone


def host_function(config: AttentionConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return AttentionSm100(config), *example_arguments(config)
