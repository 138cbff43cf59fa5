"""PTX that asks for too much, or for what there is not, is a syntax error with its line."""

from __future__ import annotations

import pytest

import ptxemu
from ptxemu.module import Module
from ptxemu.syntax.lexer import MOST_BYTES, MOST_NESTED, MOST_REGISTERS
from tests.ptxemu.kernels import HEAD


def kernel(statement: str, before: str = "") -> str:
    return f"{HEAD}{before}\n.visible .entry kernel() {{\n{statement}\nret;\n}}\n"


@pytest.mark.parametrize(("text", "words"), [
    (kernel(f".reg .b32 %r<{MOST_REGISTERS + 1}>;"), "at most 1048576 in a kernel"),
    (kernel(".reg .b32 %r<-1>;"), "-1 registers"),
    (kernel(f".reg .b32 %r<{MOST_REGISTERS - 1}>; .reg .b32 %q<9>;"), "9 registers beside"),
    (kernel(".reg .b6255 %r1;"), "unknown type .b6255"),
    (kernel("", f".global .b8 x[{MOST_BYTES + 1}];"), "a variable of 1073741825 bytes"),
    (kernel("", ".global .b8 x[99999999999][99999999999];"), "a variable of"),
    (kernel("", ".global .b32 x[2] = {1, 2, 3};"), "an initialiser of 12 bytes"),
    (kernel("", ".global .align 3 .b32 x;"), "expected a power of two"),
    (kernel(".reg .b32 %r1; mov.b32 %r1, 09;"), "09"),
    (kernel(f".reg .b32 %r1; mov.b32 %r1, {'1' * 5_000};"), "an integer of 5000 digits"),
    (kernel(f".reg .b32 %r1; mov.b32 %r1, {'{' * 5_000};"), "nest more than 100 deep"),
    (kernel("{" * MOST_NESTED + "}" * MOST_NESTED), "nest more than 100 deep"),
])  # fmt: skip
def test_it_is_a_syntax_error(text, words):
    with pytest.raises(ptxemu.PtxSyntaxError, match=words) as raised:
        Module(text)
    assert "line" in str(raised.value)


def test_the_limits_themselves_are_read():
    """One register of an entry is that of carries."""
    Module(kernel(f".reg .b32 %r<{MOST_REGISTERS - 1}>;", f".global .b8 x[{MOST_BYTES}];"))
    scopes = MOST_NESTED - 1  # the kernel's own braces count
    Module(kernel("{" * scopes + "}" * scopes))
