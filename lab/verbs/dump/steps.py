"""What `dump.py STEP` says: PTX, resources and SASS of every kernel that the step launches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from kernelkit.compile.warm import ready
from lab.verbs.dump.kernel import Subject, dump_all
from lab.verbs.explain.steps import kernels_of


def subjects_of(options: argparse.Namespace) -> Iterator[Subject]:
    """Each kernel once."""
    keys = [key for _, keys in kernels_of(options) for key in keys]
    for key in dict.fromkeys(keys):
        name = key.source.replace(":", ".")
        yield Subject(name, name, key.config, key.arch, compile=partial(ready, key))


def perform(options: argparse.Namespace) -> int:
    return dump_all(options, lambda: subjects_of(options))
