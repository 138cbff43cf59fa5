"""Invalid calls of the cache's functions: an error that names the argument, or the right result.
`lab.soak.wrong_types` has those of a manager and a cache object.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvcache
from kvcache import (
    Layout,
    Manager,
    Mix,
    Options,
    Policy,
    Record,
    Ring,
    Rows,
    Sizes,
    Stream,
    Tail,
    append_rows,
    append_swa,
    checksum,
    copy_slots,
    from_config,
    gather,
    gqa,
    plan,
    preset,
    usage,
)
from kvcache.checks import MAX_SLOTS
from kvcache.layouts.presets import CONFIGS
from kvcache.layouts.records import BF16_512, plain
from kvcache.movement.api import cut_segments
from tests.support.hostile.calls import freed, hostile, refused, sharing

HUGE = 1 << 70
MEMORY = torch.zeros(9, 4096, dtype=torch.uint8)
POOL, RECORD = MEMORY[:4], plain("k", 1, 64)
ROWS = Rows(POOL, 0, 0, 8, RECORD)
X, SLOTS = torch.ones(3, 64).bfloat16(), torch.tensor([0, 5, -1])
PAIRS = torch.tensor([[0, 1], [2, 3]])
ANGLES = torch.ones(8, 32)
PLAIN = gqa(2, 1, 8)
STREAM = Stream("kv", RECORD, 1, 2)


def appended(rows=ROWS, x=X, slots=SLOTS, second=None):
    return lambda: append_rows((rows, x), second, slots)


def gathered(**options):
    return lambda: gather(**{"rows": ROWS, "indices": SLOTS, "out": X.clone()} | options)


def copied(**options):
    given = {"source": POOL, "target": MEMORY[4:8], "pairs": PAIRS} | options
    return lambda: copy_slots(**given)


def summed(**options):
    return lambda: checksum(**{"pool": POOL, "slots": SLOTS, "begin": 0, "end": 64} | options)


def swa(**options):
    given = {
        "rows": Rows(MEMORY, 0, 0, 4, BF16_512), "kv": torch.ones(3, 512).bfloat16(),
        "positions": torch.arange(3), "slots": SLOTS, "cos": ANGLES, "sin": ANGLES,
    }  # fmt: skip
    return lambda: append_swa(**given | options)


def laid_out(**options):
    given = {"name": "l", "block_tokens": 8, "streams": (STREAM,)} | options
    return lambda: Layout(**given)


def words_of(pool: torch.Tensor, first: int) -> torch.Tensor:
    """View a slot's bytes as bf16 [3, 64]."""
    return pool.view(-1)[first : first + 3 * 128].view(torch.bfloat16).view(3, 64)


