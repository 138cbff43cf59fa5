"""`bench.py emulator`: measures how fast small problems of each family are emulated, and how the
emulator spends its time."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import FrameType

import torch

from kernelkit.call.launch import PreparedLaunch, emulation, watching
from lab.measure.timing import heading
from lab.tools.common import read_rows, refuse, save_rows
from lab.tools.tables import Row, markdown, show, table
from ptxemu.options import Options

ROWS = 32  # appended
Launches = list[Callable[[], None]]


@dataclass(frozen=True)
class Problem:
    """A problem to emulate.

    name: includes its sizes.
    call: calls the public function on the CPU."""

    name: str
    call: Callable[[], object]


def launches_of(problem: Problem) -> Launches:
    """Return the launches of the call; each can be repeated on the same tensors."""
    found: Launches = []

    def watch(prepared: PreparedLaunch | None, words: list[tuple[torch.Tensor, int]]) -> None:
        if prepared is not None:
            found.append(partial(prepared.launch, [tensor for tensor, _ in words]))

    with watching(watch, launching=False), emulation():
        problem.call()
    return found


def attention(options: argparse.Namespace) -> Problem:
    from fmha import attention
    from lab.problems.fmha import case_of, check

    case = case_of(options)
    check(case)
    call = partial(attention, *case.inputs("cpu"), **case.arguments())
    return Problem(str(case), call)


def decode(_options: argparse.Namespace) -> Problem:
    from gqa_lowlatency import decode

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((1, 1, 16, 128), (1, 1024, 2, 128), (1, 1024, 2, 128))
    )
    return Problem("1,024 keys, heads 16/2, d128, bf16", partial(decode, q, k, v))


def grouped(_options: argparse.Namespace) -> Problem:
    from lab.problems.grouped_gemm import Case
    from moe.api import grouped_gemm

    case = Case((70, 0, 130, 9), k=512, columns=256, out="nvfp4")
    call = partial(grouped_gemm, *case.inputs(), case.offsets, **case.options())
    return Problem("SwiGLU, nvfp4, 209 rows, K 512, N 256", call)


def append(_options: argparse.Namespace) -> Problem:
    from lab.problems.steps import problems_of

    problem, *_ = problems_of("kvcache", ["append"], [ROWS], 0)
    arguments = problem.draw(0, "cpu")
    call = partial(problem.peers[problem.ours], *arguments)
    return Problem(f"{ROWS} rows, {problem.name}", call)


# by the names of `lab.flags.bench.EMULATED`
PROBLEMS = {"fmha": attention, "decode": decode, "grouped": grouped, "append": append}


# Where the CPU time of an emulated launch goes: samples of the stack, each worth the time it ends.
#
# A timer interrupts the process every millisecond. What the process has computed since the last
# time belongs to the part of ptxemu that is found on the stack: samples add up to the CPU time
# whatever else the machine does, and a long call into C is one sample of its full length. A
# profiler that times every call would charge short functions for its own work.
#
# What one call into compiled code does counts as its caller: a native block is arithmetic with the
# loads and stores that are compiled into it. A garbage collection is the host's, since it goes
# through everything that the process has imported, wherever it begins.


PARTS = ARITHMETIC, MEMORY, MMA, SCHEDULING, CHECKER, HOST = (
    "arithmetic", "memory", "mma", "scheduling", "checker", "host",
)  # fmt: skip
PERIOD = 1e-3  # seconds

# Beginnings of paths below ptxemu/. An asked-for operation is what its first frame says: an MMA
# that reads shared memory is MMA, a barrier's word is scheduling.
ASKED = {
    MMA: (
        *("machine/mma", "machine/scale_factors", "machine/tensor_core", "machine/umma_desc"),
        *("machine/wgmma", "ops/tcgen05_mma", "ops/warp_mma", "ops/wgmma"),
    ),
    MEMORY: (
        *("machine/access", "machine/im2col", "machine/memory", "numerics/swizzle"),
        *("machine/tensor_map", "machine/tma_tile", "machine/tmem"),
        *("ops/async_copy", "ops/atomics", "ops/load_store", "ops/matrix_copy"),
        *("ops/tcgen05_copy", "ops/tensor_copy"),
    ),
    SCHEDULING: ("machine/mbarrier", "ops/barriers", "ops/mbarrier"),
}
# And of what is on the stack all the time: the innermost frame says what it is.
AROUND = {
    CHECKER: ("codegen/tainted", "machine/listener"),
    SCHEDULING: ("machine/",),
    ARITHMETIC: ("codegen/", "native/", "numerics/", "ops/"),
}
CHECKS = ("check/", "trace")
GENERATED = "<ptxemu"  # how the file names of generated code begin
BEGIN = "machine/machine.py", "run"  # everything a launch executes is below this function


def sampled(call: Callable[[], object], seconds: float) -> dict[str, float]:
    """Part -> its share of the CPU time of calls, as many as fill so many seconds of it. Of the
    main thread alone, which signals come to."""
    sampler = _Sampler()
    before = signal.signal(signal.SIGALRM, sampler.take)
    gc.callbacks.append(sampler.collection)
    signal.setitimer(signal.ITIMER_REAL, PERIOD, PERIOD)
    begin = time.process_time()
    try:
        while time.process_time() - begin < seconds:
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.callbacks.remove(sampler.collection)
    total = sum(sampler.found.values())
    return {part: sampler.found[part] / total for part in PARTS}


class _Sampler:
    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._last = self._collecting = time.process_time()

    def take(self, _signal: int, frame: FrameType | None) -> None:
        self.found[part_of(frame)] += time.process_time() - self._last
        self._last = time.process_time()  # what the sample itself took is nobody's

    def collection(self, phase: str, _info: dict[str, int]) -> None:
        """A callback of the garbage collector: its time is taken out of the sample around it."""
        if phase == "start":
            self._collecting = time.process_time()
        else:
            # a sample may have been taken on the way
            took = time.process_time() - max(self._collecting, self._last)
            self.found[HOST] += took
            self._last += took


def part_of(frame: FrameType | None) -> str:
    """Part of a stack, by its innermost frame. Whatever the checker calls is the checker."""
    asked = innermost = ""
    while frame is not None:
        kind, part = _place(frame.f_code.co_filename, frame.f_code.co_name)
        if kind == "check":
            return CHECKER
        if kind == "begin":
            return asked or innermost or SCHEDULING
        if kind == "asked":
            asked = part
        innermost = innermost or part
        frame = frame.f_back
    return HOST


@cache
def _place(file: str, function: str) -> tuple[str, str]:
    """('check', 'begin', 'asked', 'around' or '', part)."""
    if file.startswith(GENERATED):
        return "around", ARITHMETIC
    _, package, path = file.replace("\\", "/").rpartition("/ptxemu/")
    if not package:
        return "", ""
    if path.startswith(CHECKS):
        return "check", CHECKER
    if (path, function) == BEGIN:
        return "begin", ""
    for kind, parts in (("asked", ASKED), ("around", AROUND)):
        for part, paths in parts.items():
            if path.startswith(paths):
                return kind, part
    return "", ""


# What `bench.py emulator` does: how fast ptxemu executes kernels, and on what it spends the time.
#
# Only launches are timed, from the arguments of a compiled kernel to its report, and the clock is
# the CPU time of the process, beside the wall's: the former stays what it is on a busy machine.


SAMPLED_SECONDS = 1.0  # of CPU time, at least, that the shares are taken from
HEADS = ("arith-\nmetic %", "memory\n%", "MMA\n%", "sched-\nuling %", "checker\n%", "host\n%")


def _percent(part: str, row: Row) -> str:
    return f"{100 * row['shares'][part]:.0f}"


COLUMNS = (
    ("kernel", "{kernel}"), ("problem", "{problem}"), ("", "{mode}"),
    ("warp-instr.", "{instructions:,}"), ("CPU\nms", "{cpu_ms:.1f}"),
    ("wall\nms", "{wall_ms:.1f}"), ("M/s", lambda row: f"{row['per_second'] / 1e6:.2f}"),
    *((head, partial(_percent, part)) for head, part in zip(HEADS, PARTS, strict=True)),
)  # fmt: skip


def run(launches: Launches, options: Options) -> int:
    """All of them once; returns their warp-instructions."""
    with emulation(options) as active:
        for launch in launches:
            launch()
    return sum(report.warp_instructions for report in active.reports)


def measure(call: Callable[[], int], repeat: int) -> dict[str, object]:
    """The quickest of so many calls behind one that warms up, and the shares of further calls."""
    instructions, taken = call(), []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), _cpu_seconds()
        call()
        taken.append((_cpu_seconds() - cpu, time.perf_counter() - wall))
    cpu, wall = (min(times) for times in zip(*taken, strict=True))
    return {
        "instructions": instructions,
        "cpu_ms": cpu * 1e3,
        "wall_ms": wall * 1e3,
        "per_second": instructions / cpu,
        "shares": sampled(call, SAMPLED_SECONDS),
    }


def _cpu_seconds() -> float:
    """CPU time of this process, and of those of its children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def rows_of(problems: dict[str, Problem], asked: Options, repeat: int) -> list[dict]:
    """Two for each kernel: plain, and under the checker."""
    rows = []
    for kernel, problem in problems.items():
        launches = launches_of(problem)
        for mode, check in (("plain", False), ("checked", True)):
            found = measure(partial(run, launches, replace(asked, check=check)), repeat)
            rows.append({"kind": "emulator", "kernel": kernel, "problem": problem.name,
                         "mode": mode, **found})  # fmt: skip
    return rows


