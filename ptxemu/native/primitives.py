"""The primitives as LLVM IR: one function per operation on 32 lanes.

A primitive is one instruction of a threaded program: 32 bytes with the address of its function and
the places of its result and of up to three operands. It ends with a tail call to the function of
the next one. A place is an offset in bytes into the registers of a warp, or, where it is negative,
into the scratch of the program (its low 31 bits).
Every one computes the bits of the numpy function that it is named after; tests compare them.
"""

from __future__ import annotations

from typing import Protocol

from ptxemu.native import elementwise, product  # noqa: F401  (elementwise fills the table)
from ptxemu.native.ir import (
    BITS,
    ELEMENT,
    INTEGERS,
    LANES,
    TABLE,
    TABLES,
    Body,
    Key,
    Primitive,
    f32_literal,
)
from ptxemu.native.lanes import OPERATIONS
from ptxemu.native.memory import ACCESSES

# What Python calls, with four addresses: of the words, the scratch, the file and the context.
_CALL = """\
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
define ptr @"python.segment"(ptr %self, ptr %arguments, i64 %count) {
LOADS
  %first = load ptr, ptr %n0
  %value = call i64 %first(ptr %n0, ptr %n1, ptr %n2, ptr %n3)
  %object = call ptr @PyLong_FromLongLong(i64 %value)
  ret ptr %object
}
""".replace(
    "LOADS",
    "\n".join(
        f"""  %p{k} = getelementptr ptr, ptr %arguments, i64 {k}
  %o{k} = load ptr, ptr %p{k}
  %i{k} = call i64 @PyLong_AsLongLong(ptr %o{k})
  %n{k} = inttoptr i64 %i{k} to ptr"""
        for k in range(4)
    ),
)


class Operation(Protocol):
    """Operation that is more than a function of its operands' values."""

    @property
    def key(self) -> Key: ...

    def build(self, b: Body) -> None:
        """State the instructions."""


_NEXT = """\
  %next = getelementptr i8, ptr %ip, i64 32
  %follow = load ptr, ptr %next
  %after = musttail call i64 %follow(ptr %next, ptr %scratch, ptr %file, ptr %context)
  ret i64 %after
}
"""


def _head(number: int) -> str:
    parameters = "ptr %ip, ptr noalias %scratch, ptr noalias %file, ptr noalias %context"
    return f"define i64 @op_{number}({parameters}) #0 {{\nentry:\n"


def _function(number: int, primitive: Primitive, declared: set[str]) -> str:
    body = Body(declared=declared)
    values = [body.load(body.place(1 + k), dtype) for k, dtype in enumerate(primitive.types)]
    body.store(primitive.build(body, *values), body.place(0), primitive.result)
    return _head(number) + "\n".join(body.lines) + "\n" + _NEXT


def _operation(number: int, operation: Operation, declared: set[str]) -> str:
    body = Body(declared=declared)
    operation.build(body)
    return _head(number) + "\n".join(body.lines) + "\n" + _NEXT


def _end(number: int) -> str:
    return _head(number) + "  ret i64 0\n}\n"


def _splat(number: int, dtype: str, declared: set[str]) -> str:
    """A cell of 8 bytes in the scratch to all lanes; an f32 is held as Python's double."""
    b = Body(declared=declared)
    bits = b.do(f"load i64, ptr {b.place(1)}")
    if dtype == "F32":
        double = b.do(f"bitcast i64 {bits} to double")
        single = b.do(f"bitcast float {b.do(f'fptrunc double {double} to float')} to i32")
        sign = b.do(f"trunc i64 {b.do(f'lshr i64 {bits}, 32')} to i32")
        sign = b.do(f"and i32 {sign}, -2147483648")
        low = b.do(f"trunc i64 {b.do(f'lshr i64 {bits}, 29')} to i32")
        low = b.do(f"and i32 {low}, 8388607")
        nan = b.do(f"or i32 {low}, {b.do(f'or i32 {sign}, 2139095040')}")
        bad = b.do(f"fcmp uno double {double}, {double}")
        one = b.do(f"select i1 {bad}, i32 {nan}, i32 {single}")
        type_ = "i32"
    elif dtype == "BOOL":
        one, type_ = b.do(f"trunc i64 {bits} to i8"), "i8"
    else:
        type_ = ELEMENT[BITS[dtype]]
        one = bits if type_ == "i64" else b.do(f"trunc i64 {bits} to {type_}")
    many = f"<{LANES} x {type_}>"
    first = b.do(f"insertelement {many} poison, {type_} {one}, i32 0")
    all_ = b.do(f"shufflevector {many} {first}, {many} poison, <32 x i32> zeroinitializer")
    b.lines.append(f"  store {many} {all_}, ptr {b.place(0)}, align {32 if type_ == 'i8' else 64}")
    return _head(number) + "\n".join(b.lines) + "\n" + _NEXT


def module() -> tuple[str, list[Key]]:
    """Return (the IR of all primitives, what each is, by number)."""
    declared: set[str] = set()
    keys: list[Key] = [("end", ())]
    parts = [_end(0)]
    for dtype in (*INTEGERS, "F32", "F64", "BOOL"):
        parts.append(_splat(len(keys), dtype, declared))
        keys.append(("splat", (dtype,)))
    for key, primitive in TABLE.items():
        parts.append(_function(len(keys), primitive, declared))
        keys.append(key)
    for operation in (*ACCESSES.values(), *OPERATIONS):
        parts.append(_operation(len(keys), operation, declared))
        keys.append(operation.key)
    parts.append(product.module(declared))
    return "\n".join((_CALL, *_tables(), *sorted(declared), *parts)), keys


def _tables() -> list[str]:
    texts = []
    for name, values in TABLES.items():
        dtype = {"float32": "float", "float64": "double", "uint32": "i32"}[str(values.dtype)]
        bits = values.view(f"u{values.itemsize}").tolist()
        items = ", ".join(f"{dtype} {_literal(dtype, x)}" for x in bits)
        texts.append(f"@{name} = private constant [{len(values)} x {dtype}] [{items}], align 64")
    return texts


def _literal(dtype: str, bits: int) -> str:
    if dtype == "float":
        return f32_literal(bits)
    return f"0x{bits:016X}" if dtype == "double" else str(bits)
