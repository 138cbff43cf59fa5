"""An entry as runnable blocks: analysis once, then one Python function per block and version.

A version is (partial mask?, which live-in scalar registers currently differ between lanes). The
common one, all 32 lanes active and nothing promoted, is compiled on first execution and kept in a
plain list; the others in a dictionary.
"""

from __future__ import annotations

import marshal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ptxemu.codegen import namespace, registry, tainted
from ptxemu.codegen.analysis import Analysis, analysed, lower_steps
from ptxemu.codegen.blocks import Block, build_blocks
from ptxemu.codegen.emit import BlockWriter
from ptxemu.codegen.flow import Flow
from ptxemu.codegen.lower import Lower, Store
from ptxemu.codegen.native_writer import StepWriter
from ptxemu.codegen.values import DTYPE, Value
from ptxemu.errors import PtxEmuError
from ptxemu.native.frame import Frame, NoRoom, Plan
from ptxemu.native.library import library
from ptxemu.syntax.tree import TYPE_BITS, Entry, Instr

Key = tuple[int, int, frozenset[str], bool]  # block, partial, nonuniform, of the second form?


@dataclass
class Written:
    """Source and code of one version of a block.

    file: name of the source in tracebacks.
    code: the compiled function.
    sites: number of the instruction of each line, -1 for none.
    steps: number of the step in its block for each line, -1 for none.
    flows: flows of the instructions in the second form, by site: all fields but the first two.
    """

    source: str
    file: str
    code: bytes
    sites: list[int]
    steps: list[int]
    plan: Plan | None = None
    flows: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def function(self, scope: dict[str, Any]) -> FunctionType:
        """scope: what its source refers to."""
        return FunctionType(marshal.loads(self.code), scope)

    def lines(self, sites: Sequence[Instr]) -> list[Instr | None]:
        """The instruction behind each line."""
        return [None if site < 0 else sites[site] for site in self.sites]

    def add_flows(self, flows: dict[int, Flow], sites: Sequence[int]) -> None:
        """Add the flows of the instructions with these numbers."""
        names = [item.name for item in fields(Flow)][2:]
        for site in flows.keys() & set(sites):
            self.flows[site] = tuple(getattr(flows[site], name) for name in names)

    def flows_of(self, sites: Sequence[Instr]) -> dict[int, Flow]:
        """Whole."""
        return {site: Flow(site, sites[site], *rest) for site, rest in self.flows.items()}


def file_of(key: Key) -> str:
    """A name that no other version of the program has."""
    index, partial, nonuniform, follows = key
    words = [str(index), str(partial), "follows" * follows, *sorted(nonuniform)]
    return f"<ptxemu {' '.join(word for word in words if word)}>"


def compiled(source: str, file: str) -> bytes:
    """The code of the only function in a source."""
    module = compile(source, file, "exec", dont_inherit=True)
    return marshal.dumps(next(c for c in module.co_consts if isinstance(c, CodeType)))


PARKED = -1  # the block could not go on; run it again when woken
EXITED = -2  # no lane of the fragment is left
ELECTED = -4  # the first lane alone executes the next block
SMEM_RESERVED = 1024  # the first KiB of shared memory belongs to the system on sm_90 and later


class Layout:
    """Addresses of an entry's variables: shared offsets, local offsets, parameter offsets."""

    def __init__(
        self, entry: Entry, module_symbols: dict[str, tuple[str, int]], module_shared: list[Any]
    ) -> None:
        self.symbols = dict(module_symbols)
        self.params: list[tuple[int, int]] = []  # (offset, nbytes)
        offset = 0
        for param in entry.params:
            offset = _align(offset, max(param.align, 16))
            self.symbols[param.name] = ("param", offset)
            self.params.append((offset, param.nbytes))
            offset += param.nbytes
        self.param_bytes = offset
        self.smem_static, self.local_bytes = self._variables(entry, module_shared)

    def _variables(self, entry: Entry, module_shared: list[Any]) -> tuple[int, int]:
        shared, local = SMEM_RESERVED, 0
        dynamic = []
        for variable in (*module_shared, *entry.variables):
            if variable.space == "local":
                local = _align(local, variable.align)
                self.symbols[variable.name] = ("local", local)
                local += variable.nbytes
            elif variable.extern:
                dynamic.append(variable)
            elif variable.space == "shared":
                shared = _align(shared, variable.align)
                self.symbols[variable.name] = ("shared", shared)
                shared += variable.nbytes
            # any other (a .param of a call sequence) has no address: its use is refused
        if dynamic:
            shared = _align(shared, max(v.align for v in dynamic))
            for variable in dynamic:
                self.symbols[variable.name] = ("shared", shared)
        return shared, local


