"""Rules of language: docstrings with a subject, sentences that can be read once, short headings.

Offences that are older than a rule are counted by rule and folder in `prose.json`. A count may
only fall: whoever mends an offence writes the smaller number there, with `house.py prose --write`.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import PurePosixPath

from lab.house.source import ROOT, Finding, Source, files

COUNTS = ROOT / "lab/house/prose.json"
NO_SUBJECT = frozenset({"Of", "That", "Those", "Whose", "Who"})
SENTENCE_WORDS = 35
HEADING_CHARACTERS = 80
# Phrases with another meaning in this field, or with none.
BANNED = (
    "is said", "are said", "is told", "are told", "refused by name", "is no error where",
    "of theirs alone", "sets aside and said", "by mma.sync", "who waits", "who computes",
    "stand in what", "goes past", "is known by", "what more it",
)  # fmt: skip

_WORD = re.compile(r"\W*(\w+)")
_FIELD = re.compile(r"(?:^|[.;] )[a-z_]\w*(?:, [a-z_]\w*)*: ")
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|]|\w[\w, ]*:\s))")
_CODE = re.compile(r"```.*?```|^ {4,}.*$", re.DOTALL | re.MULTILINE)
_BANNED = re.compile(r"\b(" + "|".join(map(re.escape, BANNED)) + r")\b")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Holds = ast.stmt | ast.excepthandler | ast.match_case  # perhaps definitions


@cache
def docstrings(source: Source) -> list[tuple[int, str]]:
    """Return the line and the text of each docstring of a file."""
    inside, found = [source.tree], []
    while inside:
        node = inside.pop()
        if isinstance(node, _Documented) and (text := ast.get_docstring(node)):
            found.append((node.body[0].lineno, text))
        inside += [each for each in ast.iter_child_nodes(node) if isinstance(each, _Holds)]
    return sorted(found)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring or page, without code; inline code counts as one word."""
    plain = re.sub(r"`[^`]*`", "X", _CODE.sub("", text))
    for paragraph in _PARAGRAPH.split(plain):
        yield from re.split(r"(?<=[.!?:;])[*_]*\s+", " ".join(paragraph.split()))


def docstring_subject(source: Source) -> Iterator[Finding]:
    """A docstring is an imperative or has a subject: it does not begin with Of, That or Whose."""
    for line, text in docstrings(source):
        first = _WORD.match(text)
        if first and first[1] in NO_SUBJECT:
            yield Finding(str(source.path), line, f"begins with {first[1]}: {_shown(text)}")


def docstring_sentences(source: Source) -> Iterator[Finding]:
    """A sentence of a docstring has at most 35 words."""
    for line, text in docstrings(source):
        for sentence in sentences(text) if text.count(" ") >= SENTENCE_WORDS else ():
            if (words := len(sentence.split())) > SENTENCE_WORDS:
                yield Finding(str(source.path), line, f"{words} words: {_shown(sentence)}")


def docstring_fields(source: Source) -> Iterator[Finding]:
    """A line of a docstring describes one field or parameter."""
    for line, text in docstrings(source):
        for row in text.splitlines():
            if len(_FIELD.findall(row)) > 1:
                yield Finding(str(source.path), line, f"several fields in a line: {_shown(row)}")


def banned_phrases(source: Source) -> Iterator[Finding]:
    """A docstring uses the field's words, and none of the banned phrases."""
    for line, text in docstrings(source):
        for phrase in _BANNED.findall(text):
            yield Finding(str(source.path), line, f"has the phrase {phrase!r}")


def heading_length(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """A heading of a page is a phrase of at most 80 characters."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        fenced ^= line.startswith("```")
        heading = line.lstrip("#").strip()
        if line.startswith("#") and not fenced and len(heading) > HEADING_CHARACTERS:
            yield Finding(str(path), number, f"a heading of {len(heading)} characters")


def page_sentences(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """A sentence of a page, outside of tables, has at most 35 words."""
    plain = re.sub(r"^(?:\||#|<!--).*$", "", _CODE.sub("", text), flags=re.MULTILINE)
    for sentence in sentences(plain):
        if (words := len(sentence.split())) > SENTENCE_WORDS:
            yield Finding(str(path), 1, f"{words} words: {_shown(sentence)}")


def page_phrases(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """A page has none of the banned phrases."""
    for number, line in enumerate(text.splitlines(), start=1):
        for phrase in _BANNED.findall(line):
            yield Finding(str(path), number, f"has the phrase {phrase!r}")


OF_A_FILE: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    docstring_subject, docstring_sentences, docstring_fields, banned_phrases,
)  # fmt: skip
OF_A_PAGE = (heading_length, page_sentences, page_phrases)


def offences(everything: Sequence[Source]) -> Iterator[tuple[str, Finding]]:
    """Yield each offence in these files and in all pages, with the name of its rule."""
    for source in everything:
        for rule in OF_A_FILE:
            for finding in rule(source):
                yield rule.__name__, finding
    for path in files(".md"):
        text = (ROOT / path).read_text(encoding="utf-8")
        for page_rule in OF_A_PAGE:
            for finding in page_rule(path, text):
                yield page_rule.__name__, finding


def counted(found: list[tuple[str, Finding]]) -> dict[str, dict[str, int]]:
    """Count offences: rule -> folder -> how many."""
    counts = Counter((rule, PurePosixPath(each.subject).parts[0]) for rule, each in found)
    return {
        rule.__name__: {
            folder: n for (one, folder), n in sorted(counts.items()) if one == rule.__name__
        }
        for rule in (*OF_A_FILE, *OF_A_PAGE)
    }


def allowed() -> dict[str, dict[str, int]]:
    """Return the counts that are left from before the rules."""
    return json.loads(COUNTS.read_text(encoding="utf-8"))


def _shown(text: str) -> str:
    return " ".join(text.split())[:60]
