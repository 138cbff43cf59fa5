"""Capacity of so many bytes of GPU memory, and bytes that no request uses. Arithmetic alone.

Blocks and states live in separate pools: memory given to one cannot be used by the other. `plan`
divides the memory so that as many requests as possible fit at one context length (or a mix of
lengths). `Plan.fit` returns how many requests of other lengths fit in that division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kernelkit.plan.dtypes import BF16_BYTES
from kvcache.books.manager import RESERVED
from kvcache.books.slot_pool import Sizes
from kvcache.checks import require, share, whole
from kvcache.layouts.layout import GUARD_BYTES, Layout, Tail

MAX_BYTES = 1 << 60  # of memory, and of anything that is counted in it
# Elements of the entries that attention reads as BF16 from a workspace, where they are expanded
# first. Keys of an indexer are scored as they are, plain keys and values are read in place.
EXPANDED = MappingProxyType({"fp8_584": 512, "fp8_656": 576, "fp8_528": 512, "fp4_288": 512})

# Causes of stranded bytes, in the order of tables.
LAST_BLOCK = "last block"  # entries that it does not have yet
PAGE_PADDING = "page padding"
SLOT_PADDING = "slot padding"  # between pages, and behind the last one
GUARDS = "guards"
RING_EMPTY = "ring, not yet filled"
RING_SPARE = "ring, spare rows"  # written, and only needed to take a draft back
TAIL_IDLE = "tail, nothing pending"
CAUSES = (LAST_BLOCK, PAGE_PADDING, SLOT_PADDING, GUARDS, RING_EMPTY, RING_SPARE, TAIL_IDLE)


@dataclass(frozen=True)
class Usage:
    """Memory of a request with `tokens` tokens.

    live: bytes that it still needs.
    stranded: bytes by cause; with `live` they are all bytes of its slots.
    """

    tokens: int
    blocks: int
    block_bytes: int
    state_bytes: int
    live: int
    stranded: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of its slots."""
        return self.block_bytes + self.state_bytes

    @property
    def stranded_bytes(self) -> int:
        """Bytes stranded by all causes."""
        return sum(self.stranded.values())

    @property
    def stranded_share(self) -> float:
        """Stranded fraction of the total."""
        return self.stranded_bytes / self.total if self.total else 0.0


def usage(layout: Layout, tokens: int) -> Usage:
    """Return the memory of a request of `tokens` tokens, at least 0: blocks, and bytes by cause.

    Raises:
        ValueError: for a negative number.
    """
    require("layout", layout, Layout)
    tokens = whole("tokens", tokens, None, MAX_BYTES)
    if tokens < 0:
        raise ValueError(f"a request of {tokens} tokens, at least 0")
    blocks, draft = layout.blocks(tokens), layout.draft
    stranded = dict.fromkeys(CAUSES, 0)
    stranded[LAST_BLOCK] = blocks * layout.block_payload - layout.payload(tokens)
    pages = sum(region.bytes for region in layout.block_regions)
    stranded[PAGE_PADDING] = blocks * (pages - layout.block_payload)
    stranded[SLOT_PADDING] = blocks * (layout.block_bytes - pages - GUARD_BYTES)
    stranded[GUARDS] = blocks * GUARD_BYTES
    live = layout.payload(tokens)
    for ring in layout.rings:
        rows, row_bytes = ring.rows(draft), ring.copies * ring.record.bytes
        needed, written = min(tokens, ring.window - 1), min(tokens, rows)
        live += needed * row_bytes
        stranded[RING_EMPTY] += (rows - written) * row_bytes
        stranded[RING_SPARE] += (written - needed) * row_bytes
    for tail in layout.tails:
        pending = tail.copies * sum(size for _, size in tail.live(tokens, draft))
        live += pending
        stranded[TAIL_IDLE] += tail.copies * tail.page_bytes(draft) - pending
    if layout.has_state:
        pages = sum(region.bytes for region in layout.state_regions)
        stranded[PAGE_PADDING] += pages - layout.state_payload
        stranded[SLOT_PADDING] += layout.state_bytes - pages - GUARD_BYTES
        stranded[GUARDS] += GUARD_BYTES
    in_blocks = blocks * layout.block_bytes
    return Usage(tokens, blocks, in_blocks, layout.state_bytes, live, MappingProxyType(stranded))


def workspace_bytes(layout: Layout, rows: int) -> int:
    """Bytes of `rows` entries expanded to BF16; 0 if attention reads the pages as they are."""
    require("layout", layout, Layout)
    rows = whole("rows", rows, None)
    if rows < 0:
        raise ValueError(f"a workspace of {rows} rows, at least 0")
    records = [array.record.name for array in layout.arrays if not isinstance(array, Tail)]
    return rows * BF16_BYTES * max((EXPANDED.get(name, 0) for name in records), default=0)


