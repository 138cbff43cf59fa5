"""Routines -> LLVM IR: expressions, statements, and the function that Python calls."""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ptxemu.native import routines
from ptxemu.native.ir import f32, f64
from ptxemu.native.routines import ROUTINES, Pointer, symbol

# Expressions of routines -> LLVM IR.
#
# Local variables have their place on the stack, from which LLVM takes them into registers; the type
# of one is that of its first assignment. Literals take the type of their partner. What has no
# meaning here is an `Untranslatable`, which names the routine and the line.


class Untranslatable(Exception):
    """A routine has something that is not translated."""


class Value(NamedTuple):
    """Value of an expression.

    type: "i64", "i1", "float", "double", a pointer's class, or "literal", whose text is a number.
    """

    text: Any
    type: Any


_INTEGER = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.BitAnd: ("and", operator.and_),
    ast.BitOr: ("or", operator.or_),
    ast.BitXor: ("xor", operator.xor),
    ast.LShift: ("shl", operator.lshift),
    ast.RShift: ("ashr", operator.rshift),
    ast.FloorDiv: ("sdiv", operator.floordiv),
    ast.Mod: ("srem", operator.mod),
}
_FLOAT = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_RELATION = {
    ast.Eq: ("eq", "oeq"),
    ast.NotEq: ("ne", "une"),
    ast.Lt: ("slt", "olt"),
    ast.LtE: ("sle", "ole"),
    ast.Gt: ("sgt", "ogt"),
    ast.GtE: ("sge", "oge"),
}
_SCALARS = {int: "i64", float: "double", np.float32: "float", bool: "i64"}


class Signature:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.symbol = symbol(function)
        self.names = list(inspect.signature(function).parameters)
        spoken = dict(function.__annotations__)
        self.result = self._type(spoken.pop("return", "None"), function) or "i64"
        self.nothing = function.__annotations__.get("return") in (None, "None")
        types = [self._type(spoken.get(name), function) for name in self.names]
        if None in types:
            raise Untranslatable(f"{self.symbol}: parameter {self.names[types.index(None)]}")
        self.types: list[Any] = types

    @staticmethod
    def _type(annotation: Any, function: Callable[..., Any]) -> Any:
        if isinstance(annotation, str):
            annotation = {"int": int, "float": float}.get(annotation) or function.__globals__.get(
                annotation
            )
        return annotation if is_pointer(annotation) else _SCALARS.get(annotation)


def is_pointer(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, Pointer)


def llvm_type(type_: Any) -> str:
    return "ptr" if is_pointer(type_) else type_


def _element(type_: type[Pointer]) -> str:
    kind, bits = np.dtype(type_.dtype).kind, 8 * np.dtype(type_.dtype).itemsize
    return f"i{bits}" if kind != "f" else "float" if bits == 32 else "double"


def literal(number: Any, type_: str) -> str:
    if type_ == "i64":
        return str(routines.wrap(int(number)))
    return f32(number) if type_ == "float" else f64(number)


