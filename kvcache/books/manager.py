"""The manager: which request holds which slots, what is shared, what device work that takes.

It owns no memory and launches nothing. A call either returns the `Work` that it implies or raises a
`kvcache.books.errors.CacheError` and changes nothing. `kvcache.memory.cache.Cache` adds memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvcache.books import invariants
from kvcache.books.checkpoints import Checkpoints, Policy
from kvcache.books.errors import (
    DoubleFree,
    NotResident,
    PoolExhausted,
    RollbackPastRing,
    TokensUnknown,
)
from kvcache.books.metrics import Counters, KVEvent, Metrics
from kvcache.books.prefix import Match, PrefixCache, chained, seed
from kvcache.books.requests import MAX_TOKENS, Placeholders, Request, Tokens, token_ids
from kvcache.books.slot_pool import NO_TICKET, Sizes, SlotPool
from kvcache.books.step import Step, block_tables
from kvcache.books.work import Copy, Event, Mark, Pool, Tickets, Work
from kvcache.checks import numbers, require, whole
from kvcache.layouts.layout import Layout

RESERVED = 1  # slot 0 of BLOCKS, the null block, and of STATES, the clean state
CLEAN = 0  # that state: each new one begins as a copy of it


@dataclass(eq=False)
class Admission(Work):
    """A new request, and how many of its tokens are there already: `hit`.

    cached: tokens whose blocks were found; those behind `hit` lack a checkpoint.
    """

    request: Request = field(kw_only=True)
    hit: int = 0
    cached: int = 0


class Manager:
    """Requests over the pools of a layout.

    deferred: device work may overlap what is done next (several streams, or a host that runs
    ahead): each Work is reported by `issued`, and what it may touch is not handed out before it is
    over. keep_events: see `events`.
    """

    def __init__(
        self,
        layout: Layout,
        sizes: Sizes,
        *,
        policy: Policy | None = None,
        deferred: bool = False,
        keep_events: bool = False,
    ) -> None:
        require("layout", layout, Layout)
        require("sizes", sizes, Sizes)
        require("policy", policy, Policy, optional=True)
        require("deferred", deferred, bool)
        require("keep_events", keep_events, bool)
        if sizes.blocks < 1 or (layout.has_state and sizes.states < 1):
            raise ValueError(
                f"{sizes.blocks} blocks and {sizes.states} states: {layout.name} needs at least 1 "
                f"block{' and 1 state' if layout.has_state else ''}"
            )
        self.layout, self.sizes = layout, sizes
        self.counters = Counters()
        self.pools = {
            pool: SlotPool(
                pool.value,
                getattr(sizes, pool.name.lower()),
                first=RESERVED if pool in (Pool.BLOCKS, Pool.STATES) else 0,
                on_host=pool.on_host,
            )
            for pool in Pool
        }
        self.blocks, self.states = self.pools[Pool.BLOCKS], self.pools[Pool.STATES]
        events: list[KVEvent] | None = [] if keep_events else None
        checkpoints = self.pools[Pool.CHECKPOINTS]
        self.prefix = PrefixCache(layout, self.blocks, checkpoints, self.counters, events)
        self.checkpoints = Checkpoints(layout, policy or Policy(), self.prefix)
        self.requests: dict[Request, None] = {}
        self._tickets = Tickets(deferred)

    # -- life of a request -------------------------------------------------------------------

    def admit(
        self, name: str, prompt: Tokens | Placeholders, *, salt: bytes = b"", use_cache: bool = True
    ) -> Admission:
        """A request for `prompt`, of which the first `hit` tokens are there.

        The others, at least one, are the caller's to append. salt: requests with different ones
        share nothing. A prompt of `Placeholders` hits nothing: its tokens are not known.
        PoolExhausted without a free state.
        """
        require("name", name, str)
        require("salt", salt, bytes)
        require("use_cache", use_cache, bool)
        tokens = token_ids("prompt", prompt)
        self.poll()
        self.states.require(int(self.layout.has_state), name)
        is_looked_up = use_cache and not isinstance(prompt, Placeholders)
        match = self.prefix.match(tokens, salt) if is_looked_up else Match([], [], -1, 0)
        size = self.layout.block_tokens
        request = Request(name, salt, (len(tokens) - 1) // size * size)
        self.blocks.share(match.blocks)
        request.blocks.extend(match.blocks)
        request.digests = match.digests
        hit = len(match.blocks) * size
        request.extend(tokens[:hit])
        request.floor = hit
        ticket = self._tickets.take()
        copies = self._new_state(request, Pool.CHECKPOINTS, match.checkpoint)
        if match.checkpoint >= 0:
            self.checkpoints.keep(request.digests[-1])
            # Nobody holds it longer than the work that reads it.
            self.prefix.checkpoints.share([match.checkpoint])
            self.prefix.checkpoints.release([match.checkpoint], ticket)
        self.requests[request] = None
        counters = self.counters
        counters.admitted += 1
        if use_cache:
            counters.prompt_tokens += len(tokens)
            counters.hit_tokens += hit
            counters.lost_hit_tokens += match.lost * size
        return Admission(ticket, copies, hit, hit + match.lost * size, request=request)

    def _new_state(self, request: Request, pool: Pool, slot: int) -> tuple[Copy, ...]:
        """A state for the request, if requests have one, and the copies that make it: as if nobody
        had had it, then what `slot` of a pool knows of the request's tokens, if it is not -1."""
        if not self.layout.has_state:
            return ()
        (request.state,) = self.states.take(1, request.name)
        clean = Copy(Pool.STATES, Pool.STATES, CLEAN, request.state)
        if slot < 0:
            return (clean,)
        return clean, Copy(pool, Pool.STATES, slot, request.state, request.length)

    def fork(self, request: Request, name: str) -> Admission:
        """A request with the same tokens: it shares the blocks and has a copy of the state."""
        self.require(request, known=True)
        require("name", name, str)
        self.poll()
        self.states.require(int(self.layout.has_state), name)
        child = Request(name, request.salt, request.last_boundary)
        child.extend(request.tokens)
        child.floor = request.length
        child.blocks, child.digests = request.blocks[:], request.digests[:]
        self.blocks.share(child.blocks)
        copies = self._new_state(child, Pool.STATES, request.state)
        self.requests[child] = None
        self.counters.forked += 1
        ticket, hit = self._tickets.take(), child.length
        return Admission(ticket, copies, hit, hit, request=child)

    def free(self, request: Request) -> None:
        """The end of a request; its full blocks stay as long as nobody needs the room."""
        self.require(request, resident=False)
        del self.requests[request]
        request.freed = True
        self.checkpoints.leave(request)
        self.checkpoints.drop(request, self._tickets.last)
        if request.resident:
            self._forget_unreachable(request)
        self._release_device(request)
        self._release_host(request)
        self.counters.freed += 1

    def preempt(self, request: Request) -> np.ndarray:
        """Free a request that is to be admitted again: its tokens, int64."""
        self.require(request, resident=False, known=True)
        tokens = request.tokens.copy()
        self.free(request)
        self.counters.preempted += 1
        return tokens

    def require(self, request: Request, *, resident: bool = True, known: bool = False) -> None:
        """Check that `request` is a live request of this manager.

        Raises:
            TypeError: for anything but a request.
            DoubleFree: for a request that was freed.
            NotResident: for a request in the host tier, if `resident`.
            TokensUnknown: for a request with placeholders, if `known`.
            ValueError: for a request of another manager.
        """
        if type(request) is not Request:
            require("request", request, Request)
        if request.freed:
            raise DoubleFree(f"request {request.name!r} has been freed before")
        if resident and not request.resident:
            raise NotResident(f"request {request.name!r} is in the host tier: fetch it first")
        if request not in self.requests:
            raise ValueError(f"request {request.name!r} belongs to another manager")
        if known and request.unknown:
            raise TokensUnknown(request.name, request.unknown)

    def _forget_unreachable(self, request: Request) -> None:
        """Full blocks behind the last checkpoint would take room for hits that cannot be."""
        if not self.layout.has_state:
            return
        for block, digest in reversed([*zip(request.blocks, request.digests, strict=False)]):
            if self.prefix.checkpoints.find(digest) is not None:
                return
            if self.blocks.key(block) == digest and self.blocks.holders(block) == 1:
                self.prefix.forget(block)

    def _release_device(self, request: Request) -> None:
        ticket = self._tickets.last
        self.blocks.release(request.blocks[::-1], ticket)  # the end of a chain goes first
        del request.blocks[:]
        if request.state >= 0:
            self.states.release([request.state], ticket)
            request.state = -1

    def _release_host(self, request: Request) -> None:
        ticket = self._tickets.last
        self.pools[Pool.HOST_BLOCKS].release(request.host_blocks, ticket)
        request.host_blocks = []
        if request.host_state >= 0:
            self.pools[Pool.HOST_STATES].release([request.host_state], ticket)
            request.host_state = -1

    # -- tokens ------------------------------------------------------------------------------

    def append(
        self, batch: Mapping[Request, Tokens | Placeholders], *, marks: bool = False
    ) -> Step:
        """The next tokens of some requests; all or none.

        Of `Placeholders` only the number is known yet: `resolve` says what they are, before other
        tokens follow. PoolExhausted names the first request for which blocks are missing.
        marks: the layers write the checkpoints of `Step.marks`, so that a prompt needs no second
        step to leave one. ValueError unless `Layout.can_mark`.
        """
        require("batch", batch, Mapping)
        self._require_marks(marks)
        for request, given in batch.items():
            self.require(request, known=not isinstance(given, Placeholders))
        tokens = {request: token_ids(request.name, given) for request, given in batch.items()}
        self.poll()
        plan = self._growth(tokens)
        fresh = iter(self.blocks.take(sum(new + copied for new, copied in plan.values())))
        starts = np.array([request.length for request in tokens], np.int32)
        ticket = self._tickets.take()
        copies: list[Copy] = []
        for request, (new, copied) in plan.items():
            copies += self._make_writable(request, copied, fresh)
            request.blocks.extend(islice(fresh, new))
        after: list[Copy] = []
        marked: list[Mark] = []
        for owner, (request, ids) in enumerate(tokens.items()):
            start = request.length
            room = self.checkpoints.room(request, len(ids), marks)
            self.counters.checkpoints_missed += room < len(ids)
            request.extend(ids, unknown=isinstance(batch[request], Placeholders))
            self._store_full(request)
            if marks:
                found = self.checkpoints.mark(request, start, ticket)
                marked += [Mark(owner, *each) for each in found]
            after += self.checkpoints.take(request, start, ticket)
            self.counters.appended_tokens += len(ids)
        return Step(
            ticket, tuple(copies), tuple(tokens), tuple(after),
            starts, np.array([request.length for request in tokens], np.int32),
            np.array([request.state for request in tokens], np.int32), block_tables(tokens),
            layout=self.layout, marks=tuple(marked),
        )  # fmt: skip

    def _require_marks(self, marks: bool) -> None:
        require("marks", marks, bool)
        if marks and not self.layout.can_mark:
            raise ValueError(
                f"marks with the layout {self.layout.name}: only for states of rings of plain rows "
                "that begin anew at every boundary. Let steps end at boundaries"
            )

    def _growth(self, tokens: Mapping[Request, np.ndarray]) -> dict[Request, tuple[int, bool]]:
        """Blocks that each request needs, and whether its last one has to be copied first."""
        plan: dict[Request, tuple[int, bool]] = {}
        left: dict[int, int] = {}  # shared blocks that requests before leave for a copy
        needed = 0
        for request, ids in tokens.items():
            new = self.layout.blocks(request.length + len(ids)) - len(request.blocks)
            copied = False
            if request.length % self.layout.block_tokens:
                last = request.blocks[-1]
                # Where requests of this step share a block, the last of them may keep it.
                others = self.blocks.holders(last) - left.get(last, 0) - 1
                copied = others > 0 or self.blocks.busy(last)
                left[last] = left.get(last, 0) + copied
            plan[request] = (new, copied)
            needed += new + copied
            self.blocks.require(needed, request.name)
        return plan

    def _make_writable(self, request: Request, copied: bool, fresh: Iterator[int]) -> list[Copy]:
        """The request alone holds its last block, and nobody finds it, if it is to be written."""
        if not request.length % self.layout.block_tokens:
            return []
        last = request.blocks[-1]
        if not copied:
            if self.blocks.key(last) is not None:  # full once, then taken back
                self.prefix.forget(last)
            return []
        request.blocks[-1] = next(fresh)
        # Those who still hold it write behind the copy, in the order of steps.
        shared = self.blocks.holders(last) > 1
        self.blocks.release([last], NO_TICKET if shared else self._tickets.last)
        self.counters.blocks_copied_on_write += 1
        return [Copy(Pool.BLOCKS, Pool.BLOCKS, last, request.blocks[-1])]

    def _store_full(self, request: Request) -> None:
        """Blocks that became full can be found."""
        size, digests = self.layout.block_tokens, request.digests
        for index in range(len(digests), request.known // size):
            parent, ids = self._content(request, index)
            digests.append(chained(parent, ids))
            self.prefix.store(request.blocks[index], parent, digests[-1], ids)

    def _content(self, request: Request, index: int) -> tuple[bytes, np.ndarray]:
        """Return the digest input of full block `index`: the previous digest, and its tokens."""
        size = self.layout.block_tokens
        parent = request.digests[index - 1] if index else seed(request.salt)
        return parent, request.tokens[index * size : (index + 1) * size]

    def resolve(self, request: Request, tokens: Tokens) -> None:
        """Set the token ids of the first placeholders of a request.

        Blocks and checkpoints that end with them can be found from here on. Raise ValueError for
        more tokens than placeholders.
        """
        self.require(request)
        ids = token_ids(request.name, tokens)
        if len(ids) > request.unknown:
            raise ValueError(
                f"request {request.name!r}: {len(ids)} tokens, but {request.unknown} placeholders"
            )
        request.learn(ids)
        self._store_full(request)
        self.checkpoints.settle(request, self._tickets.last)

    def rollback(self, request: Request, tokens: int) -> None:
        """Take back the last `tokens` tokens.

        RollbackPastRing where they reach past what rings still hold: `draft` tokens behind the
        furthest position that was written, and not before the state came from elsewhere. Without
        a state the beginning is the limit.
        """
        self.require(request, known=True)
        tokens = whole("tokens", tokens, None)
        if tokens < 0:
            raise ValueError(
                f"request {request.name!r}: cannot take back {tokens} tokens, at least 0"
            )
        first = 0
        if self.layout.has_state:
            first = max(request.floor, request.furthest - self.layout.draft)
        if tokens > request.length - first:
            raise RollbackPastRing(request.name, tokens, request.length - first)
        request.length -= tokens
        kept = self.layout.blocks(request.length)
        self.blocks.release(request.blocks[kept:][::-1], self._tickets.last)
        del request.blocks[kept:]
        del request.digests[request.length // self.layout.block_tokens :]
        self.counters.rolled_back_tokens += tokens

    def room(self, request: Request, wanted: int, *, marks: bool = False) -> int:
        """Return how many of the next `wanted` tokens fit one append without missing a checkpoint.

        A longer append is allowed; then later hits are shorter. marks: as `append` will be called.
        """
        self.require(request, resident=False)
        self._require_marks(marks)
        return self.checkpoints.room(request, whole("wanted", wanted, 0, MAX_TOKENS), marks)

    def abandon(self, step: Step) -> None:
        """`step` was not executed, or not to its end: what it wrote is worth nothing.

        Its requests are freed, and nothing that it would have filled can be found. Call it before
        anything else is planned on the step.
        """
        require("step", step, Step)
        for request in (each for each in step.requests if not each.freed):
            self.require(request, resident=False)
        mine = {digest for request in step.requests for digest in request.digests}
        self.prefix.forget_checkpoints(step.checkpoints, mine)
        for request, start in zip(step.requests, step.starts.tolist(), strict=True):
            if request.freed:
                continue
            begun = start // self.layout.block_tokens
            self.prefix.forget_blocks(request.blocks[begun:], request.digests[begun:])
            self.free(request)

    # -- host tier ---------------------------------------------------------------------------

    def offload(self, request: Request) -> Work:
        """A request leaves the device for host memory; HostTierFull where there is no room."""
        self.require(request, known=True)
        self.poll()
        host_blocks, host_states = self.pools[Pool.HOST_BLOCKS], self.pools[Pool.HOST_STATES]
        host_blocks.require(len(request.blocks), request.name)
        host_states.require(int(self.layout.has_state), request.name)
        ticket = self._tickets.take()
        request.host_blocks = host_blocks.take(len(request.blocks), request.name)
        pairs = zip(request.blocks, request.host_blocks, strict=True)
        copies = [Copy(Pool.BLOCKS, Pool.HOST_BLOCKS, *pair) for pair in pairs]
        if self.layout.has_state:
            (request.host_state,) = host_states.take(1, request.name)
            slots = (request.state, request.host_state)
            copies.append(Copy(Pool.STATES, Pool.HOST_STATES, *slots, request.length))
        self._release_device(request)
        request.resident = False
        self.counters.offloaded += 1
        return Work(ticket, tuple(copies))

    def fetch(self, request: Request) -> Work:
        """A request comes back; blocks that can still be found by their content are shared."""
        self.require(request, resident=False)
        if request.resident:
            raise ValueError(f"request {request.name!r} is not in the host tier")
        self.poll()
        found = [self.blocks.find(digest) for digest in request.digests]
        there = [slot for slot in found if slot is not None]
        self.blocks.share(there)  # first, so that taking blocks does not evict them
        try:
            self.states.require(int(self.layout.has_state), request.name)
            fresh = iter(self.blocks.take(len(request.host_blocks) - len(there), request.name))
        except PoolExhausted:
            self.blocks.release(there[::-1], self._tickets.last)
            raise
        return self._fetched(request, found, fresh)

    def _fetched(self, request: Request, found: list[int | None], fresh: Iterator[int]) -> Work:
        ticket, copies = self._tickets.take(), []
        for index, host in enumerate(request.host_blocks):
            slot = found[index] if index < len(found) else None
            if slot is None:
                slot = next(fresh)
                copies.append(Copy(Pool.HOST_BLOCKS, Pool.BLOCKS, host, slot))
            request.blocks.append(slot)
            if index < len(found):
                parent, ids = self._content(request, index)
                self.prefix.store(slot, parent, request.digests[index], ids)
        copies += self._new_state(request, Pool.HOST_STATES, request.host_state)
        self._release_host(request)
        request.resident = True
        request.floor = request.furthest = request.length
        self.counters.fetched += 1
        return Work(ticket, tuple(copies))

    # -- device work, books ------------------------------------------------------------------

    def issued(self, work: Work, event: Event | None = None) -> None:
        """`work` and what reads its slots is on its way; over once `event` says so, or now."""
        require("work", work, Work)
        if event is not None and not callable(getattr(event, "query", None)):
            raise TypeError(
                f"event is {type(event).__name__}, expected an event with query(), or None"
            )
        self._tickets.issued(work.ticket, event)

    def poll(self) -> None:
        """Take note of work that is over."""
        over = self._tickets.over()
        for pool in self.pools.values():
            pool.over(over)

    def clear(self) -> None:
        """Forget the prefix cache."""
        self.prefix.clear()

    def discard(self, pool: Pool, slots: Sequence[int]) -> None:
        """Remove slots with wrong contents from the prefix cache, so that no request finds them."""
        for slot in self._slots(pool, slots):
            key = self.pools[pool].key(slot)
            if pool is Pool.BLOCKS and key is not None:
                self.prefix.forget(slot)
            elif pool is Pool.CHECKPOINTS and key is not None:
                self.prefix.forget_checkpoint(key)

    def readers(self, pool: Pool, slots: Sequence[int]) -> list[str]:
        """Names of the requests that hold one of them."""
        wanted = set(self._slots(pool, slots))
        held = {
            Pool.BLOCKS: lambda request: request.blocks,
            Pool.STATES: lambda request: [request.state],
            Pool.HOST_BLOCKS: lambda request: request.host_blocks,
            Pool.HOST_STATES: lambda request: [request.host_state],
            Pool.CHECKPOINTS: lambda request: [],
        }[pool]
        return [request.name for request in self.requests if wanted.intersection(held(request))]

    def _slots(self, pool: Pool, slots: Sequence[int]) -> list[int]:
        """Slots that a pool has; TypeError or ValueError for others."""
        require("pool", pool, Pool)
        return numbers("slots", slots, self.pools[pool].first + self.pools[pool].slots)

    def check(self) -> None:
        """InvariantBroken where the books contradict themselves."""
        invariants.check(self.layout, self.requests, self.pools)

    def events(self) -> list[KVEvent]:
        """Return changes of the prefix cache since the last call; needs keep_events."""
        if self.prefix.events is None:
            raise ValueError("no events are kept: pass Manager(..., keep_events=True)")
        taken, self.prefix.events = self.prefix.events, []
        return taken

    @property
    def metrics(self) -> Metrics:
        """Return how full every pool is; walks over all requests."""
        host = self.pools[Pool.HOST_BLOCKS], self.pools[Pool.HOST_STATES]
        return Metrics(
            len(self.requests), sum(request.length for request in self.requests),
            self.blocks.held, self.blocks.kept, self.blocks.waiting, self.blocks.available,
            self.states.held, self.states.available, self.prefix.checkpoints.kept,
            host[0].held, host[1].held, self._tickets.in_flight,
            invariants.stranded_bytes(self.layout, self.requests, self.states.held), self.counters,
        )  # fmt: skip
