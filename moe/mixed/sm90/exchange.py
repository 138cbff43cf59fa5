"""Exchange of sums between CTAs that share a tile along K (device code).

Warpgroup t of each CTA has sums of the same 64 rows of weights, or of twice as many, over its units
of K. CTA t % split of the cluster finishes them. Each other CTA sends it its sums by st.async, to a
separate slot; an mbarrier counts the bytes. The finishing CTA adds up all sums in the order of
CTAs, including its sums, and signals that the slots are free. So the result's bits depend on the
partition of K only, not on timing or tiles.

    mail: fp32 [warpgroup that the CTA finishes][sender][part][8 rows of x][thread][4]
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from kernelkit.device.shared_words import load, operands
from kernelkit.plan import hw
from moe.kernel_arguments import Sizes
from moe.mixed.fragments import THREADS
from moe.mixed.plan import PAIR
from moe.mixed.shared.args import Scope, Share
from moe.mixed.sm90.plan import MixedPlan

VECTOR = 4  # sums of a thread for eight rows of x


@cute.jit
def share_of(plan: cutlass.Constexpr[MixedPlan], sizes: Sizes) -> Share:
    """Return this CTA's part of K, in pairs of units as they are multiplied, so that it is the same
    for any tile. It is empty if there are fewer pairs than CTAs."""
    if cutlass.const_expr(plan.config.split == 1):
        return Share(Int32(0), Int32(0), sizes.units)
    split = plan.config.split
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    pairs = (sizes.units + PAIR - 1) // PAIR
    first = pairs * rank // split * PAIR
    end = cutlass.min(pairs * (rank + 1) // split * PAIR, sizes.units)
    return Share(rank, first, end - first)


@cute.jit
def open_mail(plan: cutlass.Constexpr[MixedPlan], barriers: cute.Pointer) -> None:
    """Initialise the mbarriers. All threads call this; peers may use them after the cluster
    barrier."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        for team in cutlass.range_constexpr(plan.config.teams):
            cute.arch.mbarrier_init(barriers + 2 * team, 1)
            cute.arch.mbarrier_init(barriers + 2 * team + 1, hw.WARPGROUP_WARPS)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def finishes(plan: cutlass.Constexpr[MixedPlan], scope: Scope, team: Int32) -> Boolean:
    """Whether this CTA stores the outputs of a warpgroup."""
    return scope.share.rank == team % plan.config.split


@cute.jit
def exchange(
    plan: cutlass.Constexpr[MixedPlan],
    scope: Scope,
    team: Int32,
    rows: Int32,
    turn: Int32,
    sums: list[cute.Tensor],
) -> None:
    """Complete `sums` over all of K if this CTA finishes them, else send them.

    Args:
        rows: of the tile.
        turn: number of earlier tiles.
    """
    if finishes(plan, scope, team):
        add(plan, scope, team, rows, turn, sums)
    else:
        send(plan, scope, team, rows, turn, sums)


@cute.jit
def leave(plan: cutlass.Constexpr[MixedPlan], scope: Scope, team: Int32, turn: Int32) -> None:
    """Wait, after the last of `turn` tiles, for the last remote arrival at this CTA's `freed`
    barrier."""
    if not finishes(plan, scope, team):
        wait(freed(scope, team), turn % 2 ^ 1)


@cute.jit
def send(
    plan: cutlass.Constexpr[MixedPlan],
    scope: Scope,
    team: Int32,
    rows: Int32,
    turn: Int32,
    sums: list[cute.Tensor],
) -> None:
    """Send a thread's sums, once those of the previous tile have been read."""
    wait(freed(scope, team), turn % 2 ^ 1)
    owner = team % plan.config.split
    place, box = place_of(plan, scope, team, scope.share.rank), arrived(scope, team)
    vector, words = operands("r", 1, VECTOR)
    for part in cutlass.range_constexpr(plan.config.parts):
        for block in cutlass.range_constexpr(plan.blocks):
            if 8 * block < rows:
                values = [sums[part][VECTOR * block + k] for k in range(VECTOR)]
                cute.arch.inline_ptx(
                    "{ .reg .b32 to, box; mapa.shared::cluster.u32 to, {$r0}, {$r6}; "
                    "mapa.shared::cluster.u32 box, {$r5}, {$r6}; "
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes"
                    f"{vector}.f32 [to], {words}, [box]; }}",
                    read_only_args=[place + offset(plan, part, block), *values, box, owner],
                )


