"""Invariants of a manager's bookkeeping between calls, and bytes that its slots waste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from kvcache.books.errors import InvariantBroken
from kvcache.books.prefix import chained, seed
from kvcache.books.requests import Request
from kvcache.books.slot_pool import SlotPool
from kvcache.books.work import Pool
from kvcache.layouts.layout import Layout


def check(layout: Layout, requests: Collection[Request], pools: Mapping[Pool, SlotPool]) -> None:
    """InvariantBroken, saying which, unless all of them hold; time grows with the whole cache."""
    for request in requests:
        _check_request(layout, request, pools[Pool.BLOCKS])
    expected: dict[Pool, Counter[int]] = {pool: Counter() for pool in Pool}
    for request in requests:
        expected[Pool.BLOCKS].update(request.blocks)
        expected[Pool.HOST_BLOCKS].update(request.host_blocks)
        expected[Pool.STATES].update([request.state] if request.state >= 0 else [])
        expected[Pool.HOST_STATES].update([request.host_state] if request.host_state >= 0 else [])
        expected[Pool.CHECKPOINTS].update(each.slot for each in request.nameless)
    for pool, slots in pools.items():
        slots.check(dict(expected[pool]))
    blocks, checkpoints = pools[Pool.BLOCKS], pools[Pool.CHECKPOINTS]
    without = set(checkpoints.registered()) - set(blocks.registered())
    if without:
        raise InvariantBroken(f"{len(without)} checkpoints without the block before them")


def _check_request(layout: Layout, request: Request, slots: SlotPool) -> None:
    size = layout.block_tokens
    places = {
        "blocks": (len(request.blocks), layout.blocks(request.length) * request.resident),
        "host blocks": (
            len(request.host_blocks), layout.blocks(request.length) * (not request.resident)
        ),
        "states": (request.state >= 0, layout.has_state and request.resident),
        "host states": (request.host_state >= 0, layout.has_state and not request.resident),
        "digests": (len(request.digests), request.known // size),
        "checkpoints that wait": (
            len(request.nameless), sum(each.boundary > request.known for each in request.nameless)
        ),
        "freed": (request.freed, False),
        "distinct blocks": (len(set(request.blocks)), len(request.blocks)),
    }  # fmt: skip
    wrong = {name: pair for name, pair in places.items() if pair[0] != pair[1]}
    if wrong:
        raise InvariantBroken(f"request {request.name!r}: (has, should have) {wrong}")
    floor = request.floor if layout.has_state else 0
    if not floor <= request.length <= request.furthest:
        raise InvariantBroken(
            f"request {request.name!r}: length {request.length} not between floor {floor} "
            f"and furthest {request.furthest}"
        )
    digest = seed(request.salt)
    for index, (has, block) in enumerate(zip(request.digests, request.blocks, strict=False)):
        digest = chained(digest, request.tokens[index * size : (index + 1) * size])
        if has != digest or slots.key(block) not in (None, digest):
            raise InvariantBroken(f"request {request.name!r}: block {block} has other contents")


def stranded_bytes(layout: Layout, requests: Collection[Request], states: int) -> int:
    """Bytes of held blocks, and of so many held states, that hold no row of a request."""
    filled: dict[int, int] = {}
    for request in requests:
        for index, block in enumerate(request.blocks):
            tokens = min(layout.block_tokens, request.length - index * layout.block_tokens)
            filled[block] = max(filled.get(block, 0), tokens)
    payload = sum(layout.payload(tokens) for tokens in filled.values())
    of_states = states * (layout.state_bytes - layout.state_payload)
    return len(filled) * layout.block_bytes - payload + of_states