class Expressions:
    """Translator of one function's expressions, with the text it has written."""

    def __init__(self, function: Callable[..., Any], tables: dict[str, str]) -> None:
        self.function, self.tables = function, tables
        self.signature = Signature(function)
        lines, self.first_line = inspect.getsourcelines(function)
        self.tree: Any = ast.parse(textwrap.dedent("".join(lines))).body[0]
        self.node: ast.AST = self.tree
        self.head: list[str] = []  # places of variables
        self.lines: list[str] = []
        self.count = 0
        self.open = True  # whether the block can be gone on with
        self.places: dict[str, Value] = {}
        self.loops: list[tuple[str, str]] = []  # where continue and break go
        self.left: set[str] = set()  # of the latter, those that are gone to

    # -- text -------------------------------------------------------------------------------

    def _fail(self, node: ast.AST, why: str) -> Any:
        line = self.first_line + getattr(node, "lineno", 1) - 1
        raise Untranslatable(f"{self.signature.symbol}, line {line}: {why}")

    def _do(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {text}")
        return f"%v{self.count}"

    def _put(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def _end(self, text: str) -> None:
        """End a block with the terminator `text`."""
        self._put(text)
        self.open = False

    def _label(self) -> str:
        self.count += 1
        return f"b{self.count}"

    def _begin(self, label: str) -> None:
        """Begin a block; the open block before it branches to it."""
        if self.open:
            self._put(f"br label %{label}")
        self.lines.append(f"{label}:")
        self.open = True

    def _go(self, label: str) -> None:
        if self.open:
            self._end(f"br label %{label}")

    def _place(self, type_: Any) -> str:
        self.count += 1
        llvm = llvm_type(type_)
        zero = {"ptr": "null", "float": f32(0.0), "double": f64(0.0)}.get(llvm, "0")
        name = f"%p{self.count}"
        self.head += [f"  {name} = alloca {llvm}", f"  store {llvm} {zero}, ptr {name}"]
        return name

    # -- memory -----------------------------------------------------------------------------

    def _where(self, node: ast.Subscript) -> tuple[type[Pointer], str]:
        pointer = self._value(node.value)
        if not is_pointer(pointer.type):
            self._fail(node, "an element of a value that is not a pointer")
        index = self._as(self._value(node.slice), "i64")
        element = _element(pointer.type)
        where = self._do(f"getelementptr inbounds {element}, ptr {pointer.text}, i64 {index}")
        return pointer.type, where

    def _load(self, pointer: type[Pointer], where: str) -> Value:
        element = _element(pointer)
        size = np.dtype(pointer.dtype).itemsize
        value = self._do(f"load {element}, ptr {where}, align {size}")
        if element[0] == "i" and element != "i64":
            how = "zext" if np.dtype(pointer.dtype).kind == "u" else "sext"
            value = self._do(f"{how} {element} {value} to i64")
        return Value(value, "i64" if element[0] == "i" else element)

    def _store(self, pointer: type[Pointer], where: str, value: Value) -> None:
        element = _element(pointer)
        text = self._as(value, "i64" if element[0] == "i" else element)
        if element[0] == "i" and element != "i64":
            text = self._do(f"trunc i64 {text} to {element}")
        size = np.dtype(pointer.dtype).itemsize
        self._put(f"store {element} {text}, ptr {where}, align {size}")

    # -- conditions -------------------------------------------------------------------------

    def _branch(self, node: ast.expr, yes: str, no: str) -> None:
        """Branch to one of two blocks; operands that the condition does not need are skipped."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._branch(node.operand, no, yes)
        elif isinstance(node, ast.BoolOp):
            for part in node.values[:-1]:
                further = self._label()
                ways = (further, no) if isinstance(node.op, ast.And) else (yes, further)
                self._branch(part, *ways)
                self._begin(further)
            self._branch(node.values[-1], yes, no)
        elif isinstance(node, ast.Compare) and len(node.ops) > 1:
            left = self._value(node.left)
            for number, (op, right_node) in enumerate(zip(node.ops, node.comparators, strict=True)):
                right = self._value(right_node)
                truth = self._relation(node, op, left, right)
                left, last = right, number == len(node.ops) - 1
                further = yes if last else self._label()
                self._end(f"br i1 {truth}, label %{further}, label %{no}")
                if not last:
                    self._begin(further)
        else:
            self._end(f"br i1 {self._truth(self._value(node))}, label %{yes}, label %{no}")

    def _truth(self, value: Value) -> str:
        if value.type == "i1":
            return value.text
        if value.type == "literal":
            return "true" if value.text else "false"
        if value.type == "i64":
            return self._do(f"icmp ne i64 {value.text}, 0")
        return self._fail(self.node, "a condition of integers only")

    def _relation(self, node: ast.AST, op: ast.cmpop, left: Value, right: Value) -> str:
        if type(op) not in _RELATION:
            self._fail(node, f"no {type(op).__name__}")
        type_ = self._common(node, left, right)
        integer, floating = _RELATION[type(op)]
        code = f"icmp {integer}" if type_ == "i64" else f"fcmp {floating}"
        return self._do(f"{code} {type_} {self._as(left, type_)}, {self._as(right, type_)}")

    def _joined(self, yes: str, no: str, values: Callable[[str], Value]) -> Value:
        """The value of one of two blocks that are already gone to."""
        ends: list[tuple[list[str], Value]] = []
        outer = self.lines
        for label in (yes, no):
            self.lines = []
            self.open = False
            self._begin(label)
            value = values(label)
            ends.append((self.lines, value))
        type_ = self._common(self.node, ends[0][1], ends[1][1])
        place, after = self._place(type_), self._label()
        self.lines = outer
        for lines, value in ends:
            self.lines += lines
            self._put(f"store {llvm_type(type_)} {self._as(value, type_)}, ptr {place}")
            self._put(f"br label %{after}")
        self.open = False
        self._begin(after)
        return Value(self._do(f"load {llvm_type(type_)}, ptr {place}"), type_)

    # -- expressions ------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> Value:
        method = getattr(self, f"_e_{type(node).__name__.lower()}", None)
        if method is None:
            return self._fail(node, f"no {type(node).__name__}")
        value: Value = method(node)
        return value

    def _as(self, value: Value, type_: Any) -> str:
        """The text of a value in a type; what is not a literal or a truth has it already."""
        if value.type == type_:
            text: str = value.text
            return text
        if value.type == "literal" and not is_pointer(type_):
            if type_ != "i64" or not isinstance(value.text, float):
                return literal(value.text, type_)
        if value.type == "i1" and type_ == "i64":
            return self._do(f"zext i1 {value.text} to i64")
        mine = getattr(value.type, "__name__", value.type)
        wanted = getattr(type_, "__name__", type_)
        return self._fail(self.node, f"{mine} where {wanted} is needed")

    def _common(self, node: ast.AST, left: Value, right: Value) -> Any:
        types = {left.type, right.type} - {"literal", "i1"}
        if len(types) > 1:
            self._fail(node, "two types; convert one with float(x), f32(x) or int(x)")
        if types:
            return types.pop()
        literals = [v.text for v in (left, right) if v.type == "literal"]
        return "double" if any(isinstance(x, float) for x in literals) else "i64"

    def _e_constant(self, node: ast.Constant) -> Value:
        if type(node.value) not in (int, float, bool):
            self._fail(node, f"no {node.value!r}")
        return Value(node.value, "literal")

    def _e_name(self, node: ast.Name) -> Value:
        if node.id in self.places:
            place, type_ = self.places[node.id]
            return Value(self._do(f"load {llvm_type(type_)}, ptr {place}"), type_)
        found = self.function.__globals__.get(node.id)
        if type(found) in (int, float, bool):
            return Value(found, "literal")
        if isinstance(found, Pointer) and found.array is not None:
            return self._table(node.id, type(found), found.array)
        return self._fail(
            node, f"{node.id} is neither assigned before nor a constant of its module"
        )

    def _e_attribute(self, node: ast.Attribute) -> Value:
        """A constant of another module."""
        module = (
            self.function.__globals__.get(node.value.id)
            if isinstance(node.value, ast.Name)
            else None
        )
        found = getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
        if type(found) not in (int, float, bool):
            return self._fail(node, f"{node.attr} is not a constant of a module")
        return Value(found, "literal")

    def _table(self, name: str, pointer: type[Pointer], values: np.ndarray) -> Value:
        """A constant array of the module, which is only read."""
        place = f'@"table.{self.signature.symbol.partition(".")[0]}.{name}"'
        bits = values.ravel().view(f"u{values.itemsize}").tolist()
        type_ = f"i{8 * values.itemsize}"
        items = ", ".join(f"{type_} {x}" for x in bits)
        text = f"{place} = private constant [{len(bits)} x {type_}] [{items}], align 64"
        self.tables[place] = text
        return Value(place, pointer)

    def _e_subscript(self, node: ast.Subscript) -> Value:
        return self._load(*self._where(node))

    def _e_compare(self, node: ast.Compare) -> Value:
        if len(node.ops) > 1:
            return self._e_boolop(node)
        left, right = self._value(node.left), self._value(node.comparators[0])
        return Value(self._relation(node, node.ops[0], left, right), "i1")

    def _e_boolop(self, node: ast.BoolOp | ast.Compare) -> Value:
        parts = node.values if isinstance(node, ast.BoolOp) else []
        if not all(isinstance(p, ast.Compare | ast.BoolOp | ast.UnaryOp) for p in parts):
            self._fail(node, "and, or as a value only between comparisons")
        yes, no = self._label(), self._label()
        self._branch(node, yes, no)
        found = self._joined(yes, no, lambda label: Value(int(label == yes), "literal"))
        return Value(self._truth(found), "i1")

    def _e_ifexp(self, node: ast.IfExp) -> Value:
        yes, no = self._label(), self._label()
        self._branch(node.test, yes, no)
        return self._joined(
            yes, no, lambda label: self._value(node.body if label == yes else node.orelse)
        )

    def _e_unaryop(self, node: ast.UnaryOp) -> Value:
        value = self._value(node.operand)
        if isinstance(node.op, ast.Not):
            return Value(self._do(f"xor i1 {self._truth(value)}, true"), "i1")
        if value.type == "literal":
            signs: dict[type[ast.unaryop], Callable[[Any], Any]] = {
                ast.USub: operator.neg,
                ast.Invert: operator.invert,
                ast.UAdd: operator.pos,
            }
            return Value(signs[type(node.op)](value.text), "literal")
        if isinstance(node.op, ast.USub) and value.type in ("float", "double"):
            return Value(self._do(f"fneg {value.type} {value.text}"), value.type)
        if isinstance(node.op, ast.UAdd):
            return value
        text = self._as(value, "i64")
        code = "sub i64 0," if isinstance(node.op, ast.USub) else "xor i64 -1,"
        return Value(self._do(f"{code} {text}"), "i64")

    def _e_binop(self, node: ast.BinOp) -> Value:
        return self._binary(node, node.op, self._value(node.left), self._value(node.right))

    def _binary(self, node: ast.AST, op: ast.operator, left: Value, right: Value) -> Value:
        if left.type == right.type == "literal" and type(op) in _INTEGER:
            return Value(_INTEGER[type(op)][1](left.text, right.text), "literal")
        type_ = self._common(node, left, right)
        x, y = self._as(left, type_), self._as(right, type_)
        if type_ in ("float", "double") and type(op) in _FLOAT:
            return Value(self._do(f"{_FLOAT[type(op)]} {type_} {x}, {y}"), type_)
        if type_ != "i64" or type(op) not in _INTEGER:
            self._fail(node, f"no {type(op).__name__} of {getattr(type_, '__name__', type_)}")
        if isinstance(op, ast.FloorDiv | ast.Mod):
            return Value(self._division(isinstance(op, ast.Mod), x, right, y), "i64")
        if isinstance(op, ast.LShift | ast.RShift) and right.type != "literal":
            y = self._do(f"and i64 {y}, 63")
        return Value(self._do(f"{_INTEGER[type(op)][0]} i64 {x}, {y}"), "i64")

    def _division(self, remainder: bool, x: str, divisor: Value, y: str) -> str:
        """Down, as Python's."""
        if divisor.type == "literal" and divisor.text > 0 and not divisor.text & divisor.text - 1:
            if remainder:
                return self._do(f"and i64 {x}, {divisor.text - 1}")
            return self._do(f"ashr i64 {x}, {divisor.text.bit_length() - 1}")
        if divisor.type != "literal":  # 0 would end the process
            zero = self._do(f"icmp eq i64 {y}, 0")
            y = self._do(f"select i1 {zero}, i64 1, i64 {y}")
        rest = self._do(f"srem i64 {x}, {y}")
        signs = self._do(f"icmp slt i64 {self._do(f'xor i64 {rest}, {y}')}, 0")
        below = self._do(f"and i1 {signs}, {self._do(f'icmp ne i64 {rest}, 0')}")
        if remainder:
            more = self._do(f"select i1 {below}, i64 {y}, i64 0")
            return self._do(f"add i64 {rest}, {more}")
        quotient = self._do(f"sdiv i64 {x}, {y}")
        return self._do(f"add i64 {quotient}, {self._do(f'sext i1 {below} to i64')}")

    # -- calls ------------------------------------------------------------------------------

    def _e_call(self, node: ast.Call) -> Value:
        if not isinstance(node.func, ast.Name) or node.keywords:
            return self._fail(node, "calls of plain names, without keywords")
        name = node.func.id
        values = [self._value(argument) for argument in node.args]
        if name in ("min", "max"):
            return self._extreme(node, name, values)
        found = self.function.__globals__.get(name)
        if is_pointer(found) and len(values) == 1:
            if is_pointer(values[0].type):
                return Value(values[0].text, found)
            address = self._as(values[0], "i64")
            return Value(self._do(f"inttoptr i64 {address} to ptr"), found)
        other = ROUTINES.get(symbol(found)) if callable(found) else None
        if other is not None and found == other:
            return self._routine(node, Signature(other), values)
        method = getattr(self, f"_c_{'float32' if found is np.float32 else name}", None)
        known = found is None or getattr(routines, name, None) is found
        if method is None or len(values) != 1 or not known:
            return self._fail(node, f"no call of {name}")
        value: Value = method(values[0])
        return value

    def _routine(self, node: ast.Call, other: Signature, values: list[Value]) -> Value:
        if len(values) != len(other.types):
            self._fail(node, f"{other.symbol} has {len(other.types)} parameters")
        pairs = zip(other.types, values, strict=True)
        texts = ", ".join(f"{llvm_type(type_)} {self._as(value, type_)}" for type_, value in pairs)
        return Value(self._do(f'call {other.result} @"{other.symbol}"({texts})'), other.result)

    def _extreme(self, node: ast.Call, name: str, values: list[Value]) -> Value:
        if not values:
            self._fail(node, f"{name} of nothing")
        out = values[0]
        for value in values[1:]:
            type_ = self._common(node, out, value)
            x, y = self._as(out, type_), self._as(value, type_)
            if type_ == "i64":
                text = self._do(f"call i64 @llvm.s{name}.i64(i64 {x}, i64 {y})")
            else:  # the first of two that are equal or have no order, as Python has it
                relation = "olt" if name == "min" else "ogt"
                other = self._do(f"fcmp {relation} {type_} {y}, {x}")
                text = self._do(f"select i1 {other}, {type_} {y}, {type_} {x}")
            out = Value(text, type_)
        return out

    def _c_abs(self, value: Value) -> Value:
        if value.type in ("float", "double"):
            name = f"llvm.fabs.f{32 if value.type == 'float' else 64}"
            text = self._do(f"call {value.type} @{name}({value.type} {value.text})")
            return Value(text, value.type)
        return Value(
            self._do(f"call i64 @llvm.abs.i64(i64 {self._as(value, 'i64')}, i1 false)"), "i64"
        )

    def _c_int(self, value: Value) -> Value:
        if value.type not in ("float", "double"):
            return Value(self._as(value, "i64"), "i64")
        name = f"llvm.fptosi.sat.i64.f{32 if value.type == 'float' else 64}"
        return Value(self._do(f"call i64 @{name}({value.type} {value.text})"), "i64")

    def _c_wrap(self, value: Value) -> Value:
        return Value(self._as(value, "i64"), "i64")

    def _c_float32(self, value: Value) -> Value:
        if value.type == "double":
            return Value(self._do(f"fptrunc double {value.text} to float"), "float")
        if value.type in ("i64", "i1"):
            return Value(self._do(f"sitofp i64 {self._as(value, 'i64')} to float"), "float")
        return Value(self._as(value, "float"), "float")

    def _c_float(self, value: Value) -> Value:
        if value.type == "float":
            return Value(self._do(f"fpext float {value.text} to double"), "double")
        if value.type in ("i64", "i1"):
            return Value(self._do(f"sitofp i64 {self._as(value, 'i64')} to double"), "double")
        return Value(self._as(value, "double"), "double")

    def _c_bits_f32(self, value: Value) -> Value:
        bits = self._do(f"trunc i64 {self._as(value, 'i64')} to i32")
        return Value(self._do(f"bitcast i32 {bits} to float"), "float")

    def _c_f32_bits(self, value: Value) -> Value:
        bits = self._do(f"bitcast float {self._as(value, 'float')} to i32")
        return Value(self._do(f"zext i32 {bits} to i64"), "i64")


_DECLARATIONS = """\
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @llvm.abs.i64(i64, i1)
declare float @llvm.fabs.f32(float)
declare double @llvm.fabs.f64(double)
declare i64 @llvm.fptosi.sat.i64.f32(float)
declare i64 @llvm.fptosi.sat.i64.f64(double)
declare i64 @PyLong_AsLongLong(ptr)
declare double @PyFloat_AsDouble(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyFloat_FromDouble(double)
declare ptr @PyErr_Occurred()
declare i32 @PyErr_BadArgument()
"""


def module(functions: Iterable[Callable[..., Any]]) -> str:
    """The IR of routines, which call no others, and of what Python calls."""
    parts = [_DECLARATIONS]
    tables: dict[str, str] = {}
    for function in functions:
        parts += [_Routine(function, tables).translated(), _entry(Signature(function))]
    return "\n".join((*parts, *tables.values()))


class _Routine(Expressions):
    """Translator of one function, statement by statement."""

    def translated(self) -> str:
        signature = self.signature
        parameters = []
        for number, (name, type_) in enumerate(zip(signature.names, signature.types, strict=True)):
            parameters.append(
                f"{llvm_type(type_)} {'noalias ' if is_pointer(type_) else ''}%a{number}"
            )
            self._assign(name, Value(f"%a{number}", type_))
        self._body(self.tree.body)
        if self.open:
            if not signature.nothing:
                self._fail(self.tree, "its end is reached without a value")
            self._end("ret i64 0")
        head = f'define {signature.result} @"{signature.symbol}"({", ".join(parameters)}) {{\n'
        return head + "\n".join((*self.head, *self.lines)) + "\n}\n"

    # -- statements -------------------------------------------------------------------------

    def _body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if not self.open:
                return
            self.node = statement
            method = getattr(self, f"_s_{type(statement).__name__.lower()}", None)
            if method is None:
                self._fail(statement, f"no {type(statement).__name__}")
            else:
                method(statement)

    def _s_pass(self, node: ast.Pass) -> None:
        pass

    def _s_expr(self, node: ast.Expr) -> None:
        if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
            self._value(node.value)

    def _s_assign(self, node: ast.Assign) -> None:
        if len(node.targets) != 1:
            self._fail(node, "one target only")
        target, source = node.targets[0], node.value
        if isinstance(target, ast.Tuple):
            if not isinstance(source, ast.Tuple) or len(source.elts) != len(target.elts):
                self._fail(node, "as many values as targets, one by one")
            values = [self._value(element) for element in source.elts]  # type: ignore[attr-defined]
            for element, value in zip(target.elts, values, strict=True):
                self._to(element, value)
        else:
            self._to(target, self._value(source))

    def _s_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is None:
            self._fail(node, "no value")
        else:
            self._to(node.target, self._value(node.value))

    def _s_augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Subscript):
            pointer, where = self._where(node.target)
            value = self._binary(node, node.op, self._load(pointer, where), self._value(node.value))
            self._store(pointer, where, value)
            return
        old = self._value(ast.copy_location(ast.Name(node.target.id), node))  # type: ignore[union-attr]
        self._to(node.target, self._binary(node, node.op, old, self._value(node.value)))

    def _s_return(self, node: ast.Return) -> None:
        result = self.signature.result
        if node.value is None or self.signature.nothing:
            if node.value is not None or not self.signature.nothing:
                self._fail(node, "not what its annotation says")
            self._end("ret i64 0")
        else:
            self._end(f"ret {result} {self._as(self._value(node.value), result)}")

    def _s_if(self, node: ast.If) -> None:
        yes, no, after = self._label(), self._label(), self._label()
        self._branch(node.test, yes, no)
        self._begin(yes)
        self._body(node.body)
        goes_on = self.open
        self._go(after)
        self._begin(no)
        self._body(node.orelse)
        if self.open or goes_on:
            self._begin(after)

    def _s_while(self, node: ast.While) -> None:
        test, body, after = self._label(), self._label(), self._label()
        self._begin(test)
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        if endless:
            self._go(body)
        else:
            self._branch(node.test, body, after)
        self._loop(node, body, test, after)
        self._go(test)
        if not endless or after in self.left:
            self._begin(after)

    def _loop(self, node: ast.For | ast.While, body: str, again: str, after: str) -> None:
        if node.orelse:
            self._fail(node, "no else of a loop")
        self._begin(body)
        self.loops.append((again, after))
        self._body(node.body)
        self.loops.pop()

    def _s_for(self, node: ast.For) -> None:
        call = node.iter
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            self._fail(node, "only over range()")
            return
        if call.func.id != "range" or call.keywords or not isinstance(node.target, ast.Name):
            self._fail(node, "only over range()")
            return
        bounds = [self._value(argument) for argument in call.args]
        step = bounds[2] if len(bounds) == 3 else Value(1, "literal")
        if step.type != "literal" or not isinstance(step.text, int) or step.text == 0:
            self._fail(node, "a literal step")
        first = "0" if len(bounds) == 1 else self._as(bounds[0], "i64")
        last = self._as(bounds[0 if len(bounds) == 1 else 1], "i64")
        counter = self._place("i64")
        test, body, again, after = (self._label() for _ in range(4))
        self._put(f"store i64 {first}, ptr {counter}")
        self._begin(test)
        now = self._do(f"load i64, ptr {counter}")
        relation = "slt" if step.text > 0 else "sgt"
        inside = self._do(f"icmp {relation} i64 {now}, {last}")
        self._end(f"br i1 {inside}, label %{body}, label %{after}")
        self._begin(body)
        self._assign(node.target.id, Value(now, "i64"))
        self._loop(node, self._label(), again, after)
        self._begin(again)
        following = self._do(f"add nsw i64 {now}, {step.text}")
        self._put(f"store i64 {following}, ptr {counter}")
        self._go(test)
        self._begin(after)

    def _s_break(self, node: ast.Break) -> None:
        self.left.add(self.loops[-1][1])
        self._go(self.loops[-1][1])

    def _s_continue(self, node: ast.Continue) -> None:
        self._go(self.loops[-1][0])

    def _to(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._assign(target.id, value)
        elif isinstance(target, ast.Subscript):
            self._store(*self._where(target), value)
        else:
            self._fail(target, "only to a variable or an element")

    def _assign(self, name: str, value: Value) -> None:
        if name not in self.places:
            type_ = value.type
            if type_ in ("literal", "i1"):
                type_ = "double" if isinstance(value.text, float) else "i64"
            self.places[name] = Value(self._place(type_), type_)
        place, type_ = self.places[name]
        self._put(f"store {llvm_type(type_)} {self._as(value, type_)}, ptr {place}")


# -- what Python calls --------------------------------------------------------------------------


def _entry(signature: Signature) -> str:
    """A function of METH_FASTCALL: objects to numbers, the routine, its number to an object."""
    lines, arguments = [], []
    for number, type_ in enumerate(signature.types):
        k, real = number, type_ in ("float", "double")
        lines += [
            f"  %p{k} = getelementptr ptr, ptr %arguments, i64 {k}",
            f"  %o{k} = load ptr, ptr %p{k}",
            f"  %n{k} = call double @PyFloat_AsDouble(ptr %o{k})"
            if real
            else f"  %n{k} = call i64 @PyLong_AsLongLong(ptr %o{k})",
        ]
        if type_ == "float":
            lines.append(f"  %c{k} = fptrunc double %n{k} to float")
        elif is_pointer(type_):
            lines.append(f"  %c{k} = inttoptr i64 %n{k} to ptr")
        name = f"%{'n' if type_ in ('i64', 'double') else 'c'}{k}"
        arguments.append(f"{llvm_type(type_)} {name}")
    result = signature.result
    lines += [
        "  %error = call ptr @PyErr_Occurred()",
        "  %bad = icmp ne ptr %error, null",
        "  br i1 %bad, label %refuse, label %run",
        "run:",
        f'  %value = call {result} @"{signature.symbol}"({", ".join(arguments)})',
    ]
    if result == "i64":
        lines.append("  %object = call ptr @PyLong_FromLongLong(i64 %value)")
    else:
        wide = "%value" if result == "double" else "%wide"
        lines += ["  %wide = fpext float %value to double"] if result == "float" else []
        lines.append(f"  %object = call ptr @PyFloat_FromDouble(double {wide})")
    return "\n".join(
        (
            f'define ptr @"python.{signature.symbol}"(ptr %self, ptr %arguments, i64 %count) {{',
            f"  %right = icmp eq i64 %count, {len(signature.types)}",
            "  br i1 %right, label %take, label %wrong",
            "wrong:",
            "  %said = call i32 @PyErr_BadArgument()",
            "  ret ptr null",
            "take:",
            *lines,
            "  ret ptr %object",
            "refuse:",
            "  ret ptr null",
            "}\n",
        )
    )