CALLS = [
    hostile(lambda: append_rows(None, None, SLOTS), "first is NoneType"),
    hostile(lambda: append_rows((X, ROWS), None, SLOTS), r"first is \(Tensor, Rows\)"),
    hostile(appended(second=(ROWS,)), r"second is \(Rows\)"),
    hostile(appended(x=[1]), r"\(Rows, list\)"),
    hostile(appended(slots=[0, 1, 2]), "slots is list"),
    hostile(appended(slots=SLOTS.to("meta")), "different devices"),
    hostile(appended(slots=torch.tensor([3, 3, -1])), "slots has 3 twice, at 0 and 1"),
    hostile(appended(slots=torch.tensor([7, 1, 7])), "slots has 7 twice, at 0 and 2"),
    hostile(appended(x=words_of(POOL, 0)), "first and the rows of first share memory"),
    hostile(appended(x=words_of(POOL, 3 * 4096 + 640)), "share memory", name="in the last slot"),
    hostile(appended(second=(ROWS, X)), "rows of second and the rows of first share memory"),
    hostile(appended(slots=POOL.view(-1)[:24].view(torch.int64)), "slots and the rows .* share"),
    hostile(appended(rows=replace(ROWS, pool=None)), "rows.pool is NoneType|pool is NoneType"),
    hostile(appended(rows=replace(ROWS, pool=torch.zeros((), dtype=torch.uint8))), r"pool has sh"),
    hostile(appended(rows=replace(ROWS, record="k")), "record is 'k'"),
    hostile(appended(rows=replace(ROWS, rows=0)), "4 slots of 0 rows"),
    hostile(appended(rows=replace(ROWS, rows=HUGE)), "1180591620717411303424"),
    hostile(lambda: replace(ROWS, data_offset=1.0), "data_offset is 1.0"),
    hostile(lambda: replace(ROWS, data_offset=True), "data_offset is True"),
    hostile(gathered(rows=replace(ROWS, scale_offset=1 << 40)), "scales of k at 1099511627776"),
    hostile(appended(x=X.T.contiguous().T), "elements of a token not contiguous"),
    hostile(appended(x=X[:1].expand(3, 64)), "not contiguous", name="broadcast"),
    hostile(appended(rows=replace(ROWS, pool=freed(POOL))), "pool reaches to byte"),
    hostile(gathered(rows=replace(ROWS, record=None)), "record.* is missing"),
    hostile(gathered(rows=replace(ROWS, record=3)), "rows has a int without name"),
    hostile(gathered(out=sharing(X)), "elements that share memory"),
    hostile(lambda: replace(ROWS, rows=None).data(), "rows is None"),
    hostile(lambda: replace(ROWS, data_offset=1 << 40).data(), "data of k at 1099511627776"),
    hostile(lambda: Rows(POOL.view(torch.int16), 0, 0, 8, RECORD).data(), "pool is torch.int16"),
    hostile(gathered(rows=None), "rows is NoneType"),
    hostile(gathered(out=None), "out is NoneType"),
    hostile(gathered(out=X[:2]), "indices is torch.int64"),
    hostile(gathered(out=words_of(POOL, 128)), "the rows and out share memory"),
    hostile(gathered(indices=SLOTS.double()), "indices is torch.float64"),
    hostile(gathered(indices=SLOTS + 32), "indices has numbers from 31 to 37"),
    hostile(copied(pairs=[[0, 1]]), "pairs is list"),
    hostile(copied(pairs=torch.tensor([[0, 1], [2, 1]])), "pairs of the target has 1 twice"),
    hostile(copied(target=POOL, pairs=torch.tensor([[0, 1], [1, 2]])), "pairs read slot 1"),
    hostile(copied(target=MEMORY[1:5]), "source and target share memory"),
    hostile(copied(source=None, target=None), "target is NoneType"),
    hostile(copied(pairs=torch.tensor([[0, 4]])), "pairs of the target has numbers from 4"),
    hostile(copied(target=MEMORY[4:8].to("meta")), "different devices", name="target elsewhere"),
    hostile(copied(segments=torch.tensor([[0, 0, -16]])), "segment"),
    hostile(copied(segments=torch.tensor([[8, 0, 16]])), r"segment \(8, 0, 16\)"),
    hostile(copied(source=None), "source is NoneType"),
    hostile(copied(segments=torch.tensor([[0, 0, 32], [64, 16, 32]])), "overlap in the target"),
    hostile(copied(target=POOL, pairs=PAIRS[:1] * 0, segments=torch.tensor([[0, 16, 32]])),
            "overlap in a slot that is read"),
    hostile(lambda: cut_segments([(0, 0)]), r"segments\[0\] has 2 numbers"),
    hostile(lambda: cut_segments(None), "segments is None"),
    hostile(summed(begin=-16), "bytes -16 to 64"),
    hostile(summed(begin=8), "bytes 8 to 64"),
    hostile(summed(end=HUGE), "end 1180591620717411303424"),
    hostile(summed(end="64"), "end is '64'"),
    hostile(summed(begin=True), "begin is True"),
    hostile(summed(pool=POOL.float()), "pool is torch.float32"),
    hostile(summed(slots=SLOTS[None]), "slots is torch.int64"),
    hostile(swa(slots=torch.tensor([1, 2, 1])), "slots has 1 twice, at 0 and 2"),
    hostile(swa(kv=MEMORY.view(-1)[:3072].view(torch.bfloat16).view(3, 512)), "kv and pool share"),
    hostile(swa(positions=torch.tensor([0, 8, 1])), "positions has numbers from 0 to 8"),
    hostile(swa(cos=None), "cos is NoneType"),
    hostile(swa(sin=ANGLES.to("meta")), "different devices", name="sin elsewhere"),
    *(hostile(lambda value=value: Sizes(value), words) for value, words in (
        (4.5, "blocks is 4.5"), (1 << 40, "blocks 1099511627776"), (True, "blocks is True"),
        ("4", "blocks is '4'"), (None, "blocks is None"), (MAX_SLOTS + 1, "at most"))),
    hostile(lambda: Sizes(4, host_states=math.nan), "host_states is nan"),
    hostile(lambda: Sizes(4, checkpoints=[1]), "checkpoints is list"),
    hostile(lambda: Manager(PLAIN, Sizes(4, checkpoints=-1)), "-1 checkpoints"),
    hostile(lambda: Manager(PLAIN, (4, 0)), "sizes is tuple"),
    hostile(lambda: Manager(None, Sizes(4)), "layout is None"),
    hostile(lambda: Manager(PLAIN, Sizes(4), deferred=1), "deferred is 1"),
    hostile(lambda: Policy(every=1.5), "every is 1.5"),
    hostile(lambda: Policy(every=-1), "every -1 blocks"),
    hostile(lambda: Policy(rolling="no"), "rolling is 'no'"),
    hostile(laid_out(name=None), "name is None"),
    hostile(laid_out(block_tokens=8.0), "block_tokens is 8.0"),
    hostile(laid_out(draft=-1), "draft -1"),
    hostile(laid_out(streams=[STREAM]), "streams is list"),
    hostile(laid_out(streams=()), "at least one stream"),
    hostile(laid_out(streams=(RECORD,)), r"streams\[0\] is Record"),
    hostile(laid_out(streams=(replace(STREAM, ratio=0),)), "kv: one entry for 0 tokens"),
    hostile(lambda: replace(STREAM, copies=1.0), "kv: copies is 1.0"),
    hostile(lambda: replace(STREAM, record="k"), "kv: record is 'k'"),
    hostile(lambda: replace(STREAM, name=3), "name is 3", name="stream"),
    hostile(lambda: replace(STREAM, of_layer=(0, 1.0)), r"kv: of_layer\[1\] is 1.0"),
    hostile(lambda: Ring("r", RECORD, "4", 1), "r: window is '4'"),
    hostile(lambda: Tail("t", 4, 0, 1), "t: width 0"),
    hostile(laid_out(model_layers=-1), "model_layers -1"),
    hostile(lambda: Record("r", 1.5), "data_bytes is 1.5"),
    hostile(lambda: Record(None, 16), "name is None", name="record without a name"),
    hostile(lambda: PLAIN.find(3), "name is 3"),
    hostile(lambda: PLAIN.find("kv"), "'kv': the layout gqa has"),
    hostile(lambda: PLAIN.place("k", 2), "copy 2 of 'k'"),
    hostile(lambda: PLAIN.place("k", None), "copy is None"),
    hostile(lambda: PLAIN.offset("k", 7), "page 7 of 'k'"),
    hostile(lambda: PLAIN.segments(1.0), "position is 1.0"),
    hostile(lambda: gqa(0, 1, 8), "copies|layers"),
    hostile(lambda: gqa("2", 1, 8), "layers is '2'"),
    hostile(lambda: gqa(2, 1.0, 8), "heads is 1.0"),
    hostile(lambda: gqa(2, 1, 8, window=-1), "window -1"),
    hostile(lambda: preset(["v4"]), "name is list"),
    hostile(lambda: preset("v4"), "'v4': presets are"),
    hostile(lambda: preset("llama-3.1-70b", draft="3"), "draft is '3'"),
    hostile(lambda: Options(mtp=1.5), "mtp is 1.5"),
    hostile(lambda: Options(online_hca=1), "online_hca is 1"),
    hostile(lambda: from_config(None), "config is NoneType"),
    hostile(lambda: from_config({}, {}), "options is dict"),
    hostile(lambda: from_config({"model_type": 3}), "3: model_type is 3, expected a string"),
    hostile(lambda: from_config({**CONFIGS["deepseek-v4-pro"], "model_type": b"deepseek_v4"}),
            "model_type is b'deepseek_v4', expected a string"),
    hostile(lambda: usage(PLAIN, 1.5), "tokens is 1.5"),
    hostile(lambda: usage("gqa", 1), "layout is 'gqa'"),
    hostile(lambda: Mix([100]), "tokens is list"),
    hostile(lambda: Mix((100, None)), r"tokens\[1\] is None"),
    hostile(lambda: plan(PLAIN, 1e9, Mix((100,))), "memory is 1000000000.0"),
    hostile(lambda: plan(PLAIN, 1 << 30, 100), "mix is 100"),
    hostile(lambda: plan(PLAIN, 1 << 30, Mix((9,)), checkpoint_share=math.nan), "share nan"),
    hostile(lambda: plan(PLAIN, 1 << 30, Mix((9,)), checkpoint_share="1"), "share is '1'"),
    hostile(lambda: replace(STREAM, copies=1 << 31), "copies 2147483648: at most"),
    hostile(lambda: Ring("r", RECORD, 1 << 31, 1), "window 2147483648: at most"),
    hostile(laid_out(model_layers=1 << 31), "model_layers 2147483648: at most"),
    hostile(lambda: Record("r", 1 << 40), "data_bytes 1099511627776: at most"),
    hostile(lambda: PLAIN.blocks("3"), "tokens is '3'"),
    hostile(lambda: PLAIN.live(-1), "position -1"),
    hostile(lambda: PLAIN.entries(None), "stream is None"),
    hostile(lambda: from_config({"num_hidden_layers": 1 << 31}), "num_hidden_layers is an int"),
    hostile(lambda: plan(PLAIN, 10**400, Mix((9,))), "memory 1000.*: at most"),
    hostile(lambda: Mix((1 << 62,)), r"tokens\[0\] 4611686018427387904: at most"),
    hostile(lambda: Manager(PLAIN, Sizes(4)).admit("a", range(1 << 40)), "1099511627776 tokens"),
    hostile(lambda: kvcache.Cache(PLAIN, Sizes(4), device="cuda:99"), "cuda:99: no such GPU"),
    hostile(lambda: kvcache.warmup(PLAIN, device="cuda:99"), "no such GPU", name="warm no GPU"),
    hostile(lambda: kvcache.warmup(PLAIN, device="cpu", dtypes=None), "dtypes is NoneType"),
    hostile(lambda: kvcache.warmup(PLAIN, device="gpu"), "device 'gpu'"),
    hostile(lambda: kvcache.warmup(None, device="meta", arch="sm_90a"), "layout is None",
            name="warm nothing"),
]  # fmt: skip


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize(("attempt", "words"), CALLS)
def test_a_named_error(attempt, words):
    before = MEMORY.clone()
    refused(attempt, words)
    assert torch.equal(MEMORY, before)


