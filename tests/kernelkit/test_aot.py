"""Kernels compiled ahead of time: a process without the DSL gets the same kernels; loading a folder
that does not fit reports the difference.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fmha.config import AttentionConfig
from fmha.launch import compile_attention
from kernelkit import __main__ as command_line
from kernelkit.compile import aot
from kernelkit.compile import compiler as kernel_compile
from kernelkit.compile.aot import AotError
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.store import VARIABLE
from kernelkit.compile.trace import PTXAS_VARIABLE
from kvcache.movement.config import ChecksumConfig
from kvcache.movement.launch import compile_kernel
from lab.house.source import ROOT

WORDS = "kernelkit.device.words"  # a module that kernels are traced from
CHECKSUM = KernelKey("kvcache.movement.checksum_kernel", ChecksumConfig(), "sm_100a")

# Every family in a process that cannot import the DSL; the first argument is the file for results.
PROGRAM = """
import sys
sys.modules["cutlass"] = None
import torch
from tests.kernelkit.every_family import results
torch.save(results(), sys.argv[1])
assert not [name for name in sys.modules if name.startswith("cutlass.")]
"""


@pytest.fixture
def nothing_loaded(monkeypatch, whole_ptxas):
    """No folder is loaded, and no kernel is in memory or on disk."""
    monkeypatch.setattr(aot, "_ready", {})
    monkeypatch.setattr(aot, "_folders_read", set())
    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.delenv(aot.VARIABLE, raising=False)


@pytest.fixture
def record(tmp_path) -> Path:
    aot.write_record(tmp_path / "run.jsonl", [CHECKSUM])
    return tmp_path / "run.jsonl"


@pytest.fixture
def folder(tmp_path, record, nothing_loaded, capsys) -> Path:
    out = tmp_path / "kernels"
    assert command_line.main(["aot", "--for", str(record), "--out", str(out)]) == 0
    kernel_compile._compiled.clear()
    return out


def test_every_family_runs_without_the_dsl(tmp_path, nothing_loaded, monkeypatch, capsys):
    """Record here, compile ahead, run in another process: attention, decode, merge, a layer of
    experts, append."""
    from tests.kernelkit.every_family import results

    record, out = tmp_path / "run.jsonl", tmp_path / "kernels"
    monkeypatch.setenv(aot.RECORD_VARIABLE, str(record))
    expected = results()
    monkeypatch.delenv(aot.RECORD_VARIABLE)
    assert len(aot.read_record(record)) >= 8
    assert command_line.main(["aot", "--for", str(record), "--out", str(out)]) == 0
    code, found = [sys.executable, "-c", PROGRAM], tmp_path / "found.pt"
    where = {aot.VARIABLE: str(out), VARIABLE: "off", "PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run([*code, str(found)], cwd=ROOT, env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, result in torch.load(found, weights_only=True).items():
        assert torch.equal(result, expected[name]), name


def test_a_folder_serves_its_kernels(folder, monkeypatch):
    monkeypatch.setenv(aot.VARIABLE, str(folder))
    monkeypatch.setattr(kernel_compile, "_compile", lambda *_: pytest.fail("compiled"))
    assert ".target sm_100a" in compile_kernel(CHECKSUM.config, "sm_100a").ptx
    monkeypatch.setattr(kernel_compile, "_compile", lambda *_: (None, "elsewhere"))
    with pytest.raises(AttributeError):  # a kernel that is not in the folder is compiled as usual
        compile_kernel(CHECKSUM.config, "sm_103a")


def test_a_kernel_that_is_nowhere_is_named(folder, monkeypatch):
    """Without the DSL the error names the missing kernel, and how to get it."""
    monkeypatch.setenv(aot.VARIABLE, str(folder))
    monkeypatch.setenv(VARIABLE, "off")
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(ImportError, match=r"fmha.*AttentionConfig\(head_dim=256\).*kernelkit aot"):
        compile_attention(AttentionConfig(head_dim=256))


@pytest.mark.parametrize(("change", "words"), [
    (lambda m: m | {"format": 7}, "format 7, this version reads 1"),
    (lambda m: {}, "no readable manifest.json: 'format'"),
    (lambda m: _with_sources(m, WORDS, "0"), f"other sources: {WORDS} differ"),
    (lambda m: _with_sources(m, "fmha.gone", "0"), "other sources: fmha.gone differ"),
    (lambda m: m | {"kernels": [m["kernels"][0] | {"file": "gone.kernel"}]}, "No such file"),
    (lambda m: m | {"kernels": [m["kernels"][0] | {"sha256": "0"}]}, "sha256 differs"),
])  # fmt: skip
def test_a_folder_that_does_not_fit_says_what_differs(folder, change, words, monkeypatch):
    path = folder / aot.MANIFEST
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    monkeypatch.setenv(aot.VARIABLE, str(folder))
    with pytest.raises(AotError, match=words):
        compile_kernel(CHECKSUM.config, "sm_100a")


def _with_sources(manifest: dict, module: str, digest: str) -> dict:
    (item,) = manifest["kernels"]
    return manifest | {"kernels": [item | {"sources": {**item["sources"], module: digest}}]}


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(AotError, match="no readable manifest"):
        aot.load(tmp_path)


# ---- records


def test_a_run_notes_each_kernel_once(tmp_path, nothing_loaded, monkeypatch):
    file = tmp_path / "run.jsonl"
    monkeypatch.setenv(aot.RECORD_VARIABLE, str(file))
    for _ in range(2):
        compile_kernel(CHECKSUM.config, "sm_100a")
        kernel_compile._compiled.clear()
    assert aot.read_record(file) == [CHECKSUM]


def test_a_line_that_is_no_kernel_is_named(record):
    record.write_text(record.read_text() + "\n# a comment\nno kernel\n")
    with pytest.raises(ValueError, match="line 4: "):
        aot.read_record(record)


def test_collecting_compiles_nothing(monkeypatch):
    monkeypatch.setattr(kernel_compile, "_make", lambda *_: pytest.fail("compiled"))
    with collecting() as keys:
        assert compile_kernel(CHECKSUM.config, "sm_100a") is None
    assert keys == [CHECKSUM]


def test_architectures_of_a_record():
    decode = KernelKey("gqa_lowlatency.portable.kernel", None, "sm_90a")
    found = aot.for_archs([CHECKSUM, decode], ["sm_90a", "sm_103a"])
    assert [(key.source.split(".")[0], key.arch) for key in found] == [
        ("kvcache", "sm_90a"), ("kvcache", "sm_103a"), ("gqa_lowlatency", "sm_90a"),
    ]  # fmt: skip
    decode = dataclasses.replace(decode, arch="sm_89")  # of a GPU without kernels of its own
    found = aot.for_archs([decode], ["sm_80", "sm_89", "sm_100a", "sm_120a"])
    assert [key.arch for key in found] == ["sm_89"]


# ---- the command line


@pytest.fixture
def cache(tmp_path, nothing_loaded, monkeypatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def said(capsys, *arguments: object, code: int = 0) -> str:
    assert command_line.main([*map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_the_cache_from_the_command_line(cache, record, capsys):
    said(capsys, "cache", "clear")
    assert "0 kernels, 0.0 MB (limit 2,048 MB)" in said(capsys, "cache", "list")
    warmed = said(capsys, "cache", "warm", "--for", record)
    assert "[1/1]" in warmed
    assert "1 kernels in " in warmed
    title = "kvcache.movement.checksum_kernel ChecksumConfig() sm_100a"
    assert title in said(capsys, "cache", "list")
    (row,) = json.loads(said(capsys, "cache", "list", "--json"))["kernels"]
    assert (row["title"], row["bytes"] > 1000) == (title, True)
    assert "2 files" in said(capsys, "cache", "verify")
    (path,) = cache.glob("kernels/*/*")
    path.write_bytes(path.read_bytes()[:-1])
    assert f"damaged, removed: {path}" in said(capsys, "cache", "verify", code=1)
    assert "removed 1 files" in said(capsys, "cache", "clear")


def test_a_folder_from_the_command_line(folder, capsys, monkeypatch):
    assert "made from the sources here" in said(capsys, "show", folder)
    monkeypatch.setattr(aot, "_digest_of", lambda module: "")
    assert "sources differ: kernelkit." in said(capsys, "show", folder, code=1)


@pytest.mark.parametrize(("arguments", "words"), [
    (("aot", "--for", "nowhere", "--out", "x"), "nowhere"),
    (("show", "nowhere"), "nowhere has no readable manifest.json"),
])  # fmt: skip
def test_errors_are_one_line(arguments, words, capsys, whole_ptxas):
    assert words in said(capsys, *arguments, code=1)


def test_artefacts_for_gpus_are_whole(record, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(PTXAS_VARIABLE, "-O1")
    words = said(capsys, "aot", "--for", record, "--out", tmp_path / "kernels", code=1)
    assert "BLACKWELL_KERNELS_PTXAS is set" in words


def test_a_cache_that_is_off_is_said(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "off")
    assert "off: the cache is off" in said(capsys, "cache", "list", code=1)
