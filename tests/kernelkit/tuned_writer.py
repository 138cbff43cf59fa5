"""A process that writes measured choices: first argument: the folder; then the entries' numbers.
With 'die' it is killed between writing the temporary file and renaming it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from kernelkit.tune import files as tuned_files
from kernelkit.tune.files import Entry, Machine, Place

PLACE = Place("decode", Machine("Test GPU", 132, "sm_90a", "570.1"), "ab" * 32)


def entry(number: int, cluster: int = 2) -> Entry:
    """Entry for a problem with `number` keys."""
    return Entry({"keys": number}, {"cluster": cluster}, 9.0, 10.0, (({}, 10.0),), 1.0)


def main(folder: str, *words: str) -> None:
    numbers = [int(word) for word in words if word != "die"]
    if "die" in words:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    for number in numbers:
        tuned_files.add(Path(folder), PLACE, [entry(number)])


if __name__ == "__main__":
    main(*sys.argv[1:])
