"""The PTX of a launch that failed, kept as a file: the lines of a report can be looked up."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from ptxemu.guard import GUARD, warn
from ptxemu.trusted import write_whole

FOLDER = "PTXEMU_KEEP"  # environment variable: where to
MACHINE_CODE = (".cubin", ".sass")  # what commands put beside it
_AT_MOST = 32  # kernels that are left in the folder


def folder() -> Path:
    """$PTXEMU_KEEP, or one for each user below the folder of temporary files."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"ptxemu-{os.getuid()}"


def keep(text: str, entry: str) -> Path | None:
    """Write PTX under a name that its text decides, and remove the oldest of what was kept before.
    None where the folder cannot be written to, or where others may write it, too: they could make
    links of our names there. A report is worth more than its appendix."""
    words = "".join(c if c.isalnum() else "_" for c in entry)[:40].strip("_")
    path = folder() / f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.ptx"
    try:
        GUARD.make(path.parent)
        write_whole(path, text.encode())
        kept = sorted(path.parent.glob("*.ptx"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-_AT_MOST]:
            for kind in (".ptx", *MACHINE_CODE):
                old.with_suffix(kind).unlink(missing_ok=True)
    except OSError as error:
        warn(error)
        return None
    return path
