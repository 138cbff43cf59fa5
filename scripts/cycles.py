"""Modelled time of a kernel on a GPU, and where it goes: `scripts/cycles.py gqa --kv-len 8k`.

The kernel runs in the emulator; its machine code is replayed cycle by cycle. A name is a family,
one of its steps, or FILE.py:function."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import _checkout  # noqa: F401 - lab is found
from lab.commands import CYCLES, cycles_of_file
from lab.tools.command import main_of


def main(argv: Sequence[str] | None = None) -> int:
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words and ".py:" in words[0]:
        return cycles_of_file(words[0]).main("cycles.py FILE.py:function", words[1:])
    return main_of(CYCLES, __doc__, words)


if __name__ == "__main__":
    sys.exit(main())
