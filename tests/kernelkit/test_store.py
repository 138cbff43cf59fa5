"""Compiled kernels on disk: found again, never torn, never trusted blindly, bounded, shared."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kernelkit.compile import compiler as kernel_compile
from kernelkit.compile import pristine, sources, store
from kernelkit.compile.store import LIMIT_VARIABLE, VARIABLE, CacheWarning, Store, bytes_of
from kernelkit.compile.trace import settings
from kvcache.movement import checksum_kernel
from kvcache.movement.config import ChecksumConfig
from kvcache.movement.launch import compile_kernel
from lab.house.source import ROOT

ARCH = "sm_90a"
NO_DSL = "import sys; sys.modules['cutlass'] = None\n"  # importing it raises
FORK = multiprocessing.get_context("fork")  # torch is imported, and has started no threads


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Store:
    """An empty store, and a process that has compiled nothing."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    forget(monkeypatch)
    return store.from_environment()


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """The folder of a store with one kernel, to copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("filled") / "cache"))
        forget(patch)
        compiled()
        return store.from_environment().folder


@pytest.fixture
def warm(cache, filled) -> Store:
    """A store with one kernel."""
    shutil.copytree(filled, cache.folder)
    return cache


def forget(monkeypatch) -> None:
    monkeypatch.setattr(kernel_compile, "_compiled", {})


def files(cache: Store, kind: str) -> list[Path]:
    return sorted((cache.folder / kind).glob("*/*"))


def compiled(threads: int = 256):
    return compile_kernel(ChecksumConfig(threads), ARCH)


@pytest.fixture
def traces(monkeypatch) -> list[str]:
    """Events of each trace: 'compiled', or 'found' if the traced code was known."""
    seen = []

    def traced(*arguments):
        made = real(*arguments)
        seen.append("found" if made.found else "compiled")
        return made

    real = kernel_compile.Traced
    monkeypatch.setattr(kernel_compile, "Traced", traced)
    return seen


def test_a_kernel_is_found_again(cache, traces, monkeypatch):
    first = compiled()
    forget(monkeypatch)
    again = compiled()
    assert again is not first
    assert again.artifact == first.artifact
    assert traces == ["compiled"]
    assert [len(files(cache, kind)) for kind in ("kernels", "configs")] == [1, 1]


def test_a_fresh_process_needs_no_dsl(warm):
    ptx = compiled().ptx
    code = NO_DSL + (
        "from kvcache.movement.launch import compile_kernel\n"
        "from kvcache.movement.config import ChecksumConfig\n"
        f"sys.stdout.write(compile_kernel(ChecksumConfig(), {ARCH!r}).ptx)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ptx), done.stderr


def test_without_a_cache_every_process_compiles(cache, traces, monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")
    for _ in range(2):
        forget(monkeypatch)
        compiled()
    assert traces == ["compiled", "compiled"]
    assert not cache.folder.exists()


def test_a_patched_kernel_shares_no_key(cache, traces, monkeypatch):
    """A patched kernel is not served the plain one, and never serves as the plain one."""
    with monkeypatch.context() as patch:
        forget(patch)
        real = checksum_kernel.load_bytes
        patch.setattr(checksum_kernel, "load_bytes", lambda *a, **k: real(*a, **k))
        same = compiled()  # another name for the same function: the traced code is equal
        assert pristine.patched("kvcache.movement.checksum_kernel") != []
        assert not files(cache, "configs")
    with monkeypatch.context() as patch:
        forget(patch)
        patch.setattr(checksum_kernel, "SHIFTS", checksum_kernel.SHIFTS[::-1])
        other = compiled()
        assert not files(cache, "configs")
    plain = compiled()
    assert plain.ptx == same.ptx != other.ptx
    assert traces == ["compiled", "compiled", "found"]
    assert len(files(cache, "configs")) == 1
    with monkeypatch.context() as patch:
        forget(patch)
        patch.setattr(checksum_kernel, "SHIFTS", checksum_kernel.SHIFTS[::-1])
        assert compiled().ptx == other.ptx


def test_another_fingerprint_is_another_config(warm, traces, monkeypatch):
    """A change of the sources that does not affect the kernel: it is traced, but not compiled."""
    compiled()
    forget(monkeypatch)
    monkeypatch.setattr("kernelkit.compile.sources.fingerprint", lambda module: "changed")
    compiled()
    assert traces == ["found"]
    assert [len(files(warm, kind)) for kind in ("kernels", "configs")] == [1, 2]


@pytest.mark.parametrize("kind", ["kernels", "configs"])
@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-1],
    lambda data: data[:2] + bytes([data[2] ^ 1]) + data[3:], lambda data: b"\0" * len(data),
])  # fmt: skip
def test_damaged_files_are_compiled_again_and_said(warm, kind, damage, monkeypatch):
    ptx = compiled().ptx
    (path,) = files(warm, kind)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    forget(monkeypatch)
    with pytest.warns(CacheWarning, match="compiling again"):
        assert compiled().ptx == ptx
    assert path.read_bytes() == whole


def test_a_config_whose_kernel_is_gone_is_compiled_again(warm, traces, monkeypatch):
    ptx = compiled().ptx
    (path,) = files(warm, "kernels")
    path.unlink()
    forget(monkeypatch)
    assert compiled().ptx == ptx
    assert traces == ["compiled"]


def test_a_full_disk_is_said_once_and_no_error(cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(CacheWarning, match="No space left on device") as seen:
        first, second = compiled(), compiled(128)
    assert len([w for w in seen if w.category is CacheWarning]) == 1
    assert str(cache.folder) in str(seen[0].message)
    assert first.ptx != second.ptx
    assert not files(cache, "kernels")


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    forget(monkeypatch)
    with pytest.warns(CacheWarning, match="continuing without it"):
        assert compiled().ptx


def test_what_was_used_least_recently_goes_first(warm):
    artifact = compiled().artifact
    size = len(artifact.to_bytes())
    small = Store(warm.folder / "small", 4 * size)
    for number in range(6):
        small.put_kernel(f"{number:064}", artifact)
        os.utime(small._kernel_path(f"{number:064}"), (number, number))
    assert small.kernel(f"{0:064}") is not None  # most recently used now
    small.evict()
    left = [number for number in range(6) if small.kernel(f"{number:064}") is not None]
    assert left == [0, 3, 4, 5]


def test_every_so_many_files_the_size_is_looked_at(warm):
    artifact = compiled().artifact
    small = Store(warm.folder / "small", 1)
    for number in range(2 * store._BETWEEN_LOOKS + 1):
        small.put_kernel(f"{number:064}", artifact)
    assert len(small.entries()) <= store._BETWEEN_LOOKS


def _compile_and_report(queue, traces: list[str]) -> None:
    kernel_compile.forget()
    traces.clear()
    ptx = compiled().ptx
    queue.put((len(traces), ptx))


def test_processes_that_start_at_once_compile_once(cache, traces):
    compile_kernel(ChecksumConfig(64), ARCH)  # imports the DSL
    queue = FORK.Queue()
    workers = [FORK.Process(target=_compile_and_report, args=(queue, traces)) for _ in range(8)]
    for worker in workers:
        worker.start()
    found = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(count for count, _ in found) == 1
    assert len({ptx for _, ptx in found}) == 1


def _die_before_renaming() -> None:
    kernel_compile.forget()
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    compiled()


def test_a_killed_process_leaves_no_torn_file_and_no_lock(cache):
    worker = FORK.Process(target=_die_before_renaming)
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    assert not [path for path in files(cache, "kernels") if not path.name.startswith(".new-")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert compiled().ptx
    assert cache.verify() == (2, [])
    assert cache.clear() == 2
    assert not files(cache, "kernels")


def test_kernels_with_lines_are_those_of_their_checkout(monkeypatch):
    """Another checkout has other paths in its PTX; without lines both share kernels."""
    assert str(sources.ROOT) not in settings().values()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert str(sources.ROOT) in settings().values()


def test_what_the_compiler_logs_makes_no_other_kernel(monkeypatch):
    """An engine sets these in its processes, and not where its kernels are made before."""
    before = settings()
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "30")
    monkeypatch.setenv("CUTE_DSL_LOG_TO_CONSOLE", "1")
    assert settings() == before


@pytest.mark.parametrize(("text", "expected"), [("512M", 512 << 20), ("2G", 2 << 30), ("7", 7)])
def test_sizes(text, expected):
    assert bytes_of(text) == expected


def test_a_limit_that_is_no_size_is_refused(cache, monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    with pytest.raises(ValueError, match="'much' is not a size"):
        compiled()


def test_sums_are_right_from_disk(warm, monkeypatch):
    """The kernel that comes from the cache computes."""
    from kvcache import checksum

    pool, slots = torch.randint(0, 255, (3, 4096), dtype=torch.uint8), torch.tensor([2, 0])
    first = checksum(pool, slots, 0, 4096, arch=ARCH)
    forget(monkeypatch)
    monkeypatch.setattr(kernel_compile, "_compile", lambda *_: pytest.fail("compiled"))
    assert torch.equal(checksum(pool, slots, 0, 4096, arch=ARCH), first)


def test_a_kernel_of_a_config_that_is_no_more_is_listed(warm):
    """The state is that after an update: the key has a field that the class lacks."""
    (row,) = warm.listed()
    assert row["title"].startswith("kvcache.movement.checksum_kernel ChecksumConfig()")
    (path,) = (warm.folder / "configs").glob("*/*.json")
    content = warm.config(path.stem)
    content["key"]["config"]["fields"]["gone"] = 1
    warm.put_config(path.stem, content)
    assert warm.listed() == [{**row, "title": "kvcache.movement.checksum_kernel, of other sources"}]
