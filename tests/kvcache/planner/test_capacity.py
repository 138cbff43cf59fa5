"""The planner's arithmetic: every byte of memory accounted for, and every byte of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.layouts import presets
from kvcache.layouts.layout import Layout, Tail
from kvcache.layouts.models import Options, deepseek_v4, gqa
from kvcache.memory.storage import Storage
from kvcache.planner import capacity
from kvcache.planner.capacity import (
    CAUSES,
    Mix,
    most_requests,
    plan,
    reserved_bytes,
    usage,
    workspace_bytes,
)
from kvcache.planner.traffic import step_traffic
from tests.kvcache.layouts.any_layout import layouts

# ---- The planner's arithmetic: every byte accounted for, and the best division of the memory

QUICK = settings(max_examples=60, deadline=None)
PRO = presets.deepseek_v4_pro()
GQA = gqa(2, 1, 64)  # no state
GB = 10**9


@QUICK
@given(layouts(), st.integers(0, 300))
def test_live_and_stranded_bytes_are_all_bytes(layout, tokens):
    held = usage(layout, tokens)
    assert tuple(held.stranded) == CAUSES
    assert min(held.stranded.values()) >= 0
    assert held.live + held.stranded_bytes == held.total
    assert held.total == layout.blocks(tokens) * layout.block_bytes + layout.state_bytes
    assert held.stranded_share == (held.stranded_bytes / held.total if held.total else 0)


@QUICK
@given(layouts(), st.integers(0, 200))
def test_live_bytes_are_those_that_later_tokens_read(layout, tokens):
    arrays = (*layout.rings, *layout.tails)
    state = sum(a.copies * sum(size for _, size in a.live(tokens, layout.draft)) for a in arrays)
    assert usage(layout, tokens).live == layout.payload(tokens) + state


def test_stranded_bytes_by_hand():
    """129 tokens of V4-Pro with a draft of 3: two blocks, the second with one token."""
    held = usage(presets.deepseek_v4_pro(draft=3), 129)
    assert held.blocks == 2
    assert held.stranded["last block"] == 644_024  # no entry is complete in it
    # In a block 30 CSA pages of 18,688 bytes in 19,008, the HCA page of 31 * 584 in 18,432 ...
    assert PRO.block_regions[-1].bytes == 18_432
    blocks = 2 * (30 * 320 + 18_432 - 31 * 584)
    # ... and 61 rings of 130 rows: 75,920 bytes in 76,032.
    assert held.stranded["page padding"] == blocks + 61 * 112
    assert held.stranded["ring, not yet filled"] == 61 * 584
    assert held.stranded["ring, spare rows"] == 61 * 2 * 584
    # 31 HCA tails of 130 rows with one pending; CSA: 5 of 10 rows, 4 of them with their first half.
    hca, csa, index = 31 * 2 * 2048, 30 * 2 * 4096, 30 * 2 * 1024
    assert held.stranded["tail, nothing pending"] == hca * 129 + (csa + index) * (10 - 3)
    assert held.stranded["guards"] == 3 * 64


def test_workspaces_are_for_quantised_entries_alone():
    assert workspace_bytes(PRO, 32768) == 32768 * 1024
    assert workspace_bytes(presets.deepseek_v32(), 10) == 10 * 2 * 576
    assert workspace_bytes(presets.deepseek_v4_pro(record="bf16"), 32768) == 0
    assert workspace_bytes(GQA, 32768) == 0


def everything(made):
    """Return the bytes by purpose, which add up to the memory."""
    assert sum(made.shares.values()) == made.memory
    assert min(made.shares.values()) >= 0
    return made.shares


@QUICK
@given(
    layouts(),
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 5)), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(0, 64),
)
def test_no_division_of_the_memory_has_room_for_more(layout, pairs, requests, sixteenths):
    """Given the memory for `requests`, and slightly more, no division has room for one more
    request."""
    mix = Mix(tuple(t for t, _ in pairs), tuple(w for _, w in pairs))

    def needed(count):
        return count * layout.state_bytes + mix.blocks(layout, count) * layout.block_bytes

    memory = needed(requests) + reserved_bytes(layout) + layout.block_bytes * sixteenths // 16
    made = plan(layout, memory, mix)
    everything(made)
    assert made.requests >= requests
    divided = memory - reserved_bytes(layout)
    assert made.divided == divided
    assert needed(made.requests) <= divided < needed(made.requests + 1)
    assert made.blocks >= mix.blocks(layout, made.requests)
    assert made.states == (made.requests if layout.has_state else 0)
    assert made.shares["left over"] < layout.block_bytes
    assert made.limited_by in ("memory", "blocks", "states")


@settings(max_examples=20, deadline=None)
@given(layouts(), st.integers(0, 3), st.integers(0, 2000))
def test_the_pools_of_a_cache_take_what_the_plan_says(layout, checkpoints, workspace):
    checkpoints *= layout.has_state
    memory = 10**6 + workspace + checkpoints * layout.checkpoint_bytes
    made = plan(layout, memory, Mix((16,)), checkpoints=checkpoints, workspace=workspace)
    pools = Storage(layout, made.sizes, torch.device("cpu")).pools
    taken = sum(pool.numel() for pool in pools.values())
    assert taken + workspace + everything(made)["left over"] == memory


def test_a_mix_needs_as_many_blocks_as_its_requests():
    mix = Mix((100, 1000), (3, 1))
    assert mix.blocks(PRO, 4) == 3 * 1 + 8
    assert mix.blocks(PRO, 8) == 22
    assert mix.blocks(PRO, 1) == 3  # 2.75 on average
    assert [mix.requests(PRO, blocks) for blocks in (2, 3, 10, 11)] == [0, 1, 3, 4]


def test_other_lengths_in_a_division():
    made = plan(PRO, 81 * GB, Mix((65536,)), checkpoint_share=0.05, workspace=2**25)
    shares = everything(made)
    assert shares["workspace"] == 2**25
    assert made.checkpoints == 81 * GB * 5 // 100 // PRO.checkpoint_bytes
    same, short, long = (made.fit(tokens) for tokens in (65536, 1024, 2**20))
    assert same.requests == same.best == made.requests
    assert (short.limited_by, short.requests) == ("states", made.states)
    assert short.best == most_requests(PRO, made.divided, Mix((1024,))) > 10 * short.requests
    assert short.idle_blocks == made.blocks - 8 * made.states
    assert (long.limited_by, long.requests) == ("blocks", made.blocks // 8192)
    assert long.idle_states == made.states - long.requests
    assert "of " + f"{made.blocks:,} blocks" in long.why


def test_the_longest_context():
    made = plan(PRO, 20 * GB, Mix((8192,)), batch=4)
    assert made.longest() == made.blocks * 128 == made.tokens
    assert made.longest(3) == made.blocks // 3 * 128
    assert made.fit(made.longest(3)).requests == 3
    assert made.fit(made.longest(3) + 128).requests == 2
    assert made.longest(5) == 0  # there are four states
    assert plan(GQA, GB, Mix((64,))).longest(5) > 0


def test_what_limits():
    memory = 21 * PRO.state_bytes + 206 * PRO.block_bytes  # one of each is reserved
    exact = plan(PRO, memory, Mix((1280,)))
    assert (exact.requests, exact.limited_by) == (20, "memory")
    assert f"one more request would need {PRO.state_bytes + 10 * PRO.block_bytes:,}" in exact.why
    capped = plan(PRO, memory, Mix((1280,)), batch=3)
    assert (capped.requests, capped.states, capped.limited_by) == (3, 3, "batch")
    assert capped.blocks == (memory - 4 * PRO.state_bytes) // PRO.block_bytes - 1
    few = plan(PRO, memory, Mix((1280,)), states=5)
    assert (few.requests, few.limited_by) == (5, "states")
    many = plan(PRO, memory, Mix((1280,)), states=22)
    assert (many.requests, many.states, many.limited_by) == (13, 22, "blocks")
    paged = plan(GQA, 11 * GQA.block_bytes, Mix((300,)))
    assert (paged.requests, paged.states, paged.limited_by) == (3, 0, "blocks")
    assert paged.why == "one more request would need 12 blocks, there are 10"


def test_a_batch_that_does_not_fit_is_as_many_as_fit():
    assert plan(PRO, 5 * GB, Mix((8192,)), batch=10**6).requests < 100


@pytest.mark.parametrize(("make", "words"), [
    (lambda: usage(PRO, -1), "a request of -1 tokens, at least 0"),
    (lambda: workspace_bytes(PRO, -1), "a workspace of -1 rows"),
    (lambda: Mix(()), "0 context lengths with 0 weights"),
    (lambda: Mix((5,), (1, 2)), "1 context lengths with 2 weights"),
    (lambda: Mix((5, 0)), r"lengths \(5, 0\)"),
    (lambda: Mix((5,), (0,)), r"weights \(0,\)"),
    (lambda: plan(PRO, -1, Mix((1,))), "memory -1, at least 0"),
    (lambda: plan(PRO, GB, Mix((1,)), checkpoints=-1), "checkpoints -1"),
    (lambda: plan(PRO, GB, Mix((1,)), checkpoint_share=1.0), "checkpoint_share 1.0"),
    (lambda: plan(PRO, GB, Mix((1,)), checkpoints=1, checkpoint_share=0.1), "one of them"),
    (lambda: plan(GQA, GB, Mix((1,)), checkpoints=1), "requests of gqa have none"),
    (lambda: plan(GQA, GB, Mix((1,)), states=1), "1 states, but requests of gqa have none"),
    (lambda: plan(PRO, GB, Mix((1,))).fit(0), "a request of 0 tokens, at least 1"),
    (lambda: plan(PRO, GB, Mix((1,))).longest(0), "0 requests, at least 1"),
])  # fmt: skip
def test_refusals_name_value_and_limit(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_where_nothing_fits_the_message_says_what_would():
    memory = 2 * PRO.state_bytes + 11 * PRO.block_bytes
    needed = PRO.state_bytes + 11 * PRO.block_bytes
    with pytest.raises(ValueError, match=f"1,281 tokens fits: it needs {needed:,} bytes.*1,280 "):
        plan(PRO, memory, Mix((1281,)))
    assert plan(PRO, memory, Mix((1280,))).requests == 1
    with pytest.raises(ValueError, match="0 are for blocks and states; not even one block"):
        plan(PRO, GB, Mix((1,)), workspace=GB)
    with pytest.raises(ValueError, match="not even one block would fit"):
        plan(PRO, GB, Mix((1,)), states=1000)


def test_expanded_records_are_known_by_their_names():
    """gather expands every quantised record of a preset, except an indexer's."""
    quantised = set()
    for name in presets.CONFIGS:
        for record in ("fp8", "fp8-index8", "fp4"):
            try:
                layout: Layout = presets.preset(name, record=record)
            except ValueError:
                continue
            arrays = [a for a in (*layout.streams, *layout.rings) if a.name[:5] != "index"]
            quantised |= {a.record.name for a in arrays if a.record.name[0] == "f"}
    assert quantised == capacity.EXPANDED.keys()


