"""Launch of one grid: grid -> clusters -> CTAs -> warps.

The scheduler runs it, and a LaunchReport sums it up.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ptxemu.codegen.program import Program
from ptxemu.errors import OutOfBounds, PtxEmuError
from ptxemu.findings import Finding, Launch, place_of
from ptxemu.machine.access import SHARED_WINDOW
from ptxemu.machine.async_ops import Work, WorkQueue
from ptxemu.machine.fragment import unravelled
from ptxemu.machine.heap import HEAP
from ptxemu.machine.listener import Listener
from ptxemu.machine.memory import GlobalMemory, views_of
from ptxemu.machine.scheduler import Scheduler
from ptxemu.machine.shape import TRY_CANCEL, Dim3, LaunchQueue, Shape, ctas_of_sm
from ptxemu.machine.state import Cluster, Cta, Warp
from ptxemu.options import Options

# One BLAS thread while a launch runs: an MMA tile is small, and threads cost more than they give.
#
# On a busy machine a threaded product of 128 x 128 x 16 takes 50 times as long. numpy's wheels
# bring an OpenBLAS whose thread count can be set; with another BLAS nothing happens here, and
# OPENBLAS_NUM_THREADS or its like is the user's business.

_FOLDERS = ("../numpy.libs", ".dylibs", "../numpy.dylibs")  # beside the package, by platform
_PREFIXES = (("scipy_openblas_", "64_"), ("openblas_", "64_"), ("openblas_", ""))


@cache
def _thread_control() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return (set, get) of the number of threads of numpy's own OpenBLAS, or None."""
    package = Path(np.__file__).parent
    for folder in _FOLDERS:
        for path in sorted((package / folder).glob("*openblas*")):
            library = ctypes.CDLL(str(path))
            for prefix, suffix in _PREFIXES:
                names = [f"{prefix}{verb}_num_threads{suffix}" for verb in ("set", "get")]
                if all(hasattr(library, name) for name in names):
                    return tuple(getattr(library, name) for name in names)
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block numpy's matrix products use one thread."""
    control = _thread_control()
    if control is None:
        yield
        return
    set_threads, get_threads = control
    before = get_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


