"""The arrays of a step: types, numbers beyond 32 bits, rows that a long chunk leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.books.manager import Manager
from kvcache.books.requests import Request
from kvcache.books.slot_pool import Sizes
from kvcache.books.step import PLAIN as PLAIN_ARRAYS
from kvcache.books.step import Step
from lab.soak.small_caches import PLAIN, SPARSE

STREAMS = ("main", "index", "packed")
MAPPINGS = (*STREAMS, "window", "overlap", "online")


def two():
    """A step of 11 tokens of one request and 3 of another, after 5 of the first."""
    manager = Manager(SPARSE, Sizes(8, 3))
    first, second = (manager.admit(name, range(20)).request for name in ("first", "second"))
    manager.append({first: range(5)})
    return manager.append({first: range(11), second: range(3)})


def test_what_the_arrays_say():
    step = two()
    first, second = step.requests
    assert step.starts.tolist() == [5, 0]
    assert step.lengths.tolist() == [16, 3]
    assert step.cu_tokens.tolist() == [0, 11, 14]
    assert step.positions.tolist() == [*range(5, 16), *range(3)]
    assert step.owners.tolist() == [0] * 11 + [1] * 3
    assert step.longest == 11
    assert step.block_tables.tolist() == [list(first.blocks), [second.blocks[0], 0]]
    assert step.state_slots.tolist() == [first.state, second.state]
    assert step.entries("main").tolist() == [8, 1]
    assert step.entries("packed").tolist() == [2, 0]


def test_entries_are_written_by_the_token_that_completes_them():
    step = two()
    first, second = (list(request.blocks) for request in step.requests)
    # Four entries to a block; tokens 5, 7, .. 15 complete entries 2 .. 7 of the first request.
    ends = [first[0] * 4 + 2, first[0] * 4 + 3, *(first[1] * 4 + row for row in range(4))]
    main = np.full(14, -1)
    main[0:11:2] = ends
    main[12] = second[0] * 4
    assert step.rows_of("main").tolist() == main.tolist()
    packed = np.full(14, -1)
    packed[[2, 10]] = first
    assert step.rows_of("packed").tolist() == packed.tolist()
    for name in STREAMS:
        assert step.ends_of(name).tolist() == np.flatnonzero(step.rows_of(name) >= 0).tolist()


def test_of_a_chunk_that_is_longer_than_a_ring_the_last_tokens_have_rows():
    step = two()
    rows, (first, second) = 7, step.state_slots.tolist()  # 5 and two more for three drafts
    window = [-1] * 4 + [first * rows + x % rows for x in range(9, 16)]
    window += [second * rows + x for x in range(3)]
    assert step.rows_of("window").tolist() == window
    assert (step.rows_of("online") >= 0).sum() == 4 + 3
    assert (step.rows_of("overlap") >= 0).sum() == 6 + 3


def test_slot_mappings_go_beyond_32_bits():
    """Pools of V4-Pro have more bytes than 2^32, those of other models more rows."""
    requests = (Request("far", b"", 0),)
    step = Step(
        layout=SPARSE,
        requests=requests,
        starts=np.array([0], np.int32),
        lengths=np.array([8], np.int32),
        state_slots=np.array([2_000_000_000], np.int32),
        block_tables=np.array([[2_000_000_000]], np.int32),
    )
    assert step.rows_of("main").max() == 4 * 2_000_000_000 + 3
    assert step.rows_of("window").max() == 7 * 2_000_000_000 + 6


def test_tensors_on_the_cpu():
    step = two()
    tensors = step.tensors("cpu")
    mappings = {f"rows_of.{name}" for name in MAPPINGS}
    assert set(tensors) == {*PLAIN_ARRAYS, *mappings, *(f"ends_of.{name}" for name in STREAMS)}
    wide = {"positions", *mappings}
    for name, tensor in tensors.items():
        kind, _, of = name.partition(".")
        array = getattr(step, kind)(of) if of else getattr(step, kind)
        assert tensor.tolist() == array.tolist()
        assert str(tensor.dtype) == ("torch.int64" if name in wide else "torch.int32"), name


def test_without_states():
    manager = Manager(PLAIN, Sizes(8))
    request = manager.admit("one", [1, 2]).request
    step = manager.append({request: [1, 2]})
    assert step.state_slots.tolist() == [-1]
    with pytest.raises(KeyError, match="'window': the layout plain has"):
        step.rows_of("window")


def test_an_empty_step():
    step = Manager(PLAIN, Sizes(8)).append({})
    assert step.positions.size == step.rows_of("keys").size == 0
    assert step.cu_tokens.tolist() == [0]
    assert step.longest == step.ends_of("keys").size == 0
    assert (step.copies, step.after) == ((), ())


def test_a_request_remembers_all_of_its_tokens():
    manager = Manager(PLAIN, Sizes(400))
    request = manager.admit("long", [1]).request
    for begin in range(0, 1500, 250):
        manager.append({request: range(begin, begin + 250)})
    assert request.tokens.tolist() == list(range(1500))
    manager.rollback(request, 700)
    manager.append({request: [5] * 800})
    assert request.tokens.tolist() == [*range(800), *[5] * 800]
    manager.check()


def test_stranded_bytes_are_those_of_slots_in_use_without_a_row():
    manager = Manager(SPARSE, Sizes(8, 3))
    one = manager.admit("one", range(9)).request
    manager.append({one: range(9)})
    # One token of its second block is present, which completes no entry; a twin shares both.
    of_state = SPARSE.state_bytes - SPARSE.state_payload
    of_blocks = 2 * SPARSE.block_bytes - SPARSE.block_payload
    assert manager.metrics.stranded_bytes == of_blocks + of_state
    manager.fork(one, "two")
    assert manager.metrics.stranded_bytes == of_blocks + 2 * of_state
    manager.free(one)
    manager.append({next(iter(manager.requests)): [1]})
    of_blocks -= 2 * SPARSE.find("main").record.bytes + SPARSE.find("index").record.bytes
    assert manager.metrics.stranded_bytes == of_blocks + of_state
