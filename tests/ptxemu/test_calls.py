"""vprintf: what a thread prints, and that other functions are refused."""

from __future__ import annotations

import struct

import pytest

from ptxemu.errors import OutOfBounds, UnsupportedPtx
from ptxemu.ops.control import formatted
from tests.ptxemu.kernels import kernel, launch

VARIABLES = """.extern .func (.param .b32 func_retval0) vprintf (.param .b64 p0, .param .b64 p1);
.global .align 1 .b8 template[14] = {116, 37, 100, 32, 105, 115, 32, 37, 46, 49, 102, 33, 10, 0};
"""
PROGRAM = kernel(
    """.local .align 8 .b8 depot[16];
    .reg .b64 %SP, %SPL;
    mov.b64 %SPL, depot;
    cvta.local.u64 %SP, %SPL;
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 15;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra DONE;
    st.local.b32 [%SPL], %r1;
    st.local.b64 [%SPL+8], 0d3FF8000000000000;
    { // callseq 0
    .param .b64 param0;
    .param .b64 param1;
    .param .b32 retval0;
    st.param.b64 [param1], %SP;
    mov.b64 %rd1, template;
    cvta.global.u64 %rd2, %rd1;
    st.param.b64 [param0], %rd2;
    call.uni (retval0), vprintf, (param0, param1);
    } // callseq 0
DONE:""",
    before=VARIABLES,
)


def test_every_active_thread_prints(capsys):
    launch(PROGRAM)
    assert capsys.readouterr().out == "t0 is 1.5!\nt16 is 1.5!\n"


def test_other_functions_are_refused():
    with pytest.raises(UnsupportedPtx, match="malloc"):
        launch(PROGRAM.replace("vprintf", "malloc"))


def test_conversions():
    values = struct.pack("=iIQdii", -3, 7, 1 << 40, 0.25, ord("z"), 255)
    text = formatted("%d|%3u|%llu|%g|%c|%#x|%%", lambda at, size: values[at : at + size], str)
    assert text == "-3|  7|1099511627776|0.25|z|0xff|%"


def test_a_wild_string_is_out_of_bounds():
    text = PROGRAM.replace("116, 37, 100", "116, 37, 115").replace("[%SPL], %r1", "[%SPL+4], %r1")
    with pytest.raises(OutOfBounds, match="read of 1 bytes"):
        launch(text)
