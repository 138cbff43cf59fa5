"""Control words, and the ways that an instruction may go on."""

from __future__ import annotations

import pytest

from cycle_model.sass.instruction import Control
from cycle_model.sass.listing import parse

# From a listing of nvdisasm: an instruction and the upper half of its encoding.
LISTING = """\
\t.section\t.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0010*/              @P0 CALL.REL.NOINC `($callee) ;        /* 0x00000a00ff017b82 */
                                                                     /* 0x003fea0003c00000 */
        /*0020*/                   EXIT ;                            /* 0x000000000000794d */
                                                                     /* 0x000fea0003800000 */
$callee:
        /*0030*/                   MUFU.RCP R0, R0 ;                 /* 0x0000000000007308 */
                                                                     /* 0x000e220000001000 */
        /*0040*/                   RET.REL.NODEC R4 `(kernel) ;      /* 0x0000000004007950 */
                                                                     /* 0x001fec0003c3ffff */
"""


def test_control_words():
    (function,) = parse(LISTING)
    controls = [item.control for item in function.instructions]
    assert [control.stall for control in controls] == [1, 5, 5, 1, 6]
    assert controls[1].waits == 0b000011
    assert (controls[3].writes, controls[3].reads) == (0, 7)
    assert controls[4].waits == 0b000001


@pytest.mark.parametrize("stall", [0, 1, 15])
@pytest.mark.parametrize(("writes", "reads", "waits"), [(7, 7, 0), (5, 0, 0b100001)])
def test_decoding_inverts_encoding(stall, writes, reads, waits):
    high = stall << 41 | 1 << 45 | writes << 46 | reads << 49 | waits << 52
    assert Control.decoded(high) == (stall, False, writes, reads, waits, 0)


def test_registers_are_those_that_are_named():
    (function,) = parse(LISTING)
    assert function.registers == 5
