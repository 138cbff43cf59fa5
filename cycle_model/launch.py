"""Find the machine code of a recorded launch."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from cycle_model.binding.bound import BoundLaunch
from cycle_model.sass.flow import Function
from cycle_model.sass.tools import disassemble, parse
from ptxemu.record.recording import Recording


def bind(recording: Recording) -> BoundLaunch:
    """Raises ValueError where its kernel has no machine code, and FileNotFoundError without
    nvdisasm; each warp is bound when it is asked for."""
    if not recording.cubin:
        raise ValueError(f"{recording.entry} has no machine code: it was recorded without")
    functions = functions_of(recording.cubin)
    if recording.entry not in functions:
        raise ValueError(f"{recording.entry} is not in the machine code: {', '.join(functions)}")
    return BoundLaunch(functions[recording.entry], recording)


@lru_cache(maxsize=64)
def functions_of(cubin: bytes) -> dict[str, Function]:
    """The kernels of a cubin, by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return {function.name: function for function in parse(disassemble(path))}
