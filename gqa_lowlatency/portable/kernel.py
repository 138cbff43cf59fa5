"""Decode kernel for Hopper, and for compute capabilities 8.x and 12.x with one CTA per cluster.

Each warp streams its keys through registers of mma.sync. A CTA processes tiles of keys one after
the other, each of its warps 16 or 32 keys of a tile. A warp copies them to its ring in shared
memory by cp.async and computes S^T = K Q^T and O^T += V^T P alone: the loop has no barrier of the
CTA. Above head dim 256 two warps divide the columns of the same keys (`team.py`). At the end the
warps of a CTA add their results through shared memory, the CTAs of the cluster through the
mailboxes of the owners.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.memory import SmemAllocator

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.kernel_arguments import KernelArguments
from gqa_lowlatency.portable.merge_warps import leave_partial, send_sum
from gqa_lowlatency.portable.plan import PortablePlan
from gqa_lowlatency.portable.stream import Stream, stream_keys
from gqa_lowlatency.portable.team import memory_of
from gqa_lowlatency.shared import mailbox
from gqa_lowlatency.shared.args import Scalars, Tables, Tensors
from gqa_lowlatency.shared.finish import Finishing, finish, senders_of
from gqa_lowlatency.shared.signature import example_arguments
from gqa_lowlatency.shared.split import locate


class DecodePortable:
    """Host function and kernel of one config."""

    def __init__(self, config: DecodeConfig, arch: str) -> None:
        self.config = config
        self.plan = PortablePlan(config, arch)

    @cute.jit
    def __call__(self, given: KernelArguments, stream: CUstream) -> None:
        """Launch one cluster, or `parts` of them, for each KV head and tile of rows."""
        config, beside = self.config, self.plan.bounded
        q, k = given.tensors.q, given.tensors.k
        self.kernel(given.tensors, given.tables, given.scalars).launch(
            grid=(config.cluster * given.parts, k.shape[2] * config.row_tiles, q.shape[0]),
            block=(self.plan.threads, 1, 1),
            cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
            stream=stream,
            use_pdl=config.pdl,
            min_blocks_per_mp=2 if beside else 0,  # bounds the registers of a thread
            preferred_smem_carveout=100 if beside else None,  # percent of what an SM has
        )

    @cute.kernel
    def kernel(self, tensors: Tensors, tables: Tables, scalars: Scalars) -> None:
        """Run a CTA of the grid (CTAs of all clusters of a KV head, KV heads x tiles of rows,
        entries).
        """
        config, plan = self.config, self.plan
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(config.pdl and not config.kv_ready):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(config.early):
            cute.arch.griddepcontrol_launch_dependents()
        place, share = locate(config, tensors, tables, scalars, plan.tile)
        senders = senders_of(config, place, share.active)
        smem = SmemAllocator().allocate(plan.smem_bytes, byte_alignment=128).toint()
        begins = {name: begin for name, (begin, _) in plan.smem.offsets().items()}
        box = mailbox.Mailbox(*(smem + begins[name] for name in ("statistics", "mail", "arrived")))
        if cutlass.const_expr(config.cluster > 1):
            if thread == 0:
                mailbox.open_mailbox(config, box, place.rank, senders)
            cute.arch.sync_warp()
            cute.arch.cluster_arrive_relaxed()
        if share.count > 0:
            memory = memory_of(plan, smem, begins)
            work = Stream(memory, place, tensors, tables, scalars)
            leave_partial(plan, memory.ring, stream_keys(plan, work, share))
        if cutlass.const_expr(config.pdl and not config.early):
            # Not earlier: CTAs that can only wait would occupy slots of a later grid.
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_wait()
        if share.count > 0:
            cute.arch.sync_threads()
            send_sum(plan, smem, box, place.rank)
        if cutlass.const_expr(config.pdl and config.kv_ready):
            if share.count == 0:  # it has not waited before reading Q
                cute.arch.griddepcontrol_wait()
        if place.rank < config.owner_ctas and (senders > 0 or place.part == 0):
            if cutlass.const_expr(config.cluster == 1):
                cute.arch.sync_threads()
            elif senders > 0:
                mailbox.wait_for_mail(config, box)
            how = Finishing(plan.barriers, config.pdl, plan.parts_ahead)
            finish(config, how, box, place, share.active, tensors, tables)


def host_function(config: DecodeConfig, arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return DecodePortable(config, arch), *example_arguments(config)
