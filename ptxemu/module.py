"""A loaded PTX module: parse once, compile entries on demand, launch them."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from ptxemu import mangled, ops, processes, watch  # noqa: F401  (ops fills the registry)
from ptxemu.arguments.pack import Packed, pack
from ptxemu.check.checker import Checker
from ptxemu.check.deadlock import explain
from ptxemu.check.global_memory import GlobalShadow
from ptxemu.check.timeline import Timeline
from ptxemu.codegen.analysis import Analysis
from ptxemu.codegen.program import Layout, Program
from ptxemu.errors import Deadlock, HardwareRefusal, PtxEmuError, UnsupportedPtx
from ptxemu.inspect.inspection import Inspection
from ptxemu.kept import kept
from ptxemu.machine.machine import Machine
from ptxemu.machine.memory import Allocated, Fixed, GlobalMemory, Range
from ptxemu.machine.shape import Dim3, Shape, cluster_of, padded
from ptxemu.one_launch import one_at_a_time
from ptxemu.options import Options
from ptxemu.processes import WatchedMemory
from ptxemu.record.recorder import Recorder
from ptxemu.report import LaunchReport
from ptxemu.request import Stop
from ptxemu.syntax.parser import TYPE_BYTES, parse
from ptxemu.syntax.tree import Entry, Sym, Variable

# Accesses of this context's last launch, if it was checked.
memory_before: ContextVar[GlobalShadow | None] = ContextVar("memory_before", default=None)

Dims = int | Sequence[int]  # x, or one to three dimensions from x on

_FEW = 8  # one new version of so many is too few to write them all again


@contextmanager
def no_collection() -> Iterator[None]:
    """Within the block, disable garbage collection.

    A parsed kernel has tens of thousands of objects, none of which is garbage. Each collection
    would visit all objects that the process has imported.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Module:
    """PTX text, ready to launch. Module variables live as long as the module."""

    def __init__(self, text: str, *, keep: bool = False) -> None:
        """Parse the text. keep: cache results about it on disk (`ptxemu.kept`)."""
        self.text = text
        self.names: dict[str, str] = {}  # expression such as "scale<float>" -> entry
        self._kept = kept(text) if keep else None
        self._analyses: dict[str, Analysis] = {}
        with no_collection():
            self.tree = self._recalled("tree") or self._noted("tree", parse(text))
        self._buffers: dict[str, np.ndarray] = {}
        self._symbols: dict[str, tuple[str, int]] = {}
        self._shared: list[Variable] = []
        self._symbols |= {name: ("code", at) for name, at in self.tree.addresses.items()}
        for variable in self.tree.variables:
            self._place(variable)
        for variable in self.tree.variables:
            if variable.init and variable.name in self._buffers:
                view = self._buffers[variable.name]
                view[:] = _initial_bytes(variable, self._symbols)
        self._programs: dict[tuple[Any, ...], Program] = {}

    def _place(self, variable: Variable) -> None:
        if variable.space == "shared":
            self._shared.append(variable)
            return
        if variable.extern:
            return  # an unresolved symbol raises where it is used
        buffer = np.zeros(max(variable.nbytes, 1) + 255, np.uint8)
        start = -buffer.ctypes.data % 256
        view = buffer[start : start + variable.nbytes]
        self._buffers[variable.name] = view
        self._symbols[variable.name] = ("global", view.ctypes.data)

    def variable(self, name: str) -> tuple[int, int] | None:
        """Return (address, bytes) of a global variable, or None if there is none of that name."""
        buffer = self._buffers.get(name)
        return None if buffer is None else (buffer.ctypes.data, buffer.nbytes)

    @property
    def entries(self) -> list[str]:
        """Kernel names, in order of appearance."""
        return list(self.tree.entries)

    def entry(self, name: str | None) -> Entry:
        """Return the entry called `name`; None selects the only entry of the module.

        A C++ name is also found as the source spells it, see `ptxemu.mangled`.
        """
        if name is None:
            if len(self.tree.entries) != 1:
                raise ValueError(
                    f"the module has {len(self.tree.entries)} entries; name one of {self.entries}"
                )
            return next(iter(self.tree.entries.values()))
        found = name if name in self.tree.entries else self.names.get(name) or self._meant(name)
        return self.tree.entries[found]

    def _meant(self, name: str) -> str:
        """The entry that a readable name means; raises ValueError if it is none or several."""
        found = mangled.chosen(self.entries, name)
        if len(found) == 1:
            return found[0]
        known = [mangled.demangled(entry) or entry for entry in found or self.entries]
        what = "entry {!r} may be any of {}" if found else "no entry {!r}; the module has {}"
        raise ValueError(what.format(name, known))

    def program(
        self,
        name: str | None,
        *,
        late: bool = False,
        checked: bool = False,
        stops: tuple[Stop, ...] = (),
    ) -> Program:
        """The compiled entry; `late`: as under the adversarial policy; `checked`: for a checker;
        `stops`: with room for their probes."""
        entry = self.entry(name)
        key = (entry.name, late, checked, stops)
        if key not in self._programs:
            layout = Layout(entry, self._symbols, self._shared)
            with no_collection():
                self._programs[key] = self._program(entry, layout, late, checked)
                if not stops and not self._buffers:  # the addresses of variables are in the code
                    self._recall_versions(self._programs[key])
        return self._programs[key]

    def _program(self, entry: Entry, layout: Layout, late: bool, checked: bool) -> Program:
        """Make a program; all programs of an entry share one analysis."""
        part = f"analysis of {entry.name}"
        known = self._analyses.get(entry.name) or self._recalled(part)
        program = Program(entry, layout, late=late, checked=checked, analysis=known)
        self._analyses[entry.name] = known or self._noted(part, program.analysis)
        return program

    def _recall_versions(self, program: Program) -> None:
        """Blocks that another process has generated need not be generated again."""
        program.keeps = self._kept is not None
        program.written = self._recalled(_versions(program)) or {}

    def _note_versions(self, program: Program) -> None:
        """Blocks that this process has generated, once there are enough to be worth a file."""
        if program.fresh * _FEW > len(program.written):
            self._noted(_versions(program), program.written)
            program.fresh = 0

    def _recalled(self, part: str) -> Any:
        """Return what another process has cached about the text, or None."""
        return self._kept.get(part) if self._kept else None

    def _noted(self, part: str, found: Any) -> Any:
        if self._kept:
            self._kept.put(part, found)
        return found

    @one_at_a_time
    def launch(
        self,
        entry: str | None = None,
        *,
        grid: Dims,
        block: Dims | None = None,
        cluster: Dims | None = None,
        smem_bytes: int = 0,
        args: Sequence[Any] | None = None,
        params: Sequence[bytes] = (),
        memory: list[Any] | None = None,
        options: Options | None = None,
        dependent: bool = False,
        allocated: Sequence[Range] | Allocated | None = None,
        freed: Sequence[Range] = (),
        non_portable: bool = False,
    ) -> LaunchReport:
        """Execute one launch to completion.

        Args:
            entry: Kernel, by its name in the PTX or as C++ spells it; None: the only one.
            grid: CTAs, as (x, y, z), (x, y), (x,) or x.
            block: Threads, in the same forms; None: the kernel's .reqntid.
            cluster: CTAs, in the same forms; None: the kernel's .reqnctapercluster, or one CTA.
            smem_bytes: Dynamic shared memory.
            args: Values of the kernel's parameters, in order: arrays of any library, None, numbers,
                structures, tensor maps (`ptxemu.tensor_map`). The kernel may access these arrays
                and `memory`, and no other memory.
            params: Instead of args, the raw block of each parameter; pointers are host addresses.
            memory: Memory that the kernel may access, as tensors, arrays or (address, nbytes).
                None, without args: what is `allocated`, or, if that is None too, every mapping of
                this process.
            dependent: On hardware, it may begin before the previous launch has ended (programmatic
                dependent launch).
            allocated: Address ranges (start, end, writable), or an object that knows them.
            freed: Ranges of the previous launch that no longer exist; later contents of these
                addresses count as untouched by it.
            non_portable: Clusters may have more than 8 CTAs, as after
                cudaFuncAttributeNonPortableClusterSizeAllowed.

        An access outside the memory is refused. With a checker it is a finding: it reads poison and
        writes nothing, and the launch continues. Without one it raises OutOfBounds. Raises the
        errors of `ptxemu.errors`, and ValueError or TypeError for an argument that its parameter
        cannot take.
        """
        if args is not None:
            packed = _packed(self.entry(entry), args, params, memory)  # it keeps exports alive
            params, memory = packed.params, packed.memory
        options = watch.adapted(options or Options())
        late = options.check or options.policy == "adversarial"
        stops = options.inspect.stops if options.inspect else ()
        program = self.program(entry, late=late, checked=options.check, stops=stops)
        shape = _shape(program, (grid, block, cluster), smem_bytes, non_portable)
        block_of_params = _pack(program, params)
        reachable = self._reachable(memory, allocated, block_of_params, options)
        findings = watch.Told(program.entry.name)
        before = _take_memory_before(dependent, freed)
        checker = inspection = None
        if options.inspect:
            known = program, reachable, block_of_params, options.names
            inspection = Inspection(options.inspect, *known)
        if options.check:
            checker = Checker(
                program, reachable, block_of_params, findings, strict=options.strict, before=before
            )
            reachable.tell(checker.outside)
            findings.named = partial(checker.named, options.names)
        timeline, recorder = _watchers(program, shape, options)
        more = inspection.listeners if inspection else ()
        listeners = tuple(filter(None, (checker, timeline, recorder, *more)))
        machine = Machine(program, shape, block_of_params, reachable, options, findings, listeners)
        report = self._executed(machine, inspection, checker)
        memory_before.set(checker.left() if checker else None)
        report.trace = timeline.trace if timeline else None
        report.recording = recorder.finished(machine.queue.places) if recorder else None
        watch.note(report)
        return report

    def _reachable(
        self,
        memory: list[Any] | None,
        allocated: Sequence[Range] | Allocated | None,
        params: np.ndarray,
        options: Options,
    ) -> GlobalMemory:
        """Return the memory that a launch may access: that of its arguments, parameters and
        variables."""
        if isinstance(allocated, Sequence):
            allocated = Fixed(allocated)
        kind = GlobalMemory if options.processes == 1 else WatchedMemory
        reachable = kind(memory, allocated)
        reachable.allow(params.ctypes.data, len(params))
        for buffer in self._buffers.values():
            reachable.allow(buffer.ctypes.data, buffer.nbytes)
        return reachable

    def _executed(
        self, machine: Machine, inspection: Inspection | None, checker: Checker | None
    ) -> LaunchReport:
        """Run to the end; inform watchers and inspection of an error on the way."""
        try:
            # A checker and a recorder keep nearly all that a launch makes until its end.
            with no_collection() if checker or machine.options.record else nullcontext():
                report = LaunchReport.of(processes.run(machine, checker), inspection=inspection)
                if checker:
                    report.partly = checker.completed()
                    report.unused = checker.unused_data()
                    checker.name_barriers(machine.options.names)
                    if machine.listeners == (checker,):
                        _let_go(machine, checker)
        except BaseException as error:
            if checker:
                own = error if isinstance(error, PtxEmuError) else None
                checker.name_barriers(machine.options.names, own)
            if isinstance(error, Deadlock):
                told = checker.told_deadlock(error.stall) if checker else error.stall
                error.message = explain(told, machine.program, machine.options, self.text)
            words = f"{type(error).__name__}: {error}"
            stopped = machine.report_with(stopped=words)
            watch.note(LaunchReport.of(stopped, inspection=inspection))
            if inspection:
                inspection.ended(failed=True)
            raise
        self._note_versions(machine.program)
        if inspection:
            inspection.ended()
        return report


