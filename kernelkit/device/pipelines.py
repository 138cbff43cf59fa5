"""EdgePlan -> mbarriers: events and rings with derived arrival counts (device code).

An `Event` is a one-way edge: the producer signals stage s full. A `Ring` adds the way back: the
consumer releases stage s, the producer acquires it before it fills it again.
Waits take a `PipelineState` (index and phase); only the caller's own `run` may advance it,
because a state that a helper advances silently stays where it was (CuTe DSL 4.8.1).

In a CTA pair every CTA has all barriers at the same offsets, and uses those on which its own roles
wait. Roles call the same methods in a pair as in a single CTA; a role that leads (`EdgePlan.leads`)
must run in CTA 0 only.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    MbarrierArray,
    PipelineOp,
    PipelineState,
    PipelineUserType,
    make_pipeline_state,
)

from kernelkit.plan.edges import Completion, EdgePlan, Reach, Signal

LEADER = 0
PAIR_MASK = 0b11
_OPERATION = {
    Signal.TMA: PipelineOp.TmaLoad,
    Signal.UMMA: PipelineOp.TCGen05Mma,
    Signal.THREADS: PipelineOp.AsyncThread,
    Signal.WARPS: PipelineOp.AsyncThread,
}


@dataclass(frozen=True)
class Barriers:
    """Mbarriers, one per stage, and how a signal reaches it.

    pair: whether the plan is for two CTAs
    pairs: pairs of a cluster
    by_warp: whether one thread of a warp signals for all of it
    """

    array: MbarrierArray
    reach: Reach
    pair: bool
    pairs: int
    by_warp: bool

    @cute.jit
    def arrive(self, stage: Int32) -> None:
        """Signal for this role: expect TMA bytes, commit issued MMAs, or arrive as a thread."""
        if cutlass.const_expr(self.array.op_type is PipelineOp.TCGen05Mma):
            self._commit(stage)
        elif cutlass.const_expr(self.by_warp):
            with cute.arch.elect_one():
                if cutlass.const_expr(self.reach is Reach.EACH):
                    for cta in cutlass.range_constexpr(2):
                        self.array.arrive(stage, leader_of(self.pairs) + cta)
                elif cutlass.const_expr(self.reach is Reach.LEADER):
                    self.array.arrive(stage, leader_of(self.pairs))
                else:
                    self.array.arrive(stage, None)
        elif cutlass.const_expr(self.reach is Reach.OWN):
            self.array.arrive(stage, None)
        elif cutlass.const_expr(self.array.op_type is PipelineOp.AsyncThread):
            self.array.arrive(stage, leader_of(self.pairs))
        elif in_leader():
            self.array.arrive(stage, None)

    @cute.jit
    def arrive_where(self, stage: Int32, condition: Boolean) -> None:
        """Arrive with one thread of the warp if the condition holds: in its own CTA, or with EACH
        in both CTAs of its pair."""
        barrier = self.array.get_barrier(stage).toint()
        if cutlass.const_expr(self.reach is Reach.EACH):
            cute.arch.inline_ptx(
                "{ .reg .pred wanted, one; .reg .b32 to, cta; setp.ne.s32 wanted, {$r1}, 0; "
                "elect.sync _|one, 0xffffffff; and.pred one, one, wanted; "
                "mapa.shared::cluster.u32 to, {$r0}, {$r2}; "
                "@one mbarrier.arrive.shared::cluster.b64 _, [to]; "
                "add.u32 cta, {$r2}, 1; mapa.shared::cluster.u32 to, {$r0}, cta; "
                "@one mbarrier.arrive.shared::cluster.b64 _, [to]; }",
                read_only_args=[barrier, Int32(condition), Int32(leader_of(self.pairs))],
            )
        else:
            cute.arch.inline_ptx(
                "{ .reg .pred wanted, one; setp.ne.s32 wanted, {$r1}, 0; "
                "elect.sync _|one, 0xffffffff; and.pred one, one, wanted; "
                "@one mbarrier.arrive.shared::cta.b64 _, [{$r0}]; }",
                read_only_args=[barrier, Int32(condition)],
            )

    @cute.jit
    def arrive_without_bytes(self, stage: Int32) -> None:
        """The arrival of a TMA signal that announces nothing."""
        if cutlass.const_expr(self.reach is Reach.OWN):
            self.array.arrive_and_expect_tx(stage, 0)
        elif in_leader():
            self.array.arrive_and_expect_tx(stage, 0)

    @cute.jit
    def arrive_with_bytes(self, stage: Int32, size: Int32) -> None:
        """The arrival of a TMA signal that announces so many bytes in each CTA."""
        if cutlass.const_expr(self.reach is Reach.OWN):
            self.array.arrive_and_expect_tx(stage, size)
        elif in_leader():
            self.array.arrive_and_expect_tx(stage, 2 * size)

    @cute.jit
    def _commit(self, stage: Int32) -> None:
        if cutlass.const_expr(self.pair):
            mask = PAIR_MASK if self.reach is Reach.BOTH else 1 << LEADER
            if cutlass.const_expr(self.pairs > 1):
                mask = Int32(mask) << leader_of(self.pairs)
            self.array.arrive(stage, mask, tcgen05.CtaGroup.TWO)
        else:
            self.array.arrive(stage, None, tcgen05.CtaGroup.ONE)


@dataclass(frozen=True)
class Event:
    """Event on a one-way edge: `full` has one mbarrier per stage."""

    full: Barriers

    def signal(self, stage: Int32) -> None:
        """Stage is full: announce TMA bytes, commit the issued MMAs, or arrive as a thread."""
        self.full.arrive(stage)

    def signal_bytes(self, stage: Int32, size: Int32) -> None:
        """TMA edges: announce so many bytes in each CTA, which may be fewer than the plan's."""
        self.full.arrive_with_bytes(stage, size)

    def signal_without_bytes(self, stage: Int32) -> None:
        """TMA edges: another edge tells when the stage is full, this one only counts the round."""
        self.full.arrive_without_bytes(stage)

    def wait(self, state: PipelineState, first: Int32 = 0) -> None:
        """Block until the stage of `state` is full, counted from stage `first` on."""
        self.full.array.wait(state.index + first, state.phase)

    def barrier(self, stage: Int32) -> cute.Pointer:
        """The mbarrier on which a TMA copy into `stage` completes its bytes (see `tma_group`)."""
        return self.full.array.get_barrier(stage)


