"""The grouped GEMM of Blackwell: block-scaled operands, rows sorted by expert, SwiGLU behind it.

Persistent CTAs take tiles from a queue that their scheduler warp fills. Reading order: plan.py,
roles/scheduler.py, roles/load.py, roles/mma.py, roles/epilogue.py.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from kernelkit import hw
from kernelkit.boxes import ROWS_FIRST, describe, reorder
from kernelkit.pipelines import make_pipelines, publish_barriers
from moe.config import GroupedConfig
from moe.sm100.args import Buffers, Numbers, Operands, Pipes, Scope, Sizes, Tensors
from moe.sm100.boxes import a_box, b_box, scale_box
from moe.sm100.plan import ROLES, TILE_STAGES, TILE_WORDS, make_plan
from moe.sm100.roles.epilogue import Epilogue
from moe.sm100.roles.load import Load
from moe.sm100.roles.mma import Mma
from moe.sm100.roles.scheduler import Scheduler
from moe.sm100.signature import ELEMENTS


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
        operands: tuple,
        tensors: tuple,
        numbers: tuple,
        k: Int32,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """operands: A, B and their scale factors as `signature.example_arguments` describes them;
        tensors, numbers: fields of `Tensors`, `Numbers`. k: elements of K. ctas: of the grid."""
        plan, (a, b, sfa, sfb) = self.plan, operands
        fetch = cpasync.CopyBulkTensorTileG2SOp()
        boxes = (a_box(plan), b_box(plan), scale_box(plan), scale_box(plan))
        moved = (
            describe(fetch, reorder(tensor, ROWS_FIRST), box)
            for tensor, box in zip((a, b, sfa, sfb), boxes, strict=True)
        )
        sizes = Sizes(k, b.shape[0], -(-b.shape[1] // self.config.tile_n))
        self.kernel(Operands(*moved), Tensors(*tensors), Numbers(*numbers), sizes).launch(
            grid=(ctas, 1, 1), block=(ROLES.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, operands: Operands, tensors: Tensors, numbers: Numbers, sizes: Sizes) -> None:
        """Grid (CTAs, 1, 1): as many as there are SMs, or tiles."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        tmem_base = self.buffer(smem, "tmem_base", Int32)
        pipes = Pipes(**make_pipelines(plan.edges, self.buffer(smem, "barriers", Int64)))
        if warp == self.epilogue.role.last_warp:
            cute.arch.alloc_tmem(plan.tmem.allocated, tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == self.load.role.first_warp:
            for tensor in (operands.a, operands.b, operands.sfa, operands.sfb):
                cpasync.prefetch_descriptor(tensor.atom)
        publish_barriers(plan.edges)
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
        scope = Scope(operands, tensors, numbers, sizes, self.buffers(smem, tmem), pipes)

        if warp <= self.epilogue.role.last_warp:
            self.epilogue.run(scope)
        elif warp == self.mma.role.first_warp:
            self.mma.run(scope)
        elif warp == self.load.role.first_warp:
            self.load.run(scope)
        else:
            self.scheduler.run(scope)
        cute.arch.sync_threads()
        if warp == self.epilogue.role.last_warp:
            cute.arch.dealloc_tmem(tmem, plan.tmem.allocated)

    def buffer(self, smem: cute.Pointer, name: str, dtype: type[cutlass.Numeric]) -> cute.Pointer:
        """The plan's buffer, where the plan puts it."""
        begin = self.plan.smem.offsets()[name][0]
        align = hw.SMEM_SWIZZLE_ALIGN if begin % hw.SMEM_SWIZZLE_ALIGN == 0 else dtype.width // 8
        if begin % 128 == 0:
            align = max(align, 128)
        return cute.recast_ptr((smem + begin).align(align), dtype=dtype)

    def buffers(self, smem: cute.Pointer, tmem: cute.Pointer) -> Buffers:
        """All buffers that roles use."""
        layout = cute.make_layout((TILE_STAGES, TILE_WORDS), stride=(TILE_WORDS, 1))
        tiles = cute.make_tensor(self.buffer(smem, "tiles", Int32), layout)
        element = ELEMENTS[self.config.format.element]
        a, b = (self.buffer(smem, name, element) for name in ("sA", "sB"))
        sfa, sfb = (self.buffer(smem, name, cutlass.Uint16) for name in ("sSFA", "sSFB"))
        return Buffers(tiles, a, b, sfa, sfb, tmem)