def _let_go(machine: Machine, checker: Checker) -> None:
    """Break the circles among what a launch leaves, before garbage is collected again."""
    checker.forget()
    machine.memory.tell(None)
    if isinstance(machine.findings, watch.Told):
        machine.findings.named = watch.unchanged


def _watchers(
    program: Program, shape: Shape, options: Options
) -> tuple[Timeline | None, Recorder | None]:
    """Return the listeners that options request and that need nothing else."""
    timeline = Timeline() if options.trace else None
    return timeline, Recorder(program, shape) if options.record else None


def _versions(program: Program) -> str:
    """The name under which its generated blocks are kept."""
    how = f"late={program.late} checked={program.checked} native={program.frame is not None}"
    return f"blocks of {program.entry.name} {how}"


def _take_memory_before(dependent: bool, freed: Sequence[Range]) -> GlobalShadow | None:
    """Return accesses of earlier launches that may overlap this one, except to `freed` ranges."""
    before = memory_before.get() if dependent else None
    memory_before.set(None)
    for low, high, _ in freed:
        for each in before.chain() if before else ():
            each.forget(low, high)
    return before


def _packed(
    entry: Entry, args: Sequence[Any], params: Sequence[bytes], memory: list[Any] | None
) -> Packed:
    """Pack the arguments of a launch; raises ValueError if it has raw parameters as well."""
    if params:
        raise ValueError("args and params are both given; pass one of them")
    return pack(entry, args, memory or ())