@dataclass(frozen=True)
class Ring(Event):
    """Edge with a way back: `empty` has one mbarrier per stage."""

    empty: Barriers

    def acquire(self, state: PipelineState) -> None:
        """Block until the stage of `state` may be filled, then announce its TMA bytes."""
        self.wait_free(state)
        self.signal(state.index)

    def acquire_bytes(self, state: PipelineState, size: Int32) -> None:
        """Wait until the stage is free, then announce `size` bytes, as `signal_bytes` does."""
        self.wait_free(state)
        self.signal_bytes(state.index, size)

    def wait_free(self, state: PipelineState, first: Int32 = 0) -> None:
        """Block until the stage of `state`, as in `wait`, may be filled, and announce nothing.

        A producer of a pair does so once per stage before it leaves: the leader's releases reach
        into both CTAs, and must find them alive.
        """
        self.empty.array.wait(state.index + first, state.phase)

    def release(self, stage: Int32) -> None:
        """The consumer is done with `stage`; a UMMA consumer once its issued MMAs are done."""
        self.empty.arrive(stage)

    def release_where(self, stage: Int32, condition: Boolean) -> None:
        """Release by warps if the warp-uniform condition holds, without a branch. A branch would
        make ptxas serialise wgmmas (C7513)."""
        self.empty.arrive_where(stage, condition)


