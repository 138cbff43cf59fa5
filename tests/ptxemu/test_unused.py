"""What a launch fetched or computed and never used is told where a script fails; what a tile is
read by another swizzle than it was written with, is a note."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu.check.unused import clues
from ptxemu.report import LaunchReport
from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.run import launch
from tests.ptxemu.check_pairs.scenario import Scenario, write
from tests.ptxemu.kernels import launch as launch_kernel

USE = "ld.shared.b32 %r1, [%mine];\nst.global.b32 [%out], %r1;"
TWO_LOADS = f"""warp 0:
    {parts.bulk_load()}
    wait full, 0;
    {{use}}
    add.u64 %input, %input, 128;
    {parts.expect()}
    {parts.BULK_LOAD}
    wait full, 1;
    {USE}"""
TWO_MMAS = f"""warp 0:
    {parts.MMA}
    {parts.MMA.replace(", 0;", ", {};")}
    {parts.commit()}
    wait done, 0;
    {parts.READ_WHOLE}"""


def report_of(body: str) -> LaunchReport:
    scenario = Scenario(body)
    return launch(scenario, ptxemu.load(write(scenario).text))


def test_a_tile_that_nobody_reads() -> None:
    told = clues([report_of(TWO_LOADS.format(use=""))])
    assert "what it wrote and nothing read was overwritten, 100 % by cp.async.bulk" in told
    assert "nothing read was" not in clues([report_of(TWO_LOADS.format(use=USE))])


def test_a_result_that_the_next_mma_overwrites() -> None:
    told = clues([report_of(TWO_MMAS.replace("{}", "0"))])
    assert "nothing read was overwritten, 100 % by tcgen05.mma at" in told
    assert "overwritten" not in clues([report_of(TWO_MMAS.replace("{}", "1"))])


def test_a_tile_that_is_fetched_again() -> None:
    """Of two copies in one loop, the second has another address or the same."""
    for step, told in ((0, True), (128, False)):
        loads = f"""warp 0:
            {parts.expect(256)}
            mov.u32 %r5, 0;
            AGAIN:
            {parts.BULK_LOAD}
            add.u64 %input, %input, {step};
            add.u32 %r5, %r5, 1;
            setp.lt.u32 %p3, %r5, 2;
            @%p3 bra AGAIN;
            wait full, 0;
            {USE}"""
        again = "1 of its 2 copies bring what the CTA had fetched there before"
        assert (again in clues([report_of(loads)])) is told


def test_parts_of_inputs_and_outputs() -> None:
    """What is loaded is no more than 256 bytes of a buffer."""
    lines = clues([report_of(TWO_LOADS.format(use=USE))]).splitlines()
    assert "kernel scenario" in lines[0]
    (unread,) = (line for line in lines if "nothing reads 16,384 of its 16,640 bytes, " in line)
    assert unread.count("cp.async.bulk") == 2  # both copies
    assert any(line.startswith("  written in part: parameter 1: 128 of") for line in lines)


@pytest.mark.parametrize(("step", "words"), [(8, "4 to 7 of every 8"), (4, "")])
def test_every_other_word(step: int, words: str) -> None:
    text = f""".version 8.8
.target sm_100a
.address_size 64
.visible .entry test(.param .u64 d, .param .u64 o)
{{
.reg .b32 %r<3>;
.reg .b64 %rd<5>;
ld.param.u64 %rd1, [d];
ld.param.u64 %rd3, [o];
mov.u32 %r0, %tid.x;
mad.wide.u32 %rd2, %r0, {step}, %rd1;
mad.wide.u32 %rd4, %r0, 4, %rd3;
ld.global.u32 %r1, [%rd2];
st.global.u32 [%rd4], %r1;
ret;
}}
"""
    arrays = np.zeros(8 * step, np.uint32), np.zeros(32, np.uint32)
    told = clues([launch_kernel(text, *arrays, check=True)])
    assert words in told if words else not told


def test_a_box_outside_of_its_tensor() -> None:
    load = parts.tma_load().replace("{%zero, %zero}", "{%zero, %r9}")
    told = clues([report_of(f"warp 0:\nmov.u32 %r9, 128;\n{load}\nwait full, 0;\n{USE}")])
    assert "1 of 1 boxes lie wholly outside of the tensor" in told


@pytest.mark.parametrize("mode", [0, 6])
def test_another_swizzle(mode: int) -> None:
    """The tensor maps have none."""
    body = f"""warp 0:
    {parts.tma_load(into="a")}
    wait full, 0;
    or.b64 %a, %a, {mode << 61:#x};
    {parts.MULTIPLY}"""
    found = [each for each in report_of(body).findings if each.check == "swizzle"]
    assert len(found) == bool(mode)
    for each in found:
        assert each.severity == "note"
        assert "reads with swizzle 32B what a copy has written with swizzle none" in each.message
        assert [access.role for access in each.accesses] == ["cp.async.bulk.tensor", "tcgen05.mma"]
