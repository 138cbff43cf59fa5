"""Kernel names of C++: which mangled entry a readable name means."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

_LIBRARIES = ("libstdc++.so.6", "libc++abi.so.1", "libc++.1.dylib")
_SPACES = re.compile(r"\s+(?=\W)|(?<=\W)\s+")
_TAG = re.compile(r"\[abi:[^\]]*\]")  # of which Numba's names have several
_ANONYMOUS = "(anonymous namespace)"


def chosen(entries: Iterable[str], name: str) -> list[str]:
    """Return the entries that a readable name means; more than one if it is ambiguous.

    A name may leave out the type that is returned, the parameters, the namespaces and the template
    arguments: "void ns::scale<float>(float*, int)", "ns::scale<float>" and "scale" are all right.
    """
    readable = {entry: demangled(entry) for entry in entries}
    wanted = _plain(name)
    return [entry for entry, text in readable.items() if text and wanted in _forms(text)]


@cache
def demangled(name: str) -> str:
    """Return a mangled C++ name as written; "" for a name that is not mangled, or without a C++
    library that can tell."""
    library = _library()
    if library is None or not name.startswith("_Z"):
        return ""
    status = ctypes.c_int()
    text = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value or not text:
        return ""
    try:
        return str(ctypes.cast(text, ctypes.c_char_p).value.decode())  # type: ignore[union-attr]
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))


def short(name: str) -> str:
    """The name with its namespaces, without parameters and template arguments; an entry that is
    not mangled as it is."""
    text = demangled(name)
    return _without_brackets(_name(_split(_TAG.sub("", text))[0])) if text else name


@cache
def _library() -> Any:
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            demangle = library.__cxa_demangle
        except (OSError, AttributeError):
            continue
        demangle.restype = ctypes.c_void_p
        demangle.argtypes = (ctypes.c_char_p, *[ctypes.c_void_p] * 3)
        return library
    return None


def _plain(text: str) -> str:
    return _SPACES.sub("", text.strip())


def _forms(text: str) -> set[str]:
    """What a declaration may be called."""
    head, parameters = _split(_TAG.sub("", text))
    full = _name(head)
    names = {full, _last(full)}
    names |= {_without_brackets(name) for name in names}
    found = {text, *names, *(name + parameters for name in names)}
    return {_plain(form) for form in found}


def _last(name: str) -> str:
    """Without namespaces."""
    depth, start = 0, 0
    for at, letter in enumerate(name):
        depth += (letter in "(<") - (letter in ")>")
        if name.startswith("::", at) and depth == 0:
            start = at + 2
    return name[start:]


def _split(text: str) -> tuple[str, str]:
    """Cut a declaration in front of its parameters."""
    text = text.replace(_ANONYMOUS, "{anonymous}")
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] in ")>") - (text[at] in "(<")
        if text[at] == "(" and depth == 0:
            return text[:at], text[at:]
    return text, ""


def _name(head: str) -> str:
    """Without the type that is returned, which demangled templates begin with."""
    depth, start = 0, 0
    for at, letter in enumerate(head):
        depth += (letter in "(<") - (letter in ")>")
        if letter == " " and depth == 0:
            start = at + 1
    return head[start:].replace("{anonymous}", _ANONYMOUS)


def _without_brackets(name: str) -> str:
    kept, depth = [], 0
    for letter in name:
        depth += letter == "<"
        if not depth:
            kept.append(letter)
        depth -= letter == ">"
    return "".join(kept)
