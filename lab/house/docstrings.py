"""Docstrings and signatures of this repository as the API pages of `make docs` show them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_FIELD = re.compile(r"(\w+(?:, \w+)*): (.*)")


class Docstrings(griffe.Extension):
    """Reads the docstrings of this repository for the API pages."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Show functions before classes."""
        if pkg.exports:
            pkg.exports.sort(key=lambda name: str(name)[0].isupper())

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Spell out the keyword arguments of a function with overloads, as `help` does."""
        parameters = [new for old in func.parameters for new in _spelled(old, loader)]
        if len(parameters) > len(func.parameters):
            func.overloads, func.parameters = None, griffe.Parameters(*parameters)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Show the whole first paragraph in tables of members.

        Fields that a class documents as `name: text` or `name, name: text` get docstrings.
        """
        if not obj.docstring:
            return
        first, *others = obj.docstring.value.split("\n\n")
        if obj.is_class:
            first, *others = (_without_fields(obj, part) for part in (first, *others))
        obj.docstring.value = "\n\n".join((" ".join(first.split()), *others)).strip()


def _spelled(
    parameter: griffe.Parameter, loader: griffe.GriffeLoader
) -> Iterator[griffe.Parameter]:
    """Yield the parameter, or one for each item of the TypedDict in `**options: Unpack[..]`.

    Its items are annotated with `Annotated[type, default]`, see `kernelkit.call.front`.
    """
    unpack = parameter.annotation
    if not isinstance(unpack, griffe.ExprSubscript) or unpack.canonical_name != "Unpack":
        yield parameter
        return
    options = loader.modules_collection[unpack.slice.canonical_path]
    for name, item in options.all_members.items():
        kind, default = item.annotation.slice.elements
        only = griffe.ParameterKind.keyword_only
        yield griffe.Parameter(name, annotation=kind, kind=only, default=default)


def _without_fields(obj: griffe.Object, paragraph: str) -> str:
    """Give the fields in the paragraph their docstrings; return what else it has."""
    kept, fields = [], {}
    names: list[str] = []
    for line in paragraph.splitlines():
        if found := _FIELD.match(line):
            names = [name for name in found[1].split(", ") if name in obj.members]
            line = found[2] if names else line
        elif not line.startswith("    "):
            names = []
        for name in names:
            fields.setdefault(name, []).append(line.strip())
        kept += [] if names else [line]
    for name, lines in fields.items():
        obj.members[name].docstring = griffe.Docstring(" ".join(lines), parent=obj.members[name])
    return "\n".join(kept)
