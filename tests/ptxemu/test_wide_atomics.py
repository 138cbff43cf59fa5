"""atom.exch and atom.cas of 128 bits, in global and shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.errors import HardwareRefusal
from tests.ptxemu.kernels import kernel, launch, pointers

# lane k has the word (k + 1, k + 101); `old` gets what it found
BODY = """ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; mov.u32 %r0, %tid.x; .reg .b128 %q<4>;
cvt.u64.u32 %rd2, %r0; add.u64 %rd3, %rd2, 1; add.u64 %rd4, %rd2, 101; mov.b128 %q0, {{%rd3, %rd4}};
mad.wide.u32 %rd5, %r0, 16, %rd1;
{}
st.global.b128 [%rd5], %q1;
"""
SHARED = """ld.global.v2.b64 {{%rd6, %rd7}}, [%rd0]; st.shared.v2.b64 [word], {{%rd6, %rd7}};
bar.sync 0; {} bar.sync 0; ld.shared.v2.b64 {{%rd6, %rd7}}, [word];
st.global.v2.b64 [%rd0], {{%rd6, %rd7}};"""


def run(body: str, word: np.ndarray, **how: object) -> np.ndarray:
    raw = np.zeros(6, np.uint64)
    start = raw.ctypes.data % 16 // 8  # 16-byte aligned
    here, old = raw[start : start + 2], np.zeros((32, 2), np.uint64)
    here[:] = word
    shared = ".shared .align 16 .b8 word[16];\n"
    text = kernel(BODY.format(body), ".param .u64 p0, .param .u64 p1", shared)
    launch(text, params=pointers(here, old), memory=[raw, old], **how)
    word[:] = here
    return old


WORDS = np.stack([np.arange(1, 33), np.arange(101, 133)], 1)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("form", ["atom.global", "atom.acq_rel.gpu.global", "atom", "shared"])
def test_lanes_exchange_one_after_the_other(form: str, check: bool) -> None:
    word = np.array([7, 8], np.uint64)
    body = f"{form}.exch.b128 %q1, [%rd0], %q0;"
    if form == "shared":
        body = SHARED.format("atom.shared.exch.b128 %q1, [word], %q0;")
    found = run(body, word, check=check)
    chain = [tuple(each) for each in (*found.tolist(), word.tolist())]
    assert sorted(chain) == sorted([(7, 8), *map(tuple, WORDS.tolist())])
    after = dict(zip(map(tuple, WORDS.tolist()), map(tuple, found.tolist()), strict=True))
    at, length = tuple(word.tolist()), 0
    while at in after:  # each word was found by the lane behind it
        at, length = after[at], length + 1
    assert (at, length) == ((7, 8), 32)


@pytest.mark.parametrize("expected", [(7, 8), (7, 9)])
def test_a_comparison_is_of_all_bits(expected: tuple[int, int]) -> None:
    word = np.array([7, 8], np.uint64)
    low, high = expected
    body = f"mov.u64 %rd6, {low}; mov.u64 %rd7, {high}; mov.b128 %q2, {{%rd6, %rd7}};"
    body += "atom.global.cas.b128 %q1, [%rd0], %q2, %q0;"
    found = run(body, word)
    winners = [lane for lane, old in enumerate(found.tolist()) if tuple(old) == (7, 8)]
    if expected == (7, 8):
        assert len(winners) == 1
        assert word.tolist() == WORDS[winners[0]].tolist()
    else:
        assert len(winners) == 32
        assert word.tolist() == [7, 8]


def test_the_address_is_aligned() -> None:
    with pytest.raises(HardwareRefusal, match="misaligned"):
        run("atom.global.exch.b128 %q1, [%rd0+8], %q0;", np.zeros(2, np.uint64))
