"""Attention to latent keys on Blackwell: host entry, prologue, dispatch of the warps.

Read `plan.py` first (roles, buffers, barriers), then this file, `load.py`, and of listed entries
`listed.py` with `gather4.py` or `convert.py`; then `mma.py`, `softmax.py`, and `finish.py`. The
work of a CTA, the conversion of entries and the exchange of a cluster are in `../shared/`.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from kernelkit.device.boxes import TmaTensor, describe, reorder
from kernelkit.device.buffers import buffer_at
from kernelkit.device.control import set_registers
from kernelkit.device.pipelines import announce_barriers, make_pipelines, meet_peer
from kernelkit.device.shared_words import store
from kernelkit.device.tmem import order_after_wait, order_before_signal
from kernelkit.plan import hw
from mla.attention.config import LatentConfig
from mla.attention.kernel_arguments import KernelArguments
from mla.attention.shared.intake import PANEL, PANEL_BYTES
from mla.attention.shared.mailbox import expect_mail, open_mailbox
from mla.attention.shared.work import locate
from mla.attention.signature import example_arguments
from mla.attention.sm100.args import Buffers, Pipes, Scope
from mla.attention.sm100.convert import Convert
from mla.attention.sm100.finish import mailbox_of
from mla.attention.sm100.gather4 import Gather, announce, rows_of
from mla.attention.sm100.load import LoadK, LoadV, k_box, q_box
from mla.attention.sm100.mma import Mma
from mla.attention.sm100.plan import PAIR, ROWS, Plan100
from mla.attention.sm100.softmax import Softmax

TWO = tcgen05.CtaGroup.TWO
ROWS_FIRST = (2, 3, 1, 0)  # [N, T, H, D] seen as (H, D, T, N)


class LatentSm100:
    """Host function and kernel of one config, traced by `cute.compile`."""

    def __init__(self, config: LatentConfig) -> None:
        self.plan = Plan100(config)
        self.plan.check()
        self.softmax, self.mma = Softmax(self.plan), Mma(self.plan)
        self.load_k, self.load_v = LoadK(self.plan), LoadV(self.plan)
        if not self.plan.by_tma:
            bring = Gather if self.plan.gathers else Convert
            self.fetchers = (bring(self.plan, False), bring(self.plan, True))

    @property
    def config(self) -> LatentConfig:
        return self.plan.config

    @cute.jit
    def __call__(self, given: KernelArguments, stream: CUstream) -> None:
        """Launch one cluster, or `parts` of them, for each entry and tile of rows."""
        plan = self.plan
        fetch = fetch_q = cpasync.CopyBulkTensorTileG2SOp(TWO)
        if cutlass.const_expr(self.config.cluster > 1):
            fetch_q = cpasync.CopyBulkTensorTileG2SMulticastOp(TWO)
        q = describe(fetch_q, reorder(given.q, ROWS_FIRST), q_box(plan))
        k = last_v = rows = extra_rows = None
        if cutlass.const_expr(plan.by_tma):
            tensor, own = reorder(given.keys.store, (1, 2, 0)), cpasync.CopyBulkTensorTileG2SOp()
            k = describe(fetch, tensor, k_box(plan))
            last_v = describe(own, tensor, k_box(plan))
        if cutlass.const_expr(plan.gathers):
            rows = rows_of(given.keys)
            if cutlass.const_expr(self.config.extra is not None):
                extra_rows = rows_of(given.extra)
        pairs = self.config.cluster * given.parts * (plan.tiles.count // PAIR) * given.q.shape[0]
        self.kernel(q, k, last_v, rows, extra_rows, given).launch(
            grid=(PAIR * pairs, 1, 1),
            block=(plan.roles.threads, 1, 1),
            cluster=(plan.ctas, 1, 1),
            stream=stream,
            use_pdl=self.config.pdl,
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg
        )

    @cute.kernel
    def kernel(
        self,
        q: TmaTensor,
        k: TmaTensor | None,
        last_v: TmaTensor | None,
        rows: TmaTensor | None,
        extra_rows: TmaTensor | None,
        given: KernelArguments,
    ) -> None:
        """Run a CTA, see `../shared/work.py` for its work."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=hw.SMEM_SWIZZLE_ALIGN)
        pipes = Pipes(**make_pipelines(plan.edges, buffer_at(plan.smem, smem, "barriers", Int64)))
        tmem_base = buffer_at(plan.smem, smem, "tmem_base", Int32)
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.config.cluster > 1):
            if thread == 0:
                open_mailbox(self.buffers(smem).mail_full)
        self.clear_rows(self.buffers(smem))
        announce_barriers(plan.edges)
        if cutlass.const_expr(self.config.pdl):
            cute.arch.griddepcontrol_wait()
        place, _, _ = cute.arch.block_idx()
        work = locate(plan, given, place)  # counts come from memory while the cluster meets
        if cutlass.const_expr(self.config.cluster > 1):
            if thread == 0:
                expect_mail(plan.mail, mailbox_of(plan, work, self.buffers(smem)))
        meet_peer(plan.edges)
        if warp == self.softmax.role.first_warp:
            cute.arch.alloc_tmem(plan.tmem.allocated, tmem_base, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
            order_before_signal()
        cute.arch.sync_threads()
        order_after_wait()
        buffers = self.buffers(smem)
        scope = Scope(q, k, last_v, rows, extra_rows, given, work, buffers, pipes)
        if warp <= self.softmax.role.last_warp:
            set_registers(plan.roles, self.softmax.role)
            self.softmax.run(scope)
        elif warp <= plan.roles["idle"].last_warp:
            set_registers(plan.roles, self.mma.role)
            self.issue(scope, warp)
        else:
            if cutlass.const_expr(not plan.by_tma):
                for each in self.fetchers:
                    if warp >= each.role.first_warp and warp <= each.role.last_warp:
                        set_registers(plan.roles, each.role)
                        each.run(scope)
        if warp > self.softmax.role.last_warp:
            if cutlass.const_expr(self.config.cluster > 1):
                cute.arch.cluster_arrive_relaxed()  # as the softmax does, see `finish.py`
                cute.arch.cluster_wait()
            cute.arch.cluster_arrive_relaxed()
        # No CTA leaves while another may still send to it, or use its barriers and memory.
        order_before_signal()
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        if warp == self.softmax.role.first_warp:
            pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
            cute.arch.dealloc_tmem(pointer, plan.tmem.allocated, is_two_cta=True)

    @cute.jit
    def issue(self, scope: Scope, warp: Int32) -> None:
        """Dispatch the warps that issue MMAs and TMA."""
        if warp == self.mma.role.first_warp:
            self.mma.run(scope)
        elif warp == self.load_k.role.first_warp:
            self.load_k.run(scope)
            if cutlass.const_expr(self.plan.gathers):
                announce(self.plan, scope, False)
        elif warp == self.load_v.role.first_warp:
            if cutlass.const_expr(self.plan.by_tma):
                self.load_v.run(scope)
            if cutlass.const_expr(self.plan.gathers):
                announce(self.plan, scope, True)

    @cute.jit
    def clear_rows(self, buffers: Buffers) -> None:
        """Zero the rows of Q that no head has: their products go nowhere, but memory is read."""
        plan = self.plan
        if cutlass.const_expr(plan.tiles.rows < ROWS):
            thread, _, _ = cute.arch.thread_idx()
            zero, units = (Uint32(0),) * 4, (ROWS - plan.tiles.rows) * (PANEL // 8)
            for panel in cutlass.range_constexpr(plan.panels):
                start = buffers.q.toint() + panel * PANEL_BYTES + plan.tiles.rows * PANEL * 2
                for unit in cutlass.range(thread, units, plan.roles.threads, unroll=1):
                    store(start + unit * 16, Uint32, zero)
            cute.arch.fence_proxy("async.shared", space="cta")

    def buffers(self, smem: cute.Pointer) -> Buffers:
        """Return the buffers of all roles."""
        plan = self.plan.smem

        def address(name: str) -> cutlass.Int32:
            return smem.toint() + plan.offsets()[name][0]

        return Buffers(
            *(buffer_at(plan, smem, name, BFloat16) for name in ("sQ", "sP", "sK", "sV")),
            buffer_at(plan, smem, "halves", Float32),
            address("marks"),
            address("mail"),
            address("mail") + self.plan.mail.sent_at,
            address("mail_full"),
            cute.arch.retrieve_tmem_ptr(Float32, 16, buffer_at(plan, smem, "tmem_base", Int32)),
        )


def host_function(config: LatentConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return LatentSm100(config), *example_arguments(config)
