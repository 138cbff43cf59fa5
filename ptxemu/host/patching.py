"""Replacing attributes for a while, and putting everything back, whatever happened meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def patched(target: Any, replacements: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module or class; on exit each is what it was, or gone if it was absent.

    An attribute that `target` only inherits counts as absent, so that restoring removes ours.
    """
    before = {name: vars(target).get(name, _ABSENT) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is not _ABSENT:
                setattr(target, name, value)
            elif name in vars(target):
                delattr(target, name)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
