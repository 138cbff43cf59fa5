"""The grouped GEMM of Blackwell: block-scaled operands, rows sorted by expert, fused SwiGLU.

Persistent CTAs process tiles from a queue that their scheduler warp fills. Reading order: plan.py,
roles/scheduler.py, roles/load.py, roles/mma.py, roles/epilogue.py.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from kernelkit.device.boxes import ROWS_FIRST, describe, reorder
from kernelkit.device.buffers import buffer_at
from kernelkit.device.dependent import follow
from kernelkit.device.pipelines import (
    announce_barriers,
    in_leader,
    make_pipelines,
    meet_before_exit,
    meet_peer,
    tma_group,
)
from kernelkit.device.tmem import order_after_wait, order_before_signal
from kernelkit.plan import hw
from moe.config import GroupedConfig
from moe.kernel_arguments import GroupedArguments, Numbers, Tensors
from moe.sm100.args import (
    ELEMENTS,
    Buffers,
    Operands,
    Pipes,
    Scope,
    Sizes,
    example_arguments,
)
from moe.sm100.plan import LANES, PAD, ROLES, TILE_STAGES, TILE_WORDS, make_plan
from moe.sm100.roles.epilogue import Epilogue
from moe.sm100.roles.load import Load, describe_w, scale_box, x_box
from moe.sm100.roles.mma import Mma
from moe.sm100.roles.scheduler import Scheduler


class GroupedGemm:
    """Host function and kernel of one config."""

    def __init__(self, config: GroupedConfig) -> None:
        self.config = config
        self.plan = make_plan(config)
        self.scheduler, self.load = Scheduler(self.plan), Load(self.plan)
        self.mma, self.epilogue = Mma(self.plan), Epilogue(self.plan)

    @cute.jit
    def __call__(
        self,
        given: GroupedArguments,
        stream: CUstream,
    ) -> None:
        """Describe the operands to TMA, and launch."""
        plan, x, w = self.plan, given.operands.x, given.operands.w
        scales = given.operands.x_scales, given.operands.w_scales
        fetch = cpasync.CopyBulkTensorTileG2SOp(tma_group(plan.edges, "ab"))
        moved = (
            describe(fetch, reorder(x, ROWS_FIRST), x_box(plan)),
            describe_w(fetch, w, plan),
            *(describe(fetch, reorder(each, ROWS_FIRST), scale_box(plan)) for each in scales),
        )
        sizes = Sizes(given.k, w.shape[0], -(-w.shape[1] // self.config.tile_n))
        self.kernel(Operands(*moved), given.tensors, given.numbers, sizes).launch(
            grid=(given.ctas, 1, 1),
            block=(ROLES.threads, 1, 1),
            cluster=(self.config.ctas, 1, 1) if self.config.ctas > 1 else None,
            stream=stream,
            use_pdl=self.config.pdl,
            min_blocks_per_mp=1,  # without it ptxas limits registers to 40 and spills
        )

    @cute.kernel
    def kernel(self, operands: Operands, tensors: Tensors, numbers: Numbers, sizes: Sizes) -> None:
        """Grid (CTAs, 1, 1): as many as there are SMs, or tiles."""
        plan, is_two = self.plan, self.config.ctas == 2
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        tmem_base = self.buffer(smem, "tmem_base", Int32)
        pipes = Pipes(**make_pipelines(plan.edges, self.buffer(smem, "barriers", Int64)))
        announce_barriers(plan.edges)
        if warp == self.load.role.first_warp:
            for tensor in vars(operands).values():
                cpasync.prefetch_descriptor(tensor.atom)
        meet_peer(plan.edges)
        if warp == self.epilogue.role.last_warp:
            cute.arch.alloc_tmem(plan.tmem.allocated, tmem_base, is_two_cta=is_two)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=is_two)
            order_before_signal()
        cute.arch.sync_threads()
        order_after_wait()
        if cutlass.const_expr(self.config.pdl and not self.config.w_ready):
            follow()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
        scope = Scope(operands, tensors, numbers, sizes, self.buffers(smem, tmem), pipes)

        if warp <= self.epilogue.role.last_warp:
            self.epilogue.run(scope)
        elif warp == self.mma.role.first_warp:
            if cutlass.const_expr(not is_two):
                self.mma.run(scope)
            elif in_leader():
                self.mma.run(scope)
        elif warp == self.load.role.first_warp:
            self.load.run(scope)
        else:
            self.scheduler.run(scope)
        order_before_signal()
        cute.arch.sync_threads()
        meet_before_exit(plan.edges)
        if warp == self.epilogue.role.last_warp:
            cute.arch.dealloc_tmem(tmem, plan.tmem.allocated, is_two_cta=is_two)

    def buffer(self, smem: cute.Pointer, name: str, dtype: type[cutlass.Numeric]) -> cute.Pointer:
        """Return a buffer of the plan in shared memory."""
        return buffer_at(self.plan.smem, smem, name, dtype)

    def buffers(self, smem: cute.Pointer, tmem: cute.Pointer) -> Buffers:
        """All buffers that roles use."""
        layout = cute.make_layout((TILE_STAGES, TILE_WORDS), stride=(TILE_WORDS, 1))
        tiles = cute.make_tensor(self.buffer(smem, "tiles", Int32), layout)
        element = ELEMENTS[self.config.x_format.element]  # also of w, which is padded to this type
        data = (self.buffer(smem, name, element) for name in ("x", "w"))
        scales = (self.buffer(smem, name, cutlass.Uint16) for name in ("x_scales", "w_scales"))
        passed = {}
        if self.config.swapped:
            rows = cute.make_layout((self.plan.n, LANES), stride=(LANES + PAD, 1))
            start = self.buffer(smem, "transposed", Float32)
            passed["transposed"] = cute.make_tensor(start, rows)
        else:
            passed["pieces"] = self.buffer(smem, "pieces", cutlass.Uint8)
        return Buffers(tiles, *data, *scales, tmem, **passed)


def host_function(config: GroupedConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    return GroupedGemm(config), *example_arguments(config)
