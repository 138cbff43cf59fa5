"""Hypothesis strategies: layouts of any shape, small enough to be walked byte by byte."""

from __future__ import annotations

from hypothesis import strategies as st

from kvcache.layouts import records
from kvcache.layouts.layout import Layout, Ring, Stream, Tail

RECORDS = [
    *(records.FP8_584, records.BF16_512, records.FP8_528, records.FP4_288),
    *(records.INDEXER_FP8, records.INDEXER_FP4, records.plain("thin", 1, 8, 1)),
]


@st.composite
def streams(draw, place, block):
    ratio = draw(st.sampled_from([r for r in (1, 2, 4, 16, block) if block % r == 0]))
    copies, packed = draw(st.integers(1, 3)), draw(st.booleans())
    return Stream(f"stream{place}", draw(st.sampled_from(RECORDS)), ratio, copies, packed)


@st.composite
def tails(draw, place, block):
    ratio = draw(st.sampled_from([r for r in (1, 2, 4, 16, block) if block % r == 0]))
    online = draw(st.booleans())
    overlap = 1 if online else draw(st.integers(1, 2))
    width, copies = draw(st.sampled_from([4, 12, 32])), draw(st.integers(1, 3))
    return Tail(f"tail{place}", ratio, width, copies, overlap, online)


@st.composite
def layouts(draw):
    block = draw(st.sampled_from([16, 32, 48]))
    return Layout(
        "any",
        block,
        tuple(draw(streams(k, block)) for k in range(draw(st.integers(1, 3)))),
        tuple(
            Ring(f"ring{k}", draw(st.sampled_from(RECORDS)), draw(st.integers(1, 40)), 1 + k)
            for k in range(draw(st.integers(0, 2)))
        ),
        tuple(draw(tails(k, block)) for k in range(draw(st.integers(0, 2)))),
        draft=draw(st.integers(0, 6)),
    )