def _shape(
    program: Program,
    dims: tuple[Dims, Dims | None, Dims | None],
    smem_bytes: int,
    non_portable: bool,
) -> Shape:
    """Return the geometry of a launch that the driver does not refuse; dims: of `Module.launch`."""
    grid, block, cluster = dims
    given = None if cluster is None else _dim3("cluster", cluster)
    ctas, explicit = cluster_of(program.entry, given)
    threads = _dim3("block", _block_of(program.entry) if block is None else block)
    shape = Shape(_dim3("grid", grid), threads, ctas, smem_bytes, non_portable, explicit)
    shape.check(program)
    return shape


def _block_of(entry: Entry) -> tuple[int, ...]:
    """The block that a kernel requires; raises HardwareRefusal for one that leaves it open."""
    required = entry.directives.get("reqntid")
    if not required:
        raise HardwareRefusal(
            f"no block is given, and kernel {entry.name} has no .reqntid: pass block=(x, y, z)"
        )
    return required


def _dim3(name: str, dims: Dims) -> Dim3:
    if not isinstance(dims, Sequence):
        dims = (operator.index(dims),)
    if not 1 <= len(dims) <= 3:
        raise HardwareRefusal(f"{name}={dims}; one to three dimensions")
    return padded(tuple(int(d) for d in dims))


