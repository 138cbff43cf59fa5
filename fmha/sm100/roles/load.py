"""Load role: one warp fetches Q once, then the K and V tiles in the order of the walk."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fmha.plan import AttentionPlan
from fmha.sm100.args import Buffers, Pipes, TmaLoad, Work
from fmha.sm100.products import make_pv_mma, make_qk_mma, pv_tile, qk_tile
from kernelkit.pipelines import filling


@cute.jit
def tma_views(load: TmaLoad, shared: cute.Tensor, tiles: cute.Tensor) -> tuple:
    """(shared (bytes of a tile, stage), global (bytes of a tile, tile)) for one copy."""
    return cpasync.tma_partition(
        load.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 3),
        cute.group_modes(tiles, 0, 3),
    )


class Load:
    """Fills sQ and the K and V rings. Tiles beyond the tensor arrive as zeros."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.role = plan.roles["load"]

    @cute.jit
    def run(
        self, q: TmaLoad, k: TmaLoad, v: TmaLoad, work: Work, buffers: Buffers, pipes: Pipes
    ) -> None:
        """Whole life of the warp."""
        for load in (q, k, v):
            cpasync.prefetch_descriptor(load.atom)
        tQsQ, tQgQ, tKsK, tKgK, tVsV, tVgV = self.partition(q, k, v, work, buffers)
        stages = self.plan.config.kv_stages
        k_state, v_state = filling(stages), filling(stages)
        if work.kv_tiles > 0:
            pipes.q.signal(0)
            cute.copy(q.atom, tQgQ, tQsQ[None, 0], tma_bar_ptr=pipes.q.barrier(0))
        for step in cutlass.range(work.kv_tiles, unroll=1):
            tile = work.kv_tiles - 1 - step
            pipes.k.acquire(k_state)
            k_landed = pipes.k.barrier(k_state.index)
            cute.copy(k.atom, tKgK[None, tile], tKsK[None, k_state.index], tma_bar_ptr=k_landed)
            k_state.advance()
            pipes.v.acquire(v_state)
            v_landed = pipes.v.barrier(v_state.index)
            cute.copy(v.atom, tVgV[None, tile], tVsV[None, v_state.index], tma_bar_ptr=v_landed)
            v_state.advance()

    @cute.jit
    def partition(self, q: TmaLoad, k: TmaLoad, v: TmaLoad, work: Work, buffers: Buffers) -> tuple:
        """Shared and global views of Q (this tile only), K and V (all tiles of this head)."""
        qk, pv = make_qk_mma(self.plan).get_slice(0), make_pv_mma(self.plan).get_slice(0)
        m, n, d = qk_tile(self.plan)
        gQ = cute.local_tile(q.tensor, (m, d), (work.q_tile, 0, work.head, work.batch))
        gK = cute.local_tile(k.tensor, (n, d), (None, 0, work.kv_head, work.batch))
        gV = cute.local_tile(v.tensor, pv_tile(self.plan)[1:], (0, None, work.kv_head, work.batch))
        tQsQ, tQgQ = tma_views(q, buffers.q, qk.partition_A(gQ))
        tKsK, tKgK = tma_views(k, buffers.k, qk.partition_B(gK))
        tVsV, tVgV = tma_views(v, buffers.v, pv.partition_B(gV))
        return tQsQ, tQgQ, tKsK, tKgK, tVsV, tVgV
