"""The grouped GEMM of Hopper: weights of four bits, rows in bf16 sorted by expert, SwiGLU behind it.

Persistent CTAs take tiles from a queue that their scheduler warp fills. Reading order: weights.py,
plan.py, load.py, dequantise.py, math.py, epilogue.py.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from kernelkit import hw
from kernelkit.boxes import ROWS_FIRST, TmaTensor, describe, reorder
from kernelkit.buffers import buffer_at
from kernelkit.fake import fake_tensor
from kernelkit.pipelines import make_pipelines, publish_barriers
from kernelkit.registers import set_registers
from moe.mixed_config import MixedConfig
from moe.sm90.args import Buffers, Pipes, Scope, Sizes, Tensors
from moe.sm90.load import Load, x_box
from moe.sm90.math import Math
from moe.sm90.plan import TILE_STAGES, TILE_WORDS, make_plan
from moe.sm90.scheduler import Scheduler
from moe.sm100.args import Numbers

OUT_TYPES = {"bf16": BFloat16, "fp16": Float16}


class MixedGemm:
    """Host function and kernel of one config."""

    def __init__(self, config: MixedConfig) -> None:
        self.config, self.plan = config, make_plan(config)
        self.scheduler, self.load = Scheduler(self.plan), Load(self.plan)
        self.math = Math(self.plan)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        tensors: tuple[cute.Tensor | None, ...],
        numbers: tuple[Float32, ...],
        sizes: tuple[Int32, ...],
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """x: [1, rows, 1, K]. tensors, numbers, sizes: fields of `Tensors`, `Numbers`, `Sizes`.
        ctas: of the grid."""
        fetch = cpasync.CopyBulkTensorTileG2SOp()
        moved = describe(fetch, reorder(x, ROWS_FIRST), x_box(self.plan))
        self.kernel(moved, Tensors(*tensors), Numbers(*numbers), Sizes(*sizes)).launch(
            grid=(ctas, 1, 1),
            block=(self.plan.roles.threads, 1, 1),
            stream=stream,
            use_pdl=self.config.pdl,
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg
        )

    @cute.kernel
    def kernel(self, x: TmaTensor, tensors: Tensors, numbers: Numbers, sizes: Sizes) -> None:
        """Grid (CTAs, 1, 1): as many as there are SMs, or tiles."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        pipes = Pipes(**make_pipelines(plan.edges, buffer_at(plan.smem, smem, "barriers", Int64)))
        if warp == self.load.role.first_warp:
            cpasync.prefetch_descriptor(x.atom)
        publish_barriers(plan.edges)
        if cutlass.const_expr(self.config.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        scope = Scope(x, tensors, numbers, sizes, self.buffers(smem), pipes)
        if warp <= self.math.role.last_warp:
            set_registers(plan.roles, self.math.role)
            self.math.run(scope)
        else:
            set_registers(plan.roles, self.load.role)
            if warp == self.load.role.first_warp:
                self.load.run(scope)
            elif warp == self.scheduler.role.first_warp:
                self.scheduler.run(scope)

    def buffers(self, smem: cute.Pointer) -> Buffers:
        """All buffers that roles use."""
        plan = self.plan.smem
        layout = cute.make_layout((TILE_STAGES, TILE_WORDS), stride=(TILE_WORDS, 1))
        tiles = cute.make_tensor(buffer_at(plan, smem, "tiles", Int32), layout)
        x = buffer_at(plan, smem, "x", BFloat16)
        w, out = (buffer_at(plan, smem, name, Uint8) for name in ("w", "out"))
        return Buffers(tiles, x, w, out)


def example_arguments(config: MixedConfig) -> tuple:
    """(x, tensors, numbers, sizes, ctas, stream), as `MixedGemm.__call__` takes them."""
    rows, experts, one = (cute.sym_int32() for _ in range(3))
    align = hw.TMA_ALIGN_BYTES
    bias = fake_tensor(Float32, experts, cute.sym_int32()) if config.bias else None
    tensors = (
        fake_tensor(Uint8, experts, cute.sym_int32(), align=align),
        fake_tensor(Float32, cute.sym_int32()),
        fake_tensor(Int32, cute.sym_int32()),
        fake_tensor(OUT_TYPES[config.out], rows, cute.sym_int32(), align=align),
        bias,
    )
    x = fake_tensor(BFloat16, one, rows, one, cute.sym_int32(), align=align)
    numbers = (Float32(1.0), Float32(0.0), Float32(0.0))
    return x, tensors, numbers, (Int32(1),) * 4, Int32(1), CUstream(0)


def host_function(config: MixedConfig, _arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    return MixedGemm(config), *example_arguments(config)