class Machine:
    """State shared by all CTAs of a launch, and machine-wide services for instructions."""

    def __init__(
        self,
        program: Program,
        shape: Shape,
        params: np.ndarray,
        memory: GlobalMemory,
        options: Options,
        findings: list[Finding],
        listeners: tuple[Listener, ...] = (),
    ) -> None:
        self.program = program
        self.shape = shape
        self.params = params
        self.param_base = params.ctypes.data
        self.param_views = views_of(params)
        self.memory = memory
        HEAP.admit(memory)
        self.options = options
        self.late = options.policy == "adversarial"
        self.listeners = listeners
        self.every_block = any(each.every_block for each in listeners)
        self.every_access = any(each.every_access for each in listeners)
        self.every_lane = self.every_block or any(each.every_lane for each in listeners)
        self.bytes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.findings = findings
        self._block_counts: dict[int, np.ndarray] = {}
        (gx, gy, gz), (cx, cy, cz) = shape.grid, shape.cluster
        self.cluster_grid = (gx // cx, gy // cy, gz // cz)
        places = self._places() if options.record else None
        self.queue = LaunchQueue.of(options, int(np.prod(self.cluster_grid)), places)
        self.scheduler = Scheduler(options, self.queue, self._start_cluster, listeners)
        self.units = self.scheduler.units
        alone = self.units.eager and len(listeners) == 1 and listeners[0].immediate
        self.immediate = listeners[0] if alone else None
        self.note_progress = self.scheduler.note_progress
        self.ready = self.scheduler.ready
        self.gives_up = self.scheduler.gives_up

    def run(self) -> Launch:
        began = time.perf_counter()
        with np.errstate(all="ignore"), one_thread():
            try:
                self.scheduler.run()
            except PtxEmuError as error:
                raise self._placed(error) from error.__cause__
            except IndexError as error:
                placed = OutOfBounds(f"shared or tensor memory access out of bounds ({error})")
                placed.__traceback__ = error.__traceback__
                raise self._placed(placed) from None
        seconds = time.perf_counter() - began
        for name, moved in self.memory.table.moved.items():
            self.bytes[name] += moved
        return self.ended(seconds)

    def ended(self, seconds: float) -> Launch:
        """Return the report of a launch that ended after so many seconds."""
        counted = {"by_warp": self._opcode_counts(), "bytes": self.bytes, "counts": self.counts}
        return self.report_with(**counted, seconds=seconds)

    def report_with(self, **more: Any) -> Launch:
        """Return a report of what is known while the launch runs, plus the fields `more`."""
        return Launch(
            entry=self.program.entry.name,
            grid=self.shape.grid,
            block=self.shape.block,
            cluster=self.shape.cluster,
            findings=self.findings,
            options=self.options,
            **more,
        )

    def _placed(self, error: PtxEmuError) -> PtxEmuError:
        """Add the PTX line, read off the traceback of the generated function."""
        if error.line is None:
            instr = self.program.instruction_of(error.__traceback__)
            if instr is not None:
                error.at(line=instr.line, text=instr.text, source=instr.source)
        return error

    # -- services of instructions -------------------------------------------------------------

    def find(self, check: str, message: str) -> None:
        """Record what a check noticed, once for each instruction however many CTAs show it."""
        work = self.units.acting
        instr = (work and work.instr) or self.program.running_instruction()
        self.report(Finding(check, message, **(place_of(instr) if instr else {})))

    def report(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    def issue(self, w: Warp, work: Work, queue: WorkQueue | None = None) -> Work:
        """Hand asynchronous work over to its unit."""
        work.warp, work.site = w.label, w.at
        if not self.units.eager:
            work.instr = self.program.sites[w.at]
        for each in self.listeners:
            each.issued(w, work)
        return self.units.issue(work, queue)

    def read_bytes(self, w: Warp, address: int, nbytes: int) -> bytes:
        """Bytes at a generic address: global memory, a parameter, or shared memory."""
        if address >= SHARED_WINDOW:
            cta, offset = w.cluster.locate(address & (SHARED_WINDOW - 1))
            cta.check(offset, nbytes)
            return cta.smem[offset : offset + nbytes].tobytes()
        return self.memory.read_bytes(address, nbytes)

    def _places(self) -> int | None:
        """Return the number of clusters that fit on a B200, by shared memory and warps.

        The result is None if clusters take over no work.
        """
        if not any(site.opcode.startswith(TRY_CANCEL) for site in self.program.sites):
            return None
        warps = -(-int(np.prod(self.shape.block)) // 32)
        ctas = self.sm_count * ctas_of_sm(
            self.shape.smem_used(self.program), warps, self.program.entry.target
        )
        return max(ctas // int(np.prod(self.shape.cluster)), 1)

    def cancel_cluster(self, by: Cluster) -> Dim3 | None:
        """First CTA id of a cluster that will not be launched, or None when all have been."""
        index = self.scheduler.cancel_next(by.index)
        if index is None:
            return None
        return self._ctaid(index, (0, 0, 0))

    def _ctaid(self, index: int, inner: Dim3) -> Dim3:
        """Return %ctaid of the CTA at position `inner` of cluster `index`."""
        (px, py, pz), (nx, ny, nz) = unravelled(index, self.cluster_grid), self.shape.cluster
        return px * nx + inner[0], py * ny + inner[1], pz * nz + inner[2]

    sm_count = 148  # a B200

    def sm_of(self, cta: Cta) -> int:
        return (cta.cluster.index * len(cta.cluster.ctas) + cta.rank) % self.sm_count

    # -- building CTAs ----------------------------------------------------------------------

    def _start_cluster(self, index: int) -> Cluster:
        cluster = Cluster(self, index, self.shape.cluster)
        for each in self.listeners:
            each.cluster_started(cluster)
        total = self.program.layout.smem_static + self.shape.smem_bytes
        for rank in range(int(np.prod(self.shape.cluster))):
            ctaid = self._ctaid(index, unravelled(rank, self.shape.cluster))
            cta = Cta(self, cluster, ctaid, rank, total)
            cluster.ctas.append(cta)
            for each in self.listeners:
                each.cta_started(cta)
            self._fill(cta)
        return cluster

    def _fill(self, cta: Cta) -> None:
        threads = int(np.prod(self.shape.block))
        for index in range(-(-threads // 32)):
            warp = Warp(cta, index, self.program, threads - 32 * index, self.shape.block)
            cta.warps.append(warp)
            for each in self.listeners:
                each.warp_started(warp)
        cta.live_warps = len(cta.warps)

    # -- counting ---------------------------------------------------------------------------

    def warp_exited(self, warp: Warp) -> None:
        if not warp.live:
            for each in self.listeners:
                each.warp_ended(warp)
            counts = np.array(warp.counts)
            known = self._block_counts.get(warp.index)
            self._block_counts[warp.index] = counts if known is None else known + counts
            warp.R = []
            if self.program.frame is not None:
                self.program.frame.free_file(warp.file_bytes, warp.file)
        self.scheduler.warp_exited(warp)

    def counted(self) -> tuple[Counter[str], Counter[str], dict[int, np.ndarray]]:
        """Bytes, operations, and blocks by warp, for `add_counts` in another process."""
        return self.bytes, self.counts, self._block_counts

    def add_counts(
        self, nbytes: Counter[str], counts: Counter[str], blocks: dict[int, np.ndarray]
    ) -> None:
        self.bytes.update(nbytes)
        self.counts.update(counts)
        for index, more in blocks.items():
            known = self._block_counts.get(index)
            self._block_counts[index] = more if known is None else known + more

    def _opcode_counts(self) -> dict[int, Counter[str]]:
        """Count the executed opcodes by index of the warp in its CTA."""
        if not self._block_counts:
            return {}
        warps, counts = zip(*sorted(self._block_counts.items()), strict=True)
        return dict(zip(warps, self.program.opcodes_of(np.stack(counts)), strict=True))
