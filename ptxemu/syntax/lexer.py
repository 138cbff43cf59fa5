"""PTX text -> tokens. A token is a tuple (kind, text, line); comments and white space are
dropped.

So is `.loc` within inline assembly. Compilers bracket it with comments, give its place in front of
it, and count on from there for each line of its text: such lines are none of the source file.
"""

from __future__ import annotations

import re

from ptxemu.errors import PtxSyntaxError

Token = tuple[str, str, int]

# The order matters: hexadecimal floats before numbers, dotted words before punctuation.
_TOKEN = re.compile(
    r"""
      (?P<asm>//[ ](?:begin|end)[ ]inline[ ]asm\b[^\n]*)
    | (?P<skip>[ \t\r]+|//[^\n]*|/\*.*?\*/)
    | (?P<newline>\n)
    | (?P<string>"[^"]*")
    | (?P<hexfloat>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16})
    | (?P<number>0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][-+]?\d+)?|0[bB][01]+U?|\d+U?)
    | (?P<word>[%$A-Za-z_][\w$]*(?:(?:\.|::)[A-Za-z_0-9][\w$]*)*)
    | (?P<directive>\.[A-Za-z_][\w]*(?:(?:\.|::)\w+)*)
    | (?P<punct>[][{}()<>,;:@!|+\-=*~])
    """,
    re.VERBOSE | re.DOTALL,
)


def tokenize(text: str) -> list[Token]:
    """All tokens of `text`, with 1-based line numbers."""
    tokens: list[Token] = []
    position, line, end = 0, 1, len(text)
    match, inline = _TOKEN.match, False
    while position < end:
        found = match(text, position)
        if found is None:
            quoted = text.split("\n")[line - 1].strip()
            raise PtxSyntaxError(f"unexpected character {text[position]!r}", line=line, text=quoted)
        kind = found.lastgroup
        if kind == "newline":
            line += 1
        elif kind == "skip":
            line += found.group().count("\n")
        elif kind == "asm":
            inline = found.group().startswith("// begin")
        elif inline and found.group() == ".loc":
            newline = text.find("\n", position)
            position = end if newline < 0 else newline
            continue
        else:
            tokens.append((str(kind), found.group(), line))
        position = found.end()
    return tokens