@pytest.mark.parametrize(
    "tokens",
    [
        [1 << 63],
        [1 << 63, 1],  # numpy makes floats of these
        [np.uint64(1 << 63), -1],
        [-(1 << 63) - 1],
        [0, HUGE],
        np.array([1 << 63], "u8"),
    ],
)
def test_token_ids_are_int64(tokens):
    """No token id wraps around to that of another token."""
    manager = Manager(PLAIN, Sizes(4))
    for use_cache in (True, False):
        error = refused(lambda use=use_cache: manager.admit("one", tokens, use_cache=use), "prompt")
        assert "int64" in str(error)
    assert not manager.requests
    request = manager.admit("one", [(1 << 63) - 1, -(1 << 63)]).request
    manager.append({request: np.array([(1 << 63) - 1], np.uint64)})
    assert request.tokens.tolist() == [(1 << 63) - 1]


def test_a_prompt_of_placeholders_hits_nothing():
    """Placeholders are stored as -1, which is also a valid token."""
    manager = Manager(gqa(1, 2, 64, block_tokens=16), Sizes(8))
    request = manager.admit("known", [-1] * 40).request
    manager.append({request: [-1] * 40})
    assert manager.admit("same", [-1] * 40).hit == 32
    unknown = manager.admit("unknown", kvcache.Placeholders(40))
    assert (unknown.hit, unknown.cached) == (0, 0)
    manager.check()