@cute.jit
def add(
    plan: cutlass.Constexpr[MixedPlan],
    scope: Scope,
    team: Int32,
    rows: Int32,
    turn: Int32,
    sums: list[cute.Tensor],
) -> None:
    """Add up the sums of all CTAs in their order, and signal the others to send again."""
    split, rank = plan.config.split, scope.share.rank
    thread, _, _ = cute.arch.thread_idx()
    if thread % THREADS == 0:
        blocks = cutlass.min((rows + 7) // 8, plan.blocks)
        size = blocks * ((split - 1) * plan.config.parts * VECTOR * 4 * THREADS)
        cute.arch.inline_ptx(
            "mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [{$r0}], {$r1};",
            read_only_args=[arrived(scope, team), size],
        )
    wait(arrived(scope, team), turn % 2)
    for part in cutlass.range_constexpr(plan.config.parts):
        for block in cutlass.range_constexpr(plan.blocks):
            if 8 * block < rows:
                own = [sums[part][VECTOR * block + k] for k in range(VECTOR)]
                totals = [Float32(0.0)] * VECTOR
                for cta in cutlass.range_constexpr(split):
                    place = place_of(plan, scope, team, Int32(cta)) + offset(plan, part, block)
                    sent = load(place, Float32, VECTOR)
                    for k in cutlass.range_constexpr(VECTOR):
                        totals[k] += own[k] if rank == cta else sent[k]
                for k in cutlass.range_constexpr(VECTOR):
                    sums[part][VECTOR * block + k] = totals[k]
    cute.arch.sync_warp()
    for behind in cutlass.range_constexpr(1, split):
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "{ .reg .b32 box; mapa.shared::cluster.u32 box, {$r0}, {$r1}; "
                "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [box]; }",
                read_only_args=[freed(scope, team), (rank + behind) % split],
            )


@cute.jit
def place_of(plan: cutlass.Constexpr[MixedPlan], scope: Scope, team: Int32, cta: Int32) -> Int32:
    """Return the address of a thread's sums that CTA `cta` sends. The finishing CTA has no slot:
    for it, the address is another CTA's."""
    split = plan.config.split
    owner = team % split
    sender = cutlass.min(cta - Int32(cta > owner), split - 2)
    thread, _, _ = cute.arch.thread_idx()
    number = team // split * (split - 1) + sender
    return scope.buffers.mail.toint() + number * plan.mail_bytes + thread % THREADS * (4 * VECTOR)


def offset(plan: MixedPlan, part: int, block: int) -> int:
    """Return the offset in bytes from a thread's first sums."""
    return (part * plan.blocks + block) * THREADS * 4 * VECTOR


def arrived(scope: Scope, team: Int32) -> Int32:
    """Return the address of the mbarrier that counts arriving sums of a warpgroup."""
    return scope.buffers.mail_barriers.toint() + team * (2 * hw.MBARRIER_BYTES)


def freed(scope: Scope, team: Int32) -> Int32:
    """Return the address of the mbarrier that signals free slots."""
    return arrived(scope, team) + hw.MBARRIER_BYTES


@cute.jit
def wait(barrier: Int32, parity: Int32) -> None:
    """Wait for a phase that peers complete, with an acquire of cluster scope."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; "
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}; "
        "@done bra DONE; bra WAIT; DONE: }",
        read_only_args=[barrier, parity],
    )