# ---- Bytes of a step: counted by hand for DeepSeek-V4-Pro, and row by row for any step

CONTEXT = 1 << 16


def by_name(*given, **options):
    return {part.name: part for part in step_traffic(*given, **options)}


def test_a_decode_step_of_v4_pro():
    """After 64k tokens, the keys of the indexer are most of what is read."""
    parts = by_name(PRO, [(CONTEXT - 1, CONTEXT)], selected={"csa": 1024})
    assert parts["swa"].read == 61 * 128 * 584
    assert parts["swa"].written == 61 * 584
    assert parts["index"].read == 30 * CONTEXT // 4 * 68
    assert parts["csa"].read == 30 * 1024 * 584
    assert parts["hca"].read == 31 * CONTEXT // 128 * 584
    assert [parts[name].written for name in ("csa", "index", "hca")] == [
        30 * 584,
        30 * 68,
        31 * 584,
    ]
    # The token completes a window of each kind; its own rows come from its projections.
    assert parts["csa_tail"].read == 30 * 7 * 512 * 8
    assert parts["hca_tail"].read == 31 * 127 * 512 * 8
    assert parts["hca_tail"].written == 31 * 512 * 8
    assert parts["index"].seconds(1e12) == parts["index"].bytes / 1e12


def test_what_is_refused():
    with pytest.raises(ValueError, match="from 5 to 4 tokens"):
        step_traffic(PRO, [(5, 4)])
    with pytest.raises(ValueError, match=r"\['main'\]: deepseek-v4-pro has no such stream"):
        step_traffic(PRO, [(4, 5)], {"main": 3})


