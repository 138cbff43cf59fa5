"""Calls that have a frame: recursive ones, those by address, and those whose arguments are accessed
in pieces. PTX ISA, "call", ".callprototype", ".calltargets", "Recursive functions".

Such a function is in the entry once, before its body, with registers of its own. Its results,
parameters and local variables lie in a frame of the thread's local memory:

    0        results, then parameters, each at a multiple of 16 bytes
    ...      local variables, and the arguments of its own calls
    nbytes   the frame of the function that it calls

The register @sp has the address of the frame. `call.frame` and `ret.frame` are instructions of the
emulator: the first keeps where to return to and the registers that are used again
(`ptxemu.machine.frames`), for each thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ptxemu.errors import PtxSyntaxError, UnsupportedPtx
from ptxemu.syntax.inline import (
    Function,
    Inliner,
    NeedsFrame,
    actuals_of,
    callee_of,
    calls_by_address,
    refused,
    renamed_item,
    require_count,
)
from ptxemu.syntax.tree import (
    TYPE_BITS,
    Addr,
    Entry,
    Imm,
    Instr,
    Not,
    Reg,
    Sym,
    Variable,
    Vec,
)

SP, STACK = "@sp", "@stack"
STACK_BYTES = 256 << 10  # of a thread
ADDRESSES = 3 << 56  # where addresses of functions begin: no memory has such ones
_ALIGN = 16


def function_addresses(names: Iterable[str]) -> dict[str, int]:
    """Return an address for each function of a module."""
    return {name: ADDRESSES + _ALIGN * number for number, name in enumerate(names, 1)}


def resolve_calls(entry: Entry, functions: dict[str, Function], addresses: dict[str, int]) -> None:
    """Replace the calls of `functions` in the body of an entry: most by the function's body.

    addresses: of the functions that a register may point to. Raises UnsupportedPtx and
    PtxSyntaxError, with the line.
    """
    if not functions:
        return
    graph = _Graph(functions, addresses)
    reached = graph.reached(entry.body)
    if not reached:
        return
    by_address = graph.by_address(entry.body, reached)
    for framed in (graph.recursive(reached) | by_address, reached):
        made = replace(
            entry,
            body=list(entry.body),
            variables=list(entry.variables),
            registers=dict(entry.registers),
            lists=dict(entry.lists),
        )
        try:
            Inliner(made, functions, framed).run()
            if framed:
                _Framer(made, functions, framed, addresses).run()
        except NeedsFrame:
            continue
        entry.__dict__.update(made.__dict__)
        return


@dataclass
class _Graph:
    """Calls between the functions of a module. Functions are known by the names of their code."""

    functions: dict[str, Function]
    addresses: dict[str, int]

    def called(self, body: list[Any]) -> set[str]:
        """Return the functions that a body may call itself."""
        found = {f.code.name for item in body if (f := callee_of(item, self.functions))}
        return found | (self.taken if any(map(calls_by_address, body)) else set())

    @property
    def taken(self) -> set[str]:
        return {self.functions[name].code.name for name in self.addresses}

    def after(self, name: str) -> set[str]:
        return self.called(self.functions[name].code.body)

    def reached(self, body: list[Any]) -> frozenset[str]:
        """Return the functions that a body may call, also through others."""
        found: set[str] = set()
        pending = list(self.called(body))
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending += self.after(name)
        return frozenset(found)

    def recursive(self, names: frozenset[str]) -> frozenset[str]:
        """Return those that may call themselves."""
        bodies = {name: self.functions[name].code.body for name in names}
        return frozenset(name for name, body in bodies.items() if name in self.reached(body))

    def by_address(self, body: list[Any], reached: frozenset[str]) -> frozenset[str]:
        """Return those that a register may point to."""
        bodies = [body, *(self.functions[name].code.body for name in reached)]
        any_ = any(calls_by_address(item) for each in bodies for item in each)
        return frozenset(self.taken) if any_ else frozenset()


@dataclass
class _Unit:
    """A body with its frame: that of the kernel, which has none, or of a function.

    places: offset and size of each variable in the frame, by name.
    in_registers: results and parameters in the .reg space, with their offsets.
    """

    code: Entry
    suffix: str = ""
    nbytes: int = 0
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    results: list[tuple[Variable, int]] = field(default_factory=list)
    params: list[tuple[Variable, int]] = field(default_factory=list)
    pieces: dict[str, set[tuple[int, int]] | None] = field(default_factory=dict)
    system: set[str] = field(default_factory=set[str])  # arguments of calls of the system

    def note_pieces(self, is_call: Callable[[object], bool]) -> None:
        """Fill `pieces`: the parts (offset, bytes) of each variable that an instruction accesses;
        None where others may be needed."""
        passed: set[str] = {formal.name for formal, _ in (*self.results, *self.params)}
        self.pieces |= dict.fromkeys(passed)
        for instr in (item for item in self.code.body if isinstance(item, Instr)):
            if is_call(instr):
                names = {name for name in actuals_of(instr) if isinstance(name, str)}
                self.pieces |= dict.fromkeys(names & passed)
                passed |= names
            elif instr.root in ("ld", "st"):
                for operand in instr.operands:
                    self._note_access(instr, operand)
            else:
                taken = [o.name for o in instr.operands if isinstance(o, Sym)]
                self.pieces |= dict.fromkeys(taken)

    def _note_access(self, instr: Instr, operand: Any) -> None:
        if not isinstance(operand, Addr) or not isinstance(operand.base, Sym):
            return
        known = self.pieces.setdefault(operand.base.name, set())
        size, count = _elements(instr)
        first = operand.base.offset + operand.offset
        if known is not None:
            known |= {(first + k * size, size) for k in range(count)}

    def reserve(self, nbytes: int) -> int:
        """Return the offset of so many bytes at the end of the frame."""
        at = self.nbytes
        self.nbytes += _up(nbytes)
        return at


class _Framer:
    """Adds functions with frames to an entry whose other calls are inlined."""

    def __init__(
        self,
        entry: Entry,
        functions: dict[str, Function],
        framed: frozenset[str],
        addresses: dict[str, int],
    ) -> None:
        self.entry = entry
        self.functions, self.framed = functions, framed
        self.addresses = addresses
        self.calls = 0

    def run(self) -> None:
        entry = self.entry
        kernel = _Unit(entry)
        kernel.note_pieces(self.is_call)
        self.move_arguments()
        units = [self.unit(name) for name in sorted(self.framed)]
        entry.registers[SP] = "b64"
        entry.framed = {SP, *(name for unit in units for name in unit.code.registers)}
        entry.variables.append(Variable(STACK, "local", "b8", _ALIGN, STACK_BYTES))
        first = next(item for item in entry.body if isinstance(item, Instr))
        body: list[Any] = [_like(first, "bra.uni", Sym("@kernel"))]
        for unit in units:
            body += self.function(unit)
        body += ["@kernel", _like(first, "mov.u64", Reg(SP), Sym(STACK))]
        body += self.rewritten(kernel)
        entry.body = body
        for unit in units:
            entry.registers |= unit.code.registers
            entry.lists |= unit.code.lists
            local = ("local", "param")
            static = [each for each in unit.code.variables if each.space not in local]
            entry.variables += [each for each in static if each not in entry.variables]
        for name, address in self.addresses.items():
            label = f"@{self.functions[name].code.name}"
            if label[1:] in self.framed:
                entry.pointers[label] = address

    def move_arguments(self) -> None:
        """Arguments that the kernel passes to functions with frames become local variables."""
        passed = {
            name
            for item in self.entry.body
            if self.is_call(item)
            for name in actuals_of(item)
            if isinstance(name, str)
        }
        self.entry.variables = [
            replace(each, space="local") if each.name in passed else each
            for each in self.entry.variables
        ]

    def is_call(self, item: object) -> bool:
        return calls_by_address(item) or callee_of(item, self.functions) is not None

    def unit(self, name: str) -> _Unit:
        """A function under names of its own, its frame laid out."""
        function, suffix = self.functions[name], f"@{name}"
        code = Entry(name, target=self.entry.target)
        unit = _Unit(code, suffix)
        inliner = Inliner(code, self.functions, self.framed)
        names = inliner.declare(function, suffix)
        body = [renamed_item(item, names, "") for item in function.code.body]
        code.body = list(inliner.expanded(body, {}, (name,)))
        for formals, known in (
            (function.results, unit.results),
            (function.code.params, unit.params),
        ):
            for formal in formals:
                own = replace(formal, name=names[formal.name])
                at = unit.reserve(formal.nbytes)
                unit.places[own.name] = at, formal.nbytes
                known.append((own, at))
        unit.system = {
            name
            for item in code.body
            if isinstance(item, Instr) and item.opcode in ("call", "call.uni")
            if not self.is_call(item)
            for name in actuals_of(item)
            if isinstance(name, str)
        }
        for variable in code.variables:
            if variable.space in ("local", "param") and variable.name not in unit.system:
                unit.places[variable.name] = unit.reserve(variable.nbytes), variable.nbytes
        unit.note_pieces(self.is_call)
        return unit

    def function(self, unit: _Unit) -> Iterator[Any]:
        """The function's body: parameters in the .reg space are loaded, such results stored."""
        code = unit.code
        instrs = [item for item in code.body if isinstance(item, Instr)]
        if not instrs:
            raise UnsupportedPtx(f"unsupported call: of the empty function {code.name}")
        yield f"@{code.name}"
        for formal, at in unit.params:
            if formal.space == "reg":
                yield from self.load(
                    unit, instrs[0], Reg(formal.name), Addr(Reg(SP), at), formal.nbytes
                )
        yield from self.rewritten(unit)
        yield from self.leave(unit, _like(instrs[-1], "ret.frame"))

    def leave(self, unit: _Unit, instr: Instr) -> Iterator[Any]:
        for formal, at in unit.results:
            if formal.space == "reg":
                value = Reg(formal.name)
                yield from self.store(unit, instr, value, Addr(Reg(SP), at), formal.nbytes)
        yield instr

    def rewritten(self, unit: _Unit) -> Iterator[Any]:
        for item in list(unit.code.body):
            if isinstance(item, str):
                yield item
            elif self.is_call(item):
                yield from self.guarded(item, self.call(unit, replace(item, guard=None)))
            elif item.opcode == "ret.frame":
                yield from self.guarded(item, self.leave(unit, replace(item, guard=None)))
            else:
                yield from self.accesses(unit, item)

    def guarded(self, instr: Instr, items: Iterator[Any]) -> Iterator[Any]:
        if instr.guard is None:
            yield from items
            return
        self.calls += 1
        skip = instr.guard.reg if isinstance(instr.guard, Not) else Not(instr.guard)
        around = f"around@{self.calls}"
        yield replace(instr, opcode="bra", operands=(Sym(around),), guard=skip)
        yield from items
        yield around

    # -- variables in the frame -----------------------------------------------------------------

    def accesses(self, unit: _Unit, instr: Instr) -> Iterator[Any]:
        """An instruction whose operands may name variables of the frame."""
        named = [_base(operand) for operand in instr.operands]
        if not unit.system.isdisjoint(named):
            yield instr
            return
        if unit.suffix and instr.root in ("ld", "st", "cvta"):
            instr = _to_local(instr)
        if not any(name in unit.places or self.is_local(unit, name) for name in named):
            yield instr
            return
        if instr.root in ("ld", "st"):
            instr = _to_local(instr)
        if not unit.suffix:
            yield instr
            return
        if instr.root == "mov":
            target, source = instr.operands
            at = unit.places[source.name][0] + source.offset
            yield replace(instr, opcode="add.u64", operands=(target, Reg(SP), Imm(at)))
            return
        operands = tuple(self.placed(unit, instr, operand) for operand in instr.operands)
        yield replace(instr, operands=operands)

    def is_local(self, unit: _Unit, name: str) -> bool:
        """Whether a name is that of an argument which the kernel passes."""
        return not unit.suffix and any(
            each.name == name and each.space == "local" for each in self.entry.variables
        )

    def placed(self, unit: _Unit, instr: Instr, operand: Any) -> Any:
        """An address in the frame for that of a variable."""
        if not isinstance(operand, Addr) or _base(operand) not in unit.places:
            return operand
        at, nbytes = unit.places[_base(operand)]
        offset = operand.offset + getattr(operand.base, "offset", 0)
        size, count = _elements(instr)
        if not 0 <= offset <= nbytes - size * count:
            name = _base(operand).split("@")[0]
            what = f"{size * count} bytes at offset {offset} of {name}, which has {nbytes}"
            raise PtxSyntaxError(what, line=instr.line, text=instr.text)
        return replace(operand, base=Reg(SP), offset=at + offset)

    # -- calls ------------------------------------------------------------------------------------

    def call(self, unit: _Unit, instr: Instr) -> Iterator[Any]:
        """Arguments to the new frame, the jump, and results from there."""
        results, params, target = self.signature(instr)
        actuals = actuals_of(instr)
        self.calls += 1
        back = f"@return@{self.calls}"
        at = unit.nbytes
        placed = []
        for actual, nbytes in zip(actuals, (*results, *params), strict=True):
            placed.append((actual, nbytes, at))
            at += _up(nbytes)
        for actual, nbytes, at in placed[len(results) :]:
            yield from self.copy(unit, instr, actual, Addr(Reg(SP), at), nbytes, store=True)
        step = (Reg(SP), Reg(SP), Imm(unit.nbytes))
        yield _like(instr, "add.u64", *step)
        yield _like(instr, "call.frame", target[0], Sym(back), target[-1])
        yield back
        yield _like(instr, "sub.u64", *step)
        for actual, nbytes, at in placed[: len(results)]:
            yield from self.copy(unit, instr, actual, Addr(Reg(SP), at), nbytes, store=False)

    def signature(self, instr: Instr) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
        """Return the bytes of results and parameters, and the operands that say where to go."""
        function = callee_of(instr, self.functions)
        if function is not None:
            require_count(instr, function.code.name, len(function.formals))
            return *_sizes(function), (Sym(f"@{function.code.name}"),)
        register = next(operand for operand in instr.operands if isinstance(operand, Reg))
        last = instr.operands[-1]
        if not isinstance(last, Vec):
            raise refused(instr, "of an address without a prototype or a list of targets")
        names: Iterable[str] = self.addresses
        if last.items and isinstance(last.items[0], Sym):
            names = [item.name for item in last.items]
            listed = [self.functions[name] for name in names if name in self.functions]
            if not listed:
                raise refused(instr, "of an address whose targets the module does not define")
            sizes = _sizes(listed[0])
        else:
            count, *given = (item.value for item in last.items)
            sizes = tuple(given[:count]), tuple(given[count:])
        require_count(instr, "an address", sum(map(len, sizes)))
        bodies = [self.functions[name] for name in names if name in self.functions]
        labels = dict.fromkeys(f"@{f.code.name}" for f in bodies if _sizes(f) == sizes)
        fitting = [Sym(label) for label in labels if label[1:] in self.framed]
        return *sizes, (register, Vec(tuple(fitting)))

    def copy(
        self, unit: _Unit, instr: Instr, actual: Any, there: Addr, nbytes: int, *, store: bool
    ) -> Iterator[Instr]:
        """Copy an argument to the new frame, or (not `store`) a result from it."""
        if actual is None:
            return
        if not isinstance(actual, str):
            move = self.store if store else self.load
            yield from move(unit, instr, actual, there, nbytes)
            return
        if unit.suffix:
            if actual not in unit.places:
                raise refused(instr, f"with {actual}, which is no variable of the function")
            here = Addr(Reg(SP), unit.places[actual][0])
        else:
            here = Addr(Sym(actual))
        source, target = (here, there) if store else (there, here)
        known = unit.pieces.get(actual, set())
        for at, size in _bytes_of(nbytes) if known is None else sorted(known):
            temporary = Reg(f"@copy{size}{unit.suffix}")
            unit.code.registers[temporary.name] = f"b{max(8 * size, 16)}"
            kind = f"local.b{8 * size}"
            yield _like(instr, f"ld.{kind}", temporary, _moved(source, at))
            yield _like(instr, f"st.{kind}", _moved(target, at), temporary)

    def load(
        self, unit: _Unit, instr: Instr, register: Any, there: Addr, nbytes: int
    ) -> Iterator[Instr]:
        yield _like(instr, f"ld.local.b{8 * nbytes}", register, there)

    def store(
        self, unit: _Unit, instr: Instr, value: Any, there: Addr, nbytes: int
    ) -> Iterator[Instr]:
        yield _like(instr, f"st.local.b{8 * nbytes}", there, value)


