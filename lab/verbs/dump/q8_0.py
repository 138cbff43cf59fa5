"""What `dump.py q8_0` says: PTX, resources and SASS of every kernel of the problems."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from kernelkit.compile.warm import ready
from lab.verbs.dump.kernel import Subject, dump_all
from lab.verbs.explain.q8_0 import kernels_of


def subjects_of(options: argparse.Namespace) -> Iterator[Subject]:
    """Each kernel once."""
    keys = [key for _, found in kernels_of(options) for key in found]
    for key in dict.fromkeys(keys):
        yield Subject(*(key.source, key.source, key.config, key.arch), compile=partial(ready, key))


def perform(options: argparse.Namespace) -> int:
    return dump_all(options, lambda: subjects_of(options))