def test_integers_of_several_widths_are_token_ids():
    """numpy makes floats of a row with both."""
    manager = Manager(PLAIN, Sizes(4))
    request = manager.admit("mixed", [np.uint64(5), -1]).request
    manager.append({request: [np.uint64(5), -1, 7]})
    assert request.tokens.tolist() == [5, -1, 7]


def test_integers_of_numpy_are_integers():
    sizes = Sizes(np.int64(4), host_blocks=np.uint8(2))
    assert sizes == Sizes(4, host_blocks=2)
    assert type(sizes.blocks) is int
    manager = Manager(PLAIN, sizes)
    request = manager.admit("one", np.arange(3, dtype=np.uint16)).request
    manager.append({request: [1, 2, 3]})
    manager.rollback(request, np.int32(2))
    assert request.length == 1
    assert manager.room(request, np.int64(5)) == 5


def test_buffers_of_a_step_are_plain_tensors():
    manager = Manager(PLAIN, Sizes(4))
    step = manager.append({manager.admit("one", [1, 2]).request: [1, 2]})
    lengths = torch.zeros(1, dtype=torch.int32)
    for buffer, words in (
        (lengths.to(torch.uint32), "torch.uint32"),
        (lengths.to("meta"), "meta"),
        (freed(lengths), "reaches to byte 4"),
        (lengths.to_sparse(), "sparse_coo"),
        (lengths.expand(3), "share memory"),
    ):
        refused(lambda buffer=buffer: step.fill({"lengths": buffer}), words)


