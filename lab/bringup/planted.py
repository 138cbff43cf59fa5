"""Faults on purpose, for a rehearsal: `python -m lab.bringup.planted KIND -- COMMAND`.

    hang      a kernel, or here the host, never ends
    address   a kernel writes to an address that there is not
    result    one number of every result is another

The command is a script of this repository, or -m and a module, with its arguments.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

KINDS = ("hang", "address", "result")
STORE = """\
.version 8.3
.target {target}
.address_size 64
.visible .entry bench()
{{
.reg .b64 %d<2>;
mov.u64 %d0, 64;
st.global.u32 [%d0], 1;
ret;
}}
"""
ENDLESS = (1 << 63) - 1  # cycles


def hang() -> None:
    """Hang forever."""
    import torch

    if torch.cuda.is_available():
        torch.cuda._sleep(ENDLESS)
        torch.cuda.synchronize()
    while True:
        time.sleep(1)


def address() -> None:
    """The error of the driver or of the emulator; a GPU's context is of no more use."""
    import torch

    if not torch.cuda.is_available():
        import ptxemu

        program = ptxemu.load(STORE.format(target="sm_100a"))
        program.launch("bench", grid=(1, 1, 1), block=(32, 1, 1), params=[], memory=[])
        return
    from lab.silicon.units.launch import Gpu

    gpu = Gpu()
    _, kernel = gpu.load(STORE.format(target="sm_90"), 0, 1)
    gpu.launch(kernel, 1, 32, [])
    gpu.synchronize()


def result() -> None:
    """Spoil the results of all later operator calls in this process."""
    from kernelkit.call.operator import Operator

    real = Operator.__call__

    def other(self: Operator, given: Any) -> Any:
        results = real(self, given)
        _spoil(results[0] if isinstance(results, tuple) else results)
        return results

    Operator.__call__ = other  # type: ignore[method-assign]


def _spoil(tensor: Any) -> None:
    """Overwrite the tensor's first element."""
    import torch

    if isinstance(tensor, torch.Tensor) and tensor.numel():
        first = tensor[(0,) * tensor.dim()]
        first.copy_(7 if first.dtype in (torch.uint8, torch.bool) else 1000)


PLANTS: dict[str, Callable[[], None]] = {"hang": hang, "address": address, "result": result}


def main(argv: Sequence[str] | None = None) -> int:
    """Plant, and run the command in this process."""
    kind, dashes, *command = sys.argv[1:] if argv is None else argv
    if kind not in PLANTS or dashes != "--" or not command:
        raise SystemExit(f"planted: one of {', '.join(KINDS)}, --, and a command")
    PLANTS[kind]()
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
