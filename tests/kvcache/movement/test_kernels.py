"""Every kernel in the emulator, under its checker: it writes the reference's bytes and no
others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelkit.call.front import forget
from kvcache.layouts.latent import LATENTS
from kvcache.layouts.records import BF16_512, FP8_584, INDEXER_BF16, Record, plain
from kvcache.layouts.rows import Rows
from kvcache.movement import api, config, launch, reference
from kvcache.movement.config import SMALLEST_PIECE, ctas_for, lanes_of, vector_of
from kvcache.movement.launch import ARCHS
from lab.house.hops import as_on_a_gpu
from tests.kvcache.movement.rows_cases import (
    DTYPES,
    LATENT_RECORDS,
    Append,
    Gather,
    Movement,
    Plain,
    Slots,
    Sums,
    any_case,
    around,
    assert_equal,
    checked,
    like,
    more_cases,
    poisoned,
)

# ---- Every kernel in the emulator, under its checker: the reference's bytes and no others

each_arch = pytest.mark.parametrize("arch", ARCHS)
PARTS = ((16, 32, 4000), (4032, 4096, 64), (0, 0, 0))
CASES = [
    *(kind(record, 9) for kind in (Append, Gather) for record in LATENT_RECORDS),
    Append(FP8_584, 12, dtype="fp32", seed=1),
    Append(BF16_512, 6, dtype="fp32"),
    Gather(INDEXER_BF16, 9, gap=80),
    Gather(plain("k", 3, 7), 6, gap=82),
    Plain(9, (8, 128), (8, 128)),
    Plain(7, (2, 96), (2, 64), torch.float32, apart=4),
    Plain(6, (5,), (9, 7), apart=3, gap=82),
    Plain(6, (68,), dtype=torch.uint8, apart=0, gap=64),
    Slots(4096 + 80),
    Slots(SMALLEST_PIECE * 2 + 16, SMALLEST_PIECE * 2 + 16),
    Slots(4096, 8192, segments=PARTS, cut=1024),
    Sums(3 * SMALLEST_PIECE, 16, 2 * SMALLEST_PIECE + 48),
]
ROWS = [
    Plain(tokens, k, v, dtype)
    for tokens in (1, 2, 35)
    for k, v, dtype in (
        ((1, 576), (), torch.bfloat16),
        ((128, 128), (128, 128), torch.uint8),  # more vectors than a row's threads process at once
        ((1, 1), (1, 3), torch.uint8),
        ((2, 64), (8, 64), torch.float32),
    )
]
GATHERED = (*LATENT_RECORDS, plain("k", 8, 128), plain("odd", 1, 5))
MORE = [
    *(
        case
        for record in LATENT_RECORDS
        for dtype in DTYPES
        for case in more_cases(Append, record, dtype)
    ),
    *(case for record in GATHERED for case in more_cases(Gather, record)),
    *ROWS,
    *(replace(case, apart=1, gap=84) for case in ROWS),
    Slots(70_000, pairs=((4, 0),)),
    Slots(16, 16),
    Slots(48, 64, segments=((16, 48, 16), (32, 0, 16))),
    Slots(40_000, 50_000, segments=((0, 9600, 40_000),), cut=10_000),
    Slots(16_400, segments=((0, 16, 16_384),), pairs=((0, 1), (2, 3), (-1, -1))),
    *(Sums(70_000, *span) for span in ((0, 16), (16, 16), (0, 70_000), (4080, 4112))),
]
NOTHING = [
    *(kind(record, 0) for kind in (Append, Gather) for record in (FP8_584, BF16_512)),
    Plain(0, (8, 16), (4,)),
    Slots(4096, pairs=()),
    Slots(64, 64, segments=()),
    Sums(64, 32, 32),
    Sums(64, 0, 64, slots=()),
]


@each_arch
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes(case, arch):
    case.check(arch=arch)


@each_arch
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more(case, arch):
    case.check(arch=arch)


@st.composite
def any_slots(draw):
    """Segments anywhere in the source, which are disjoint and ordered in the target."""
    source, place, segments = draw(st.integers(1, 400)) * 16, 0, []
    for _ in range(draw(st.integers(0, 6))):
        size = draw(st.integers(0, source // 16)) * 16
        begin = draw(st.integers(0, (source - size) // 16)) * 16
        place += draw(st.integers(0, 3)) * 16
        segments.append((begin, place, size))
        place += size
    order = draw(st.permutations(range(5)))
    pairs = ((order[0], order[1]), (order[2], order[3]), (-1, order[4]))
    cut = draw(st.integers(1, 200)) * 16
    return Slots(source, place + 32, pairs, tuple(segments), cut=cut)


@settings(max_examples=120, deadline=None)
@given(
    any_case(Append, LATENT_RECORDS)
    | any_case(Gather, (*LATENT_RECORDS, plain("k", 1, 9)))
    | any_slots()
)
def test_any(case):
    case.check()


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("case", NOTHING, ids=str)
def test_nothing_to_do(case):
    case.check()


@each_arch
def test_every_element_with_every_scale(arch):
    """All 256 codes of e4m3 with all 256 of the scale."""
    rows = 256
    pool = torch.zeros(1, rows * 584, dtype=torch.uint8)
    where = Rows(pool, 0, rows * 576, rows, FP8_584)
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    where.data()[0, :, :448] = codes.repeat(2)[:448]
    where.data()[0, 1::2, :448] = codes.flip(0).repeat(2)[:448]
    where.scales()[0] = codes[:, None]
    out, expected = (torch.empty(rows, 512, dtype=torch.bfloat16) for _ in range(2))
    indices = torch.arange(rows)
    with checked():
        api.gather(where, indices, out, arch=arch)
    reference.gather(where, indices, expected)
    assert_equal(out, expected)


@pytest.mark.parametrize("record", LATENT_RECORDS, ids=lambda record: record.name)
def test_what_was_appended_comes_back(record):
    """BF16 exactly; FP8 within half a step of e4m3, and unchanged a second time."""
    case = Movement(record, 12, holes=0)
    rows, slots = case.build_rows(), case.mapping()
    latent = LATENTS[record.name]
    kv = torch.randn(case.tokens, latent.elements).bfloat16()
    positions, cos, sin = case.rope()
    api.append_swa(rows, kv, positions, slots, cos, sin)
    entries = reference.rotated(kv, cos[positions], sin[positions])
    out = torch.empty_like(kv)
    api.gather(rows, slots, out)
    if record == BF16_512:
        assert torch.equal(out, entries)
        return
    assert torch.equal(out[:, latent.nope :], entries[:, latent.nope :])
    torch.testing.assert_close(out, entries, rtol=2**-4, atol=2**-9 * 5 / 448)
    again = case.build_rows()
    ones = torch.ones(1, 32)
    api.append_swa(again, out, positions * 0, slots, ones, ones * 0)
    api.gather(again, slots, entries)
    assert torch.equal(entries, out)


def of_layers(pool):
    """[(K, V)] of layers that follow each other in a pool."""
    record, size = Record("plain", 96), 7 * 96 + 80
    begins = range(0, pool.shape[1] - size, 2 * size)
    return [
        tuple(Rows(pool, begin + place, 0, 7, record).alone for place in (0, size))
        for begin in begins
    ]


def test_layers_whose_rows_are_alone_have_one_tape():
    """The tape of one layer's call serves the other layers, as on a GPU: it writes their bytes, and
    no others. Overlapping rows are still refused."""
    pool, slots = poisoned(5, 6 * (7 * 96 + 80)), torch.tensor([34, -1, 0, 20, 8, 9])
    expected, x = like(pool), torch.randint(0, 256, (3, 2, len(slots), 96), dtype=torch.uint8)
    forget()
    with as_on_a_gpu(), checked():
        for layer, given in zip(of_layers(pool), x, strict=True):
            api.append_rows(*zip(layer, given, strict=True), slots)
            for rows, appended in zip(layer, given, strict=True):
                found = torch.empty_like(appended)
                api.gather(rows, slots, found)
                assert_equal(found, torch.where(slots[:, None] >= 0, appended, 0))
        assert len(launch.APPEND_ROWS.tapes.known) == len(launch.GATHER.tapes.known) == 1
        k, _ = of_layers(pool)[1]
        near = Rows(pool, 3 * 96, 0, 7, k.record).alone, Rows(pool, 6 * 96, 0, 7, k.record).alone
        with pytest.raises(ValueError, match="share memory"):
            api.append_rows(*zip(near, x[0], strict=True), slots)
    for layer, given in zip(of_layers(expected), x, strict=True):
        reference.append_rows([*zip(layer, given, strict=True)], slots)
    assert_equal(around(pool), around(expected))


def test_the_check_sees_a_wrong_byte(monkeypatch):
    """The test itself: entries that the reference puts elsewhere are noticed."""
    put = reference._put
    elsewhere = lambda view, slots, values: put(view, slots.flip(0), values)  # noqa: E731
    monkeypatch.setattr(reference, "_put", elsewhere)
    with pytest.raises(AssertionError, match="bytes differ"):
        Plain(5, (2, 8)).check()


# ---- Grids of the data movement: with fewer CTAs than work they loop over all of it; pieces of
# slots, rows of threads, widths of accesses


@pytest.fixture
def two_ctas(monkeypatch):
    monkeypatch.setattr(config, "CTAS", 2)


PIECES = 9 * config.SMALLEST_PIECE


@pytest.mark.usefixtures("two_ctas")
@pytest.mark.parametrize(
    "case",
    [Append(FP8_584, 19), Gather(FP8_584, 19), Gather(BF16_512, 19),
     Plain(19, (2, 64), (1, 64)), Slots(PIECES), Sums(PIECES, 0, PIECES)],
    ids=str,
)  # fmt: skip
def test_ctas_take_turns(case):
    case.check()


@pytest.mark.parametrize(
    ("items", "at_once", "expected"),
    [(1, 4, 1), (4, 4, 1), (5, 4, 2), (1 << 30, 4, config.CTAS)],
)
def test_sized_by_the_work_up_to_a_limit(items, at_once, expected):
    assert ctas_for(items, at_once) == expected


def test_a_row_is_shared_by_as_many_threads_as_it_has_work_for():
    found = [lanes_of(row_bytes, 16) for row_bytes in (16, 64, 128, 256, 1024, 2048, 1 << 16)]
    assert found == [1, 1, 2, 4, 16, 32, 32]
    assert lanes_of(2048, 1) == 32


def test_accesses_are_as_wide_as_everything_allows():
    assert [vector_of(*numbers) for numbers in ((32, 48), (32, 8), (6,), (7,), (0, 64))] == [
        16, 8, 2, 1, 16,
    ]  # fmt: skip


@pytest.mark.parametrize("most", [16, 1000, 1 << 20])
def test_cut_segments_are_the_same_bytes(most):
    segments = [(0, 160, 1600), (1600, 0, 16), (4000, 4800, 0), (8000, 6400, 48_000)]
    cut = api.cut_segments(segments, most)
    assert not (cut % 16).any()
    assert cut[:, 2].max() <= -(-most // 16) * 16
    bytes_of = [
        {begin + i: place + i for begin, place, size in parts for i in range(size)}
        for parts in (segments, cut.tolist())
    ]
    assert bytes_of[0] == bytes_of[1]
    assert int(cut[:, 2].sum()) == sum(size for *_, size in segments)
    assert api.cut_segments([]).shape == (0, 3)


def test_pieces_are_powers_of_two():
    for total in (0, 16, 1 << 20, 1 << 24, 1 << 27, 1 << 40):
        piece = config.piece_bytes(total)
        assert piece & (piece - 1) == 0
        assert config.SMALLEST_PIECE <= piece <= config.LARGEST_PIECE