def asked_of(options: argparse.Namespace) -> Options:
    """Return the emulator's options; raise ValueError for several processes if ptxemu has only
    one."""
    asked = Options(policy=options.policy, seed=options.seed, limit=None)
    if hasattr(asked, "processes"):
        return replace(asked, processes=options.processes)
    if options.processes > 1:
        raise ValueError(f"--processes {options.processes}: this ptxemu has one")
    return asked


def setting_of(options: argparse.Namespace) -> dict:
    """The machine, how busy it is, and whether blocks are compiled."""
    try:
        native = os.environ.get("PTXEMU_NATIVE") != "0" and metadata.version("llvmlite")
    except metadata.PackageNotFoundError:
        native = False
    found = {"processor": processor(), "cores": os.cpu_count(), "llvmlite": native or "not used"}
    found["load"] = [round(x, 2) for x in os.getloadavg()]
    return heading(**found, repeat=options.repeat, processes=options.processes)


def processor() -> str:
    """Return the processor's name as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show_rows(rows: list[dict], *, as_markdown: bool = False) -> None:
    setting, *found = rows
    title, heads, cells = table("", COLUMNS, found)
    if as_markdown:
        print(markdown([head.replace("-\n", "").replace("\n", " ") for head in heads], cells))
        return
    print(f"{setting['processor']}, {setting['cores']} cores, Python "
          f"{setting['versions']['python']}, llvmlite {setting['llvmlite']}, {setting['date']}; "
          f"best of {setting['repeat']}")  # fmt: skip
    show(title, heads, cells)


def perform(options: argparse.Namespace) -> int:
    if options.show:
        show_rows(read_rows(options.show), as_markdown=options.markdown)
        return 0
    try:
        if options.repeat < 1:
            raise ValueError(f"--repeat {options.repeat}: at least 1")
        asked = asked_of(options)
        problems = {kernel: PROBLEMS[kernel](options) for kernel in options.kernel}
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    rows = [setting_of(options), *rows_of(problems, asked, options.repeat)]
    show_rows(rows)
    if options.json:
        save_rows(options.json, rows)
    return 0
