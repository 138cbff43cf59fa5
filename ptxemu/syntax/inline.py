"""Calls of functions that the module defines: each call becomes the function's body. PTX ISA,
"call", ".func", "Function Declarations and Definitions". `syntax.frames` has those that cannot.

Names of a function get the number of the call, so that two calls share no register. Arguments and
results in the .param space become registers, one for each offset that somebody stores or loads;
those in registers are moved. A `ret` becomes a branch behind the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.lexer import MOST_CALLS, MOST_NESTED
from ptxemu.syntax.tree import (
    TYPE_BITS,
    Addr,
    Args,
    Entry,
    Instr,
    Not,
    Pair,
    Reg,
    Sym,
    Variable,
    Vec,
)


@dataclass
class Function:
    """A .func with a body: `code` as an entry has it, and its formal results and parameters, those
    in the .reg space by the names of registers of `code`."""

    code: Entry
    results: list[Variable] = field(default_factory=list)

    @property
    def formals(self) -> list[Variable]:
        return [*self.results, *self.code.params]


class NeedsFrame(Exception):
    """A call whose arguments cannot be registers: their parts are accessed in several sizes or in
    fewer than 32 bits, or another call that has a frame uses the same variable."""


def callee_of(item: object, functions: dict[str, Function]) -> Function | None:
    """Return the function of the module that an instruction calls by its name."""
    if not isinstance(item, Instr) or item.root != "call":
        return None
    named = [operand.name for operand in item.operands if isinstance(operand, Sym)]
    return functions.get(named[0]) if named else None


def calls_by_address(item: object) -> bool:
    """Whether an instruction calls what a register points to."""
    return isinstance(item, Instr) and item.root == "call" and _has_register(item)


def _has_register(instr: Instr) -> bool:
    return any(isinstance(operand, Reg) for operand in instr.operands)


class Inliner:
    """Replaces calls in the body of `entry`: those of `functions` but not of `framed`.

    Raises UnsupportedPtx for more calls or deeper ones than MOST_CALLS and MOST_NESTED say, and
    NeedsFrame.
    """

    def __init__(
        self, entry: Entry, functions: dict[str, Function], framed: frozenset[str]
    ) -> None:
        self.entry = entry
        self.functions = {name: f for name, f in functions.items() if f.code.name not in framed}
        self.all = functions
        self.calls = 0

    def run(self) -> None:
        self.entry.body = list(self.expanded(self.entry.body, {}, ()))

    def keeps(self, item: object) -> bool:
        """Whether an instruction is a call that keeps its arguments in memory."""
        return calls_by_address(item) or (
            callee_of(item, self.functions) is None and callee_of(item, self.all) is not None
        )

    def expanded(
        self, body: list[Any], formals: dict[str, str], open_: tuple[str, ...]
    ) -> Iterator[Any]:
        """The items of a body; formals: .param variables that are registers already, by the name of
        those; open_: functions that are being inlined."""
        passed = dict(formals)
        stored: set[str] = set()
        for item in body:
            if callee_of(item, self.functions):
                passed |= {name: name for name in actuals_of(item) if isinstance(name, str)}
            elif self.keeps(item):
                stored |= {name for name in actuals_of(item) if isinstance(name, str)}
        if stored & passed.keys():
            raise NeedsFrame
        for item in body:
            callee = callee_of(item, self.functions)
            if callee:
                yield from self.call(item, callee, passed, open_)
            elif isinstance(item, Instr) and param_of(item) in passed:
                yield from self.moves(item, passed)
            elif isinstance(item, Instr) and not passed.keys().isdisjoint(_addressed(item)):
                raise NeedsFrame
            else:
                yield item

    def call(
        self, instr: Instr, callee: Function, passed: dict[str, str], open_: tuple[str, ...]
    ) -> Iterator[Any]:
        name, actuals = callee.code.name, actuals_of(instr)
        require_count(instr, name, len(callee.formals))
        if len(open_) == MOST_NESTED:
            raise refused(instr, f"more than {MOST_NESTED} nested calls")
        if self.calls == MOST_CALLS:
            raise refused(instr, f"more than {MOST_CALLS} calls in a kernel, all of them inlined")
        self.calls += 1
        suffix = f"@{name}@{self.calls}"
        end, around = f"end{suffix}", f"around{suffix}"
        if instr.guard is not None:
            skip = instr.guard.reg if isinstance(instr.guard, Not) else Not(instr.guard)
            yield replace(instr, opcode="bra", operands=(Sym(around),), guard=skip)
        names = self.declare(callee, suffix)
        formals: dict[str, str] = {}
        before: list[Instr] = []
        after: list[Instr] = []
        for position, (formal, actual) in enumerate(zip(callee.formals, actuals, strict=True)):
            if isinstance(actual, str):
                formals[f"{formal.name}{suffix}"] = passed[actual]
                continue
            own = Reg(f"{formal.name}{suffix}")
            result = position < len(callee.results)
            operands = (actual, own) if result else (own, actual)
            move = Instr(f"mov.{formal.type}", operands, None, instr.line, instr.text)
            (after if result else before).append(move)
        body = [renamed_item(item, names, end) for item in callee.code.body]
        yield from before
        yield from self.expanded(body, formals, (*open_, name))
        yield end
        yield from after
        if instr.guard is not None:
            yield around

    def declare(self, callee: Function, suffix: str) -> dict[str, str]:
        """The function's registers, variables and labels get new names, and the entry them."""
        code = callee.code
        names = {name: f"{name}{suffix}" for name in (*code.registers, *_labels(code.body))}
        names |= {formal.name: f"{formal.name}{suffix}" for formal in callee.formals}
        names |= {name: f"{name}{suffix}" for name in code.lists}
        for name, labels in code.lists.items():
            self.entry.lists[names[name]] = tuple(names.get(label, label) for label in labels)
        self.entry.registers |= {names[name]: kind for name, kind in code.registers.items()}
        for variable in code.variables:
            static = variable.space not in ("local", "param")
            names[variable.name] = f"{variable.name}@{code.name}{'' if static else suffix}"
            made = replace(variable, name=names[variable.name])
            if made not in self.entry.variables:
                self.entry.variables.append(made)
        return names

    def moves(self, instr: Instr, passed: dict[str, str]) -> Iterator[Instr]:
        """st.param and ld.param of what is a register now."""
        stores = instr.root == "st"
        address, value = instr.operands if stores else reversed(instr.operands)
        assert isinstance(address, Addr)
        assert isinstance(address.base, Sym)
        bits = TYPE_BITS[instr.type]
        if bits not in (32, 64):
            raise NeedsFrame
        for k, item in enumerate(value.items if isinstance(value, Vec) else (value,)):
            offset = address.offset + address.base.offset + k * bits // 8
            held = f"{passed[address.base.name]}@{offset}"
            if self.entry.registers.setdefault(held, f"b{bits}") != f"b{bits}":
                raise NeedsFrame
            operands = (Reg(held), item) if stores else (item, Reg(held))
            yield replace(instr, opcode=f"mov.{instr.type}", operands=operands)


