"""Attention forward kernel for Hopper: prologue, dispatch of the warps.

Read `plan.py` first (roles and barriers), then this file, `fmha/shared/walk.py` (blocks of a CTA
and their tiles), `fmha/shared/load.py` and `math.py`, then `epilogue.py`. Head dim 512 also uses
`seesaw.py`, K and V in e4m3 use `fp8.py`. The softmax of a row is in `fmha/shared/two_rows.py`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.memory import SmemAllocator

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from fmha.shared.args import (
    IO_TYPES,
    OUT_TYPES,
    Buffers,
    Globals,
    Pipes,
    Scalars,
    Scope,
    TmaTensors,
)
from fmha.shared.host import Forward, example_arguments
from fmha.shared.load import LoadQK, LoadV
from fmha.sm90.fp8 import MathFp8, Turn
from fmha.sm90.math import Math
from fmha.sm90.plan import Plan90
from fmha.sm90.seesaw import Seesaw
from kernelkit.device.buffers import buffer_at
from kernelkit.device.control import set_registers
from kernelkit.device.dependent import follow
from kernelkit.device.pipelines import make_pipelines, publish_barriers
from kernelkit.plan import hw


class AttentionSm90(Forward):
    """Kernel of one config, traced by `cute.compile(AttentionSm90(config), ...)`."""

    plan: Plan90

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(make_plan(config, "sm_90a"))
        self.load_qk = LoadQK(self.plan)
        self.load_v = None if config.k_is_v else LoadV(self.plan)
        shared = self.plan.layout.sharers > 1
        math = MathFp8 if config.is_fp8 else Seesaw if shared else Math
        self.math = math(self.plan)
        if self.plan.config.is_fp8:
            self.turn = Turn(self.plan)

    @cute.kernel
    def kernel(self, tma: TmaTensors, tensors: Globals, scalars: Scalars) -> None:
        """Run the prologue in all warps, then each warp's role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        barriers = buffer_at(plan.smem, smem, "barriers", Int64)
        rings = make_pipelines(plan.edges, barriers)
        pipes = Pipes(**rings, **({"v": rings["k"]} if plan.config.k_is_v else {}))
        publish_barriers(plan.edges)
        if cutlass.const_expr(plan.config.pdl):
            follow()
        scope = Scope(tma, tensors, scalars, self.buffers(smem), pipes)
        if warp <= self.math.role.last_warp:
            set_registers(plan.roles, self.math.role)
            self.math.run(scope)
        else:
            set_registers(plan.roles, self.load_qk.role)
            if warp == self.load_qk.role.first_warp:
                self.load_qk.run(scope)
            elif cutlass.const_expr(plan.config.k_is_v):
                pass  # V is not loaded separately
            elif warp == self.load_v.role.first_warp:
                self.load_v.run(scope)
            elif cutlass.const_expr(plan.config.is_fp8):
                self.turn.run(scope)

    def buffers(self, smem: cute.Pointer) -> Buffers:
        """Return the buffers of all roles."""
        plan, config = self.plan.smem, self.plan.config
        io, v_name = IO_TYPES[config.keys_dtype], "sK" if config.k_is_v else "sV"
        q, k, v = (buffer_at(plan, smem, name, io) for name in ("sQ", "sK", v_name))
        vt = buffer_at(plan, smem, "sVt", io) if config.is_fp8 else None
        q = cute.recast_ptr(q, dtype=IO_TYPES[config.dtype])
        o, p, statistics = None, None, None
        if self.plan.layout.o_in_smem:
            o = buffer_at(plan, smem, "sO", OUT_TYPES[config.o_dtype])
        if self.plan.layout.sharers > 1:
            p = buffer_at(plan, smem, "sP", io)
            statistics = buffer_at(plan, smem, "statistics", Float32)
        return Buffers(q, k, v, o, p=p, statistics=statistics, vt=vt)


def host_function(config: AttentionConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return AttentionSm90(config), *example_arguments(config)