def make_pipelines(plan: EdgePlan, storage: cute.Pointer) -> dict[str, Event]:
    """Initialise the barriers of all edges, in plan order from `storage` on (warp 0 does it).

    `publish_barriers`, or the three steps of it, must follow before any of them is used.
    """
    pipelines, cursor = {}, 0
    for edge in plan.edges:
        full = _barriers(storage + cursor, plan.full(edge.name), plan)
        if edge.release is None:
            pipelines[edge.name] = Event(full)
        else:
            pointer = storage + cursor + edge.stages
            pipelines[edge.name] = Ring(full, _barriers(pointer, plan.empty(edge.name), plan))
        cursor += edge.barriers
    return pipelines


def _barriers(pointer: cute.Pointer, completion: Completion, plan: EdgePlan) -> Barriers:
    agent = _OPERATION[completion.signal], CooperativeGroup(Agent.Thread, completion.arrivals)
    array = MbarrierArray(pointer, completion.stages, agent, completion.tx_bytes)
    by_warp = completion.signal is Signal.WARPS
    return Barriers(array, completion.reach, plan.ctas == 2, plan.pairs, by_warp)


@cute.jit
def publish_barriers(plan: EdgePlan) -> None:
    """All threads: barriers, and what else the CTA wrote to its shared memory, can be used.

    Between the CTAs of a pair only barriers are ordered. Who allocates tensor memory of a pair
    takes the three steps in another order: the allocation behind the peer, in front of its CTA.
    """
    announce_barriers(plan)
    cute.arch.sync_threads()
    meet_peer(plan)


@cute.jit
def announce_barriers(plan: EdgePlan) -> None:
    """All threads, before what else they prepare: the barriers are initialised, the CTA runs."""
    cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(plan.ctas == 2):
        cute.arch.cluster_arrive_relaxed()


@cute.jit
def meet_peer(plan: EdgePlan) -> None:
    """All threads, behind `announce_barriers`: the peer runs, which who allocates tensor memory of
    both has to know, and its barriers are initialised. Nothing in a single CTA."""
    if cutlass.const_expr(plan.ctas == 2):
        cute.arch.cluster_wait()


@cute.jit
def meet_before_exit(plan: EdgePlan) -> None:
    """All threads, after their roles: no CTA of a pair leaves while the other may still use its
    barriers, its shared memory or its tensor memory. Nothing in a single CTA."""
    if cutlass.const_expr(plan.ctas == 2):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


def in_leader() -> Boolean:
    """Whether this CTA is the leader of its pair."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) % 2 == LEADER


def leader_of(pairs: int) -> Int32 | int:
    """Return the rank in the cluster of the leader of this CTA's pair. pairs: of the cluster."""
    if pairs == 1:
        return LEADER
    return cute.arch.block_idx_in_cluster() & ~1


def cta_group(plan: EdgePlan) -> tcgen05.CtaGroup:
    """Return the CTA group of all MMAs and tensor memory of a kernel."""
    return tcgen05.CtaGroup.TWO if plan.ctas == 2 else tcgen05.CtaGroup.ONE


def tma_group(plan: EdgePlan, name: str) -> tcgen05.CtaGroup:
    """Return the CTA group of TMA copies that fill edge `name`; TWO completes bytes in the
    leader."""
    two = plan.full(name).reach is Reach.LEADER
    return tcgen05.CtaGroup.TWO if two else tcgen05.CtaGroup.ONE


def producer_state(stages: int) -> PipelineState:
    """State of who fills stages: on a fresh barrier the first round of waits passes."""
    return make_pipeline_state(PipelineUserType.Producer, stages)


def consumer_state(stages: int) -> PipelineState:
    """Pipeline state of a consumer, which waits for filled stages."""
    return make_pipeline_state(PipelineUserType.Consumer, stages)


def consumer_state_at(stages: int, filling: Int32) -> PipelineState:
    """Return the state of a consumer that waits for filling number `filling`, counted from 0."""
    return PipelineState(stages, filling, filling % stages, filling // stages % 2)


def producer_state_at(stages: int, filling: Int32) -> PipelineState:
    """State of who is to fill a stage of the ring for the time `filling`, counted from 0."""
    return PipelineState(stages, filling, filling % stages, filling // stages % 2 ^ 1)
