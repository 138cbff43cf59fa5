"""The mixed product of Blackwell: weights of four bits, rows in bf16 by expert, SwiGLU behind it.

Persistent CTAs take tiles from a queue that their scheduler warp fills. Reading order:
fragments.py, plan.py, roles.py, and shared/load.py, shared/dequantise.py, shared/output.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from kernelkit.device.buffers import buffer_at
from kernelkit.device.dependent import follow
from kernelkit.device.pipelines import make_pipelines, publish_barriers
from kernelkit.device.tmem import order_before_signal
from kernelkit.plan import hw
from moe.kernel_arguments import MixedTensors, Numbers, Sizes
from moe.mixed.config import MixedConfig
from moe.mixed.plan import TILE_STAGES, TILE_WORDS
from moe.mixed.shared.args import X_TYPES, Scope, Share, example_arguments
from moe.mixed.shared.kernel import Product, Scheduler
from moe.mixed.sm100.plan import make_plan
from moe.mixed.sm100.roles import Buffers, Epilogue, Gather, Load, Math, Mma, Pipes


class MixedGemm(Product):
    """Kernel of one config."""

    def __init__(self, config: MixedConfig) -> None:
        self.config, self.plan = config, make_plan(config)
        self.scheduler, self.load = Scheduler(self.plan), Load(self.plan)
        self.math, self.mma = Math(self.plan), Mma(self.plan)
        self.epilogue = Epilogue(self.plan)
        if config.gather:
            self.gather = Gather(self.plan)

    @cute.kernel
    def kernel(self, x: Any, tensors: MixedTensors, numbers: Numbers, sizes: Sizes) -> None:
        """Grid (CTAs, 1, 1): as many as there are SMs, or tiles."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        tmem_base = buffer_at(plan.smem, smem, "tmem_base", Int32)
        pipes = Pipes(**make_pipelines(plan.edges, buffer_at(plan.smem, smem, "barriers", Int64)))
        if warp == self.epilogue.role.last_warp:
            cute.arch.alloc_tmem(plan.tmem.allocated, tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()
        if cutlass.const_expr(not self.config.gather):
            if warp == self.load.role.first_warp:
                cpasync.prefetch_descriptor(x.atom)
        publish_barriers(plan.edges)
        if cutlass.const_expr(self.config.pdl):
            follow()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
        share = Share(Int32(0), Int32(0), sizes.units)
        scope = Scope(x, tensors, numbers, sizes, share, self.buffers(smem, tmem), pipes)
        if warp <= self.math.role.last_warp:
            self.math.run(scope)
        elif warp <= self.epilogue.role.last_warp:
            self.epilogue.run(scope)
        elif warp == self.mma.role.first_warp:
            self.mma.run(scope)
        elif warp == self.load.role.first_warp:
            self.load.run(scope)
        elif warp == self.scheduler.role.first_warp:
            self.scheduler.run(scope)
        elif cutlass.const_expr(self.config.gather):
            self.gather.run(scope)
        order_before_signal()
        cute.arch.sync_threads()
        if warp == self.epilogue.role.last_warp:
            cute.arch.dealloc_tmem(tmem, plan.tmem.allocated)

    def buffers(self, smem: cute.Pointer, tmem: cute.Pointer) -> Buffers:
        """All buffers that roles use."""
        plan = self.plan.smem
        layout = cute.make_layout((TILE_STAGES, TILE_WORDS), stride=(TILE_WORDS, 1))
        tiles = cute.make_tensor(buffer_at(plan, smem, "tiles", Int32), layout)
        x = buffer_at(plan, smem, "x", X_TYPES[self.config.x])
        w, out = (buffer_at(plan, smem, name, Uint8) for name in ("w", "out"))
        return Buffers(tiles, x, w, out, tmem)


def host_function(config: MixedConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    return MixedGemm(config), *example_arguments(config)
