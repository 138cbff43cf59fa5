"""The one rule for files whose content is executed: no other user may have written them.

A file is trusted if this user or root owns the file, every folder on the way to it and every
symbolic link on that way, and neither group nor others may write them. A sticky folder such as /tmp
may be on the way: others can add entries there, but cannot replace ours. Folders below one that the
user names in an environment variable are shared on purpose and are not checked.

kernelkit and ptxemu, which do not import each other, have one copy of this file each; a test checks
that the texts are equal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRIVATE_FOLDER = 0o700
UNFINISHED = ".new-"  # what the name of a file that is being written begins with
_FILE = 0o644
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as many as Linux follows
# A FIFO must not block the open; the descriptor is not for children.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class Untrusted(PermissionError):
    """Somebody else may have written a file, or may exchange it. culprit: what has to be mended."""

    def __init__(self, message: str, culprit: str) -> None:
        super().__init__(errno.EPERM, message)
        self.culprit = culprit

    def __str__(self) -> str:
        return str(self.args[1])


@dataclass(frozen=True)
class Guard:
    """The rule, with the switch of its user.

    variable: name of the environment variable that lists folders which are shared on purpose,
    separated by colons (`os.pathsep`).
    """

    variable: str

    def shared(self, path: Path) -> bool:
        """Whether the user has named the path, or a folder above it, as shared on purpose."""
        names = filter(None, os.environ.get(self.variable, "").split(os.pathsep))
        here = Path(os.path.abspath(path))
        folders = [Path(os.path.abspath(Path(name).expanduser())) for name in names]
        return any(here == folder or folder in here.parents for folder in folders)

    def check(self, path: Path) -> None:
        """Raise Untrusted where another user may change a file or what is in a folder.

        Raises FileNotFoundError where there is nothing, and OSError for a way that cannot be read.
        """
        if not hasattr(os, "geteuid") or self.shared(path):
            return
        steps = list(_steps(path))
        for number, (here, status) in enumerate(steps, 1):
            self._require_ours(here, status, sticky_is_safe=number < len(steps))

    def read(self, path: Path, *, trust: bool = False) -> bytes:
        """Return the content of a trusted file; trust: of any file, for callers who check it.

        The status of the open file counts, not that of its name, so nothing can be exchanged
        between the check and the reading. Raises what `check` does.
        """
        if not trust:
            self.check(path)
        with os.fdopen(os.open(path, _READ), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            if not trust and hasattr(os, "geteuid") and not self.shared(path):
                self._require_ours(str(path), status, sticky_is_safe=False)
            return file.read()

    def make(self, folder: Path) -> None:
        """Make a folder and those above it that are missing, for this user alone; then `check`.

        In a folder that is shared on purpose the user's umask decides who may do what.
        """
        mode = 0o777 if self.shared(folder) else PRIVATE_FOLDER
        missing = [folder]
        while not missing[-1].exists() and missing[-1].parent != missing[-1]:
            missing.append(missing[-1].parent)
        for path in reversed(missing[:-1]):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode)
        self.check(folder)

    def _require_ours(self, here: str, status: os.stat_result, *, sticky_is_safe: bool) -> None:
        me = os.geteuid()
        if status.st_uid not in (me, 0):
            why, mend = f"belongs to user {status.st_uid}, not to {me}", f"chown {me} {here}"
        elif stat.S_ISLNK(status.st_mode) or not status.st_mode & _OTHERS_WRITE:
            return
        elif sticky_is_safe and status.st_mode & stat.S_ISVTX:
            return
        else:
            mode = stat.S_IMODE(status.st_mode)
            why, mend = f"may be written by other users (mode {mode:o})", f"chmod go-w {here}"
        raise Untrusted(
            f"{here} {why}: its contents are not used. Run `{mend}`, or name the folder in "
            f"{self.variable} if it is shared on purpose",
            here,
        )


def write_whole(path: Path, data: bytes, *, lasting: bool = False) -> None:
    """Replace a file so that it is the old one or the new one, whatever ends this process.

    lasting: or the machine, once this returns. Neither group nor others may write the file.
    Raises OSError where it cannot be written.
    """
    new = path.with_name(f"{UNFINISHED}{os.getpid()}-{threading.get_ident()}-{path.name}")
    new.unlink(missing_ok=True)  # of a process that had the same number
    try:
        with os.fdopen(os.open(new, _CREATE, _FILE), "wb") as file:
            file.write(data)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(new, path)
        if lasting:
            _sync_folder(path.parent)
    finally:
        new.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _steps(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all folders and symbolic links on the way to a path, and what the path is, in order.

    What is found stays true: whoever could exchange a step may write a folder in front of it, and
    the caller refuses that one first.
    """
    ahead, at, links = [*reversed(path.absolute().parts)], "", 0
    while ahead:
        part = ahead.pop()
        if part == os.pardir:
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, part)
        status = os.lstat(here)
        yield here, status
        if not stat.S_ISLNK(status.st_mode):
            at = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        ahead += reversed(Path(os.readlink(here)).parts)
