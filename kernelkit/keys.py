"""What a kernel is compiled from, as text: where its source is, its config, the architecture.

A config is a frozen dataclass of plain values, so that it can be written down, compared between
processes, and read again.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any

PLAIN = (bool, int, float, str, type(None))  # types of values that have a lasting text


class NotPlain(TypeError):
    """A config that holds something with no lasting text, such as a function."""


@dataclass(frozen=True)
class KernelKey:
    """source: 'package.module:function', or 'package.module' for its `host_function`, which gives
    what to compile. config, arch: its arguments."""

    source: str
    config: Any
    arch: str

    def host_function(self) -> tuple:
        """(function, *example arguments) for `cute.compile`. Imports the DSL."""
        module, _, function = self.source.partition(":")
        return getattr(import_module(module), function or "host_function")(self.config, self.arch)

    @property
    def module(self) -> str:
        return self.source.partition(":")[0]

    def to_text(self) -> str:
        """One line of JSON, the same in every process. NotPlain for a config that has none."""
        fields = {"source": self.source, "arch": self.arch, "config": _encoded(self.config)}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> KernelKey:
        """Of what `to_text` gave. ValueError for anything else."""
        try:
            fields = json.loads(text)
            return cls(fields["source"], _decoded(fields["config"]), fields["arch"])
        except (KeyError, TypeError, AttributeError, ImportError) as error:
            raise ValueError(f"no key of a kernel: {text[:200]} ({error})") from error

    def title(self) -> str:
        """For people: the source and what differs from the config's defaults."""
        return f"{self.source} {_short(self.config)} {self.arch}"


def _encoded(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        own = {name: _encoded(item) for name, item in fields.items()}
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": own}
    if isinstance(value, Enum):
        return {"enum": f"{type(value).__module__}:{type(value).__qualname__}", "name": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(item) for item in value]}
    if type(value) in PLAIN:
        return value
    raise NotPlain(f"{value!r} in a config")


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_decoded(item) for item in value["tuple"])
    if "enum" in value:
        return _named(value["enum"])[value["name"]]
    fields = {name: _decoded(item) for name, item in value["fields"].items()}
    return _named(value["class"])(**fields)


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _short(value: Any) -> str:
    if not dataclasses.is_dataclass(value):
        return "" if value is None else str(value)
    shown = [
        f"{item.name}={_short(getattr(value, item.name)) or None}"
        for item in dataclasses.fields(value)
        if getattr(value, item.name) != item.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"