def test_no_tokens_no_bytes():
    assert not any(part.bytes for part in step_traffic(PRO, [(300, 300)], {"csa": 4}))
    assert not any(part.bytes for part in step_traffic(PRO, []))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 700), st.integers(0, 300), st.booleans(), st.integers(0, 4))
def test_tails_row_by_row(start, tokens, online, draft):
    """Completed windows read each half row as often as it is needed."""
    options = Options(draft=draft, online_hca=online)
    layout, length = deepseek_v4("v4", [4, 128], 128, options), start + tokens
    parts = by_name(layout, [(start, length)])
    for tail in layout.tails:
        assert parts[tail.name].read == sum(_halves(tail, start, length)) * tail.width * 4
        rows = min(tokens, tail.rows(draft)) * (3 if tail.online else 2 * tail.overlap)
        assert parts[tail.name].written == rows * tail.width * 4


def _halves(tail: Tail, start: int, length: int):
    """Yield the number of fp32 rows of `width` that the step reads."""
    if tail.online:
        yield 3 * (start % tail.ratio > 0 and length > start)
        return
    for position in range(start, length):
        if (position + 1) % tail.ratio == 0:
            first = position + 1 - tail.overlap * tail.ratio
            yield from (2 for row in range(first, position + 1) if 0 <= row < start)
