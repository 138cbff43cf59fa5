"""PTX text -> tokens. A token is a tuple (kind, text, line); comments and white space are
dropped.

So is `.loc` within inline assembly. Compilers bracket it with comments, give its place in front of
it, and count on from there for each line of its text: such lines are none of the source file.

Words repeat, so they are cut off first, all at once, and each is looked at only once.
"""

from __future__ import annotations

import re

from ptxemu.errors import PtxSyntaxError

MOST_REGISTERS = 1 << 20  # of an entry
MOST_BYTES = 1 << 30  # of a variable
MOST_NESTED = 100  # brackets in brackets, calls in calls
MOST_CALLS = 10_000  # inlined into an entry
_MOST_DIGITS = 100  # of an integer; in binary a number of 64 bits has 66


def integer_literal(text: str) -> int:
    """Decimal, 0x, 0b, or octal with a leading 0; U says unsigned. ValueError for anything else."""
    digits = text.rstrip("U")
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    return int(digits, 8 if octal else 0)


def register_count(count: int, known: int) -> range:
    """Numbers of so many registers, in an entry that has `known` others. ValueError for too many,
    or less than none."""
    if not 0 <= count <= MOST_REGISTERS - known:
        raise ValueError(f"{count} registers besides {known}, at most {MOST_REGISTERS} in a kernel")
    return range(count)


def variable_bytes(nbytes: int, align: int, initial: int) -> int:
    """The size of a variable. ValueError for one that is too large, for more `initial` bytes than
    it has, and for an alignment that is not a power of two."""
    if initial > nbytes:
        raise ValueError(f"an initialiser of {initial} bytes for a variable of {nbytes}")
    if not 0 <= nbytes <= MOST_BYTES:
        raise ValueError(f"a variable of {nbytes} bytes, at most {MOST_BYTES}")
    if align < 0 or align & (align - 1) or align > MOST_BYTES:
        raise ValueError(f".align {align}, expected a power of two")
    return nbytes


Token = tuple[str, str, int]

# The order matters: hexadecimal floats before numbers, dotted words before punctuation.
_KINDS = r"""
      (?P<begin>//[ ]begin[ ]inline[ ]asm\b[^\n]*)
    | (?P<end>//[ ]end[ ]inline[ ]asm\b[^\n]*)
    | (?P<skip>//[^\n]*|/\*.*?\*/)
    | (?P<newline>\n)
    | (?P<string>"[^"]*")
    | (?P<hexfloat>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16})
    | (?P<number>0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][-+]?\d+)?|0[bB][01]+U?|\d+U?)
    | (?P<word>[%$A-Za-z_][\w$]*(?:(?:\.|::)[A-Za-z_0-9][\w$]*)*)
    | (?P<directive>\.[A-Za-z_][\w]*(?:(?:\.|::)\w+)*)
    | (?P<punct>[][{}()<>,;:@!|+\-=*~])
    | (?P<unknown>[^ \t\r])
"""
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_KIND = re.compile(_KINDS, re.VERBOSE | re.DOTALL)
_WORD = re.compile(f"[ \\t\\r]*({re.sub('[?]P<[a-z]+>', '?:', _KINDS)})", re.VERBOSE | re.DOTALL)


def tokenize(text: str) -> list[Token]:
    """Return all tokens of `text`, with 1-based line numbers. PtxSyntaxError for a character that
    PTX has not, and for brackets that nest more than MOST_NESTED deep."""
    tokens: list[Token] = []
    line = 1
    inline = ignored = False  # within inline assembly; behind a .loc in it
    kinds: dict[str, str] = {}
    for word in _WORD.findall(text):
        kind = kinds.get(word)
        if kind is None:
            kind = kinds[word] = _kind(word)
        if kind == "newline":
            line += 1
            ignored = False
        elif ignored:
            continue
        elif kind == "skip":
            line += word.count("\n")
        elif kind in ("begin", "end"):
            inline = kind == "begin"
        elif kind == "unknown":
            quoted = text.split("\n")[line - 1].strip()
            raise PtxSyntaxError(f"unexpected character {word!r}", line=line, text=quoted)
        elif inline and word == ".loc":
            ignored = True
        else:
            tokens.append((kind, word, line))
    _require_shallow(tokens, text)
    return tokens


def _require_shallow(tokens: list[Token], text: str) -> None:
    """Refuse brackets that nest too deep for a parser that calls itself. Python's own limit of
    calls says nothing: other packages raise it."""
    depth = 0
    for _, word, line in tokens:
        if word in _OPENING:
            depth += 1
        elif word in _CLOSING:
            depth -= 1
        if depth > MOST_NESTED:
            message = f"brackets nest more than {MOST_NESTED} deep"
            raise PtxSyntaxError(message, line=line, text=text.split("\n")[line - 1].strip())


def _kind(word: str) -> str:
    found = _KIND.match(word)
    assert found is not None, "a word was cut off by the same pattern"
    return str(found.lastgroup)
