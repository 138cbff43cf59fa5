"""Host side of the kernels of all architectures: describe copies, order blocks, launch.

Also example arguments to compile with: fake tensors whose shapes and strides are dynamic.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fmha.config import AttentionConfig
from fmha.kernel_arguments import KernelArguments, Scalars, Tables
from fmha.mods import parsed
from fmha.plan import AttentionPlan
from fmha.shared.args import IO_TYPES, OUT_TYPES, Globals, Inputs, TmaTensors
from fmha.shared.load import k_box, o_box, q_box, v_box
from fmha.shared.walk import make_order
from kernelkit.device.boxes import ROWS_FIRST, describe, group_heads, reorder
from kernelkit.device.fake import fake_tensor
from kernelkit.device.pipelines import tma_group
from kernelkit.plan import hw

# Dimensions of the lists of a block mask.
LISTS = {
    "block_counts": 3,
    "block_indices": 4,
    "full_counts": 3,
    "full_indices": 4,
    "block_order": 3,
}
# Elements of tables of functions; bools are bytes.
TABLE_TYPES = {
    "i32": Int32,
    "i64": Int64,
    "f32": Float32,
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "bool": cutlass.Uint8,
}


def example_arguments(config: AttentionConfig) -> tuple[KernelArguments, CUstream]:
    """Return the arguments to compile `Forward` with: fake tensors with dynamic shapes
    and strides.
    """
    batch, entries, sq, skv, q_heads, kv_heads = (cute.sym_int32() for _ in range(6))
    q, io = IO_TYPES[config.dtype], IO_TYPES[config.keys_dtype]
    out = OUT_TYPES[config.o_dtype]

    def rows(dtype: type[cutlass.Numeric], *shape: int | cute.SymInt) -> Any:
        return fake_tensor(dtype, *shape, align=hw.TMA_ALIGN_BYTES)

    per_row = (batch, q_heads, sq)
    keys = (entries, skv, kv_heads)
    given = KernelArguments(
        q=rows(q, batch, sq, q_heads, config.head_dim),
        k=rows(io, *keys, config.head_dim),
        v=rows(io, *keys, config.v_dim),
        o=rows(out, batch, sq, q_heads, config.v_dim),
        lse=fake_tensor(Float32, *per_row),
        row_max=None if config.normalize else fake_tensor(Float32, *per_row),
        tables=_tables(config, q_heads, kv_heads),
        scalars=Scalars(
            scale_log2=Float32(1.0),
            softcap_log2=Float32(1.0),
            window_left=Int32(0),
            window_right=Int32(0),
            sink_tokens=Int32(0),
        ),
        longest=Int32(1),
        section=Int32(1),
        near=Int32(1),
        places=Int32(1),
    )
    return given, CUstream(0)


def _tables(config: AttentionConfig, q_heads: Any, kv_heads: Any) -> Tables:
    """Return the tables; None for a table that the config does not read."""

    def table(wanted: bool, dtype: type[cutlass.Numeric], *shape: Any) -> Any:
        shape = shape or (cute.sym_int32(),)
        return fake_tensor(dtype, *shape) if wanted else None

    def tables_of(program: str) -> tuple[Any, ...]:
        kinds = parsed(program).tables if program else ()
        return tuple(
            fake_tensor(TABLE_TYPES[kind], *(cute.sym_int32() for _ in range(max(rank, 1))))
            for kind, rank in kinds
        )

    def lists(rank: int) -> Any:
        return table(config.block_keys > 0, Int32, *(cute.sym_int32() for _ in range(rank)))

    rotated = config.rope_dim > 0
    return Tables(
        kv_lens=table(config.kv_lens, Int32),
        q_offset=table(config.q_offset, Int32),
        cu_seqlens_q=table(config.varlen_q, Int32),
        cu_seqlens_k=table(config.varlen_k, Int32),
        page_table=table(config.page_size > 0, Int32, cute.sym_int32(), cute.sym_int32()),
        tree=table(config.tree, Int64),
        sinks=table(config.sinks, Float32, q_heads),
        cos=table(rotated, Float32, cute.sym_int32(), cute.sym_int32()),
        sin=table(rotated, Float32, cute.sym_int32(), cute.sym_int32()),
        q_scale=table(config.q_scale, Float32, q_heads),
        k_scale=table(config.k_scale, Float32, kv_heads),
        v_scale=table(config.v_scale, Float32, kv_heads),
        out_scale=table(config.out_scale, Float32),
        **{name: lists(rank) for name, rank in LISTS.items()},
        mask_mod=tables_of(config.mask_mod),
        score_mod=tables_of(config.score_mod),
    )


class Forward:
    """Kernel of one config, traced by `cute.compile(..)`; a subclass has the `kernel`."""

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
        if cutlass.const_expr(config.block_keys > 0):  # whole blocks of the block mask
            blocks = cute.ceil_div(given.longest, config.block_rows) * layout.of_mask_block
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
        """Return TMA descriptions with the shapes and strides of this launch; Inputs for kernels
        without TMA.
        """
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
        """Return the load operation whose bytes complete on the barriers of `edge`."""
        if self.plan.edges.has(edge) and self.plan.edges[edge].multicast:
            return cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.CopyBulkTensorTileG2SOp(tma_group(self.plan.edges, edge))
