"""Order of execution: warps by policy, asynchronous work, new clusters.

`progress` counts everything that could let a waiting warp go on. When nothing can move, the machine
runs outstanding asynchronous work, then launches the next cluster, then lets `try_wait`s time out
once (hardware may return false at any time), and only then reports a deadlock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ptxemu.errors import Deadlock, LimitExceeded
from ptxemu.machine.async_ops import AsyncUnits
from ptxemu.machine.deadlock import observe
from ptxemu.machine.listener import Listener
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.shape import LaunchQueue
from ptxemu.machine.state import Cluster, Warp
from ptxemu.options import Options

_QUANTUM = 2000  # blocks a warp may run before the next one gets a turn
_POLL_QUANTUM = 50  # the same for a warp whose last turn went into polling
_SPIN_TURNS = 3000  # turns in a row that only polled before the launch counts as hung
_MAX_RESIDENT_CTAS = 148  # streaming multiprocessors of a B200; one CTA of these kernels fills one
_CHECK_SECONDS = 1.0
_FAIR_SECONDS = 4.0  # before them the first compilations, or a busy machine, decide an estimate
_TURNS = 16  # turns between looks at the clock
_GIVE_UP = 0.25  # chance that a try_wait or try_cancel fails early, under the policies with chance


TIMED_OUT = object()  # token of a try_wait that is to return false


class Scheduler:
    """Runs `clusters` of one launch to completion, in order. `start(i)` makes cluster i's warps."""

    def __init__(
        self,
        options: Options,
        clusters: LaunchQueue,
        start: Callable[[int], Cluster],
        listeners: tuple[Listener, ...],
    ) -> None:
        self.options = options
        self.order = clusters.order
        self.resident, self.shares = clusters.resident, clusters.shares
        self.total = len(self.order)
        self.start = start
        self.random = random.Random(options.seed)
        self.units = AsyncUnits(options.policy == "round-robin", self.note_progress, listeners)
        self.queue: list[Warp] = []
        self.clusters: list[Cluster] = []  # resident
        self.launched = 0
        self.finished = 0
        self.progress = 0
        self.released_at = -1
        self.idle_turns = 0  # turns since the last progress
        self.poll_turns = 0  # turns since a warp last did anything but poll
        self.patience = _SPIN_TURNS
        self.clock = time.perf_counter()
        self.began = self.clock

    def note_progress(self) -> None:
        self.progress += 1
        self.idle_turns = self.poll_turns = 0

    def ready(self, warp: Warp) -> None:
        """A fragment of `warp` can go on."""
        if not warp.queued and warp.live:
            warp.queued = True
            self.queue.append(warp)

    def gives_up(self) -> bool:
        """Whether a try_wait that would wait returns false instead, or a try_cancel cancels
        nothing, as hardware may at any time."""
        return self.options.policy != "round-robin" and self.random.random() < _GIVE_UP

    def elsewhere(self, finished: int) -> None:
        """Other processes run the clusters, and so many are done."""
        self.finished = finished
        if time.perf_counter() - self.clock > _CHECK_SECONDS:
            self._tell_time()

    def restart(self) -> None:
        """Restart the clock, and count no cluster that ran elsewhere."""
        self.finished = 0
        self.clock = self.began = time.perf_counter()

    # -- the loop ---------------------------------------------------------------------------

    def run(self) -> None:
        while self.launched < self.total and len(self.clusters) < self.resident:
            self._launch()
        turn = {
            "round-robin": self._turn_in_order,
            "random": self._turn_random,
            "adversarial": self._turn_adversarial,
        }[self.options.policy]
        turns = 0
        while self.finished < self.total:
            if not self.queue:
                self._unstick()
                continue
            turn()
            if self.idle_turns > 2 * len(self.queue) + 2:
                self._break_polling()
            turns += 1
            if turns % _TURNS == 0 and time.perf_counter() - self.clock > _CHECK_SECONDS:
                self._tell_time()
        while self.units.open:
            self.units.run_one()

    def _launch(self) -> None:
        number = self.order[self.launched]
        cluster = self.start(number)
        self.launched += 1
        for share in self.shares.values():
            if number in share:
                share.remove(number)
        self.clusters.append(cluster)
        self.note_progress()
        for cta in cluster.ctas:
            for warp in cta.warps:
                self.ready(warp)

    def _take(self, position: int, quantum: int) -> None:
        warp = self.queue.pop(position)
        warp.queued = False
        self.idle_turns += 1
        self.poll_turns += 1
        if warp.polled and quantum > _POLL_QUANTUM:
            quantum = _POLL_QUANTUM
        warp.polled = warp.stored = warp.woken = False
        warp.run(quantum)
        if not warp.polled or warp.stored:
            self.poll_turns = 0
        if not warp.queued and warp.runnable_now():
            warp.queued = True
            self.queue.append(warp)

    def _turn_in_order(self) -> None:
        """Warps that waited together all run a block before one of them goes on, as on hardware:
        NVIDIA's mla_decode_fp16.py reuses its exchange buffer after one barrier."""
        self._take(0, 1 if self.queue[0].woken else _QUANTUM)

    def _turn_random(self) -> None:
        if self.units.open and self.random.random() < 0.25:
            self.units.run_one(self.random.randrange(len(self.units.open)))
        else:
            self._take(self.random.randrange(len(self.queue)), self.random.choice((1, 3, 20, 200)))

    def _turn_adversarial(self) -> None:
        self._take(self.random.randrange(len(self.queue)), self.random.choice((2, 50, _QUANTUM)))

    def _break_polling(self) -> None:
        """All warps have had turns without progress."""
        if self.units.open:
            self.units.run_one()
        elif not self._launch_more() and self.poll_turns > self.patience:
            if not self._time_out():
                raise self._deadlock()

    def _tell_time(self) -> None:
        self.clock = time.perf_counter()
        self._check_limit(self.clock - self.began)

    def _check_limit(self, elapsed: float) -> None:
        done = self.finished / self.total
        if self.options.progress:
            self.options.progress(self.finished, self.total)
        limit = self.options.limit
        if limit is None or elapsed < min(_FAIR_SECONDS, limit):
            return
        estimate = elapsed / done if done else elapsed
        if estimate > limit:
            raise LimitExceeded(
                f"this launch is estimated at {estimate:.0f} s ({self.finished} of {self.total} "
                f"clusters in {elapsed:.0f} s), above the limit of {limit:.0f} s; run a smaller "
                "problem, or remove the limit: --limit 0, Options(limit=None)"
            )

    # -- nothing can move -------------------------------------------------------------------

    def _unstick(self) -> None:
        if self.units.open and self.options.policy == "adversarial":
            self.units.run_starving(("tma", "tensor core")[self.options.seed % 2])
        elif self.units.open:
            self.units.run_one(self.random.randrange(len(self.units.open)))
        elif not self._launch_more() and not self._time_out():
            raise self._deadlock()

    def _launch_more(self) -> bool:
        if self.launched == self.total:
            return False
        per_cluster = len(self.clusters[0].ctas) if self.clusters else 1
        if (len(self.clusters) + 1) * per_cluster > max(_MAX_RESIDENT_CTAS, per_cluster):
            return False
        self._launch()
        return True

    def cancel_next(self, cluster: int) -> int | None:
        """Take the next cluster out of the launch queue for that one (clusterlaunchcontrol), or the
        next of its share; None when there is none, and now and then although there is, as a request
        may fail for reasons of the hardware's own: the next is then launched as any other."""
        if self.launched == self.total or self.gives_up():
            return None
        if self.shares:
            share = self.shares.get(cluster)
            if not share:
                return None
            number = share.pop(0)
            left = [each for each in self.order[self.launched :] if each != number]
            self.order = [*self.order[: self.launched], number, *left]
        self.launched += 1
        self.finished += 1
        return self.order[self.launched - 1]

    def _time_out(self) -> bool:
        """Let every waiting try_wait return false, once per state of the machine."""
        if self.released_at == self.progress:
            return False
        self.released_at = self.progress
        released = False
        for warp in self._live_warps():
            for frag in warp.frags:
                if isinstance(frag.wait, tuple):
                    bar: MBarrier = frag.wait[0]
                    bar.waiters = [w for w in bar.waiters if w[1] is not frag]
                    frag.polls = *frag.wait, frag.pc
                    frag.wait, frag.token = None, TIMED_OUT
                    self.ready(warp)
                    released = True
        return released

    def _live_warps(self) -> list[Warp]:
        return [w for cluster in self.clusters for cta in cluster.ctas for w in cta.warps if w.live]

    def _deadlock(self) -> Deadlock:
        program = next(w.program for w in self._live_warps())
        stall = observe(program, self.clusters)
        return Deadlock(stall.headline, stall=stall)

    # -- ends -------------------------------------------------------------------------------

    def warp_exited(self, warp: Warp) -> None:
        """Some lanes of `warp` exited; perhaps the last of its cluster."""
        warp.cluster.complete_if_all()
        if warp.live:
            return
        self.note_progress()
        warp.cta.live_warps -= 1
        for barrier in warp.cta.barriers.values():
            barrier.complete_if_all()
        if warp.cta.live_warps == 0:
            warp.cta.check_warpgroups()
            for each in warp.listeners:
                each.cta_ended(warp.cta)
        cluster = warp.cluster
        if all(cta.live_warps == 0 for cta in cluster.ctas):
            self.clusters.remove(cluster)
            self.finished += 1
            left = self.launched < self.total and len(self.clusters) < self.resident
            if left and not (self.shares and self.clusters):  # the others take their shares
                self._launch()
