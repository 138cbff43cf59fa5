"""Every operation of a manager as a method that takes small numbers, beside the naive model.

What the numbers mean depends on what is there (a request is chosen modulo how many there are), so
any list of operations can be run: hypothesis, a random long run and its shrinker use the same ones.
After each of them the books, the events and every byte that a request needs are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvcache.books.checkpoints import Policy
from kvcache.books.errors import (
    CacheError,
    DoubleFree,
    HostTierFull,
    NotResident,
    PoolExhausted,
    RollbackPastRing,
    TokensUnknown,
)
from kvcache.books.manager import Manager
from kvcache.books.requests import UNKNOWN, Placeholders, Request
from kvcache.books.step import Step
from kvcache.books.work import Pool, Work
from lab.soak.ledger import Ledger, require, same
from lab.soak.machine import Holder, Machine
from lab.soak.small_caches import Case, History
from lab.soak.wrong_types import Call, books_of, wrong_batches, wrong_books, wrong_calls

MOST_BLOCKS = 9  # of a request: longer ones teach nothing new
MOST_REQUESTS = 7
MOST_IN_FLIGHT = 6
SALTS = (b"", b"", b"", b"tenant")
# What refuses requests with placeholders: before these operations all of them are resolved.
NEED_TOKENS = {"append", "rollback", "fork", "preempt", "offload", "abandon", "misuse"}
Operation = tuple[str, tuple[int, ...]]


class Live:
    """A request: the manager's handle, what it should hold, and what of its prompt is to come."""

    def __init__(self, request: Request, history: History, todo: list[int], prompt: int) -> None:
        self.request, self.history, self.todo = request, history, todo
        self.prompt = prompt  # tokens

    @property
    def holder(self) -> Holder:
        """Return the request's holder as the device sees it."""
        request = self.request
        return Holder(request.name, self.history, request.blocks, request.state)


