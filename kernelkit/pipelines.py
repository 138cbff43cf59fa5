"""EdgePlan -> mbarriers: events and rings with derived arrival counts (device code).

An `Event` is a one-way edge: the producer signals stage s full. A `Ring` adds the way back: the
consumer releases stage s, the producer acquires it before it fills it again.
Waits take a `PipelineState` (index and phase); only the caller's own `run` may advance it,
because a state that a helper advances silently stays where it was (CuTe DSL 4.8.1).
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
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

from kernelkit.arrivals import Signal
from kernelkit.edges import EdgePlan

_OPERATION = {
    Signal.TMA: PipelineOp.TmaLoad,
    Signal.UMMA: PipelineOp.TCGen05Mma,
    Signal.THREADS: PipelineOp.AsyncThread,
}


def _barriers(
    pointer: cute.Pointer, stages: int, signal: Signal, count: int, tx_bytes: int = 0
) -> MbarrierArray:
    group = CooperativeGroup(Agent.Thread, count)
    return MbarrierArray(pointer, stages, (_OPERATION[signal], group), tx_bytes)


@dataclass(frozen=True)
class Event:
    """One-way edge: `full` has one mbarrier per stage."""

    full: MbarrierArray

    def signal(self, stage: Int32) -> None:
        """Stage is full: announce TMA bytes, commit the issued MMAs, or arrive as a thread."""
        self.full.arrive(stage, None, tcgen05.CtaGroup.ONE)

    def wait(self, state: PipelineState) -> None:
        """Block until the stage of `state` is full."""
        self.full.wait(state.index, state.phase)

    def barrier(self, stage: Int32) -> cute.Pointer:
        """The mbarrier on which a TMA copy into `stage` completes its bytes."""
        return self.full.get_barrier(stage)


@dataclass(frozen=True)
class Ring(Event):
    """Edge with a way back: `empty` has one mbarrier per stage."""

    empty: MbarrierArray

    def acquire(self, state: PipelineState) -> None:
        """Block until the stage of `state` may be filled, then announce its TMA bytes."""
        self.empty.wait(state.index, state.phase)
        self.signal(state.index)

    def release(self, stage: Int32) -> None:
        """The consumer is done with `stage`; a UMMA consumer once its issued MMAs are done."""
        self.empty.arrive(stage, None, tcgen05.CtaGroup.ONE)


def make_pipelines(plan: EdgePlan, storage: cute.Pointer) -> dict[str, Event]:
    """Initialise the barriers of all edges, in plan order from `storage` on (warp 0 does it).

    A fence and a CTA barrier must follow before any of them is used.
    """
    pipelines, cursor = {}, 0
    for edge in plan.edges:
        count = plan.full_arrivals(edge.name)
        full = _barriers(storage + cursor, edge.stages, edge.signal, count, edge.tx_bytes)
        if edge.release is None:
            pipelines[edge.name] = Event(full)
        else:
            pointer, count = storage + cursor + edge.stages, plan.empty_arrivals(edge.name)
            empty = _barriers(pointer, edge.stages, edge.release, count)
            pipelines[edge.name] = Ring(full, empty)
        cursor += edge.barriers
    return pipelines


def filling(stages: int) -> PipelineState:
    """State of who fills stages: on a fresh barrier the first round of waits passes."""
    return make_pipeline_state(PipelineUserType.Producer, stages)


def draining(stages: int) -> PipelineState:
    """State of who waits for filled stages."""
    return make_pipeline_state(PipelineUserType.Consumer, stages)
