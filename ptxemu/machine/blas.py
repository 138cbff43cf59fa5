"""One BLAS thread while a launch runs: an MMA tile is small, and threads cost more than they give.

On a busy machine a threaded product of 128 x 128 x 16 takes 50 times as long. numpy's wheels bring
an OpenBLAS whose thread count can be set; with another BLAS nothing happens here, and
OPENBLAS_NUM_THREADS or its like is the user's business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_FOLDERS = ("../numpy.libs", ".dylibs", "../numpy.dylibs")  # beside the package, by platform
_PREFIXES = (("scipy_openblas_", "64_"), ("openblas_", "64_"), ("openblas_", ""))


@cache
def _thread_control() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """(set, get) of the number of threads of numpy's own OpenBLAS, or None."""
    package = Path(np.__file__).parent
    for folder in _FOLDERS:
        for path in sorted((package / folder).glob("*openblas*")):
            library = ctypes.CDLL(str(path))
            for prefix, suffix in _PREFIXES:
                names = [f"{prefix}{verb}_num_threads{suffix}" for verb in ("set", "get")]
                if all(hasattr(library, name) for name in names):
                    return tuple(getattr(library, name) for name in names)
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block numpy's matrix products use one thread."""
    control = _thread_control()
    if control is None:
        yield
        return
    set_threads, get_threads = control
    before = get_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)
