"""Keys of kernels as text: source, config, architecture.

A config is a frozen dataclass of plain values, so that it can be written, compared between
processes, and read again. A text can name only kernels and configs of our own packages. Reading it
imports nothing else and calls nothing but their constructors.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any

from kernelkit.compile.outside import json_of, require_fields
from kernelkit.compile.sources import PACKAGES, path_of

# What constructors raise for arguments that are not theirs.
_FAILURES = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
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
        """Return one line of JSON, equal in every process. NotPlain for a config that has none."""
        fields = {"source": self.source, "arch": self.arch, "config": _encoded(self.config)}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> KernelKey:
        """Parse the text of `to_text`. ValueError for anything else."""
        try:
            fields = json_of(text, "it")
            require_fields("it", fields, {"source": str, "arch": str})
            key = cls(fields["source"], _decoded(fields["config"]), fields["arch"])
            _require_ours(key.module)
        except (*_FAILURES, ImportError) as error:
            raise ValueError(f"not a key of a kernel: {text[:200]} ({error})") from error
        return key

    def title(self) -> str:
        """Title for people: the source and what differs from the config's defaults."""
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
        return _class_of(value["enum"])[value["name"]]
    fields = {name: _decoded(item) for name, item in value["fields"].items()}
    return _class_of(value["class"])(**fields)


def _class_of(path: str) -> Any:
    """An Enum or a frozen dataclass by its name; ValueError for anything else."""
    module, _, name = path.partition(":")
    _require_ours(module)
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, type) and found.__module__ == module:
        about: Any = vars(found).get("__dataclass_params__")
        if issubclass(found, Enum) or (about is not None and about.frozen):
            return found
    raise ValueError(f"{path} is not the class of a config")


def _require_ours(module: str) -> None:
    if path_of(module) is None:
        raise ValueError(f"{module} is not a module of {', '.join(PACKAGES)}")


def _short(value: Any) -> str:
    if not dataclasses.is_dataclass(value):
        return "" if value is None else str(value)
    shown = [
        f"{item.name}={_short(getattr(value, item.name)) or None}"
        for item in dataclasses.fields(value)
        if getattr(value, item.name) != item.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"
