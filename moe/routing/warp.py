"""Communication between lanes of a warp, and between CTAs of a cluster (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from moe.routing.config import VECTOR_BYTES, LinearConfig

LOWEST = -(1 << 31)  # below the key of any number: cannot be chosen


@cute.jit
def key_of(value: Float32) -> Int32:
    """Return an integer that is ordered as the number; NaN counts as -inf."""
    return flip(number(value).bitcast(Int32))


@cute.jit
def number(value: Float32) -> Float32:
    """Replace NaN by -inf."""
    return cute.arch.fmax(value, -Float32.inf)


@cute.jit
def value_of(key: Int32) -> Float32:
    """Return the number of a key."""
    return flip(key).bitcast(Float32)


@cute.jit
def flip(bits: Int32) -> Int32:
    """Flip all bits but the sign of negative floats, so that they are ordered as integers. It is
    its own inverse; +0 is above -0."""
    return bits ^ ((bits >> 31) & Int32(0x7FFFFFFF))


@cute.jit
def is_first(mask: Int32, lane: Int32) -> Boolean:
    """Return whether no lane below `lane` is in the mask."""
    return (mask & lanes_below(lane)) == 0


@cute.jit
def lanes_below(lane: Int32) -> Int32:
    """Return a mask of the lanes below `lane`."""
    return (Int32(1) << lane) - 1


@cute.jit
def lanes_alike(value: Int32, bits: cutlass.Constexpr[int]) -> Int32:
    """Return a mask of the lanes whose values have the same lowest `bits`; all 32 lanes take part.

    It votes for each bit: match.any is slow with many different values.
    """
    alike = Int32(-1)
    for bit in cutlass.range_constexpr(bits):
        is_set = (value >> bit) & 1
        alike = alike & (cute.arch.vote_ballot_sync(is_set != 0) ^ (is_set - 1))
    return alike


@cute.jit
def lanes_equal(value: Int32) -> Int32:
    """Return a mask of the lanes that hold the same value; all 32 lanes take part."""
    return cute.arch.inline_ptx(
        "match.any.sync.b32 {$w0}, {$r0}, 0xffffffff;",
        write_only_types=[Int32],
        read_only_args=[value],
    )


# ---- Exchange of partial sums of logits with the CTA that routes a token
#
# Every warp of a cluster sends its sums by st.async, each to a separate slot. The mbarrier of the
# receiving CTA counts the bytes. Each slot is written once.


@dataclass(frozen=True)
class Mail:
    """Shared memory that receives partial logits of the token that this CTA routes."""

    sums: cute.Tensor  # fp32 [shares, E]
    arrived: cute.Tensor  # an mbarrier


@cute.jit
def open_mail(config: cutlass.Constexpr[LinearConfig], is_wanted: Boolean) -> Mail:
    """Allocate the mail and initialise its mbarrier. All threads of all CTAs call this, and wait
    for the cluster barrier before anything is sent. is_wanted: whether this CTA routes a token."""
    smem, (thread, _, _) = SmemAllocator(), cute.arch.thread_idx()
    shape = config.shares, config.route.experts
    layout = cute.make_ordered_layout(shape, order=(1, 0))
    sums = smem.allocate_tensor(Float32, layout, byte_alignment=VECTOR_BYTES)
    arrived = smem.allocate_tensor(Int64, cute.make_layout(1), byte_alignment=8)
    if thread == 0:
        cute.arch.mbarrier_init(arrived.iterator, 1)
        cute.arch.mbarrier_init_fence()
        if is_wanted:
            cute.arch.inline_ptx(
                "mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [{$r0}], {$r1};",
                read_only_args=[arrived.iterator.toint(), Int32(4 * cute.size(shape))],
            )
    cute.arch.sync_warp()
    cute.arch.cluster_arrive_relaxed()
    return Mail(sums, arrived)


@cute.jit
def send(mail: Mail, share: Int32, expert: Int32, value: Float32, cta: Int32) -> None:
    """Send a share's part of a logit to CTA `cta` of the cluster."""
    place = mail.sums.iterator.toint() + mail.sums.layout((share, expert)) * 4
    cute.arch.inline_ptx(
        "{ .reg .b32 to, box; "
        "mapa.shared::cluster.u32 to, {$r0}, {$r3}; mapa.shared::cluster.u32 box, {$r1}, {$r3}; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], {$r2}, [box]; }",
        read_only_args=[place, mail.arrived.iterator.toint(), value, cta],
    )


@cute.jit
def wait(mail: Mail) -> None:
    """Wait until all sums have arrived. Peers write them, so it is an acquire of cluster scope."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; "
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], 0; "
        "@done bra DONE; bra WAIT; DONE: }",
        read_only_args=[mail.arrived.iterator.toint()],
    )
