"""The product of numbers on Hopper: tokens in fp16 or bf16 times weights in Q8_0 (device code).

Persistent clusters walk over tiles of rows by tokens. Reading order: config.py, plan.py, scope.py,
load.py, weights.py, math.py, store.py.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint8, Uint16
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from kernelkit.device.boxes import ROWS_FIRST, TmaTensor, describe, reorder
from kernelkit.device.buffers import buffer_at
from kernelkit.device.control import set_registers
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.fake import fake_tensor
from kernelkit.device.param_table import ParamTable
from kernelkit.device.pipelines import make_pipelines, meet_before_exit, publish_barriers
from kernelkit.plan import hw
from q8_0.numbers.config import NumbersConfig
from q8_0.numbers.load import Copy, Load
from q8_0.numbers.math import Math
from q8_0.numbers.params import NumbersParams
from q8_0.numbers.plan import make_plan
from q8_0.numbers.scope import TYPES, Pipes, Scope, share_of, w_box, x_box
from q8_0.numbers.store import meet_cluster, open_mail


class Product:
    """Host function and kernel of one config."""

    def __init__(self, config: NumbersConfig) -> None:
        self.config, self.plan = config, make_plan(config)
        self.load, self.math = Load(self.plan), Math(self.plan)
        if config.copies:
            self.copy = Copy(self.plan)

    @cute.jit
    def __call__(
        self, operands: tuple[Any, ...], table: ParamTable, ctas: Int32, stream: CUstream
    ) -> None:
        """Describe the operands to TMA, and launch.

        Args:
            operands: x [1, tokens, 1, cols]; quants [1, rows, 1, cols] as bytes, or blocks as pairs
                of bytes, unless threads copy them
            table: `NumbersParams`
            ctas: number of CTAs, whole clusters
            stream: CUDA stream
        """
        config, fetch = self.config, cpasync.CopyBulkTensorTileG2SOp()
        many = cpasync.CopyBulkTensorTileG2SMulticastOp() if config.pair else fetch
        x = describe(many, reorder(operands[0], ROWS_FIRST), x_box(self.plan))
        w = None
        if cutlass.const_expr(self.plan.edges.has("w")):
            w = describe(fetch, reorder(operands[1], ROWS_FIRST), w_box(self.plan))
        self.kernel(x, w, table).launch(
            grid=(ctas, 1, 1),
            block=(self.plan.roles.threads, 1, 1),
            cluster=(config.ctas, 1, 1) if config.ctas > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg
        )

    @cute.kernel
    def kernel(self, x: TmaTensor, w: TmaTensor | None, table: DeviceTable) -> None:
        """Grid (CTAs, 1, 1)."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        pipes = Pipes(**make_pipelines(plan.edges, buffer_at(plan.smem, smem, "barriers", Int64)))
        if warp == self.load.role.first_warp:
            cpasync.prefetch_descriptor(x.atom)
            if cutlass.const_expr(w is not None):
                cpasync.prefetch_descriptor(w.atom)
        if cutlass.const_expr(self.config.split > 1):
            open_mail(self.config, buffer_at(plan.smem, smem, "mail_barrier", Int64))
        publish_barriers(plan.edges)
        if cutlass.const_expr(self.config.split > 1 and not self.config.pair):
            meet_cluster()
        scope = self.scope(x, w, table.unpack(NumbersParams), smem, pipes)
        if warp <= self.math.role.last_warp:
            set_registers(plan.roles, self.math.role)
            self.math.run(scope)
        else:
            set_registers(plan.roles, self.load.role)
            if warp == self.load.role.first_warp:
                self.load.run(scope)
            elif cutlass.const_expr(self.config.copies):
                if warp <= self.copy.role.last_warp:
                    self.copy.run(scope)
        meet_before_exit(plan.edges)

    @cute.jit
    def scope(
        self,
        x: TmaTensor,
        w: TmaTensor | None,
        params: NumbersParams,
        smem: cute.Pointer,
        pipes: Pipes,
    ) -> Scope:
        """Return the context of this CTA."""
        config, plan = self.config, self.plan.smem
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        member, share = (rank % 2, rank // 2) if config.pair else (Int32(0), rank)
        return Scope(
            x=x,
            w=w,
            params=params,
            pipes=pipes,
            x_buffer=buffer_at(plan, smem, "x", TYPES[config.dtype]),
            w_buffer=buffer_at(plan, smem, "w", Uint16 if config.interleaved else Uint8),
            scales=Int32(buffer_at(plan, smem, "scales", Uint8).toint()),
            out=Int32(buffer_at(plan, smem, "out", Uint8).toint()),
            mail=Int32(buffer_at(plan, smem, "mail", Uint8).toint()),
            mail_barrier=Int32(buffer_at(plan, smem, "mail_barrier", Uint8).toint()),
            member=member,
            share=share_of(config, Int32(params.blocks), share),
            cluster=cta // config.ctas,
            clusters=ctas // config.ctas,
        )


def host_function(config: NumbersConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    align, one = hw.TMA_ALIGN_BYTES, cute.sym_int32()
    shape = one, cute.sym_int32(), one, cute.sym_int32()
    x = fake_tensor(TYPES[config.dtype], *shape, align=align)
    operands: tuple[Any, ...] = (x,)
    product = Product(config)
    if product.plan.edges.has("w"):
        rows = one, cute.sym_int32(), one, cute.sym_int32()
        operands = (x, fake_tensor(Uint16 if config.interleaved else Uint8, *rows, align=align))
    return product, operands, ParamTable.zeros(NumbersParams), Int32(1), CUstream(0)
