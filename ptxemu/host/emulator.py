"""The launcher that emulates: each launch request run on its module, with one report for all."""

from __future__ import annotations

import ctypes
import struct
import sys
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

from ptxemu.host.allocations import LIVE
from ptxemu.host.graphs import capturing
from ptxemu.host.launch_config import LaunchRequest
from ptxemu.machine.memory import Range
from ptxemu.options import Options
from ptxemu.report import LaunchReport, Report
from ptxemu.watch import adapted

# The machine code that a host module passes to the CUDA runtime: an ELF file, or a fat binary that
# contains one. It is not executed here; recordings need it.

_ELF, _FAT_BINARY = b"\x7fELF", b"\x50\xed\x55\xba"
_FAT_HEADER = 16  # bytes; the size of what follows is in the last 8
_FAT_ENTRY_SIZE = slice(8, 16)  # in the header of the first entry
_MOST = 1 << 30  # bytes


def cubin_at(address: int) -> bytes:
    """Return the ELF file at an address, or b""."""
    head = ctypes.string_at(address, 4) if address else b""
    if head == _ELF:
        return ctypes.string_at(address, _elf_size(ctypes.string_at(address, 64)))
    if head != _FAT_BINARY:
        return b""
    (size,) = struct.unpack_from("<Q", ctypes.string_at(address, _FAT_HEADER), 8)
    whole = ctypes.string_at(address, _FAT_HEADER + min(size, _MOST))
    start = whole.find(_ELF)
    if start < 0:
        return b""
    (size,) = struct.unpack("<Q", whole[_FAT_HEADER:][_FAT_ENTRY_SIZE])
    return whole[start : start + size]


def _elf_size(header: bytes) -> int:
    """Return the size of an ELF file, which ends with its last table."""
    program, sections = struct.unpack_from("<QQ", header, 32)
    program_size, programs, section_size, count = struct.unpack_from("<4H", header, 54)
    return max(program + program_size * programs, sections + section_size * count)


class Emulator:
    """Launcher for `cutedsl.run` and `intercepted`; each launch adds to `report`.

    whole_process: a kernel may access every mapping of the process; else only known allocations
    (`host.allocations`), which needs torch, or somebody who has told them.
    told: somebody has.
    """

    def __init__(
        self, options: Options | None = None, *, whole_process: bool = False, told: bool = False
    ) -> None:
        self.options = options or Options()
        self.report = Report()
        self._whole_process = whole_process
        self._told = told

    def __call__(self, request: LaunchRequest) -> LaunchReport:
        """Run one launch to its end; raises what `Module.launch` raises.

        While a graph is captured (`host.graphs`), the launch is recorded for its replays, and the
        report is empty.
        """
        capture = capturing()
        if capture is not None:
            capture.add(partial(self._launched, request))
            cluster = request.cluster or (1, 1, 1)
            return LaunchReport(request.entry, request.grid, request.block, cluster)
        return self._launched(request)

    def _launched(self, request: LaunchRequest) -> LaunchReport:
        checked = adapted(self.options).check
        known = (self._told or "torch" in sys.modules) and (checked or not self._whole_process)
        launched = _module(request.ptx).launch(
            request.entry,
            grid=request.grid,
            block=request.block,
            cluster=request.cluster,
            non_portable=request.non_portable,
            smem_bytes=request.smem_bytes,
            params=list(request.params),
            options=self.options,
            dependent=request.attributes.pdl,
            allocated=LIVE if known else None,
            freed=_freed_since_last_time() if checked else (),
        )
        if launched.recording is not None:
            launched.recording.cubin = cubin_at(request.image)
            launched.recording.dependent = request.attributes.pdl
            if not known:  # else it has looked for what it touched
                LIVE.look()
                LIVE.look_at_frozen()
            blocks = LIVE.known()
            launched.recording.memory = [(block.start, block.end) for block in blocks]
        self.report.launches.append(launched)
        return launched


# The mark of `LIVE.freed_since` at the last checked launch of this context.
_mark: ContextVar[int] = ContextVar("mark", default=0)


def _freed_since_last_time() -> list[Range]:
    """Return what was freed since the launch before this one in the same context, which is the one
    that `ptxemu.module.memory_before` is about."""
    freed, mark = LIVE.freed_since(_mark.get())
    _mark.set(mark)
    return freed


@lru_cache(maxsize=32)
def _module(ptx: str) -> Any:
    """A loaded module is kept: generating its code costs more than many a launch."""
    from ptxemu.module import load  # with numpy and every instruction

    return load(ptx)


def variable_of(ptx: str, name: str) -> tuple[int, int] | None:
    """Return (address, bytes) of a variable of a module, or None if it has no such variable."""
    return _module(ptx).variable(name)
