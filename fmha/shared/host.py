"""The host side of the kernels of all architectures: describe copies, order blocks, launch."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import cpasync

from fmha.kernel_arguments import KernelArguments
from fmha.plan import AttentionPlan
from fmha.shared.args import Globals, Inputs, TmaTensors
from fmha.shared.boxes import k_box, o_box, q_box, v_box
from fmha.shared.order import make_order
from kernelkit.device.boxes import ROWS_FIRST, describe, group_heads, reorder
from kernelkit.device.pipelines import tma_group


class Forward:
    """One config, traced by `cute.compile(..)`; a subclass has the `kernel`."""

    kernel: Any

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan

    @cute.jit
    def __call__(self, given: KernelArguments, stream: CUstream) -> None:
        """Describe the copies and launch."""
        q, k, v, o = (
            reorder(tensor, ROWS_FIRST) for tensor in (given.q, given.k, given.v, given.o)
        )
        config, layout, tables = self.plan.config, self.plan.layout, given.tables
        heads, entries, row_max = q.shape[2] // config.group, q.shape[3], given.row_max
        if cutlass.const_expr(config.varlen_q):
            entries = cute.size(tables.cu_seqlens_q) - 1
        tiles = cute.ceil_div(given.longest, layout.box_tokens) * layout.head_parts
        blocks = cute.ceil_div(tiles, layout.block_tiles)
        places = cutlass.min(given.places, blocks * heads * entries)
        group = heads // k.shape[2]
        every = Globals(
            q.shape[0],
            k.shape[0],
            o,
            reorder(given.lse, (2, 1, 0)),
            reorder(row_max, (2, 1, 0)) if cutlass.const_expr(row_max is not None) else None,
            tables,
            make_order(blocks, heads, group, entries, given.section, given.near, places),
        )
        self.kernel(self.describe_copies(q, k, v, o), every, given.scalars).launch(
            grid=(places * layout.ctas, 1, 1),
            block=(self.plan.roles.threads, 1, 1),
            cluster=(layout.ctas, 1, 1) if layout.ctas > 1 else None,
            stream=stream,
            use_pdl=config.pdl,
            min_blocks_per_mp=layout.residents,  # without it ptxas ignores setmaxnreg
            preferred_smem_carveout=100 if layout.residents > 1 else None,  # percent
        )

    @cute.jit
    def describe_copies(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor
    ) -> TmaTensors | Inputs:
        """TMA descriptions, which carry shapes and strides of this launch; Inputs, where a kernel
        fetches without TMA."""
        q, o = (group_heads(tensor, self.plan.config.group) for tensor in (q, o))
        store = cpasync.CopyBulkTensorTileS2GOp()
        has_v, has_tail = (self.plan.edges.has(name) for name in ("v", "tail"))
        return TmaTensors(
            q=describe(self.fetch("q"), q, q_box(self.plan)),
            k=describe(self.fetch("k"), k, k_box(self.plan)),
            v=describe(self.fetch("v"), v, v_box(self.plan)) if has_v else None,
            tail=describe(self.fetch("tail"), v, v_box(self.plan)) if has_tail else None,
            o=describe(store, o, o_box(self.plan)),
        )

    def fetch(self, edge: str) -> object:
        """The load whose bytes complete on the barriers of `edge`."""
        if self.plan.edges.has(edge) and self.plan.edges[edge].multicast:
            return cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.CopyBulkTensorTileG2SOp(tma_group(self.plan.edges, edge))