def reserved_bytes(layout: Layout) -> int:
    """Bytes of the slots that no request gets: the null block and the clean state."""
    return RESERVED * (layout.block_bytes + layout.state_bytes)


@dataclass(frozen=True)
class Mix:
    """Requests by their length: of every `sum(weights)` requests `weights[i]` have `tokens[i]`."""

    tokens: tuple[int, ...]
    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "weights"):
            require(name, getattr(self, name), tuple)
            given = enumerate(getattr(self, name))
            plain = tuple(whole(f"{name}[{at}]", number, None, MAX_BYTES) for at, number in given)
            object.__setattr__(self, name, plain)
        if not self.weights:
            object.__setattr__(self, "weights", (1,) * len(self.tokens))
        if not self.tokens or len(self.weights) != len(self.tokens):
            raise ValueError(
                f"{len(self.tokens)} context lengths with {len(self.weights)} weights: at least "
                "one, and as many of both"
            )
        if min(self.tokens) < 1 or min(self.weights) < 1:
            raise ValueError(
                f"context lengths {self.tokens}, weights {self.weights}: all at least 1"
            )

    def blocks(self, layout: Layout, requests: int) -> int:
        """Number of blocks of so many requests."""
        return -(-requests * self._turn(layout) // sum(self.weights))

    def requests(self, layout: Layout, blocks: int) -> int:
        """Number of requests for which so many blocks are enough."""
        return blocks * sum(self.weights) // self._turn(layout)

    def _turn(self, layout: Layout) -> int:
        """Blocks of `sum(weights)` requests."""
        pairs = zip(self.tokens, self.weights, strict=True)
        return sum(weight * layout.blocks(tokens) for tokens, weight in pairs)


@dataclass(frozen=True)
class Fit:
    """Number of requests of `tokens` tokens that fit in a plan's pools.

    limited_by: "blocks" or "states", with `why` in a sentence.
    best: number that would fit if the memory were divided for them.
    """

    tokens: int
    requests: int
    limited_by: str
    why: str
    idle_blocks: int
    idle_states: int
    best: int
    usage: Usage


@dataclass(frozen=True)
class Plan:
    """The memory in bytes and how the pools share it, in slots.

    requests: number of requests of the mix that it was made for.
    limited_by: "memory", "batch", "blocks" or "states".
    """

    layout: Layout
    mix: Mix
    memory: int
    workspace: int
    blocks: int
    states: int
    checkpoints: int
    requests: int
    limited_by: str
    why: str

    @property
    def shares(self) -> Mapping[str, int]:
        """Bytes by what they are for; they add up to the memory."""
        layout = self.layout
        parts = {
            "blocks": self.blocks * layout.block_bytes,
            "states": self.states * layout.state_bytes,
            "checkpoints": self.checkpoints * layout.checkpoint_bytes,
            "workspace": self.workspace,
            "reserved": reserved_bytes(layout),
        }
        return {**parts, "left over": self.memory - sum(parts.values())}

    @property
    def sizes(self) -> Sizes:
        """Sizes of the pools, for a `Cache`."""
        return Sizes(self.blocks, self.states, self.checkpoints)

    @property
    def tokens(self) -> int:
        """Number of tokens that the blocks have room for."""
        return self.blocks * self.layout.block_tokens

    def fit(self, tokens: int) -> Fit:
        """Requests of another length in the pools as they are divided."""
        tokens = whole("tokens", tokens, None, MAX_BYTES)
        if tokens < 1:
            raise ValueError(f"a request of {tokens} tokens, at least 1")
        layout, held = self.layout, usage(self.layout, tokens)
        by_blocks = self.blocks // held.blocks
        requests = min(by_blocks, self.states) if layout.has_state else by_blocks
        limited_by = "states" if layout.has_state and self.states <= by_blocks else "blocks"
        if limited_by == "states":
            why = f"{self.states:,} states, while blocks are there for {by_blocks:,} requests"
        else:
            why = f"a request has {held.blocks:,} of {self.blocks:,} blocks"
        best = most_requests(layout, self.divided, Mix((tokens,)))
        return Fit(
            tokens,
            requests,
            limited_by,
            why,
            self.blocks - requests * held.blocks,
            self.states - requests if layout.has_state else 0,
            best,
            held,
        )

    def longest(self, requests: int = 1) -> int:
        """Tokens that so many requests can have each, all alike; 0 where there are no states."""
        requests = whole("requests", requests, None)
        if requests < 1:
            raise ValueError(f"{requests} requests, at least 1")
        if self.layout.has_state and requests > self.states:
            return 0
        return self.blocks // requests * self.layout.block_tokens

    @property
    def divided(self) -> int:
        """Bytes that blocks and states have among them."""
        return sum(self.shares[part] for part in ("blocks", "states", "left over"))


def plan(
    layout: Layout,
    memory: int,
    mix: Mix,
    *,
    batch: int = 0,
    states: int = 0,
    checkpoints: int = 0,
    checkpoint_share: float = 0.0,
    workspace: int = 0,
) -> Plan:
    """Divide `memory` bytes among the pools so that as many requests of the mix fit as can.

    Args:
        batch: no more requests than that, 0 for as many as fit; what is left goes to blocks, where
            a prefix cache uses it.
        states: this many instead, 0 for one per request.
        checkpoints, checkpoint_share: slots for them, or their share of the memory.
        workspace: bytes set aside, see `workspace_bytes`.

    Raises:
        ValueError: where not even one request fits, with what it needs.
    """
    require("layout", layout, Layout)
    require("mix", mix, Mix)
    sizes = {"memory": memory, "batch": batch, "states": states, "workspace": workspace}
    sizes = {name: whole(name, size, None, MAX_BYTES) for name, size in sizes.items()}
    memory, batch, states, workspace = sizes.values()
    checkpoints = whole("checkpoints", checkpoints, None, MAX_BYTES)
    share("checkpoint_share", checkpoint_share)
    checkpoints = _checkpoints(layout, memory, checkpoints, checkpoint_share)
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} {size}, at least 0")
    pools = memory - workspace - checkpoints * layout.checkpoint_bytes - reserved_bytes(layout)
    most = most_requests(layout, pools, mix)
    if states and not layout.has_state:
        raise ValueError(f"{states} states, but requests of {layout.name} have none")
    if states:
        blocks = max(0, pools - states * layout.state_bytes) // layout.block_bytes
        most = min(mix.requests(layout, blocks), states)
    if not most:
        raise ValueError(_nothing_fits(layout, memory, pools, mix, max(states, 1)))
    requests = min(most, batch) if batch else most
    slots = (states or requests) if layout.has_state else 0
    blocks = (pools - slots * layout.state_bytes) // layout.block_bytes
    limited_by, why = _limit(layout, mix, requests, blocks, slots, batch)
    return Plan(
        layout, mix, memory, workspace, blocks, slots, checkpoints, requests, limited_by, why
    )


