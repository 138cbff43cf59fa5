"""PTX text -> tokens. A token is a tuple (kind, text, line); comments and white space are
dropped.
"""

from __future__ import annotations

import re

from ptxemu.errors import PtxSyntaxError

Token = tuple[str, str, int]

# The order matters: hexadecimal floats before numbers, dotted words before punctuation.
_TOKEN = re.compile(
    r"""
      (?P<skip>[ \t\r]+|//[^\n]*|/\*.*?\*/)
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
    match = _TOKEN.match
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
        else:
            tokens.append((str(kind), found.group(), line))
        position = found.end()
    return tokens
