"""Garbage collection, put off while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_off() -> Iterator[None]:
    """Within the block nothing is collected. A parsed kernel is tens of thousands of objects, none
    of which is garbage, and each look for it goes through all that the process has imported."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
