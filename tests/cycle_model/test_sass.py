"""Control words, and the possible successors of an instruction."""

from __future__ import annotations

import pytest

from cycle_model.sass.flow import Control, is_serialised
from cycle_model.sass.tools import parse

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


GROUP = """
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR12], R24 ;
        /*0020*/                   HGMMA.64x16x16.F32.BF16 R24, R44, gdesc[UR20], R24, gsb0 ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""
ALONE = """
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   QGMMA.64x16x32.F32.E4M3.E4M3 R24, R40, gdesc[UR12], R24, gsb0 ;
        /*0020*/                   MOV R1, R2 ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""
LATER = ALONE.replace("0x0 ;", "0x1 ;")


@pytest.mark.parametrize(("code", "serialised"), [
    (GROUP, False), (ALONE, True), (ALONE + ALONE, True), (ALONE + GROUP, False), (LATER, False),
    (ALONE.partition("/*0020*/")[0], False), ("\t/*0000*/ EXIT ;\n", None),
])  # fmt: skip
def test_products_that_wait_for_each_other(code, serialised):
    """ptxas serialises all products of a kernel, or none."""
    (function,) = parse(f'\t.section\t.text.kernel,"ax",@progbits\n{code}')
    assert is_serialised(function) is serialised


BRANCHES = """
        /*0000*/              @!P0 CALL.REL.NOINC `(.L_x_1) ;
        /*0010*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   CALL.REL.NOINC `($callee) ;
.L_x_2:
        /*0030*/                   EXIT ;
"""


def test_a_call_of_a_label_of_the_function_is_a_branch():
    (function,) = parse(f'\t.section\t.text.kernel,"ax",@progbits\n{BRANCHES}')
    assert [block.successors for block in function.blocks] == [[1, 2], [3], [3], []]
    assert len(function.order) == len(function.blocks)