def _pack(program: Program, params: Sequence[bytes]) -> np.ndarray:
    """The parameters at their offsets, 64-byte aligned as tensor maps need."""
    layout = program.layout
    if len(params) != len(layout.params):
        raise ValueError(
            f"{len(params)} parameters; {program.entry.name} takes {len(layout.params)}"
        )
    size = -(-max(layout.param_bytes, 1) // 16) * 16
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    block = raw[start : start + size]
    for index, (data, (offset, nbytes)) in enumerate(zip(params, layout.params, strict=True)):
        if len(data) != nbytes:
            raise ValueError(
                f"parameter {index} has {len(data)} bytes; {program.entry.name} declares {nbytes}"
            )
        block[offset : offset + nbytes] = np.frombuffer(bytes(data), np.uint8)
    return block


def _initial_bytes(variable: Variable, symbols: dict[str, tuple[str, int]]) -> np.ndarray:
    """The initialiser of a module variable; symbols: spaces and addresses by name."""
    out = np.zeros(variable.nbytes, np.uint8)
    size = TYPE_BYTES[variable.type]
    for k, item in enumerate(variable.init):
        if isinstance(item, Sym) and (item.name not in symbols or size < 8):
            raise UnsupportedPtx(f"initialiser of {variable.name} with {item.name}")
        bits = symbols[item.name][1] + item.offset if isinstance(item, Sym) else item.value
        if isinstance(bits, float):
            if size not in (2, 4, 8):
                raise UnsupportedPtx(f"initialiser of {variable.name} with a decimal number")
            raw = np.array([bits], f"f{size}").tobytes()
        else:
            raw = (int(bits) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        out[k * size : (k + 1) * size] = np.frombuffer(raw, np.uint8)
    return out


def load(ptx_text: str) -> Module:
    """Parse PTX text; raise PtxSyntaxError with the line for invalid text.

    Results about the text are cached on disk for other processes, see `ptxemu.kept`.
    """
    return Module(ptx_text, keep=True)


Launch = Callable[..., LaunchReport]


@contextmanager
def launching(through: Callable[[Launch, Module], Launch]) -> Iterator[None]:
    """Within the block a launch of a module is `through(launch, module)(entry, ...)`, where
    launch(module, entry, ...) is `Module.launch`.

    The launch then has the name of its entry, three dimensions, and params instead of args.
    """
    launch = Module.launch

    def instead(self: Module, entry: str | None = None, **given: Any) -> LaunchReport:
        called = self.entry(entry)
        args, block = given.pop("args", None), given.pop("block", None)
        if args is not None:
            packed = _packed(called, args, given.get("params", ()), given.get("memory"))
            given |= {"params": packed.params, "memory": packed.memory}
        given["block"] = _dim3("block", _block_of(called) if block is None else block)
        for name in {"grid", "cluster"} & given.keys():
            given[name] = None if given[name] is None else _dim3(name, given[name])
        return through(launch, self)(called.name, **given)

    Module.launch = instead  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module.launch = launch  # type: ignore[method-assign]
