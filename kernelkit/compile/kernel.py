"""A compiled kernel, ready to be called: its host code linked to the CUDA runtime or an emulator.

It needs no DSL. Natively its symbols are those of the CUDA runtime that torch has loaded.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from functools import cached_property

from kernelkit.compile.artifact import Artifact, cubin_in
from kernelkit.compile.cuda import check_result, runtime_symbol
from kernelkit.compile.host_object import HostObject, LoadedObject
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.signature import Signature

_PACKED = "_mlir_"  # prefix of a function that takes an array of pointers
_C_INTERFACE = "_mlir_ciface_"


class CompiledKernel:
    """Result of `kernelkit.compile.compiler.compile_once`, launched by `kernelkit.call.launch`.

    key: key that it was compiled from; None for a kernel of a test or an experiment
    """

    def __init__(self, artifact: Artifact, key: KernelKey | None = None) -> None:
        self.artifact = artifact
        self.key = key
        self.arch = artifact.arch
        self.ptx = artifact.ptx
        self.name = artifact.function
        self.signature = Signature.from_json(artifact.signature)
        self._lock = threading.Lock()
        self._library = ctypes.c_void_p()
        self._devices: set[int] = set()

    @cached_property
    def _object(self) -> HostObject:
        return HostObject(self.artifact.host)

    @cached_property
    def cubin(self) -> bytes:
        """The machine code of the GPU, an ELF file."""
        self._require_all_of_ptxas()
        return cubin_in(self._object.constant("_binary"))

    def link(self, bind: Callable[[Iterable[str]], dict[str, int]]) -> Callable[[str], int]:
        """Load the host code, as `ptxemu.host.engine.HostCode` does.

        `bind(names)` returns addresses of the names that it defines. Others are resolved in the
        CUDA runtime and the C library.
        """
        known = bind(self._object.undefined)
        loaded = LoadedObject(self._object, lambda name: known.get(name) or runtime_symbol(name))
        return lambda name: loaded.address(_PACKED + name)

    def entry(self, device: int) -> Callable[[ctypes.Array], None]:
        """The host function, once its kernels are ready for `device`: it takes what
        `Packed.pointers` holds and leaves a cudaError_t in the last of them."""
        if device not in self._devices:
            with self._lock:
                self._prepare(device)
        return self._entry

    def _prepare(self, device: int) -> None:
        """Load the library, set the attributes of its kernels on `device`."""
        self._require_all_of_ptxas()
        slot, index, code = ctypes.pointer(self._library), ctypes.c_int32(device), ctypes.c_int32(0)
        if not self._devices:
            self._find = self.link(lambda names: {})
            self._entry = self._function(_C_INTERFACE + self.name)
            self._function("cuda_init")(_addresses(slot, code))
            check_result(code.value)
        self._function("cuda_load_to_device")(_addresses(slot, index, code))
        check_result(code.value)
        self._devices.add(device)

    def _require_all_of_ptxas(self) -> None:
        options = self.artifact.about.get("ptxas")
        if options:
            raise RuntimeError(
                f"{self!r} was compiled only for the emulator, by ptxas {options}: run with "
                "BLACKWELL_KERNELS_PTXAS unset"
            )

    def _function(self, name: str) -> Callable[[ctypes.Array], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._find(name))

    def __repr__(self) -> str:
        return f"<compiled for {self.arch}: {self.name[:60]}>"


def _addresses(*words: ctypes._SimpleCData | ctypes._Pointer) -> ctypes.Array:
    return (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
