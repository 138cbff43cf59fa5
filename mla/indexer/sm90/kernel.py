"""Scores of index keys by wgmma: e4m3 by e4m3, fp32 sums over heads.

The tensor core keeps 13 bits of a product below its largest term. Reading order: plan.py,
shared/load.py, math.py.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from kernelkit.device.buffers import buffer_at
from kernelkit.device.control import set_registers
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.param_table import ParamTable
from kernelkit.device.pipelines import make_pipelines, publish_barriers
from kernelkit.device.words import vector_at
from kernelkit.plan import hw
from mla.indexer.params import ScoresParams
from mla.indexer.scores_config import KEYS, WgmmaConfig
from mla.indexer.scores_device import most_of, note_spans
from mla.indexer.shared.args import (
    Buffers,
    Operands,
    Pipes,
    Scope,
    Share,
    fake_operand,
    operands_of,
)
from mla.indexer.shared.load import Load, Scales
from mla.indexer.sm90.math import Math
from mla.indexer.sm90.plan import ROLES, make_plan


class WgmmaScores:
    """Host function and kernel of one config."""

    def __init__(self, config: WgmmaConfig) -> None:
        self.config = config
        self.plan = make_plan(config)
        self.load = Load(self.plan, ROLES["load"])
        self.scales = Scales(self.plan, ROLES["scales"])
        self.math = Math(self.plan)

    @cute.jit
    def __call__(
        self,
        operands: tuple[cute.Tensor, ...],
        table: ParamTable,
        ctas: Int32,
        groups: Int32,
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            operands: keys [slots, rows, 1, bytes] and queries [T, H, 1, bytes].
            table: `ScoresParams`.
            ctas: number of CTAs that share the tiles of keys.
            groups: number of groups of tokens.
        """
        self.kernel(operands_of(self.plan, operands), table).launch(
            grid=(groups, ctas, 1),
            block=(ROLES.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.plan.ctas_per_sm,
        )

    @cute.kernel
    def kernel(self, operands: Operands, table: DeviceTable) -> None:
        """Run the roles on a grid of (groups of tokens, CTAs that share tiles, 1)."""
        plan, params = self.plan, table.unpack(ScoresParams)
        group, cta, _ = cute.arch.block_idx()
        _, ctas, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        pipes = Pipes(**make_pipelines(plan.edges, self.buffer(smem, "barriers", Int64)))
        if warp == self.load.role.first_warp:
            for tensor in vars(operands).values():
                cpasync.prefetch_descriptor(tensor.atom)
        share = Share(group * self.config.tokens, cta, ctas)
        layout = cute.make_layout((self.config.tokens + 1, 2), stride=(2, 1))
        spans = cute.make_tensor(self.buffer(smem, "spans", Int32), layout)
        layout = cute.make_layout(self.config.columns)
        weights = cute.make_tensor(self.buffer(smem, "weights", Float32), layout)
        note_spans(params, spans, share.first)
        self.note_weights(params, share, weights)
        publish_barriers(plan.edges)
        buffers = Buffers(
            spans,
            weights,
            self.buffer(smem, "key_scales", Uint32),
            self.buffer(smem, "q", Float8E4M3FN),
            self.buffer(smem, "keys", Float8E4M3FN),
        )
        scope = Scope(operands, params, buffers, pipes, share)
        if cta * KEYS < most_of(spans):  # otherwise this CTA has no tile
            self.play(scope, warp)

    @cute.jit
    def play(self, scope: Scope, warp: Int32) -> None:
        """Run the role of a warp."""
        if warp <= self.math.role.last_warp:
            set_registers(ROLES, self.math.role)
            self.math.run(scope)
        else:
            set_registers(ROLES, self.load.role)
            if warp == self.load.role.first_warp:
                self.load.run(scope)
            elif warp == self.scales.role.first_warp:
                self.scales.run(scope)

    @cute.jit
    def note_weights(self, params: ScoresParams, share: Share, weights: cute.Tensor) -> None:
        """Write the weights of every head of the CTA's tokens to shared memory; zeros for tokens
        that do not exist.
        """
        thread, _, _ = cute.arch.thread_idx()
        for column in cutlass.range(thread, self.config.columns, ROLES.threads, unroll=1):
            token, weight = Int64(share.first + column // self.config.heads), Float32(0.0)
            if token < params.tokens:
                row = params.weights + token * params.weights_stride
                weight = vector_at(row + Int64(column % self.config.heads) * 4, Float32, 1)[0]
            weights[column] = weight

    def buffer(self, smem: cute.Pointer, name: str, dtype: type[cutlass.Numeric]) -> cute.Pointer:
        """Return the address of a buffer of the plan."""
        return buffer_at(self.plan.smem, smem, name, dtype)


def host_function(config: WgmmaConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    numbers = Int32(1), Int32(1), CUstream(0)
    operands = fake_operand(), fake_operand()
    return WgmmaScores(config), operands, ParamTable.zeros(ScoresParams), *numbers
