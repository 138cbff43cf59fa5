"""Scores of index keys by block-scaled MMAs: e2m1 by e2m1, UE8M0 scales, fp32 sums.

Reading order: plan.py, shared/load.py, roles/scales.py, roles/mma.py,
roles/epilogue.py.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float4E2M1FN, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from kernelkit.device.buffers import buffer_at
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.param_table import ParamTable
from kernelkit.device.pipelines import make_pipelines, publish_barriers
from kernelkit.device.tmem import order_before_signal
from kernelkit.device.words import vector_at
from kernelkit.plan import hw
from mla.indexer.entry import row_address
from mla.indexer.params import ScoresParams
from mla.indexer.scores_config import KEYS, BlockScaledConfig
from mla.indexer.scores_device import most_of, note_spans
from mla.indexer.shared.args import (
    Buffers,
    Operands,
    Pipes,
    Scope,
    Share,
    operands_of,
)
from mla.indexer.shared.load import Load
from mla.indexer.shared.plan import SCALE_BYTES
from mla.indexer.sm100.plan import ATOM_BYTES, ROLES, make_plan
from mla.indexer.sm100.roles.epilogue import Epilogue
from mla.indexer.sm100.roles.mma import Mma
from mla.indexer.sm100.roles.scales import ScaleFactors

QUARTER = 32  # rows of a quarter of an atom; the words of these rows are not adjacent


class BlockScaledScores:
    """Host function and kernel of one config."""

    def __init__(self, config: BlockScaledConfig) -> None:
        self.config = config
        self.plan = make_plan(config)
        self.load = Load(self.plan, ROLES["load"])
        self.scales = ScaleFactors(self.plan, ROLES["scales"])
        self.mma, self.epilogue = Mma(self.plan), Epilogue(self.plan)

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
            min_blocks_per_mp=self.plan.ctas_per_sm,  # bounds the registers of a thread
            preferred_smem_carveout=100,  # percent of what an SM has
        )

    @cute.kernel
    def kernel(self, operands: Operands, table: DeviceTable) -> None:
        """Run the roles on a grid of (groups of tokens, CTAs that share tiles, 1)."""
        plan, params = self.plan, table.unpack(ScoresParams)
        group, cta, _ = cute.arch.block_idx()
        _, ctas, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        tmem_base = self.buffer(smem, "tmem_base", Int32)
        pipes = Pipes(**make_pipelines(plan.edges, self.buffer(smem, "barriers", Int64)))
        owner = self.epilogue.role.last_warp
        if warp == owner:
            cute.arch.alloc_tmem(plan.tmem.allocated, tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == self.load.role.first_warp:
            for tensor in vars(operands).values():
                cpasync.prefetch_descriptor(tensor.atom)
        share = Share(group * self.config.tokens, cta, ctas)
        spans = self.tensor(smem, "spans", Int32, (self.config.tokens + 1, 2))
        weights = self.tensor(smem, "weights", Float32, (plan.n, 1))
        q_scales = self.buffer(smem, "q_scales", Uint32)
        note_spans(params, spans, share.first)
        self.note_heads(params, share, weights, q_scales)
        publish_barriers(plan.edges)
        buffers = Buffers(
            spans,
            weights,
            self.buffer(smem, "key_scales", Uint32),
            self.buffer(smem, "q", Float4E2M1FN),
            self.buffer(smem, "keys", Float4E2M1FN),
            q_scales,
            cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base),
        )
        scope = Scope(operands, params, buffers, pipes, share)

        if cta * KEYS < most_of(spans):  # otherwise this CTA has no tile
            self.play(scope, warp)
        order_before_signal()
        cute.arch.sync_threads()
        if warp == owner:
            cute.arch.dealloc_tmem(buffers.tmem, plan.tmem.allocated)

    @cute.jit
    def play(self, scope: Scope, warp: Int32) -> None:
        """Run the role of a warp."""
        if warp <= self.epilogue.role.last_warp:
            self.epilogue.run(scope)
        elif warp == self.mma.role.first_warp:
            self.mma.run(scope)
        elif warp == self.load.role.first_warp:
            self.load.run(scope)
        else:
            self.scales.run(scope)

    @cute.jit
    def note_heads(
        self, params: ScoresParams, share: Share, weights: cute.Tensor, q_scales: cute.Pointer
    ) -> None:
        """Write the weights and the scale factors of every head of the CTA's tokens to shared
        memory.

        The fence makes them visible to the tensor core.
        """
        thread, _, _ = cute.arch.thread_idx()
        atom = cute.make_tensor(q_scales, cute.make_layout(ATOM_BYTES // SCALE_BYTES))
        if thread < ATOM_BYTES // SCALE_BYTES:
            token = Int64(share.first + thread // self.config.heads)
            head, weight, codes = Int64(thread % self.config.heads), Float32(0.0), Uint32(0)
            if (thread < self.plan.n) & (token < params.tokens):
                place = params.weights + token * params.weights_stride
                weight = vector_at(place + head * 4, Float32, 1)[0]
                place = row_address(params.q_scales, token, head)
                codes = Uint32(vector_at(place, Uint32, 1)[0])
            if thread < self.plan.n:
                weights[thread, 0] = weight
            atom[thread % QUARTER * 4 + thread // QUARTER] = codes
            cute.arch.fence_proxy("async.shared", space="cta")

    def buffer(self, smem: cute.Pointer, name: str, dtype: type[cutlass.Numeric]) -> cute.Pointer:
        """Return the address of a buffer of the plan."""
        return buffer_at(self.plan.smem, smem, name, dtype)

    def tensor(
        self, smem: cute.Pointer, name: str, dtype: type[cutlass.Numeric], shape: tuple[int, int]
    ) -> cute.Tensor:
        """Return a buffer as a row-major tensor."""
        layout = cute.make_layout(shape, stride=(shape[1], 1))
        return cute.make_tensor(self.buffer(smem, name, dtype), layout)