def require_count(instr: Instr, name: str, formals: int) -> None:
    """A call has as many results and arguments as its function."""
    if (count := len(actuals_of(instr))) != formals:
        raise refused(instr, f"a call of {name} with {count} results and arguments")


def refused(instr: Instr, what: str) -> UnsupportedPtx:
    """An error with the place of the call."""
    return UnsupportedPtx(f"unsupported call: {what}", line=instr.line, text=instr.text)


def actuals_of(instr: Instr) -> list[Any]:
    """Return the arguments of a call, results first.

    They are names of .param variables, or registers and numbers.
    """
    lists = [operand.items for operand in instr.operands if isinstance(operand, Args)]
    return [item.name if isinstance(item, Sym) else item for items in lists for item in items]


def _addressed(instr: Instr) -> list[str]:
    """The symbols whose address the instruction has as an operand."""
    return [operand.name for operand in instr.operands if isinstance(operand, Sym)]


def param_of(instr: Instr) -> str:
    """The variable that a st.param or ld.param names."""
    if instr.root not in ("st", "ld") or not {"param", "param::func"} & set(instr.parts):
        return ""
    for operand in instr.operands:
        if isinstance(operand, Addr) and isinstance(operand.base, Sym):
            return operand.base.name
    return ""


def _labels(body: list[Any]) -> list[str]:
    return [item for item in body if isinstance(item, str)]


def renamed_item(item: Any, names: dict[str, str], end: str) -> Any:
    """A label or an instruction of a function under its new names. end: where its `ret` goes; ""
    for one that has a frame."""
    if isinstance(item, str):
        return names[item]
    guard = _renamed(item.guard, names)
    if item.root == "ret" and not end:
        return replace(item, opcode="ret.frame", guard=guard)
    if item.root == "ret":
        return replace(item, opcode="bra", operands=(Sym(end),), guard=guard)
    operands = tuple(_renamed(operand, names) for operand in item.operands)
    return replace(item, operands=operands, guard=guard)


def _renamed(operand: Any, names: dict[str, str]) -> Any:
    if isinstance(operand, (Reg, Sym)):
        return replace(operand, name=names.get(operand.name, operand.name))
    if isinstance(operand, Not):
        return Not(_renamed(operand.reg, names))
    if isinstance(operand, (Vec, Args)):
        return replace(operand, items=tuple(_renamed(item, names) for item in operand.items))
    if isinstance(operand, Pair):
        return Pair(_renamed(operand.first, names), _renamed(operand.second, names))
    if isinstance(operand, Addr):
        coords = tuple(_renamed(item, names) for item in operand.coords)
        return replace(operand, base=_renamed(operand.base, names), coords=coords)
    return operand
