"""CUDA C++ by NVRTC: source text to a module that can be launched. No GPU and no nvcc is needed.

NVRTC comes with the wheel nvidia-cuda-nvrtc, headers such as cuda_fp16.h with nvidia-cuda-runtime
and nvidia-cuda-crt, CUB and libcu++ with nvidia-cuda-cccl. A CUDA toolkit serves as well.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ptxemu.module import Module, load

_ROOTS = ("CUDA_HOME", "CUDA_PATH")  # environment variables of toolkits
_TOOLKIT = Path("/usr/local/cuda")
_INSTALL = "pip install nvidia-cuda-nvrtc"
# Lines in reports; functions without __device__ are device code, since there is no host code.
_FLAGS = ("--generate-line-info", "--device-as-default-execution-space")
# Headers of a host's C library that cuda.h includes, for CUtensorMap, and that NVRTC lacks.
_STUBS = {
    "stdlib.h": "#pragma once\n",
    "stdint.h": "#pragma once\n"
    + "".join(
        f"typedef {sign}{name} {kind}{bits}_t;\n"
        for bits, name in {8: "char", 16: "short", 32: "int", 64: "long long"}.items()
        for sign, kind in (("signed ", "int"), ("unsigned ", "uint"))
    ),
}
_HEADERS = "nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"


class CompilationError(RuntimeError):
    """NVRTC did not compile the source. `log` is what it printed."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.log = log


def compile(
    source: str | Path,
    arch: str = "sm_100a",
    options: Sequence[str] = (),
    *,
    names: Sequence[str] = (),
    include: Iterable[str | Path] = (),
    name: str = "kernel.cu",
) -> Module:
    """Compile CUDA C++ and load its PTX.

    Args:
        source: Text, or the path of a file.
        arch: Target, such as "sm_90a" or "compute_120f".
        options: More options of NVRTC, such as "-DTILE=128", "--use_fast_math" or "-std=c++20".
        names: Name expressions of kernels, such as "scale<float>"; they instantiate templates.
            `Module.names` maps each to its entry, and `Module.launch` accepts them.
        include: Folders of headers, searched before those that are installed.
        name: File name of a text in messages and reports.

    Lines of reports are those of the source. Raises CompilationError with NVRTC's log, and
    ModuleNotFoundError where NVRTC is not installed.
    """
    if isinstance(source, Path):
        source, name = source.read_text(encoding="utf-8"), str(source)
    target = arch.replace("sm_", "compute_", 1)
    flags = [f"--gpu-architecture={target}", *_FLAGS]
    flags += [f"--include-path={folder}" for folder in (*include, *include_folders())]
    with _Program(source, name, names) as program:
        ptx = program.compiled([*flags, *options])
        lowered = {each: program.lowered(each) for each in names}
    module = load(ptx)
    module.names.update(lowered)
    _remember(name, source, module)
    return module


def version() -> tuple[int, int]:
    """Major and minor version of NVRTC, such as (13, 5)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def library_path() -> Path | None:
    """The NVRTC that is used: that of the wheel that is found first, else of a toolkit."""
    return next(iter(_found("lib*/libnvrtc.so.*", "lib64/libnvrtc.so*")), None)


def include_folders() -> list[Path]:
    """Folders of headers of wheels and toolkits, those that belong to the library first."""
    library = library_path()
    own = [library.parent.parent / "include"] if library else []
    marks = ("cuda_fp16.h", "crt/host_defines.h", "cuda/std/version", "nv/target")
    folders = [
        folder
        for root in (*own, *_found("include"))
        for folder in (root, root / "cccl")
        if any((folder / mark).exists() for mark in marks)
    ]
    return list(dict.fromkeys(folders))


def _found(*patterns: str) -> Iterator[Path]:
    """Paths below the folders of NVIDIA's wheels, then below toolkits."""
    wheels = (Path(place or ".") / "nvidia" for place in sys.path)
    toolkits = [Path(os.environ[name]) for name in _ROOTS if os.environ.get(name)]
    for folder in wheels:
        if folder.is_dir():
            for pattern in patterns:
                yield from sorted(folder.glob(f"*/{pattern}"), reverse=True)
    for folder in (*toolkits, _TOOLKIT):
        for pattern in patterns:
            yield from sorted(folder.glob(pattern), reverse=True)


@cache
def _loaded(path: str) -> Any:
    return ctypes.CDLL(path)


def _library() -> Any:
    path = library_path()
    try:
        return _loaded(str(path or "libnvrtc.so"))
    except OSError as error:
        raise ModuleNotFoundError(
            f"CUDA C++ needs NVRTC, which is not installed ({error}): {_INSTALL} {_HEADERS}",
            name="nvidia.cuda_nvrtc",
        ) from error


class _Program:
    """An nvrtcProgram, destroyed at the end of the block."""

    def __init__(self, source: str, name: str, names: Sequence[str]) -> None:
        self._nvrtc = _library()
        self._handle = ctypes.c_void_p()
        self._names = names
        text = (source.encode(), name.encode())
        texts, includes = (
            (ctypes.c_char_p * len(_STUBS))(*(word.encode() for word in words))
            for words in (_STUBS.values(), _STUBS)
        )
        handle = ctypes.byref(self._handle)
        self._call("nvrtcCreateProgram", handle, *text, len(_STUBS), texts, includes)

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._nvrtc.nvrtcDestroyProgram(ctypes.byref(self._handle))

    def compiled(self, options: Sequence[str]) -> str:
        """The PTX; raises CompilationError."""
        for name in self._names:
            self._call("nvrtcAddNameExpression", self._handle, name.encode())
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = self._nvrtc.nvrtcCompileProgram(self._handle, len(options), flags)
        if code:
            log = self._text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
            raise CompilationError(f"NVRTC: {self._words(code)}{_missing(log)}", log)
        return self._text("nvrtcGetPTXSize", "nvrtcGetPTX")

    def lowered(self, name: str) -> str:
        """The entry of a name expression."""
        found = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", self._handle, name.encode(), ctypes.byref(found))
        return (found.value or b"").decode()

    def _text(self, sizes: str, function: str) -> str:
        size = ctypes.c_size_t()
        self._call(sizes, self._handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(function, self._handle, buffer)
        return buffer.value.decode(errors="replace")

    def _call(self, function: str, *args: Any) -> None:
        call: Callable[..., int] = getattr(self._nvrtc, function)
        code = call(*args)
        if code:
            raise CompilationError(f"{function}: {self._words(code)}", "")

    def _words(self, code: int) -> str:
        describe = self._nvrtc.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        return str(describe(code).decode())


def _missing(log: str) -> str:
    """Return a hint if a header was not found."""
    if "open source file" not in log:
        return ""
    return f"; headers of CUDA come with: pip install {_HEADERS}"


def _remember(name: str, source: str, module: Module) -> None:
    """Let reports quote the lines of a source that is in no file."""
    lines = source.splitlines(keepends=True)
    for path in {name, *module.tree.files.values()}:
        if Path(path).name == Path(name).name and not Path(path).exists():
            linecache.cache[path] = (len(source), None, lines, path)
