"""The product of an MMA in machine code: D = B A^T, or D + B A^T, for 128 rows of A.

Written as vectors of LLVM IR, since the sums stay in registers so. Every sum begins at 0, adds
product after product in the order of k, each rounded once with its product (fma), and is added to D
at last: the bits of a BLAS that sums in this order.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ptxemu.native.operands import widened_operands

ROWS = 128  # of A, which are D's lanes
STEP = 2  # rows of B at a time, so that all sums are in registers
_WIDE = 32  # lanes of a vector
_PARTS = range(ROWS // _WIDE)
_TYPE = f"<{_WIDE} x float>"
_POINTERS = ("d", "b", "a")
_ARGUMENTS = (*_POINTERS, "n", "k", "fresh")
_PRODUCT = 'call i64 @"product.multiply"(ptr %d, ptr %b, ptr %a, i64 %n, i64 %k, i64 %fresh)'
_OPERANDS = 'call i64 @"operands.widened_operands"(i64 %where, i64 %count)'


def multiply(d: int, b: int, a: int, n: int, k: int, fresh: int) -> int:
    """Compute D in place.

    Args:
        d: address of float32 (n, 128), D transposed.
        b: address of float32 (n, k); n is even.
        a: address of float32 (k, 128), A transposed.
        n: rows of B.
        k: length of the sums, at least 1.
        fresh: 1 if D is not read.

    Returns 0. This is the definition; `library.compiled` returns the machine code.
    """
    at, rows = _at(a, (k, ROWS)), _at(b, (n, k))
    total = np.zeros((n, ROWS), np.float64)
    for step in range(k):
        total = (total + rows[:, step, None].astype(np.float64) * at[step]).astype(np.float32)
    out = _at(d, (n, ROWS))
    out[:] = total if fresh else out + total.astype(np.float32)
    return 0


def multiply_operands(
    where: int, count: int, d: int, b: int, a: int, n: int, k: int, fresh: int
) -> int:
    """Write so many operands as float32, see `operands.widened_operands`, and multiply them."""
    widened_operands(where, count)
    return multiply(d, b, a, n, k, fresh)


def _at(address: int, shape: tuple[int, int]) -> np.ndarray:
    raw: Any = (ctypes.c_uint8 * (4 * shape[0] * shape[1])).from_address(address)
    return np.frombuffer(raw, np.float32).reshape(shape)


def module(declared: set[str]) -> str:
    """Return the IR of the function, and of what Python calls; add what they call."""
    declared.add(f"declare {_TYPE} @llvm.fma.v{_WIDE}f32({_TYPE}, {_TYPE}, {_TYPE})")
    lines = [
        'define i64 @"product.multiply"(ptr noalias %d, ptr noalias %b, ptr noalias %a, '
        "i64 %n, i64 %k, i64 %fresh) #1 {",
        "entry:",
        "  %new = icmp ne i64 %fresh, 0",
        "  br label %rows",
        "rows:",
        "  %row = phi i64 [ 0, %entry ], [ %row_next, %stored ]",
        "  %b_first = mul i64 %row, %k",
        "  %b0 = getelementptr float, ptr %b, i64 %b_first",
        "  %b1 = getelementptr float, ptr %b0, i64 %k",
        "  br label %steps",
        *_steps(),
        "summed:",
        f"  %d_first = mul i64 %row, {ROWS}",
        "  %d_row = getelementptr float, ptr %d, i64 %d_first",
        "  br i1 %new, label %write, label %add",
        *_stores("add"),
        *_stores("write"),
        "stored:",
        f"  %row_next = add i64 %row, {STEP}",
        "  %again = icmp slt i64 %row_next, %n",
        "  br i1 %again, label %rows, label %done",
        "done:",
        "  ret i64 0",
        "}",
        'attributes #1 = { "min-legal-vector-width"="512" "prefer-vector-width"="512" }',
    ]
    declared.add('declare i64 @"operands.widened_operands"(i64, i64)')
    both = _entry("multiply_operands", ("where", "count", *_ARGUMENTS), (_OPERANDS, _PRODUCT))
    return "\n".join((*lines, *_entry("multiply", _ARGUMENTS, (_PRODUCT,)), *both))


_SUMS = [(row, part) for row in range(STEP) for part in _PARTS]


def _steps() -> list[str]:
    """The loop over k: every sum gets one product."""
    lines = ["steps:", "  %step = phi i64 [ 0, %rows ], [ %step_next, %steps ]"]
    for row, part in _SUMS:
        name = f"%s{row}{part}"
        lines.append(f"  {name} = phi {_TYPE} [ zeroinitializer, %rows ], [ {name}_next, %steps ]")
    lines.append(f"  %a_first = mul i64 %step, {ROWS}")
    for part in _PARTS:
        lines += [
            f"  %a_at{part} = add i64 %a_first, {part * _WIDE}",
            f"  %a_ptr{part} = getelementptr float, ptr %a, i64 %a_at{part}",
            f"  %a_{part} = load {_TYPE}, ptr %a_ptr{part}, align 64",
        ]
    for row in range(STEP):
        lines += [
            f"  %b_ptr{row} = getelementptr float, ptr %b{row}, i64 %step",
            f"  %b_one{row} = load float, ptr %b_ptr{row}",
            f"  %b_in{row} = insertelement {_TYPE} poison, float %b_one{row}, i32 0",
            f"  %b_all{row} = shufflevector {_TYPE} %b_in{row}, {_TYPE} poison, "
            f"<{_WIDE} x i32> zeroinitializer",
        ]
    for row, part in _SUMS:
        lines.append(
            f"  %s{row}{part}_next = call {_TYPE} @llvm.fma.v{_WIDE}f32({_TYPE} %b_all{row}, "
            f"{_TYPE} %a_{part}, {_TYPE} %s{row}{part})"
        )
    return [
        *lines,
        "  %step_next = add i64 %step, 1",
        "  %more = icmp slt i64 %step_next, %k",
        "  br i1 %more, label %steps, label %summed",
    ]


def _stores(label: str) -> list[str]:
    """The sums, after they are added to D or as they are, to D."""
    lines = [f"{label}:"]
    for row, part in _SUMS:
        name, place = f"s{row}{part}", row * ROWS + part * _WIDE
        where, value = f"%{label}_{name}", f"%{name}_next"
        lines.append(f"  {where} = getelementptr float, ptr %d_row, i64 {place}")
        if label == "add":
            lines += [
                f"  %old_{name} = load {_TYPE}, ptr {where}, align 64",
                f"  %sum_{name} = fadd {_TYPE} %old_{name}, {value}",
            ]
            value = f"%sum_{name}"
        lines.append(f"  store {_TYPE} {value}, ptr {where}, align 64")
    return [*lines, "  br label %stored"]


def _entry(name: str, arguments: tuple[str, ...], calls: tuple[str, ...]) -> list[str]:
    """The function that Python calls, of METH_FASTCALL; the caller passes so many integers."""
    lines = [f'define ptr @"python.product.{name}"(ptr %self, ptr %arguments, i64 %size) {{']
    for number, argument in enumerate(arguments):
        pointer = argument in _POINTERS
        lines += [
            f"  %p{number} = getelementptr ptr, ptr %arguments, i64 {number}",
            f"  %o{number} = load ptr, ptr %p{number}",
            f"  %{'i' * pointer}{argument} = call i64 @PyLong_AsLongLong(ptr %o{number})",
        ]
        if pointer:
            lines.append(f"  %{argument} = inttoptr i64 %i{argument} to ptr")
    lines += [f"  %value{number} = {call}" for number, call in enumerate(calls)]
    return [
        *lines,
        f"  %object = call ptr @PyLong_FromLongLong(i64 %value{len(calls) - 1})",
        "  ret ptr %object",
        "}",
    ]