def _align(offset: int, align: int) -> int:
    return -(-offset // align) * align


def _never(*_: Any) -> int:
    raise AssertionError("a block that does not go on at once")


class _OpcodeTable(NamedTuple):
    """Counts of opcodes by block.

    names: names of opcodes, in the order of blocks.
    times: number of each opcode in one execution of a block, [block, name].
    """

    names: tuple[str, ...]
    times: np.ndarray


class Prober(Protocol):
    """Adds nodes of its own to blocks, for whoever looks inside."""

    def place(self, lower: Lower, position: int) -> None:
        """Before a step of the block is lowered."""


class Program:
    """Compiled form of one entry.

    late: whether it has the visibility of the adversarial policy.
    checked: whether every step sets `Warp.at` to its index in `sites`.
    """

    def __init__(
        self,
        entry: Entry,
        layout: Layout,
        *,
        late: bool = False,
        checked: bool = False,
        analysis: Analysis | None = None,
    ) -> None:
        """analysis: where it is known already, of another program of the entry."""
        self.entry = entry
        self.layout = layout
        # results of wgmma arrive when all warps of the warpgroup have come to it
        self.late = late or any(getattr(item, "root", "") == "wgmma" for item in entry.body)
        self.checked = checked
        self.blocks: list[Block] = build_blocks(entry)
        if analysis is None:
            analysis = analysed(entry, self.blocks, layout.symbols)
        self.analysis = analysis
        self.registers, self.defs = analysis.registers, analysis.defs
        self.pending, self.live_scalars = analysis.pending, analysis.live_scalars
        for block, live_in, live_out in zip(
            self.blocks, analysis.live_in, analysis.live_out, strict=True
        ):
            block.live_in, block.live_out = live_in, live_out
        found = library()
        self.frame = Frame(found, self._arrays()) if found else None
        self.sites = [step.instr for block in self.blocks for step in block.steps]
        self.site_of = {id(instr): number for number, instr in enumerate(self.sites)}
        self._opcodes: dict[int, Counter[str]] = {}
        self.lengths = [len(block.steps) for block in self.blocks]
        self.fast: list[Callable[..., Any]] = [self._stub(block.index) for block in self.blocks]
        self.versions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.awaited: set[tuple[Any, ...]] = set()  # versions that other processes have executed
        self._skirts: dict[int, tuple[int, Callable[..., Any]]] = {}
        # the same in the form of `codegen.tainted`, and the flows of the instructions in them
        self._tainted: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.flows: dict[int, Flow] = {}
        self.sources: dict[tuple[Any, ...], str] = {}  # what was generated, for whoever looks
        self.lines: dict[str, list[Any]] = {}  # generated file name -> instruction of each line
        self.steps: dict[str, list[int]] = {}  # and the step of its block
        # all versions as data, those of another process, too, if they are to be kept
        self.keeps = False
        self.written: dict[Key, Written] = {}
        self.fresh = 0  # how many of them are of this process
        self.probes: Prober | None = None  # set before any block is compiled

    @cached_property
    def shared_grain(self) -> int:
        """Bytes of the smallest element that may be accessed in shared memory, up to 4."""
        return self._grain("global")

    @cached_property
    def global_grain(self) -> int:
        """Bytes of the smallest element that may be accessed in global memory, up to 4."""
        return self._grain("shared")

    def _grain(self, other: str) -> int:
        """other: one of the spaces that do not count."""
        sizes, others = [4], {other, "param", "local"}
        for instr in self.sites:
            if instr.root in ("ld", "st", "atom", "red", "wmma") and others.isdisjoint(instr.parts):
                sizes += [TYPE_BITS[part] // 8 for part in instr.parts[-1:] if part in TYPE_BITS]
        return max(min(sizes), 1)

    # -- registers --------------------------------------------------------------------------

    @cached_property
    def crossing(self) -> list[str]:
        """Registers that go from block to block."""
        alive = set[str]().union(*(block.live_in for block in self.blocks))
        return [name for name in self.entry.registers if name in alive]

    def _arrays(self) -> dict[int, str]:
        """Slots of registers that are always arrays and go from block to block, with numpy's types.

        Registers whose arrays may be filled later are not among them.
        """
        pending = frozenset[str]().union(*self.pending) if self.late else frozenset[str]()
        return {
            slot: DTYPE[type_]
            for name in self.crossing
            if self.registers.always_varying(name) and self.registers.root(name) not in pending
            for slot, type_ in self.registers.slots(name)
        }

    @cached_property
    def initial(self) -> list[Any]:
        """Registers start undefined, which is legal: zero, or zeros where always an array.

        Those of one block alone have the highest slots, and no value that only a probe would read.
        """
        values: dict[int, Any] = {}
        zeros = {"pred": False, "f32": 0.0, "f64": 0.0}
        for name in self.crossing if self.probes is None else self.entry.registers:
            for slot, type_ in self.registers.slots(name):
                if self.registers.always_varying(name):
                    values[slot] = namespace.ZEROS[type_]
                else:
                    values[slot] = zeros.get(type_, 0)
        return [values[slot] for slot in range(len(values))]

    # -- compilation ------------------------------------------------------------------------

    def _stub(self, index: int) -> Callable[..., Any]:
        def compile_first(w: Any, R: list[Any]) -> int:
            function = self.version(index, 0, frozenset())
            self.fast[index] = function
            return function(w, R)

        return compile_first

    def version(self, index: int, partial: int, nonuniform: frozenset[str]) -> Callable[..., Any]:
        key = (index, partial, nonuniform)
        if key not in self.versions:
            function = self._compile(key)
            if self.checked:
                function = tainted.switching(self, key, function)
            self.versions[key] = function
        return self.versions[key]

    def prepare(self) -> None:
        """Generate the versions that other processes have executed in earlier launches."""
        for index, partial, nonuniform in self.awaited - self.versions.keys():
            function = self.version(index, partial, nonuniform)
            if not partial and not nonuniform:
                self.fast[index] = function
        self.awaited.clear()

    def skirt(self, index: int) -> tuple[int, Callable[..., Any]]:
        """Return where a block always goes on, at once, or -1; and the block for some lanes."""
        if index not in self._skirts:
            join = self.blocks[index].join
            self._skirts[index] = join, self.version(index, 2, frozenset()) if join >= 0 else _never
        return self._skirts[index]

    def tainted(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        """The version that follows undefined data."""
        if key not in self._tainted:
            self._tainted[key] = self._compile(key, follows=True)
        return self._tainted[key]

    def _compile(self, key: tuple[Any, ...], *, follows: bool = False) -> Callable[..., Any]:
        try:
            known = self.written.get((*key, follows))
            if known is not None:
                return self._made((*key, follows), known)
            return self._generated(key, self._writer(key[1], follows), follows)
        except NoRoom:
            return self._generated(key, self._writer(key[1], follows, native=False), follows)

    def _writer(self, partial: int, follows: bool, *, native: bool = True) -> BlockWriter:
        sites, checked = self.site_of, self.checked
        if self.frame is None:
            return BlockWriter(sites, checked, resumes=follows)
        if follows or not native:
            return BlockWriter(sites, checked, resumes=follows, filed=self.frame.offsets)
        return StepWriter(sites, checked, frame=self.frame, tells=checked, partial=partial)

    def _generated(
        self, key: tuple[Any, ...], writer: BlockWriter, follows: bool
    ) -> Callable[..., Any]:
        index, partial, nonuniform = key
        block = self.blocks[index]
        lower = Lower(
            block,
            self.registers,
            self.layout.symbols,
            partial=partial,
            nonuniform=nonuniform,
            late=self.late,
            pending=self.pending[index],
            observed=self.checked,
        )
        failure = None
        narrator = tainted.Narrator(lower, self.site_of, self.flows) if follows else None
        election = block.election if self._may_elect(partial) else 0
        try:
            lower_steps(
                lower,
                narrator.tell if narrator else None,
                self.probes.place if self.probes else None,
                election,
            )
            if narrator:
                narrator.finish(self.blocks[min(index + 1, len(self.blocks) - 1)])
        except PtxEmuError as error:
            failure = error
        stores, guard = ([], None) if failure else lower.finish(guarded=not election)
        writer.load(lower.nodes)
        writer.run(lower.nodes)
        if failure:
            writer.line("raise FAILURE")  # after what can be executed before it
        else:
            self._finish(writer, lower, stores, guard, elects=election > 0)
        body = "\n    ".join(writer.lines)
        body = body.replace("<mb>", "mb" if partial else "0xffffffff")
        body = body.replace("<m>", "m" if partial else "None")
        parameters = "w, R, m, mb" if partial else "w, R"
        parameters += ", saved, start" * follows
        source = f"def block_{index}({parameters}):\n    {body}\n"
        file = file_of((*key, follows))
        sites = [self.site_of.get(id(instr), -1) for instr in writer.instrs]
        written = Written(
            source, file, compiled(source, file), sites, writer.step_of, writer.plan()
        )
        if narrator:
            written.add_flows(self.flows, [self.site_of[id(step.instr)] for step in block.steps])
        if self.keeps and failure is None:
            self.written[(*key, follows)] = written
            self.fresh += 1
        return self._made((*key, follows), written, failure)

    def _made(
        self, key: Key, written: Written, failure: PtxEmuError | None = None
    ) -> Callable[..., Any]:
        """The function, and what is to be known of it."""
        scope: dict[str, Any] = {**namespace.GLOBALS, **registry.RUNTIME}
        scope.update(FAILURE=failure, PARKED=PARKED)
        if self.frame is not None and written.plan is not None:
            scope.update(self.frame.bound(written.plan))
        self.sources[key] = written.source
        self.lines[written.file] = written.lines(self.sites)
        self.steps[written.file] = written.steps
        self.flows.update(written.flows_of(self.sites))
        return written.function(scope)

    def _may_elect(self, partial: int) -> bool:
        """Whether nobody has to hear of an election among the lanes of a whole warp."""
        return not partial and not self.checked and self.probes is None

    def _finish(
        self,
        writer: BlockWriter,
        lower: Lower,
        stores: list[Store],
        guard: Value | None,
        *,
        elects: bool,
    ) -> None:
        """Live-out registers back to their slots, then the terminator."""
        values = [value for _, _, value in stores]
        ends = [value for value in (guard, lower.jump) if value is not None]
        writer.require((*values, *ends))
        condition = None if guard is None else writer.condition(guard)
        jump = "" if lower.jump is None else writer.expr(lower.jump)
        for store, text in writer.stored(stores, lower.partial):
            writer.line(self._store(lower, text, *store))
        if lower.block.jump:
            writer.instr = lower.block.steps[-1].instr
            writer.line(self._jump(jump, lower.block, "mb" if lower.partial else "0xffffffff"))
        elif elects:
            writer.line(f"return {ELECTED}")
        else:
            writer.line(self._terminator(condition, lower.block, guard, lower.partial))

    def instruction_of(self, traceback: TracebackType | None) -> Instr | None:
        """The instruction that generated code was executing, from an exception's traceback."""
        found = None
        while traceback is not None:
            found = self._instruction(traceback.tb_frame, traceback.tb_lineno) or found
            traceback = traceback.tb_next
        return found

    def running_instruction(self) -> Instr | None:
        """The instruction that the innermost generated function is executing now."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found = self._instruction(frame, frame.f_lineno)
            if found is not None:
                return found
            frame = frame.f_back
        return None

    def running_warp(self) -> object:
        """Return the warp that executes the program; None if no generated function is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self.lines:
            frame = frame.f_back
        return frame and frame.f_locals["w"]

    def _instruction(self, frame: FrameType, line: int) -> Instr | None:
        instrs = self.lines.get(frame.f_code.co_filename)
        return instrs[line - 2] if instrs is not None else None

    def _store(self, lower: Lower, text: str, name: str, slot: int, value: Value) -> str:
        dtype = DTYPE[value.type]
        always = self.registers.always_varying(name)
        if self.frame is not None and slot in self.frame.offsets:
            mask = ", m" if lower.partial == 2 else ""
            return f"put(w.file_bytes, {self.frame.offsets[slot]}, {text}, {dtype}{mask})"
        if lower.partial == 2:
            line = f"R[{slot}] = choose(m, {text}, R[{slot}], {dtype})"
            return line if always else f"{line}; w.nonuniform.add({name!r})"
        if always:
            return f"R[{slot}] = {text if not value.uniform else f'full({text}, {dtype})'}"
        line = f"R[{slot}] = {text}"
        if value.uniform:
            promoted = lower.nonuniform or lower.partial
            return f"{line}; w.nonuniform.discard({name!r})" if promoted else line
        return f"{line}; w.nonuniform.add({name!r})"

    def _jump(self, where: str, block: Block, mask: str) -> str:
        """A terminator of `ops.jumps`; where: the expression of an index or an address, if any."""
        if block.jump == "brx":
            return f"return jump_by_index(w, {where}, {block.targets}, {mask})"
        if block.jump == "ret":
            return f"return return_from_frame(w, {mask})"
        back, *functions = block.targets
        kept = tuple(sorted(self.blocks[back].live_in & self.entry.framed))
        if not where:
            name = self.blocks[functions[0]].label
            return f"return call_frame(w, {name!r}, {functions[0]}, {back}, {kept}, {mask})"
        table = {self.entry.pointers[str(self.blocks[k].label)]: k for k in functions}
        return f"return call_address(w, {where}, {table}, {back}, {kept}, {mask})"

    def _terminator(
        self, condition: str | None, block: Block, guard: Value | None, partial: int
    ) -> str:
        mask = "mb" if partial else "0xffffffff"
        after = block.index + 1
        if block.trap and guard is None:
            return "return w.trap()"
        if block.exits and guard is None:
            return f"return w.exit({mask})"
        if block.branch is None and not block.exits:
            return f"return {after}"
        taken = EXITED if block.exits else block.branch
        if guard is None:
            return f"return {taken}"
        if not guard.uniform:
            return f"return w.branch({condition}, {taken}, {after}, {mask})"
        if block.exits:
            return f"return w.exit({mask}) if {condition} else {after}"
        return f"return {taken} if {condition} else {after}"

    # -- description ------------------------------------------------------------------------

    def opcode_counts(self, index: int) -> Counter[str]:
        """Count the opcodes in one execution of a block."""
        if index not in self._opcodes:
            self._opcodes[index] = Counter(s.instr.opcode for s in self.blocks[index].steps)
        return self._opcodes[index]

    def opcodes_of(self, counts: np.ndarray) -> list[Counter[str]]:
        """Count the opcodes in `counts` executions of each block, [warp, block], for each warp."""
        table = self._opcode_table
        totals = (counts.astype(np.float64) @ table.times).astype(np.int64)  # exact to 2**53
        return [
            Counter({table.names[at]: row[at] for at, count in enumerate(row) if count})
            for row in totals.tolist()
        ]

    @cached_property
    def _opcode_table(self) -> _OpcodeTable:
        counts = [self.opcode_counts(block.index) for block in self.blocks]
        names = tuple(dict.fromkeys(chain.from_iterable(counts)))
        times = np.array([[count[name] for name in names] for count in counts], np.float64)
        return _OpcodeTable(names, times)
