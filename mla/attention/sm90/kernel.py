"""Attention to latent keys on Hopper: host entry, prologue, dispatch of the warps.

Read `plan.py` first (roles, buffers, barriers), then this file, `walk.py`, `load.py` or `gather.py`
with `entries.py`, `math.py`, and `finish.py`; `halves.py` and `query.py` are for tiles in fp16. The
work of a CTA, the conversion of entries and the exchange of a cluster are in `../shared/`.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from kernelkit.device.boxes import TmaTensor, describe, reorder
from kernelkit.device.buffers import buffer_at
from kernelkit.device.control import set_registers
from kernelkit.device.pipelines import make_pipelines, publish_barriers
from kernelkit.device.shared_words import store
from kernelkit.plan import hw
from mla.attention.config import LatentConfig
from mla.attention.kernel_arguments import KernelArguments
from mla.attention.shared.intake import PANEL
from mla.attention.shared.mailbox import expect_mail, open_mailbox
from mla.attention.signature import example_arguments
from mla.attention.sm90.args import Buffers, Past, Pipes, Scope
from mla.attention.sm90.finish import mailbox_of
from mla.attention.sm90.gather import Gather
from mla.attention.sm90.load import LoadHalf, k_box, load_q, q_box
from mla.attention.sm90.math import Math
from mla.attention.sm90.plan import ROWS, Plan90
from mla.attention.sm90.walk import work_of

ROWS_FIRST = (2, 3, 1, 0)  # [N, T, H, D] seen as (H, D, T, N)


class LatentSm90:
    """Host function and kernel of one config, traced by `cute.compile`."""

    def __init__(self, config: LatentConfig) -> None:
        self.plan = Plan90(config)
        self.plan.check()
        self.math = Math(self.plan)
        if self.plan.by_tma:
            self.halves = (LoadHalf(self.plan, False), LoadHalf(self.plan, True))
        else:
            self.gather = Gather(self.plan)

    @cute.jit
    def __call__(self, given: KernelArguments, stream: CUstream) -> None:
        """Launch one cluster, or `parts` of them, for each entry, tile of rows and slice."""
        config, plan = self.config, self.plan
        groups = plan.tiles.count // config.sharers
        fetch, fetch_q = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SOp()
        if cutlass.const_expr(config.cluster > 1):
            fetch_q = cpasync.CopyBulkTensorTileG2SMulticastOp()
        q = describe(fetch_q, reorder(given.q, ROWS_FIRST), q_box(plan))
        k = None
        if cutlass.const_expr(plan.by_tma):
            if cutlass.const_expr(config.sharers > 1):
                fetch = cpasync.CopyBulkTensorTileG2SMulticastOp()
            k = describe(fetch, reorder(given.keys.store, (1, 2, 0)), k_box(plan))
        units = given.parts * groups * config.slices * given.q.shape[0]
        if cutlass.const_expr(config.ways.resident > 0):
            units = cutlass.min(units, config.ways.resident)
        self.kernel(q, k, given).launch(
            grid=(plan.ctas * units, 1, 1),
            block=(plan.roles.threads, 1, 1),
            cluster=(plan.ctas, 1, 1) if plan.ctas > 1 else None,
            stream=stream,
            use_pdl=config.pdl,
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg
        )

    @property
    def config(self) -> LatentConfig:
        return self.plan.config

    @cute.kernel
    def kernel(self, q: TmaTensor, k: TmaTensor | None, given: KernelArguments) -> None:
        """Run a CTA, see `../shared/work.py` for its work."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        pipes = Pipes(**make_pipelines(plan.edges, buffer_at(plan.smem, smem, "barriers", Int64)))
        buffers = self.buffers(smem)
        work = None
        if cutlass.const_expr(not self.config.pdl):
            work = work_of(plan, given, Int32(0))  # counts come from memory in the meantime
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            self.prefetch(q, k)
            cute.arch.mbarrier_init(buffers.q_full, 1)
            if cutlass.const_expr(self.config.cluster > 1):
                open_mailbox(buffers.mail_full)
        self.clear_rows(buffers)
        publish_barriers(plan.edges)
        if cutlass.const_expr(plan.ctas > 1):
            cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(self.config.pdl):
            cute.arch.griddepcontrol_wait()
            work = work_of(plan, given, Int32(0))
        past = Past((Int32(0), Int32(0)), Int32(0))
        scope = Scope(q, k, given, work, past, buffers, pipes)
        if cutlass.const_expr(self.config.cluster > 1):
            if thread == 0:
                expect_mail(plan.mail, mailbox_of(plan, scope))
        if warp <= self.math.role.last_warp:
            set_registers(plan.roles, self.math.role)
            if cutlass.const_expr(plan.ctas > 1):
                cute.arch.cluster_wait()
            if cutlass.const_expr(not plan.by_tma):
                if warp == 0 and mailbox_of(plan, scope).senders > 0:
                    load_q(plan, scope)
            self.math.run(scope)
        else:
            if cutlass.const_expr(plan.by_tma):
                set_registers(plan.roles, plan.roles["load_q"])
                self.load(scope, warp)
            else:
                set_registers(plan.roles, plan.roles["gather"])
                self.gather.run(scope)
                if cutlass.const_expr(plan.ctas > 1 and not plan.crosses):
                    cute.arch.cluster_wait()
            if cutlass.const_expr(self.config.cluster > 1):
                for _ in cutlass.range_constexpr(2):  # as those that compute, see `finish.py`
                    cute.arch.cluster_arrive_relaxed()
                    cute.arch.cluster_wait()

    @cute.jit
    def prefetch(self, q: TmaTensor, k: TmaTensor | None) -> None:
        """Bring the descriptors of TMA, before anybody waits for them."""
        cpasync.prefetch_descriptor(q.atom)
        if cutlass.const_expr(self.plan.by_tma):
            cpasync.prefetch_descriptor(k.atom)

    @cute.jit
    def load(self, scope: Scope, warp: cutlass.Int32) -> None:
        """Dispatch the warps that load by TMA. All of them pass the cluster's first barrier."""
        plan = self.plan
        if warp == plan.roles["load_q"].first_warp:
            if cutlass.const_expr(plan.ctas > 1):
                cute.arch.cluster_wait()
            if mailbox_of(plan, scope).senders > 0:
                load_q(plan, scope)
        elif warp == plan.roles["idle"].first_warp:
            if cutlass.const_expr(plan.ctas > 1):
                cute.arch.cluster_wait()
        for half in self.halves:
            if warp == half.role.first_warp:
                half.run(scope)

    @cute.jit
    def clear_rows(self, buffers: Buffers) -> None:
        """Zero the rows of Q that no head has: their products go nowhere, but memory is read."""
        plan = self.plan
        if cutlass.const_expr(plan.tiles.rows < ROWS):
            thread, _, _ = cute.arch.thread_idx()
            missing = ROWS - plan.tiles.rows
            zero = (Uint32(0),) * 4
            start = buffers.q.toint() + plan.tiles.rows * PANEL * 2
            units = plan.panels * missing * (PANEL // 8)
            for turn in cutlass.range_constexpr(-(-units // plan.roles.threads)):
                unit = turn * plan.roles.threads + thread
                panel, rest = unit // (missing * 8), unit % (missing * 8)
                if unit < units:
                    store(start + panel * (ROWS * PANEL * 2) + rest * 16, Uint32, zero)
            if cutlass.const_expr(plan.by_tma):  # else a fence of others precedes all products
                cute.arch.fence_proxy("async.shared", space="cta")

    def buffers(self, smem: cute.Pointer) -> Buffers:
        """Return the buffers of all roles."""
        mail, plan = self.plan.mail, self.plan.smem

        def address(name: str) -> cutlass.Int32:
            return smem.toint() + plan.offsets()[name][0]

        return Buffers(
            q=buffer_at(plan, smem, "sQ", BFloat16),
            k=buffer_at(plan, smem, "sK", BFloat16),
            q_full=buffer_at(plan, smem, "q_full", Int64),
            rows=buffer_at(plan, smem, "rows", Float32),
            factors=address("factors"),
            units=address("units"),
            valid=address("valid"),
            mail=address("mail"),
            sent=address("mail") + mail.sent_at,
            mail_full=address("mail_full"),
        )


def host_function(config: LatentConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return LatentSm90(config), *example_arguments(config)
