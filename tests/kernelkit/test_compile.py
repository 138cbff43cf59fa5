"""The compile cache: one compile per key and architecture, also under threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from kernelkit.compile import compiler as kernel_compile
from kernelkit.compile import trace


@pytest.fixture
def compiles(monkeypatch):
    """Architectures of the kernels that had to be made; each is a new object here."""
    calls = []
    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.setattr(
        kernel_compile, "_make", lambda config, arch, source: calls.append(arch) or object()
    )
    return calls


def describe():
    return (print,)


def test_a_key_is_compiled_once_per_architecture(compiles):
    first = kernel_compile.compile_once("a", "sm_100a", describe)
    assert kernel_compile.compile_once("a", "sm_100a", describe) is first
    assert kernel_compile.compile_once("b", "sm_100a", describe) is not first
    assert kernel_compile.compile_once("a", "sm_90a", describe) is not first
    assert compiles == ["sm_100a", "sm_100a", "sm_90a"]


def test_what_was_forgotten_is_compiled_again(compiles):
    first = kernel_compile.compile_once("a", "sm_100a", describe)
    assert kernel_compile.forget() == 1
    assert kernel_compile.compile_once("a", "sm_100a", describe) is not first
    assert len(compiles) == 2


def test_threads_share_one_compile(compiles):
    threads = [
        threading.Thread(target=kernel_compile.compile_once, args=("a", "sm_100a", describe))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiles) == 1


def test_unknown_architectures_are_refused(compiles):
    with pytest.raises(ValueError, match="sm_75"):
        kernel_compile.compile_once("a", "sm_75", describe)
    assert not compiles


def test_the_same_code_of_other_arguments_is_another_kernel():
    """An argument of None leaves no trace in the code, but a launch passes it."""
    module = SimpleNamespace(operation=SimpleNamespace(get_asm=lambda **_: "code"))
    keys = [trace._key_of(module, "sm_90a", given) for given in ((None,), ((None, None),), (None,))]
    assert keys[0] == keys[2] != keys[1]
