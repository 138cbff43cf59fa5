"""Role that loads scale factors of keys for the tensor core (device code).

A proxy fence of the thread that copied words makes them visible to tcgen05.cp. So the warp waits
for its copies, AHEAD tiles later.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelkit.device.pipelines import producer_state
from mla.indexer.scores_device import run_from
from mla.indexer.shared.args import Scope, look_up, tiles_of, visits, visits_left
from mla.indexer.shared.load import Scales
from mla.indexer.sm100.plan import AHEAD


class ScaleFactors(Scales):
    """Device code that fills the ring of scale factors, each stage an atom."""

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Run the role."""
        plan, share, pipe = self.plan, scope.share, scope.pipes.scales
        state, arrived = producer_state(plan.stages), producer_state(plan.stages)
        begin, pending = Int32(0), Int32(0)
        while begin < plan.config.tokens:
            run = run_from(scope.buffers.spans, begin)
            begin = run.end
            step = visits(plan) * share.ctas
            for first in cutlass.range(share.cta, tiles_of(run), step, unroll=1):
                words = self.words_of(scope, look_up(plan, scope, run, first))
                for visit in cutlass.range(visits_left(plan, scope, run, first), unroll=1):
                    pipe.wait_free(state)
                    self.fetch(scope, words, visit, state)
                    cute.arch.cp_async_commit_group()
                    state.advance()
                    pending += 1
                    if pending > AHEAD:
                        cute.arch.cp_async_wait_group(AHEAD)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        pipe.signal(arrived.index)
                        arrived.advance()
                        pending -= 1
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        for _ in cutlass.range(pending, unroll=1):
            pipe.signal(arrived.index)
            arrived.advance()
