"""Exchange between the CTAs of a pair: maxima of rows, and weights (device code).

Each CTA has the scores of its own keys. Both need the maximum of a row over all keys, and the
weights of all keys. Maxima go by st.async, a float a row, to one of two slots in turn: a thread
sends its next number to a slot only after the thread of the same row in the peer has sent its own,
so has read the slot. Weights go by bulk copies, 32 rows each.

    mbarriers: p_full   bytes of the peer's weights
               p_free   the peer has multiplied by the weights that it got
               maxima   bytes of the peer's maxima, two in turn
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from kernelkit.device.shared_words import load
from kernelkit.plan import hw
from mla.attention.sm100.args import Scope
from mla.attention.sm100.plan import P_BYTES, PAIR, ROWS

P_FULL, P_FREE, MAXIMA = 0, 8, 16  # bytes from the first barrier
BARRIERS = 4


@cute.jit
def open_exchange(first: Int32) -> None:
    """Initialise the mbarriers; one thread, before the cluster's barrier."""
    for number in cutlass.range_constexpr(BARRIERS):
        cute.arch.inline_ptx(
            "mbarrier.init.shared.b64 [{$r0}], 1;", read_only_args=[first + 8 * number]
        )


@cute.jit
def peer_of() -> Int32:
    """Return the rank in the cluster of the other CTA of the pair."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) ^ 1


@cute.jit
def expect(barrier: Int32, nbytes: cutlass.Constexpr) -> None:
    """Arrive, and announce bytes; one thread."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [{$r0}], {$r1};",
        read_only_args=[barrier, Int32(nbytes)],
    )


@cute.jit
def wait_for(barrier: Int32, phase: Int32) -> None:
    """Wait for a phase. The peer completes it, so the acquire has cluster scope."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; "
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}; "
        "@done bra DONE; bra WAIT; DONE: }",
        read_only_args=[barrier, phase],
    )


@cute.jit
def joint(scope: Scope, row: Int32, value: Float32, turn: Int32) -> Float32:
    """Send a row's number to the peer, and return the one that it sends. turn: counts the calls."""
    slot, buffers = turn % PAIR, scope.buffers
    barrier, place = buffers.exchanged + MAXIMA + 8 * slot, buffers.maxima + slot * (4 * ROWS)
    if row == 0:
        expect(barrier, 4 * ROWS)
    cute.arch.inline_ptx(
        "{ .reg .b32 to, box; mapa.shared::cluster.u32 to, {$r0}, {$r3}; "
        "mapa.shared::cluster.u32 box, {$r1}, {$r3}; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], {$r2}, [box]; }",
        read_only_args=[place + 4 * row, barrier, value, peer_of()],
    )
    wait_for(barrier, turn // PAIR % 2)
    return load(place + 4 * row, Float32)


@cute.jit
def send_weights(scope: Scope) -> None:
    """Send the rows of this warp, once its lanes have stored and fenced them."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    start = scope.buffers.p.toint() + warp * (P_BYTES // 4)
    peer = peer_of()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "{ .reg .b32 to, box; mapa.shared::cluster.u32 to, {$r0}, {$r4}; "
            "mapa.shared::cluster.u32 box, {$r3}, {$r4}; "
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            "[to], [{$r1}], {$r2}, [box]; }",
            read_only_args=[
                start + P_BYTES,
                start,
                Int32(P_BYTES // (ROWS // hw.WARP_THREADS)),
                scope.buffers.exchanged + P_FULL,
                peer,
            ],
        )


@cute.jit
def expect_weights(scope: Scope, number: Int32) -> None:
    """Wait for the peer's weights of tile `number`; the warp that issues MMAs."""
    barrier = scope.buffers.exchanged + P_FULL
    with cute.arch.elect_one():
        expect(barrier, P_BYTES)
    wait_for(barrier, number % 2)


@cute.jit
def free_weights(scope: Scope) -> None:
    """Tell the peer, once the MMAs issued so far are done, that its weights have been used."""
    barrier = cute.make_ptr(
        cutlass.Int64, scope.buffers.exchanged + P_FREE, cute.AddressSpace.smem, assumed_align=8
    )
    mask = Int32(1) << peer_of()
    with cute.arch.elect_one():
        tcgen05.commit(barrier, mask, tcgen05.CtaGroup.ONE)