def _elements(instr: Instr) -> tuple[int, int]:
    """Bytes of an element that a load or store moves, and the number of elements."""
    size = max(TYPE_BITS.get(instr.type, 8) // 8, 1)
    return size, next((int(part[1:]) for part in instr.parts if part in ("v2", "v4", "v8")), 1)


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _sizes(function: Function) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bytes of results and of parameters."""
    results = tuple(each.nbytes for each in function.results)
    return results, tuple(each.nbytes for each in function.code.params)


def _bytes_of(nbytes: int) -> list[tuple[int, int]]:
    """All bytes of a variable, one by one: some may never be written, such as padding."""
    return [(at, 1) for at in range(nbytes)]


def _moved(place: Addr, by: int) -> Addr:
    return replace(place, offset=place.offset + by)


def _like(instr: Instr, opcode: str, *operands: Any) -> Instr:
    """An instruction of the emulator's own, at the place of one of the text."""
    return replace(instr, opcode=opcode, operands=operands, guard=None)


def _base(operand: Any) -> str:
    """The symbol that an operand names, "" for none."""
    named = operand.base if isinstance(operand, Addr) else operand
    return named.name if isinstance(named, Sym) else ""


def _to_local(instr: Instr) -> Instr:
    """Parameters of a function with a frame lie in local memory."""
    parts = ["local" if part in ("param", "param::func") else part for part in instr.parts]
    return instr if tuple(parts) == instr.parts else replace(instr, opcode=".".join(parts))
