"""Expected bookkeeping of a manager, derived independently: events, hits, room, sharing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcache.books.errors import PoolExhausted
from kvcache.books.manager import Manager
from kvcache.books.metrics import (
    BlockRemoved,
    BlockStored,
    CheckpointRemoved,
    CheckpointStored,
    Cleared,
)
from kvcache.books.prefix import chained, seed
from kvcache.books.requests import Request
from kvcache.books.step import Step
from kvcache.books.work import Copy, Pool
from lab.soak.machine import Holder, Machine
from lab.soak.small_caches import History, Past


def require(true: bool, what: str) -> None:
    """AssertionError where something does not hold."""
    if not true:
        raise AssertionError(what)


def same(what: str, found: object, wanted: object) -> None:
    """AssertionError where two things differ, which says both."""
    if found != wanted:
        raise AssertionError(f"{what}: {found}, but it should be {wanted}")


class Ledger:
    """Follows the events of a manager, and compares what it says with what they come to."""

    def __init__(self, manager: Manager, machine: Machine, salts: Iterable[bytes]) -> None:
        self.manager, self.machine, self.layout = manager, machine, manager.layout
        self.blocks: set[bytes] = set()
        self.checkpoints: set[bytes] = set()
        self.checkpoints_stored = 0  # since the beginning
        self.chains: dict[bytes, Past] = {seed(salt): History(salt) for salt in salts}

    # -- events and hits -----------------------------------------------------------------------

    def replay(self) -> int:
        """Take the new events into account; how many there were."""
        events = self.manager.events()
        for event in events:
            match event:
                case BlockStored(digest, parent, tokens):
                    require(digest not in self.blocks, "a block is stored that is there")
                    require(chained(parent, np.array(tokens)) == digest, "digest of other tokens")
                    require(len(tokens) == self.layout.block_tokens, "a block that is not full")
                    self.blocks.add(digest)
                    if digest not in self.chains:
                        self.chains[digest] = self.chains[parent].followed(tokens)
                case BlockRemoved(digest):
                    self.blocks.remove(digest)
                case CheckpointStored(digest):
                    require(digest not in self.checkpoints, "a checkpoint that is there")
                    self.checkpoints.add(digest)
                    self.checkpoints_stored += 1
                case CheckpointRemoved(digest):
                    self.checkpoints.remove(digest)
                case Cleared():
                    self.blocks.clear()
                    self.checkpoints.clear()
        return len(events)

    def hit(self, prompt: Sequence[int], salt: bytes = b"") -> int:
        """Tokens of a prompt that can be used, by the events so far."""
        return self.found(prompt, salt)[0]

    def found(self, prompt: Sequence[int], salt: bytes = b"") -> tuple[int, int]:
        """Return the usable tokens of a hit, and the tokens in blocks that are present."""
        size, digest, usable, cached = self.layout.block_tokens, seed(salt), 0, 0
        for end in range(size, len(prompt), size):
            digest = chained(digest, np.array(prompt[end - size : end], np.int64))
            if digest not in self.blocks:
                break
            cached = end
            if not self.layout.has_state or digest in self.checkpoints:
                usable = end
        return usable, cached

    # -- room ----------------------------------------------------------------------------------

    def growth(self, request: Request, tokens: int) -> int:
        """The most blocks that appending so many tokens takes."""
        size = self.layout.block_tokens
        new = -(-(request.length + tokens) // size) - len(request.blocks)
        return new + bool(request.length % size)

    def held(self, pool: Pool, requests: Sequence[Request]) -> int:
        """Distinct slots that requests hold."""
        if pool in (Pool.BLOCKS, Pool.HOST_BLOCKS):
            name = "blocks" if pool is Pool.BLOCKS else "host_blocks"
            return len({slot for request in requests for slot in getattr(request, name)})
        name = "state" if pool is Pool.STATES else "host_state"
        return sum(getattr(request, name) >= 0 for request in requests)

    def exhausted(self, error: PoolExhausted, need: int, requests: Sequence[Request]) -> None:
        """The pool cannot give what the call needs, however its slots are counted."""
        pool = next(pool for pool in Pool if pool.value == error.pool)
        total = self.manager.pools[pool].slots
        free = total - self.held(pool, requests)
        need = need if pool in (Pool.BLOCKS, Pool.HOST_BLOCKS) else 1
        require(error.available < error.needed <= need, f"{error}: {need} would do")
        require(not error.held or self.machine.in_flight, f"{error}: nothing is in flight")
        require(need > free - error.held, f"{error}: {free} less {error.held} are there")
        for part in (error.pool, str(error.needed), str(error.available)):
            require(part in str(error), f"no {part} in {error}")

    # -- slots ---------------------------------------------------------------------------------

    def handed_out(self, block: int) -> None:
        """A block that a request did not have before its append."""
        require(1 <= block <= self.manager.sizes.blocks, f"block {block} is none")
        self.machine.hands_out(Pool.BLOCKS, block)

    def writes(self, step: Step, requests: Sequence[Request]) -> None:
        """Nobody else holds a block that a step writes, and nobody finds what it had."""
        size = self.layout.block_tokens
        holders: dict[int, int] = {}
        for request in requests:
            for block in request.blocks:
                holders[block] = holders.get(block, 0) + 1
        for request, start, end in zip(step.requests, step.starts, step.lengths, strict=True):
            written = request.blocks[int(start) // size : -(-int(end) // size)]
            shared = [block for block in written if holders[block] > 1]
            require(not shared, f"{request.name!r} writes blocks {shared} that others hold")

    def snapshot(self, lives: Sequence) -> tuple:
        """Return the state that a failing call must not change; its first element counts new
        events."""
        pools, requests = self.manager.pools, [live.request for live in lives]
        return (
            self.replay(),
            [(r.length, r.floor, r.resident, r.state, tuple(r.blocks)) for r in requests],
            [(r.furthest, r.host_state, tuple(r.host_blocks)) for r in requests],
            len(self.manager.requests),
            [pool.held for pool in pools.values()],
            [pool.available + pool.waiting for pool in pools.values()],
        )

    def compare(self, requests: Sequence[Request]) -> None:
        """Metrics and what can be found, with what requests and events say."""
        manager, metrics = self.manager, self.manager.metrics
        require(set(manager.blocks.registered()) == self.blocks, "other blocks are found")
        checkpoints = manager.pools[Pool.CHECKPOINTS]
        require(set(checkpoints.registered()) == self.checkpoints, "other checkpoints are found")
        said = (
            metrics.requests, metrics.tokens, metrics.blocks_used, metrics.states_used,
            metrics.host_blocks_used, metrics.host_states_used,
        )  # fmt: skip
        pools = (Pool.BLOCKS, Pool.STATES, Pool.HOST_BLOCKS, Pool.HOST_STATES)
        tokens = sum(request.length for request in requests)
        counted = (len(requests), tokens, *(self.held(pool, requests) for pool in pools))
        same("metrics", said, counted)
        under_way = metrics.works_in_flight
        require(under_way >= len(self.machine.in_flight), f"{under_way} works in flight")
        total = metrics.blocks_used + metrics.blocks_waiting + metrics.blocks_available
        same("blocks used, waiting and available", total, manager.sizes.blocks)
        require(metrics.stranded_bytes >= 0, "stranded bytes below 0")
        states = [request.state for request in requests if request.state >= 0]
        require(len(set(states)) == len(states), f"states {states} of two requests")
        self.found_blocks()

    def found_blocks(self) -> None:
        """Whatever a hit could find is what it should be."""
        size, pool = self.layout.block_tokens, self.manager.blocks
        for digest in self.blocks:
            require(len(self.chains[digest]) % size == 0, "a block that is not full is found")
        self.machine.verify_blocks([(pool.find(d), self.chains[d]) for d in self.blocks])

    def deep(self) -> None:
        """Check checkpoints deeply: each is restored to a spare state and compared."""
        if not self.layout.has_state:
            return
        checkpoints, spare = self.manager.pools[Pool.CHECKPOINTS], self.manager.sizes.states + 1
        for digest in self.checkpoints:
            slot, chain = checkpoints.find(digest), self.chains[digest]
            self.machine.pools[Pool.STATES][spare] = 0
            copy = Copy(Pool.CHECKPOINTS, Pool.STATES, slot, spare, len(chain))
            self.machine.copy([copy])
            self.machine.verify_state(Holder("a checkpoint", chain, [], spare))
