"""The decode kernel of Blackwell: host entry, prologue, dispatch of the warps.

Read `plan.py` first (roles, buffers, waits), then this file, then `roles/` in the order in which
data flows: load, mma, epilogue (columns, correction). `gqa_lowlatency/shared/` holds the work that
the CTAs of a cluster share.

One cluster per batch entry, KV head and tile of query rows; its CTAs share the keys.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.kernel_arguments import KernelArguments
from gqa_lowlatency.shared.args import Scalars, Tables, Tensors
from gqa_lowlatency.shared.finish import senders_of
from gqa_lowlatency.shared.mailbox import Mailbox, open_mailbox
from gqa_lowlatency.shared.signature import TYPES, example_arguments
from gqa_lowlatency.shared.split import locate, place_of
from gqa_lowlatency.sm100.args import Buffers, Pipes, Scope
from gqa_lowlatency.sm100.plan import ROLES, TILE, make_plan
from gqa_lowlatency.sm100.roles.epilogue import Epilogue
from gqa_lowlatency.sm100.roles.load import LoadKV, LoadQ, kv_box
from gqa_lowlatency.sm100.roles.mma import Mma
from kernelkit.device.boxes import ROWS_FIRST, TmaTensor, describe, reorder
from kernelkit.device.buffers import buffer_at
from kernelkit.device.pipelines import make_pipelines, publish_barriers
from kernelkit.plan import hw


class DecodeSm100:
    """Host function and kernel of one config, traced by `cute.compile`."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        self.plan = make_plan(config)
        self.load_q, self.load_kv = LoadQ(self.plan), LoadKV(self.plan)
        self.mma, self.epilogue = Mma(self.plan), Epilogue(self.plan)

    @cute.jit
    def __call__(self, given: KernelArguments, stream: CUstream) -> None:
        """Launch one cluster, or `parts` of them, for each KV head and tile of rows."""
        config, beside = self.config, self.plan.ctas_per_sm > 1
        q, k, v = given.tensors.q, given.tensors.k, given.tensors.v
        box, fetch = kv_box(self.plan), cpasync.CopyBulkTensorTileG2SOp()
        copies = (describe(fetch, reorder(tensor, ROWS_FIRST), box) for tensor in (k, v))
        self.kernel(*copies, given.tensors, given.tables, given.scalars).launch(
            grid=(config.cluster * given.parts, k.shape[2] * config.row_tiles, q.shape[0]),
            block=(ROLES.threads, 1, 1),
            cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
            stream=stream,
            use_pdl=config.pdl,
            min_blocks_per_mp=2 if beside else 0,  # bounds the registers of a thread
            preferred_smem_carveout=100 if beside else None,  # percent of what an SM has
        )

    @cute.kernel
    def kernel(
        self, k: TmaTensor, v: TmaTensor, tensors: Tensors, tables: Tables, scalars: Scalars
    ) -> None:
        """Grid (CTAs of all clusters of a KV head, KV heads x tiles of rows, entries)."""
        config, plan = self.config, self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        if cutlass.const_expr(self.load_q.begins_early):
            if warp == self.load_q.role.first_warp:
                self.load_q.begin(tensors, place_of(config), self.address(smem, "sQ"))
        tmem_base = buffer_at(plan.smem, smem, "tmem_base", Int32)
        barriers = buffer_at(plan.smem, smem, "barriers", Int64)
        # Warp 0 initialises barriers, those of the ring first, and fetches K of the first tile.
        # Other warps prepare everything else.
        first = make_pipelines(plan.first_edges, barriers)
        owner = self.epilogue.role.last_warp
        if warp == owner:
            # Waits until an earlier grid frees columns; that grid does not wait for this one.
            cute.arch.alloc_tmem(plan.tmem.allocated, tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == self.load_kv.role.first_warp:
            cpasync.prefetch_descriptor(v.atom)
        if cutlass.const_expr(config.pdl and not config.kv_ready):
            cute.arch.griddepcontrol_wait()
        place, share = locate(config, tensors, tables, scalars, TILE)
        box = Mailbox(*(self.address(smem, name) for name in ("statistics", "mail", "arrived")))
        args = k, v, tensors, tables, scalars, place, share
        if warp == 0:
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()  # one lane initialised, one lane fetches
            self.load_kv.begin(Scope(*args, self.buffers(smem, None), Pipes(**first), box))
        others = make_pipelines(plan.other_edges, barriers + plan.first_edges.barriers)
        pipes = Pipes(**first, **others)
        if cutlass.const_expr(config.cluster > 1):
            if thread == self.mma.role.first_warp * hw.WARP_THREADS:
                senders = senders_of(config, place, share.active)
                open_mailbox(config, box, place.rank, senders)
            cute.arch.sync_warp()
            cute.arch.cluster_arrive_relaxed()
        publish_barriers(plan.edges)
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
        scope = Scope(*args, self.buffers(smem, tmem), pipes, box)

        if warp <= self.epilogue.role.last_warp:
            self.epilogue.run(scope)
            if warp == owner:
                cute.arch.dealloc_tmem(tmem, plan.tmem.allocated)
            self.epilogue.finish(scope)
        elif warp == self.mma.role.first_warp:
            self.mma.run(scope)
        elif warp == self.load_kv.role.first_warp:
            self.load_kv.run(scope)
        elif warp == self.load_q.role.first_warp:
            self.load_q.run(scope)
        if cutlass.const_expr(config.cluster > 1):
            if warp > self.epilogue.role.last_warp:
                cute.arch.cluster_wait()

    def address(self, smem: cute.Pointer, name: str) -> Int32:
        """Return the shared address of a buffer of the plan."""
        return smem.toint() + self.plan.smem.offsets()[name][0]

    def buffers(self, smem: cute.Pointer, tmem: cute.Pointer | None) -> Buffers:
        """Return the buffers of all roles."""
        operand = TYPES[self.config.keys_dtype]
        names = ("sQ", "sP", "ring")
        q, p, ring = (buffer_at(self.plan.smem, smem, name, operand) for name in names)
        words = (self.address(smem, name) for name in ("parts", "bases", "row_scales"))
        return Buffers(*words, q, p, ring, tmem)


def host_function(config: DecodeConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return DecodeSm100(config), *example_arguments(config)
