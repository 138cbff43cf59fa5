"""The grouped GEMM of Hopper: weights of four bits, rows in bf16 by expert, SwiGLU behind it.

Persistent CTAs take tiles from a queue that their scheduler warp fills. Reading order:
fragments.py, plan.py, roles.py, exchange.py, and shared/load.py, shared/dequantise.py,
shared/output.py.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from kernelkit.device.buffers import buffer_at
from kernelkit.device.control import set_registers
from kernelkit.device.dependent import follow
from kernelkit.device.pipelines import make_pipelines, publish_barriers
from kernelkit.plan import hw
from moe.kernel_arguments import MixedTensors, Numbers, Sizes
from moe.mixed.config import MixedConfig
from moe.mixed.plan import TILE_STAGES, TILE_WORDS
from moe.mixed.shared.args import X_TYPES, Scope, example_arguments
from moe.mixed.shared.kernel import Product, Scheduler
from moe.mixed.shared.load import Gather
from moe.mixed.sm90.exchange import open_mail, share_of
from moe.mixed.sm90.plan import make_plan
from moe.mixed.sm90.roles import Buffers, Load, Math, Pipes


class MixedGemm(Product):
    """Kernel of one config."""

    def __init__(self, config: MixedConfig) -> None:
        self.config, self.plan = config, make_plan(config)
        self.scheduler, self.load = Scheduler(self.plan), Load(self.plan)
        self.math = Math(self.plan)
        if config.gather:
            self.gather = Gather(self.plan)

    @cute.kernel
    def kernel(self, x: Any, tensors: MixedTensors, numbers: Numbers, sizes: Sizes) -> None:
        """Grid (CTAs, 1, 1): as many as there are SMs, or tiles."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        pipes = Pipes(**make_pipelines(plan.edges, buffer_at(plan.smem, smem, "barriers", Int64)))
        if cutlass.const_expr(not self.config.gather):
            if warp == self.load.role.first_warp:
                cpasync.prefetch_descriptor(x.atom)
        if cutlass.const_expr(plan.config.split > 1):
            open_mail(plan, buffer_at(plan.smem, smem, "mail_barriers", Int64))
        publish_barriers(plan.edges)
        if cutlass.const_expr(plan.config.split > 1):
            cute.arch.cluster_wait()
        self.begin()
        share = share_of(plan, sizes)
        scope = Scope(x, tensors, numbers, sizes, share, self.buffers(smem), pipes)
        if warp <= self.math.role.last_warp:
            set_registers(plan.roles, self.math.role)
            self.math.run(scope)
        else:
            set_registers(plan.roles, self.load.role)
            if warp == self.load.role.first_warp:
                self.load.run(scope)
            elif warp == self.scheduler.role.first_warp:
                self.scheduler.run(scope)
            elif cutlass.const_expr(self.config.gather):
                self.gather.run(scope)
        if cutlass.const_expr(self.config.least):
            cute.arch.griddepcontrol_wait()  # the next kernel then waits for both

    @cute.jit
    def begin(self) -> None:
        """Wait for the previous kernel in all threads, then let the next one begin. A launch of
        other experts of the same product does not wait: the previous launch waited for all its
        inputs."""
        config = self.config
        if cutlass.const_expr(config.pdl and not config.least):
            follow()
        elif cutlass.const_expr(config.least or config.most):
            cute.arch.griddepcontrol_launch_dependents()

    def buffers(self, smem: cute.Pointer) -> Buffers:
        """All buffers that roles use."""
        plan = self.plan.smem
        layout = cute.make_layout((TILE_STAGES, TILE_WORDS), stride=(TILE_WORDS, 1))
        tiles = cute.make_tensor(buffer_at(plan, smem, "tiles", Int32), layout)
        x = buffer_at(plan, smem, "x", X_TYPES[self.config.x])
        w, out = (buffer_at(plan, smem, name, Uint8) for name in ("w", "out"))
        table = buffer_at(plan, smem, "table", Int32)
        rows = cute.make_layout(self.config.tile_rows)
        scales = buffer_at(plan, smem, "scales", Float32)
        result = Buffers(tiles, x, w, out, cute.make_tensor(table, rows), scales)
        if self.config.split == 1:
            return result
        mail = buffer_at(plan, smem, "mail", Float32)
        barriers = buffer_at(plan, smem, "mail_barriers", Int64)
        return replace(result, mail=mail, mail_barriers=barriers)


def host_function(config: MixedConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    return MixedGemm(config), *example_arguments(config)