class Driver:
    """A manager, a machine and a naive model that live through the same operations.

    every: contents of all requests are compared after so many operations, those that an operation
    has touched always.
    """

    def __init__(self, case: Case, *, every: int = 1) -> None:
        self.case, self.layout, self.every = case, case.layout, every
        self.manager = Manager(
            case.layout, case.sizes, policy=case.policy, deferred=case.deferred, keep_events=True
        )
        self.machine = Machine(case.layout, case.sizes)
        self.ledger = Ledger(self.manager, self.machine, SALTS)
        self._misuse = Misuse(self)
        self.live: list[Live] = []
        self.gone: list[Live] = []  # freed handles
        self.past: list[tuple[bytes, list[int]]] = [(b"", [])]  # token lists to begin prompts with
        self.counts: Counter[str] = Counter()
        self.told: Counter[str] = Counter()  # what the manager's own counters have to say
        self.log: list[Operation] = []
        self._names = 0

    # -- running -------------------------------------------------------------------------------

    def run(self, operation: str, *numbers: int) -> None:
        """Run an operation, and check everything that must hold after it."""
        self.log.append((operation, numbers))
        if operation in NEED_TOKENS:
            for live in self.live:
                self._resolved(live, live.request.unknown)
        touched = getattr(self, operation)(*numbers) or ()
        self.counts[operation] += 1
        self.verify(touched, everything=len(self.log) % self.every == 0)

    def verify(self, touched: Sequence[Live] = (), *, everything: bool = True) -> None:
        """Books and events, and the bytes of the `touched`, or of everything that can be found."""
        self.ledger.replay()
        self.manager.check()
        resident = [live for live in self.live if live.request.resident]
        self._compare(resident if everything else [live for live in touched if live in resident])
        if everything:
            self.ledger.compare([live.request for live in self.live])
            self._compare_counters()
            self.counts["full checks"] += 1

    def _compare(self, lives: Sequence[Live]) -> None:
        for live in lives:
            request, history = live.request, live.history
            tokens = history.tokens[: request.known] + [UNKNOWN] * request.unknown
            require(request.tokens.tolist() == tokens, f"{request.name}: other tokens")
            reach = (history.floor, history.furthest)
            same("floor and furthest", (request.floor, request.furthest), reach)
        self.machine.verify([live.holder for live in lives])

    def _compare_counters(self) -> None:
        counters = self.manager.counters
        self.told["checkpoints"] = self.ledger.checkpoints_stored
        same("counters", {name: getattr(counters, name) for name in self.told}, self.told)
        evicted = counters.block_evictions, counters.checkpoint_evictions
        self.counts["block evictions"], self.counts["checkpoint evictions"] = evicted

    def finish(self) -> None:
        """All works end, all requests are freed: every slot can be had again."""
        while self.machine.in_flight:
            self.over(0)
        for live in list(self.live):
            self.manager.free(live.request)
            self.told["freed"] += 1
        self.live.clear()
        self.manager.poll()
        self.ledger.replay()
        self.manager.check()
        self.ledger.deep()
        self._compare_counters()
        self.counts.update(self.told)
        for pool, slots in self.manager.pools.items():
            require(slots.available == slots.slots, f"{pool.value}: {slots.slots} slots leak")
        require(not self.manager.checkpoints._rolling, "a request that is gone is remembered")
        metrics = self.manager.metrics
        require(metrics.requests == metrics.tokens == metrics.stranded_bytes == 0, str(metrics))

    # -- operations: life of a request ---------------------------------------------------------

    def admit(self, source: int, cut: int, fresh: int, variety: int, salt: int) -> list[Live]:
        """A prompt that begins as some tokens of the past and goes on in its own way."""
        known_salt, known = self.past[source % len(self.past)]
        most = MOST_BLOCKS * self.layout.block_tokens - 1
        prompt = known[: min(cut % (len(known) + 1), most - 1)]
        new = 1 + fresh % min(3 * self.layout.block_tokens, most - len(prompt))
        prompt = prompt + [variety % 3 + 2 * i % 5 for i in range(new)]
        chosen = known_salt if salt % 2 else SALTS[salt % len(SALTS)]
        return self.admit_prompt(prompt, chosen, use_cache=salt % 8 < 7)

    def admit_prompt(
        self, prompt: list[int], salt: bytes = b"", *, use_cache: bool = True
    ) -> list[Live]:
        """The new request, or none where there is no room."""
        if len(self.live) >= MOST_REQUESTS:
            return []
        name = self._name()
        there = self.ledger.found(prompt, salt) if use_cache else (0, 0)
        admission = self._try(
            lambda: self.manager.admit(name, prompt, salt=salt, use_cache=use_cache),
            "states", need=1, name=name,
        )  # fmt: skip
        if admission is None:
            return []
        self.ledger.replay()
        said = admission.hit, admission.cached
        require(said == there, f"{name}: (hit, cached) {said}, the cache has {there}")
        hit = admission.hit
        self.counts["hits"] += bool(hit)
        self.told.update(admitted=1, hit_tokens=hit, lost_hit_tokens=there[1] - hit)
        self.told["prompt_tokens"] += len(prompt) * use_cache
        live = Live(admission.request, History(salt, prompt[:hit]), prompt[hit:], len(prompt))
        live.history.restored()
        self.live.append(live)
        self._remember(salt, prompt)
        self._issue(admission)
        return [live]

    def fork(self, which: int) -> list[Live]:
        """A twin, which goes its own way from here."""
        live = self.choose(which)
        if live is None or len(self.live) >= MOST_REQUESTS:
            return []
        name = self._name()
        admission = self._try(
            lambda: self.manager.fork(live.request, name), "states", need=1, live=live, name=name
        )
        if admission is None:
            return []
        history = History(live.history.salt, live.history.tokens)
        child = Live(admission.request, history, list(live.todo), live.prompt)
        child.history.restored()
        self.told["forked"] += 1
        self.live.append(child)
        self._issue(admission)
        return [live, child]

    def free(self, which: int) -> None:
        """The end of a request, in the host tier or not."""
        live = self.choose(which)
        if live is not None:
            self.manager.free(live.request)
            self.told["freed"] += 1
            self._buried(live)

    def preempt(self, which: int) -> None:
        """The end of a request that will be resumed: its tokens are a prompt for later."""
        live = self.choose(which)
        if live is not None:
            tokens = self.manager.preempt(live.request)
            require(tokens.tolist() == live.history.tokens, "preempt: other tokens")
            self.told.update(freed=1, preempted=1)
            self._remember(live.history.salt, [*live.history.tokens, *live.todo])
            self._buried(live)

    def resume(self, source: int) -> list[Live]:
        """A prompt of the past once more, all of it."""
        salt, tokens = self.past[source % len(self.past)]
        return self.admit_prompt(tokens, salt) if tokens else []

    def _buried(self, live: Live) -> None:
        self._remember(live.history.salt, live.history.tokens)
        self.live.remove(live)
        self.gone = [*self.gone[-3:], live]

    def _remember(self, salt: bytes, tokens: list[int]) -> None:
        if tokens:
            self.past = [*self.past[-11:], (salt, list(tokens))]

    # -- operations: tokens --------------------------------------------------------------------

    def append(self, first: int, requests: int, count: int, variety: int, room: int) -> list[Live]:
        """Chunks of prompts, or new tokens, of several requests in one step."""
        batch = self._batch(first, requests, count, variety)
        if room % 2:
            batch = {live: new[: self._room(live, len(new))] for live, new in batch.items()}
        starts = {live: len(live.history) for live in batch}
        counters = self.manager.counters
        lost = counters.checkpoints_skipped, counters.checkpoint_evictions
        touched = self.append_tokens(batch) if batch else []
        self.ledger.replay()
        if room % 2 and lost == (counters.checkpoints_skipped, counters.checkpoint_evictions):
            for live in touched:
                self._has_checkpoints(live, starts[live])
        return touched

    def _has_checkpoints(self, live: Live, start: int) -> None:
        """Whether the checkpoints are there that the policy wants of a step from `start` that was
        as long as `room` allowed."""
        size, policy = self.layout.block_tokens, self.case.policy or Policy()
        last = (live.prompt - 1) // size * size
        for end in range((start // size + 1) * size, len(live.history) + 1, size):
            wanted = policy.prompt_end and end == last
            wanted |= bool(policy.every) and end // size % (policy.every or 1) == 0
            if wanted and self.layout.has_state and self.case.sizes.checkpoints:
                digest = live.request.digests[end // size - 1]
                require(digest in self.ledger.checkpoints, f"{live.request.name}: none at {end}")

    def _batch(self, first: int, requests: int, count: int, variety: int) -> dict[Live, list[int]]:
        chosen = [live for live in self.live if live.request.resident]
        chosen = [chosen[(first + i) % len(chosen)] for i in range(len(chosen))]
        batch: dict[Live, list[int]] = {}
        for index, live in enumerate(chosen[: 1 + requests % 4]):
            most = MOST_BLOCKS * self.layout.block_tokens - len(live.history)
            wanted = min(1 + (count + 3 * index) % (2 * self.layout.block_tokens + 3), most)
            new = [(variety + i) % 2 for i in range(wanted)]
            if wanted > 0:
                batch[live] = live.todo[:wanted] or new
        return batch

    def _room(self, live: Live, wanted: int) -> int:
        room = self.manager.room(live.request, wanted)
        require(1 <= room <= wanted, f"{live.request.name}: room {room} of {wanted}")
        return room

    def append_tokens(self, batch: dict[Live, list[int]], known: bool = True) -> list[Live]:
        """Run a step; return its requests, or none if there is no room.

        known: see `append_unknown`."""
        before = {live: set(live.request.blocks) for live in batch}
        step = self._planned(batch, known)
        if step is None:
            return []
        self._look_at(step, batch)
        for live, new in batch.items():
            live.history.extend(new)
            del live.todo[: len(new)]
            start = (len(live.history) - len(new)) // self.layout.block_tokens
            for block in set(live.request.blocks) - before[live]:
                self.ledger.handed_out(block)
            for block in before[live].intersection(live.request.blocks[start:]):
                self.machine.writes_in_place(block)
        self._tell(step)
        self._issue(step, [live.holder for live in batch])
        return list(batch)

    def append_unknown(self, first: int, requests: int, count: int, variety: int) -> list[Live]:
        """Tokens of which the manager hears later what they are."""
        batch = self._batch(first, requests, count, variety)
        touched = self.append_tokens(batch, known=False) if batch else []
        for live in touched:
            self._misuse.unknown_tokens(live.request, variety)
        return touched

    def resolve(self, which: int, count: int) -> list[Live]:
        """Resolve some of a request's placeholders."""
        pending = [live for live in self.live if live.request.unknown]
        for live in pending[which % 4 :][:1]:
            self._resolved(live, 1 + count % live.request.unknown)
        return pending

    def _resolved(self, live: Live, count: int) -> None:
        if count:
            tokens = live.history.tokens[live.request.known :][:count]
            self.manager.resolve(live.request, tokens)

    def _planned(self, batch: dict[Live, list[int]], known: bool = True) -> Step | None:
        need = sum(self.ledger.growth(live.request, len(new)) for live, new in batch.items())
        told = [new if known else Placeholders(len(new)) for new in batch.values()]
        tokens = dict(zip([live.request for live in batch], told, strict=True))
        return self._try(lambda: self.manager.append(tokens), "blocks", need=need)

    def _tell(self, step: Step) -> None:
        tokens = int((step.lengths - step.starts).sum())
        self.told.update(appended_tokens=tokens, blocks_copied_on_write=len(step.copies))

    def _look_at(self, step: Step, batch: dict[Live, list[int]]) -> None:
        """The arrays of a step, by what was asked for."""
        require(step.requests == tuple(live.request for live in batch), "a step of others")
        starts = [len(live.history) for live in batch]
        lengths = [len(live.history) + len(new) for live, new in batch.items()]
        positions = [x for span in zip(starts, lengths, strict=True) for x in range(*span)]
        same("starts", step.starts.tolist(), starts)
        same("lengths", step.lengths.tolist(), lengths)
        same("positions", step.positions.tolist(), positions)
        require(step.state_slots.tolist() == [r.state for r in step.requests], "state_slots")
        for row, live in zip(step.block_tables.tolist(), batch, strict=True):
            blocks = list(live.request.blocks)
            require(row[: len(blocks)] == blocks and not any(row[len(blocks) :]), "block_tables")
        for stream in self.layout.streams:
            entries = [length // stream.ratio for length in lengths]
            require(step.entries(stream.name).tolist() == entries, f"entries of {stream.name}")
        self.ledger.writes(step, [live.request for live in self.live])

    def abandon(self, first: int, requests: int, count: int, variety: int, done: int) -> None:
        """A step that is planned and does not come to its end: its requests are freed."""
        batch = self._batch(first, requests, count, variety)
        if batch:
            self.abandon_tokens(batch, done=done % 3)

    def abandon_tokens(self, batch: dict[Live, list[int]], *, done: int = 0) -> None:
        """A step of which nothing is executed, or (1) its first copies, or (2) its writes, too,
        which leave nonsense."""
        step = self._planned(batch)
        if step is None:
            return
        self._tell(step)
        if done:
            self.machine.copy(step.copies)
        if done > 1:
            self.machine.spoil(step)
        self.manager.abandon(step)
        self.told["freed"] += len(batch)
        for live in batch:
            self._buried(live)
        self.manager.issued(step)

    def rollback(self, which: int, count: int) -> list[Live]:
        """Some tokens back, as many as can be or fewer."""
        live = self.choose(which, resident=True)
        if live is None:
            return []
        self.take_back(live, count % (live.history.most_back(self.layout) + 1))
        return [live]

    def take_back(self, live: Live, count: int) -> None:
        """The last `count` tokens, which can be taken back."""
        layout, length = self.layout, len(live.history)
        self.manager.rollback(live.request, count)
        self.told["rolled_back_tokens"] += count
        wraps = {ring.rows(layout.draft) for ring in (*layout.rings, *layout.tails)}
        self.counts["rollbacks over a wrap"] += any(
            (length - 1) // rows > (length - count - 1) // rows for rows in wraps if count
        )
        size = layout.block_tokens
        self.counts["rollbacks over a block"] += (length - 1) // size > (length - count) // size
        live.history.cut(length - count)
        live.todo = []

    # -- operations: host tier, cache, works ---------------------------------------------------

    def offload(self, which: int) -> None:
        """Offload a request to host memory."""
        live = self.choose(which, resident=True)
        if live is None:
            return
        need = len(live.request.blocks)
        work = self._try(lambda: self.manager.offload(live.request), "host", need=need, live=live)
        if work is not None:
            self.told["offloaded"] += 1
            self._issue(work)

    def fetch(self, which: int) -> list[Live]:
        """Fetch a request from host memory."""
        live = self.choose(which, resident=False)
        if live is None:
            return []
        need = len(live.request.host_blocks)
        work = self._try(
            lambda: self.manager.fetch(live.request), "blocks states", need=need, live=live
        )
        if work is None:
            return []
        live.history.restored()
        self.told["fetched"] += 1
        self._issue(work)
        return [live]

    def clear(self) -> None:
        """Forget the prefix cache."""
        self.manager.clear()

    def discard(self, index: int, checkpoint: int) -> None:
        """A slot that nobody holds is found spoiled: nobody finds it any more."""
        pool = Pool.CHECKPOINTS if checkpoint % 2 else Pool.BLOCKS
        slots = self.manager.pools[pool]
        found = self.ledger.checkpoints if checkpoint % 2 else self.ledger.blocks
        kept = [slots.find(digest) for digest in sorted(found)]
        kept = [slot for slot in kept if not slots.holders(slot)]
        if kept:
            slot = kept[index % len(kept)]
            self.machine.pools[pool][slot] ^= 0xFF
            self.manager.discard(pool, [slot])
            require(slots.key(slot) is None, f"slot {slot} of {pool.value} is still found")

    def over(self, index: int) -> None:
        """A work comes to its end, in any order."""
        if self.machine.in_flight:
            index %= len(self.machine.in_flight)
            self._report(index)
            self.machine.over(index)

    def report(self, index: int) -> None:
        """A work that was planned is under way, and the manager hears of it."""
        if self.machine.in_flight:
            self._report(index % len(self.machine.in_flight))

    def poll(self) -> None:
        """The manager looks which works are over."""
        self.manager.poll()

    def _report(self, index: int) -> None:
        work = self.machine.in_flight[index]
        if not work.reported:
            self.manager.issued(work.work, work.event)
            work.reported = True

    def _issue(self, work: Work, holders: Sequence[Holder] = ()) -> None:
        issued = self.machine.issue(work, holders)
        if not self.case.deferred:
            self.machine.over(len(self.machine.in_flight) - 1)
            return
        # Every third work is reported late; the oldest one ends when there are too many.
        if len(self.log) % 3:
            self.manager.issued(work, issued.event)
            issued.reported = True
        if len(self.machine.in_flight) > MOST_IN_FLIGHT:
            self.over(0)

    # -- operations that have to fail -------------------------------------------------------

    def misuse(self, kind: int, which: int, more: int) -> None:
        """A call that cannot be served, see `Misuse`."""
        self._misuse.run(kind, which, more)

    def _try(
        self,
        call: Callable[[], object],
        pools: str,
        *,
        need: int,
        live: Live | None = None,
        name: str = "",
    ) -> Any:
        """The call's result; None where a pool is exhausted, and really is."""
        self.ledger.replay()
        before = self.ledger.snapshot(self.live)
        try:
            return call()
        except NotResident:
            require(live is not None and not live.request.resident, "NotResident, but it is")
            self.counts["refused: NotResident"] += 1
        except PoolExhausted as error:
            require(any(word in error.pool for word in pools.split()), f"{error}")
            self.ledger.exhausted(error, need, [live.request for live in self.live])
            require(isinstance(error, HostTierFull) == ("host" in error.pool), repr(error))
            names = [name] if name else [live.request.name for live in self.live]
            require(error.request in names and error.request in str(error), f"{error}: {names}")
            self.counts[f"refused: {type(error).__name__} ({error.pool})"] += 1
        require(self.ledger.snapshot(self.live) == before, "changed by a call that failed")
        return None

    def choose(self, which: int, *, resident: bool | None = None) -> Live | None:
        """Choose a request, optionally by whether it is on the device; None if there is none."""
        found = [x for x in self.live if resident is None or x.request.resident == resident]
        return found[which % len(found)] if found else None

    def _name(self) -> str:
        self._names += 1
        return f"request-{self._names}"


# -- calls that cannot be served: a named exception with request and limit, nothing changes -----


class Misuse:
    """Wrong calls on the manager of a driver; its methods are what can be wrong."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.manager, self.layout = driver, driver.manager, driver.layout

    def run(self, kind: int, which: int, more: int) -> None:
        """The wrong call that the numbers name, where it can be made."""
        kinds: tuple[Callable[[int, int], None], ...] = (
            self._freed_handle,
            self._not_resident,
            self._rollback_past,
            self._too_much,
            self._foreign_handle,
            self._nonsense,
            self._wrong_type,
        )
        kinds[kind % len(kinds)](which, more)

    def _freed_handle(self, which: int, more: int) -> None:
        self._wrong_handle(self.driver.gone, which, more % 7, DoubleFree)

    def _not_resident(self, which: int, more: int) -> None:
        away = [live for live in self.driver.live if not live.request.resident]
        self._wrong_handle(away, which, more % 4, NotResident)

    def _wrong_handle(
        self, lives: Sequence[Live], which: int, call: int, expected: type[Exception]
    ) -> None:
        if lives:
            request = lives[which % len(lives)].request
            error = self._refused(self._calls(request)[call], expected)
            require(request.name in str(error), f"no name in {error}")

    def unknown_tokens(self, request: Request, which: int) -> None:
        """A call that needs to know a request's placeholders, or resolves more than there are."""
        unknown, calls = request.unknown, self._calls(request)
        needing = [calls[call] for call in (0, 1, 2, 3, 5)]
        error = self._refused(needing[which % len(needing)], TokensUnknown)
        require((error.request, error.unknown) == (request.name, unknown), f"{error}: {unknown}")
        self._refused(lambda: self.manager.resolve(request, [0] * (unknown + 1)), ValueError)

    def _rollback_past(self, which: int, more: int) -> None:
        live = self.driver.choose(which)
        if live is not None and live.request.resident:
            limit = live.history.most_back(self.layout)
            asked = limit + 1 + more % 5
            error = self._refused(
                lambda: self.manager.rollback(live.request, asked), RollbackPastRing
            )
            require((error.asked, error.limit) == (asked, limit), f"{error}: limit {limit}")
            for part in (live.request.name, str(asked), str(limit)):
                require(part in str(error), f"no {part} in {error}")

    def _too_much(self, which: int, more: int) -> None:
        """More tokens than all blocks hold, beside a request that could be served."""
        resident = [live for live in self.driver.live if live.request.resident]
        if resident:
            huge = (self.driver.case.sizes.blocks + 1) * self.layout.block_tokens
            greedy = resident[which % len(resident)]
            batch = {live.request: [1] for live in resident[: more % 3]}
            batch[greedy.request] = [0] * huge
            error = self._refused(lambda: self.manager.append(batch), PoolExhausted)
            require(error.request in [request.name for request in batch], f"{error}: not of them")
            for part in (error.request, str(error.needed), str(error.available)):
                require(part in str(error), f"no {part} in {error}")

    def _foreign_handle(self, which: int, more: int) -> None:
        stranger = Request("stranger", b"", 0)
        self._refused(self._calls(stranger)[more % 7], (ValueError, CacheError))

    def _nonsense(self, which: int, more: int) -> None:
        manager, live = self.manager, self.driver.choose(which)
        calls = [lambda: manager.admit("empty", []), lambda: manager.admit("text", ["a"])]
        if live is not None and live.request.resident:
            request = live.request
            calls += [
                lambda: manager.append({request: []}),
                lambda: manager.append({request: [0.5]}),
                lambda: manager.append({request: [[1], [2]]}),
                lambda: manager.rollback(request, -1),
                lambda: manager.fetch(request),
            ]
        self._refused(calls[more % len(calls)], (ValueError, TypeError))

    def _wrong_type(self, which: int, more: int) -> None:
        """Make one of all calls with arguments of a wrong type."""
        live = self.driver.choose(which)
        resident = live is not None and live.request.resident
        calls = self.wrong_calls(live.request if live is not None and resident else None)
        self.refused_at_once(*calls[(which * 128 + more) % len(calls)])

    def wrong_calls(self, request: Request | None) -> list[Call]:
        """All of them; request: a live one on the device."""
        manager = self.manager
        return [
            *wrong_calls(manager, request),
            *wrong_batches(manager.append, request),
            *wrong_books(manager, request),
        ]

    def refused_at_once(self, what: str, call: Callable[[], object]) -> None:
        """Before anything is looked at that may change: all books are as they were."""
        before = books_of(self.manager)
        try:
            call()
        except (TypeError, ValueError) as error:
            require(books_of(self.manager) == before, f"{what}: changed by {error!r}")
            self.driver.counts[f"refused: {type(error).__name__}"] += 1
            return
        raise AssertionError(f"{what}: not refused")

    def _calls(self, request: Request) -> list[Callable[[], object]]:
        manager = self.manager
        return [
            lambda: manager.append({request: [1, 2]}),
            lambda: manager.rollback(request, 0),
            lambda: manager.fork(request, "twin"),
            lambda: manager.offload(request),
            lambda: manager.free(request),
            lambda: manager.preempt(request),
            lambda: manager.fetch(request),
        ]

    def _refused(self, call: Callable[[], object], expected: type | tuple[type, ...]) -> Any:
        self.driver.ledger.replay()
        before = self.driver.ledger.snapshot(self.driver.live)
        try:
            call()
        except expected as error:
            require(
                self.driver.ledger.snapshot(self.driver.live) == before, f"changed by {error!r}"
            )
            self.driver.counts[f"refused: {type(error).__name__}"] += 1
            return error
        raise AssertionError(f"not refused with {expected}")
