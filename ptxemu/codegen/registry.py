"""Opcode -> emitter. A form lists the modifiers and types it implements; anything else is refused.

An opcode is matched by its longest registered prefix ("cp.async.bulk.tensor" before
"cp.async.bulk"); its trailing parts that name types are the types, the parts between are the flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.tree import Instr


@dataclass(frozen=True)
class Form:
    """Opcodes that one emitter implements."""

    name: str
    emit: Callable[..., Any]
    flags: frozenset[str]
    types: tuple[frozenset[str], ...]  # alternatives for each trailing type; () where there is none
    section: str  # PTX ISA section, by its title
    blocking: bool = False  # may park the warp: starts a basic block of its own

    @cached_property
    def convergent(self) -> bool:
        """Every live lane of the warp (or of the member mask) executes it together."""
        return not {"sync", "aligned"}.isdisjoint((*self.name.split("."), *self.flags))


@dataclass(frozen=True)
class Match:
    """A form applied to one instruction."""

    form: Form
    flags: frozenset[str]
    types: tuple[str, ...]

    @property
    def type(self) -> str:
        return self.types[-1]

    def pick(self, *choices: str, default: str = "") -> str:
        """The flag among `choices` that the instruction carries, else `default`."""
        for choice in choices:
            if choice in self.flags:
                return choice
        return default

    def keywords(self, *flags: str) -> str:
        """Return the flags that the instruction has, as keyword arguments of a call."""
        return "".join(f", {flag}=True" for flag in flags if flag in self.flags)


_FORMS: dict[str, list[Form]] = {}
RUNTIME: dict[str, Callable[..., Any]] = {}  # what generated code may call, by name


def runtime(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from generated code."""
    RUNTIME[function.__name__] = function
    return function


def op(
    names: str,
    *,
    types: str | tuple[str, ...] = (),
    flags: str = "",
    section: str = "",
    blocking: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an emitter for the opcodes in `names` (space-separated prefixes).

    `types` lists the alternatives of each trailing type; a plain string means one type. `section`
    is titled by the opcodes where it is not given. What an emitter returns is bound to the first
    operand, a list to its items.
    """
    section = section or ", ".join(names.split())
    columns = (types,) if isinstance(types, str) else types
    alternatives = tuple(frozenset(column.split()) for column in columns)

    def register(emit: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            form = Form(name, emit, frozenset(flags.split()), alternatives, section, blocking)
            _FORMS.setdefault(name, []).append(form)
        _find.cache_clear()
        return emit

    return register


def _match_form(form: Form, parts: tuple[str, ...]) -> Match | None:
    """The last parts are types, all others flags, and the form knows each of them."""
    cut = len(parts) - len(form.types)
    if cut < 0 or not form.flags.issuperset(parts[:cut]):
        return None
    if not all(t in allowed for t, allowed in zip(parts[cut:], form.types, strict=True)):
        return None
    return Match(form, frozenset(parts[:cut]), parts[cut:])


def match(instr: Instr) -> Match:
    """The form that implements `instr`; raises UnsupportedPtx naming what is not known."""
    parts = instr.parts
    found = _find(parts)
    if found is not None:
        return found
    known = [name for name in _FORMS if name.split(".")[0] == parts[0]]
    what = f"form of {parts[0]}" if known else "instruction"
    raise UnsupportedPtx(f"unsupported {what} {instr.opcode!r}", line=instr.line, text=instr.text)


@cache
def _find(parts: tuple[str, ...]) -> Match | None:
    """A kernel has thousands of instructions and a hundred opcodes."""
    for cut in range(len(parts), 0, -1):
        for form in _FORMS.get(".".join(parts[:cut]), ()):
            found = _match_form(form, parts[cut:])
            if found is not None:
                return found
    return None


def supported() -> list[Form]:
    """Every registered form."""
    return [form for name in sorted(_FORMS) for form in _FORMS[name]]
