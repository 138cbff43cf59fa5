"""Files that other users may write are never executed: the kernel cache, folders of kernels made
ahead of time, data kept by the emulator, its machine code.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kernelkit.compile import aot, trusted
from kernelkit.compile.artifact import Artifact
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.store import SHARED_VARIABLE, CacheWarning, Store
from kernelkit.compile.trusted import Guard, Untrusted
from kernelkit.tune import files as tuned_files
from kvcache.movement.config import ChecksumConfig
from lab.house.source import ROOT
from ptxemu import guard as emulator
from ptxemu import kept
from ptxemu.check import text as reports
from ptxemu.native import library

STRANGER = 12_345  # a user that is neither root nor us
KEY = KernelKey("kvcache.movement.checksum_kernel", ChecksumConfig(), "sm_100a")
ARTIFACT = Artifact("f", "sm_100a", "ptx", b"host", [])
GUARD = Guard("TEST_SHARED")

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files")


@pytest.fixture
def owners(monkeypatch) -> dict[str, int]:
    """Path -> its owner, set by `chown` if root, else by a faked status."""
    if os.geteuid() == 0:
        return _Chowned()
    found: dict[str, int] = {}
    lstat, fstat = os.lstat, os.fstat
    monkeypatch.setattr(os, "lstat", lambda p: _owned(lstat(p), found.get(os.fspath(p))))
    monkeypatch.setattr(
        os, "fstat", lambda f: _owned(fstat(f), found.get(os.readlink(f"/proc/self/fd/{f}")))
    )
    return found


class _Chowned(dict[str, int]):
    def __setitem__(self, path: str, user: int) -> None:
        os.chown(path, user, -1, follow_symlinks=False)


def _owned(status: os.stat_result, user: int | None) -> os.stat_result:
    return status if user is None else os.stat_result((*status[:4], user, *status[5:]))


# ---- the rule


def test_both_packages_have_the_same_rule():
    texts = {
        (ROOT / folder / "trusted.py").read_text() for folder in ("kernelkit/compile", "ptxemu")
    }
    assert len(texts) == 1


def made(path: Path, mode: int, content: bytes | None = None) -> Path:
    path.mkdir() if content is None else path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o400])
def test_ours_is_read(tmp_path, mode):
    assert GUARD.read(made(tmp_path / "file", mode, b"ours")) == b"ours"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o602])
@pytest.mark.parametrize("which", ["file", "folder", "folder above"])
def test_what_others_may_write_is_refused(tmp_path, mode, which):
    """The message names what is wrong, and how to mend it."""
    above = made(tmp_path / "above", 0o755)
    folder = made(above / "folder", 0o755)
    file = made(folder / "file", 0o644, b"")
    culprit = {"file": file, "folder": folder, "folder above": above}[which]
    culprit.chmod(mode | (0 if which == "file" else 0o100))
    with pytest.raises(Untrusted, match=rf"chmod go-w {culprit}`.*TEST_SHARED") as raised:
        GUARD.read(file)
    assert raised.value.culprit == str(culprit)
    culprit.chmod(0o755)
    assert GUARD.read(file) == b""


@pytest.mark.parametrize("which", ["file", "folder", "folder above", "link"])
def test_what_belongs_to_another_user_is_refused(tmp_path, owners, which):
    above = made(tmp_path / "above", 0o755)
    folder = made(above / "folder", 0o755)
    file, link = made(folder / "file", 0o644, b""), tmp_path / "link"
    link.symlink_to(above)
    culprit = {"file": file, "folder": folder, "folder above": above, "link": link}[which]
    assert GUARD.read(link / "folder" / "file") == b""
    owners[str(culprit)] = STRANGER
    with pytest.raises(Untrusted, match=f"belongs to user {STRANGER}.*chown {os.geteuid()} "):
        GUARD.read(link / "folder" / "file")


def test_root_may_own_it(tmp_path, owners, monkeypatch):
    file = made(tmp_path / "file", 0o644, b"root's")
    owners[str(file)] = 0
    assert GUARD.read(file) == b"root's"


def test_a_sticky_folder_may_be_on_the_way(tmp_path):
    """/tmp is such a folder. But nothing is written directly into it, where others could create our
    file name first."""
    sticky = made(tmp_path / "sticky", 0o1777)
    file = made(made(sticky / "ours", 0o700) / "file", 0o600, b"")
    assert GUARD.read(file) == b""
    with pytest.raises(Untrusted, match="mode 1777"):
        GUARD.make(sticky)
    sticky.chmod(0o777)
    with pytest.raises(Untrusted, match="mode 777"):
        GUARD.read(file)


def test_a_link_leads_to_what_is_checked_too(tmp_path):
    open_folder = made(tmp_path / "open", 0o777)
    made(open_folder / "file", 0o600, b"")
    (tmp_path / "link").symlink_to("open")
    (tmp_path / "file").symlink_to(open_folder / "file")
    (tmp_path / "round").symlink_to("round")
    for path in (tmp_path / "link" / "file", tmp_path / "file", tmp_path / "link/../open/file"):
        with pytest.raises(Untrusted, match=f"{open_folder} may be written"):
            GUARD.read(path)
    with pytest.raises(OSError, match="symbolic links"):
        GUARD.read(tmp_path / "round")


def test_the_open_file_counts_and_not_its_name(tmp_path, monkeypatch):
    """The file is exchanged between check and opening: the file that is read is the checked one."""
    file = made(tmp_path / "file", 0o600, b"ours")
    other = made(tmp_path / "other", 0o666, b"theirs")

    def exchanged(path, flags):
        os.replace(other, file)
        return real(path, flags)

    real = os.open
    monkeypatch.setattr(os, "open", exchanged)
    with pytest.raises(Untrusted, match="mode 666"):
        GUARD.read(file)


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(OSError, match="not a regular file"):
        GUARD.read(tmp_path / "pipe")


def test_folders_are_made_for_this_user_alone(tmp_path, monkeypatch):
    was = os.umask(0)
    try:
        GUARD.make(tmp_path / "a" / "b")
        trusted.write_whole(tmp_path / "a" / "b" / "file", b"")
    finally:
        os.umask(was)
    assert [os.stat(tmp_path / name).st_mode & 0o777 for name in ("a", "a/b")] == [0o700] * 2
    assert os.stat(tmp_path / "a/b/file").st_mode & 0o022 == 0


def test_a_draft_is_not_written_through_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(trusted.Path, "unlink", lambda *_, **__: None)  # created between the two
    victim = made(tmp_path / "victim", 0o600, b"whole")
    monkeypatch.setattr(trusted.threading, "get_ident", lambda: 7)
    (tmp_path / f".new-{os.getpid()}-7-file").symlink_to(victim)
    with pytest.raises(FileExistsError):
        trusted.write_whole(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"whole"


@pytest.mark.parametrize("named", ["", "above", "above/folder"])
def test_the_switch_names_folders(tmp_path, monkeypatch, named):
    folder = made(made(tmp_path / "above", 0o777) / "folder", 0o777)
    file = made(folder / "file", 0o666, b"shared")
    monkeypatch.setenv("TEST_SHARED", f"/elsewhere:{tmp_path / named}")
    assert GUARD.read(file) == b"shared"
    GUARD.make(folder / "new")
    monkeypatch.setenv("TEST_SHARED", f"/elsewhere:{folder}-too")
    with pytest.raises(Untrusted):
        GUARD.read(file)


# ---- parts that keep executable files


@dataclass(frozen=True)
class User:
    """A part of the project that keeps files.

    keep: writes a file into the folder.
    find: returns the kept file's content, None for nothing.
    variable: its switch.
    warning: class of its warnings.
    """

    keep: Callable[[Path], Any]
    find: Callable[[Path], Any]
    variable: str
    warning: type[Warning]


def _kept(folder: Path) -> kept.Kept:
    return kept.Kept(folder, "text", b"sources")


def _native(folder: Path) -> Any:
    found = library._read(folder / "code.o")
    return found and found.code


def _tuned(folder: Path) -> Any:
    return tuned_files.load(folder / "tuned", PLACE) or None


PLACE = tuned_files.Place("op", tuned_files.Machine("GPU", 1, "sm_90a", "1.2"), "sources")
ENTRY = tuned_files.Entry({"rows": 1}, {"tile": 2}, 1.0, 2.0)
USERS = {
    "kernels": User(
        lambda folder: Store(folder, 1 << 20).put_kernel("ab12", ARTIFACT),
        lambda folder: Store(folder, 1 << 20).kernel("ab12"),
        SHARED_VARIABLE, CacheWarning,
    ),
    "configs": User(
        lambda folder: Store(folder, 1 << 20).put_config("ab12", {"kernel": "cd"}),
        lambda folder: Store(folder, 1 << 20).config("ab12"),
        SHARED_VARIABLE, CacheWarning,
    ),
    "measured choices": User(
        lambda folder: tuned_files.add(folder / "tuned", PLACE, [ENTRY]), _tuned,
        SHARED_VARIABLE, tuned_files.TunedWarning,
    ),
    "emulator": User(
        lambda folder: _kept(folder).put("part", (1, "two")),
        lambda folder: _kept(folder).get("part"),
        emulator.SHARED, emulator.CacheWarning,
    ),
    "machine code": User(
        lambda folder: library._keep(folder / "code.o", library._Code([], b"code")), _native,
        emulator.SHARED, emulator.CacheWarning,
    ),
}  # fmt: skip


@pytest.fixture(params=USERS)
def user(request) -> User:
    emulator._warn_once.cache_clear()
    return USERS[request.param]


def files(folder: Path) -> list[Path]:
    """List the kept files, without locks."""
    return [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_what_is_kept_is_found_and_private(tmp_path, user):
    user.keep(tmp_path / "folder")
    assert user.find(tmp_path / "folder") is not None
    folders = [tmp_path / "folder", *(tmp_path / "folder").rglob("*/")]
    assert {p.stat().st_mode & 0o777 for p in folders if p.is_dir()} == {0o700}


@pytest.mark.parametrize("how", ["foreign", "writable"])
@pytest.mark.parametrize("which", ["folder", "file"])
def test_nobody_uses_what_others_may_write(tmp_path, user, owners, monkeypatch, how, which):
    """A warning names the file; the switch allows it."""
    folder = tmp_path / "folder"
    user.keep(folder)
    (file,) = files(folder)
    culprit = folder if which == "folder" else file
    if how == "foreign":
        owners[str(culprit)] = STRANGER
    else:
        culprit.chmod(0o777)
    with pytest.warns(user.warning, match=rf"{culprit} .*{user.variable}"):
        assert user.find(folder) is None
    monkeypatch.setenv(user.variable, str(folder))
    assert user.find(folder) is not None


def test_nothing_is_written_where_others_may_write(tmp_path, user):
    folder = made(tmp_path / "folder", 0o777)
    if user is USERS["measured choices"]:  # requested by name: an error
        with pytest.raises(Untrusted):
            user.keep(folder)
    else:
        with pytest.warns(user.warning, match=f"{folder} may be written"):
            user.keep(folder)
    assert not files(folder)


def test_a_foreign_file_is_replaced(tmp_path, owners):
    """A compilation is the only cost, in our own folder."""
    store = Store(tmp_path / "folder", 1 << 20)
    store.put_kernel("ab12", ARTIFACT)
    (file,) = files(tmp_path / "folder")
    file.chmod(0o666)
    with pytest.warns(CacheWarning):
        assert store.kernel("ab12") is None
    store.put_kernel("ab12", ARTIFACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.kernel("ab12") == ARTIFACT


def test_clearing_follows_no_link_of_others(tmp_path):
    """`clear` and `verify` remove files, so they refuse a folder that others may write."""
    store, victim = Store(tmp_path / "folder", 1 << 20), made(tmp_path / "victim", 0o700)
    store.put_kernel("ab12", ARTIFACT)
    made(victim / "letter", 0o600, b"dear")
    (tmp_path / "folder" / "kernels" / "cd").symlink_to(victim)
    (tmp_path / "folder").chmod(0o777)
    for remove in (store.clear, store.verify):
        with pytest.raises(Untrusted):
            remove()
    assert (victim / "letter").exists()


def test_a_report_is_not_kept_where_others_may_write(tmp_path, monkeypatch):
    emulator._warn_once.cache_clear()
    monkeypatch.setenv(reports.FOLDER, str(made(tmp_path / "folder", 0o777)))
    with pytest.warns(emulator.CacheWarning):
        assert reports.keep("ptx", "entry") is None
    monkeypatch.setenv(emulator.SHARED, str(tmp_path))
    assert reports.keep("ptx", "entry") is not None


# ---- folders of kernels made ahead of time


@pytest.fixture
def ahead(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(aot, "_ready", {})
    monkeypatch.setattr(aot, "_folders_read", set())
    monkeypatch.delenv(aot.VARIABLE, raising=False)
    aot.write(tmp_path / "ahead", [(KEY, ARTIFACT)], {"dsl": "1"})
    return tmp_path / "ahead"


@pytest.mark.parametrize("how", ["foreign", "writable"])
@pytest.mark.parametrize("which", ["folder", "manifest", "kernel"])
def test_a_folder_of_others_is_refused(ahead, owners, monkeypatch, how, which):
    digest, (kernel,) = aot.digest_of(ahead), ahead.glob("*.kernel")
    culprit = {"folder": ahead, "manifest": ahead / aot.MANIFEST, "kernel": kernel}[which]
    if how == "foreign":
        owners[str(culprit)] = STRANGER
    else:
        culprit.chmod(0o777)
    monkeypatch.setenv(aot.VARIABLE, str(ahead))
    with pytest.raises(aot.AotError, match=f"{culprit} .*{SHARED_VARIABLE}"):
        aot.artefact_for(KEY)
    for allowed in ({"digest": digest}, {"trust": True}):
        aot._ready.clear()
        aot.load(ahead, **allowed)
        assert aot._ready[KEY.to_text()].read() == ARTIFACT
    aot._ready.clear()
    monkeypatch.setenv(aot.VARIABLE, f"{ahead}@{digest}")
    assert aot.artefact_for(KEY) == ARTIFACT
    aot._ready.clear()
    aot._folders_read.clear()
    monkeypatch.setenv(aot.VARIABLE, str(ahead))
    monkeypatch.setenv(SHARED_VARIABLE, str(ahead.parent))
    assert aot.artefact_for(KEY) == ARTIFACT


def test_a_digest_covers_the_kernels(ahead):
    digest, (kernel,) = aot.digest_of(ahead), ahead.glob("*.kernel")
    assert digest == hashlib.sha256((ahead / aot.MANIFEST).read_bytes()).hexdigest()
    with pytest.raises(aot.AotError, match=f"has digest {digest}, expected 00"):
        aot.load(ahead, digest="00")
    kernel.write_bytes(Artifact("other", "sm_100a", "", b"", []).to_bytes())
    aot.load(ahead, digest=digest)
    with pytest.raises(aot.AotError, match="sha256 differs"):
        aot._ready[KEY.to_text()].read()
    manifest = json.loads((ahead / aot.MANIFEST).read_text())
    manifest["kernels"][0]["sha256"] = hashlib.sha256(kernel.read_bytes()).hexdigest()
    (ahead / aot.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(aot.AotError, match="has digest"):
        aot.load(ahead, digest=digest)


# ---- two users at once

FORK = multiprocessing.get_context("fork")  # modules are loaded: another user may not read them


def _be_stranger(folder: Path, end: Connection) -> None:
    "".encode("cp437")  # loads the codec now: it decodes names of files in an archive
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    store = Store(folder, 1 << 20)
    store.put_kernel("ab12", Artifact("theirs", "sm_100a", "", b"", []))
    end.send(getattr(store.kernel("ab12"), "function", "nothing"))


def as_stranger(folder: Path) -> str:
    """Return the kernel that another user finds, after having tried to keep one."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_be_stranger, args=(folder, theirs))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return ours.recv()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be two users"
)
def test_processes_of_two_users_keep_apart():
    """Both may write the folder above, as in /tmp. Each finds its own kernel, never the other's."""
    with tempfile.TemporaryDirectory() as made_here:
        room = Path(made_here)
        room.chmod(0o1777)
        assert as_stranger(room / "theirs") == "theirs"
        with pytest.warns(CacheWarning, match=f"belongs to user {STRANGER}"):
            assert Store(room / "theirs", 1 << 20).kernel("ab12") is None
        Store(room / "ours", 1 << 20).put_kernel("ab12", ARTIFACT)
        assert as_stranger(room / "ours") == "nothing"
        assert Store(room / "ours", 1 << 20).kernel("ab12") == ARTIFACT
