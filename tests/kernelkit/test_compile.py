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


@pytest.mark.parametrize(
    ("driver", "installed", "loaded"),
    [
        (13, (12, 13), [13]),
        (12, (12, 13), [12]),
        (None, (12, 13), [13]),
        (13, (12,), [12]),
        (12, (13,), []),
        (None, (), []),
    ],
)
def test_the_driver_decides_which_libraries_compile(driver, installed, loaded):
    assert trace.libraries_for(driver, installed) == loaded


@pytest.mark.parametrize("driver", [12, 13])
def test_an_update_of_the_driver_changes_the_toolchain(driver, monkeypatch):
    """Both sets of libraries are installed, so without this a kernel of the other ptxas would be
    found in the cache."""
    monkeypatch.setattr(trace, "version", lambda name: "4.8.1")
    monkeypatch.setattr(trace, "_driver", lambda: driver)
    found = trace.toolchain.__wrapped__()
    assert [name[-4:] for name in found if "libs-cu" in name] == [f"cu{driver}"]


def test_the_toolchain_names_the_libraries_that_are_loaded():
    from cutlass._mlir._mlir_libs import _cutlass_ir

    (libraries,) = (name[-4:] for name in trace.toolchain() if "libs-cu" in name)
    assert f"_cutlass_ir.{libraries}." in _cutlass_ir.__file__
