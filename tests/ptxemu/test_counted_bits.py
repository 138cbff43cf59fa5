"""Operands of which only some bits count: the other bits may be anything.

Each instruction is executed with clean operands, and with operands that differ in bits that do not
count. An operand differs by lane, is uniform, or is a constant in the text.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.errors import Deadlock
from tests.ptxemu.kernels import kernel, launch

_ALL = 0xFFFFFFFF
# instruction of %r2 (the value), %r3 (the operand) into %r4 -> the bits of %r3 that count
BITS = {
    "shf.l.wrap.b32 %r4, %r2, %r0, %r3;": 0x1F,
    "shf.r.wrap.b32 %r4, %r2, %r0, %r3;": 0x1F,
    "bmsk.wrap.b32 %r4, %r3, 7;": 0x1F,
    "bmsk.wrap.b32 %r4, 5, %r3;": 0x1F,
    "szext.wrap.s32 %r4, %r2, %r3;": 0x1F,
    "szext.wrap.u32 %r4, %r2, %r3;": 0x1F,
    "bfe.u32 %r4, %r2, %r3, 9;": 0xFF,
    "bfe.s32 %r4, %r2, 3, %r3;": 0xFF,
    "bfi.b32 %r4, %r2, %r0, %r3, 5;": 0xFF,
    "bfi.b32 %r4, %r2, %r0, 4, %r3;": 0xFF,
    "bfe.u64 %rd3, %rd4, %r3, 40; mov.b64 {%r4, %r5}, %rd3;": 0xFF,
    "prmt.b32 %r4, %r2, %r0, %r3;": 0xFFFF,
    **{f"prmt.b32.{mode} %r4, %r2, %r0, %r3;": 0x3 for mode in
       "f4e b4e rc8 ecl ecr rc16".split()},
    "shfl.sync.idx.b32 %r4, %r2, %r3, 0x0c1f, 0xffffffff;": 0x1F,
    "shfl.sync.bfly.b32 %r4, %r2, %r3, 31, 0xffffffff;": 0x1F,
    "shfl.sync.up.b32 %r4, %r2, 3, %r3, 0xffffffff;": 0x1F1F,
    "shfl.sync.down.b32 %r4, %r2, 3, %r3, 0xffffffff;": 0x1F1F,
    "mul24.lo.u32 %r4, %r2, %r3;": 0xFFFFFF,
    "mul24.hi.s32 %r4, %r2, %r3;": 0xFFFFFF,
    "dp2a.lo.u32.u32 %r4, %r2, %r3, %r0;": 0xFFFF,
    "dp2a.hi.s32.s32 %r4, %r2, %r3, %r0;": 0xFFFF0000,
    "cvt.u32.u8 %r4, %r3;": 0xFF,
    "cvt.s32.s8 %r4, %r3;": 0xFF,
    "cvt.u32.u16 %r4, %r3;": 0xFFFF,
    "cvt.rn.f32.s16 %r4, %r3;": 0xFFFF,
    "st.global.u8 [%rd2], %r3; ld.global.u8 %r4, [%rd2];": 0xFF,
    "st.global.u16 [%rd2], %r3; ld.global.u16 %r4, [%rd2];": 0xFFFF,
}  # fmt: skip
_KERNEL = """ld.param.u64 %rd1, [d]; mov.u32 %r0, %tid.x; mad.wide.u32 %rd2, %r0, 4, %rd1;
ld.global.b32 %r2, [%rd2]; cvt.u64.u32 %rd4, %r2; mul.lo.u64 %rd4, %rd4, 0x100000001;
OPERAND
INSTRUCTION
st.global.b32 [%rd2], %r4;"""
_OPERANDS = {
    "lanes": "ld.global.b32 %r3, [%rd2+128];",
    "uniform": "ld.global.b32 %r3, [%rd1+128];",
    "constant": "mov.u32 %r3, {word};",
}


def _result(instruction: str, how: str, values: np.ndarray, words: np.ndarray) -> list[int]:
    operand = _OPERANDS[how].format(word=int(words[0]))
    text = _KERNEL.replace("OPERAND", operand).replace("INSTRUCTION", instruction)
    memory = np.concatenate([values, words])
    launch(kernel(text, ".param .u64 d"), memory)
    return memory[:32].tolist()


@pytest.mark.parametrize("instruction", BITS)
def test_other_bits_do_not_matter(instruction):
    rng = np.random.default_rng(list(instruction.encode()))
    bits = BITS[instruction]
    for how in _OPERANDS:
        values, words, junk = rng.integers(0, 1 << 32, (3, 32), np.uint32)
        clean = words & np.uint32(bits)
        expected = _result(instruction, how, values, clean)
        others = clean | junk & np.uint32(~bits & _ALL)
        assert _result(instruction, how, values, others) == expected, how


_WAITS = """ld.param.u64 %rd1, [d]; mov.u32 %r0, %tid.x; mad.wide.u32 %rd2, %r0, 4, %rd1;
OPERAND
mov.u32 %r5, bar;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r5], 1;
bar.warp.sync 0xffffffff;
@%p1 bra ARRIVE; bra BEHIND;
ARRIVE: ARRIVALS
BEHIND:
bar.warp.sync 0xffffffff;
mbarrier.WAIT.parity.shared::cta.b64 %p0, [%r5], %r3;
selp.u32 %r4, 1, 0, %p0;
st.global.b32 [%rd2], %r4;"""
_WORDS = (0, 1, 2, 3, -1, -2, 1 << 31, (1 << 31) + 1)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("how", ["lanes", "uniform"])
@pytest.mark.parametrize("wait", ["test_wait", "try_wait"])
def test_bit_0_of_a_parity_counts(wait, how, check):
    """Triton waits for a parity of -1."""
    for phases in range(3):
        arrivals = "mbarrier.arrive.shared::cta.b64 _, [%r5];" * phases
        text = _WAITS.replace("ARRIVALS", arrivals).replace("WAIT", wait)
        text = text.replace("OPERAND", _OPERANDS[how].replace("+128", ""))
        module = kernel(text, ".param .u64 d", ".shared .align 8 .b64 bar;\n")
        if how == "lanes":
            rounds = [np.resize(np.array(_WORDS, np.int64), 32).astype(np.uint32)]
        else:
            rounds = [np.full(32, word & _ALL, np.uint32) for word in _WORDS]
        for words in rounds:
            done = (phases & 1) != (words & 1)
            memory = words.copy()
            launch(module, memory, check=check)
            assert memory.tolist() == done.astype(np.uint32).tolist()


def test_a_deadlock_names_the_phase_of_the_bit():
    text = """mbarrier.init.shared::cta.b64 [bar], 1;
    AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p0, [bar], 2;
    @!%p0 bra AGAIN;"""
    module = kernel(text, before=".shared .align 8 .b64 bar;\n")
    with pytest.raises(Deadlock, match="phase 0"):
        launch(module, block=(1,))
