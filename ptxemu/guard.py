"""Folders of this user that ptxemu keeps something in, and the warning about one that is not."""

from __future__ import annotations

import warnings
from functools import cache

from ptxemu.trusted import Guard, Untrusted

SHARED = "PTXEMU_SHARED"  # environment variable: folders that may belong to others
GUARD = Guard(SHARED)


class CacheWarning(UserWarning):
    """A folder or file of ptxemu is not used, since other users may write it."""


def warn(error: OSError) -> None:
    """Warn of what others may write, once in a process for each file or folder; other errors of a
    folder cost time and nothing else."""
    if isinstance(error, Untrusted):
        _warn_once(str(error))


@cache
def _warn_once(message: str) -> None:
    warnings.warn(f"ptxemu: {message}", CacheWarning, stacklevel=4)