def test_a_step_that_is_abandoned_twice_takes_no_checkpoint_of_others():
    """The step's slots may have been handed out again by then."""
    layout = Layout("ring", 4, (STREAM,), (Ring("r", RECORD, 4, 1),))
    manager = Manager(layout, Sizes(8, 2, checkpoints=1))
    request = manager.admit("first", [1, 2, 3, 4, 5]).request
    step = manager.append({request: [1, 2, 3, 4]})
    manager.abandon(step)
    manager.append({manager.admit("second", [6, 7, 8, 9, 0]).request: [6, 7, 8, 9]})
    assert manager.metrics.checkpoints_kept == 1
    manager.abandon(step)
    assert manager.metrics.checkpoints_kept == 1
    manager.check()


def test_rows_take_integers_of_numpy():
    """Small numpy types would overflow in computations of bytes."""
    rows = Rows(POOL, np.uint8(0), np.uint8(0), np.uint8(8), RECORD)
    assert [type(size) for size in (rows.data_offset, rows.scale_offset, rows.rows)] == [int] * 3
    rows.check()
    ring = Ring("r", RECORD, np.uint8(200), np.uint8(2))
    assert ring.page_bytes(100) == 299 * 128


def test_memory_beside_is_no_overlap(no_launches):
    """Rows of a slot lie next to the tensor that is read, which lies piece by piece between the
    slots."""
    between = MEMORY[:3, 2048 : 2048 + 128].view(torch.bfloat16)
    nowhere = torch.full((3,), -1)
    for rows, x in ((ROWS, between), (replace(ROWS, data_offset=2176), between)):
        with pytest.raises(pytest.fail.Exception, match="compiled"):
            append_rows((rows, x), None, nowhere)
    refused(appended(rows=replace(ROWS, data_offset=2048), x=between, slots=nowhere), "share")
