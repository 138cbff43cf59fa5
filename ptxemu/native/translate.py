"""Routines -> LLVM IR: their statements, and what Python calls. `expressions` has the rest."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ptxemu.native.expressions import Expressions, Signature, Value, is_pointer, llvm_type
from ptxemu.native.routines import symbol

_DECLARATIONS = """\
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @llvm.abs.i64(i64, i1)
declare i64 @llvm.ctpop.i64(i64)
declare i64 @llvm.cttz.i64(i64, i1)
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


def entry_name(function: Callable[..., Any]) -> str:
    """The symbol of what Python calls."""
    return f"python.{symbol(function)}"


class _Routine(Expressions):
    """One function, statement by statement."""

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