def most_requests(layout: Layout, pools: int, mix: Mix) -> int:
    """Largest number of requests that fit in `pools` bytes, split best over blocks and states."""
    weight = sum(mix.weights)
    per_turn = weight * layout.state_bytes + mix.blocks(layout, weight) * layout.block_bytes
    requests = max(0, pools) * weight // per_turn
    while requests and _bytes(layout, mix, requests) > pools:  # a part of a block counts as one
        requests -= 1
    return requests


def _bytes(layout: Layout, mix: Mix, requests: int) -> int:
    return requests * layout.state_bytes + mix.blocks(layout, requests) * layout.block_bytes


def _limit(
    layout: Layout, mix: Mix, requests: int, blocks: int, states: int, batch: int
) -> tuple[str, str]:
    """Return the limit that keeps one more request out, and a sentence about the rest."""
    more = mix.blocks(layout, requests + 1)
    free = blocks - mix.blocks(layout, requests)
    if batch and requests == batch:
        return "batch", f"{free:,} blocks stay free for a prefix cache"
    if not layout.has_state:
        return "blocks", f"one more request would need {more:,} blocks, there are {blocks:,}"
    if states > requests:
        return "blocks", f"{requests + 1:,} requests would need {more:,} blocks, not {blocks:,}"
    if more <= blocks:
        return "states", f"all {states:,} states are taken, while {free:,} blocks stay free"
    one = layout.state_bytes + (more - mix.blocks(layout, requests)) * layout.block_bytes
    return "memory", (
        f"one more request would need {one:,} bytes, a state of {layout.state_bytes:,} among them; "
        f"{free * layout.block_bytes:,} are free"
    )


def _checkpoints(layout: Layout, memory: int, count: int, share: float) -> int:
    if count < 0 or not 0 <= share < 1 or (count and share):
        raise ValueError(
            f"checkpoints {count}, checkpoint_share {share}: one of them, at least 0 and a share "
            "below 1"
        )
    if (count or share) and not layout.has_state:
        raise ValueError(f"checkpoints of states, but requests of {layout.name} have none")
    return int(memory * share) // layout.checkpoint_bytes if share else count


def _nothing_fits(layout: Layout, memory: int, pools: int, mix: Mix, states: int) -> str:
    longest = max(mix.tokens)
    in_states = states * layout.state_bytes
    needed = in_states + layout.blocks(longest) * layout.block_bytes
    room = (pools - in_states) // layout.block_bytes * layout.block_tokens
    fits = f"{room:,} tokens would fit" if room > 0 else "not even one block would fit"
    return (
        f"no request of {longest:,} tokens fits: it needs {needed:,} bytes, states included, and "
        f"of {memory:,} bytes {max(0, pools):,} are for blocks and states; {fits}"
    )
