"""mma.sync and movmatrix, one program per form, each warp with matrices of its own.

Sums have a free order on hardware. Most programs have inputs of which every partial sum is exact,
so that every bit counts: small integers times one power of two per row of A and per column of B.
The others have any numbers, and their results are within what the manual allows (`fragments`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from workbench.conformance import fragments
from workbench.conformance.case import Case
from workbench.conformance.fragments import M, N, place_a, place_b, place_d
from workbench.conformance.kernel import case, output, random_buffer, registers
from workbench.conformance.patterns import expand
from workbench.conformance.ptx_program import Buffer
from workbench.conformance.values import below, random_words

MATRICES = 1024  # of a program
_WARPS = 4  # of a CTA
_FP8 = "{e4m3|e5m2}"
FORMS = (
    *expand("m16n8{k8|k16}.row.col.{f32.f16.f16.f32|f16.f16.f16.f16|f32.bf16.bf16.f32}"),
    *expand("m16n8{k4|k8}.row.col.f32.tf32.tf32.f32"),
    *expand(f"m16n8{{k16|k32}}.row.col.f32.{_FP8}.{_FP8}.f32"),
    *expand(f"m16n8{{k16|k32}}.row.col.f16.{_FP8}.{_FP8}.f16"),
    *expand("m16n8{k16|k32}.row.col{|.satfinite}.s32.{s8|u8}.{s8|u8}.s32"),
)
# the powers of two of rows and columns: down to the subnormal numbers of narrow types, and so far
# up that f16 holds each sum
_POWERS = {
    "f16": (-24, 8),
    "bf16": (-40, 40),
    "tf32": (-40, 40),
    "e4m3": (-9, 6),
    "e5m2": (-16, 12),
}
_POWERS_OF_HALVES = {"f16": (-12, 2), "e4m3": (-9, 3), "e5m2": (-12, 3)}
_INTEGERS = {"e4m3": 4, "e5m2": 4}  # the largest, 8 for other types
_NEAR = 4  # exponents of any numbers lie in -4 ... 4

Matrices = list[np.ndarray]


def _integers(seed: str, shape: tuple[int, ...], most: int) -> np.ndarray:
    return below(seed, int(np.prod(shape)), 2 * most + 1).reshape(shape) - most


def exact_operands(opcode: str, count: int) -> Matrices:
    """A, B and C, float64: all terms of an element of D are multiples of one power of two, and few
    enough that sums of them have no more bits than the accumulator."""
    d_type, a_type, b_type, _ = opcode.split(".")[-4:]
    k, powers = fragments.depth(opcode), _POWERS if d_type == "f32" else _POWERS_OF_HALVES
    scales = []
    for type_, length, name in ((a_type, M, "rows"), (b_type, N, "columns")):
        low, high = powers[type_]
        exponent = low + below(f"{opcode} {name}", count * length, high - low + 1)
        scales.append(np.exp2(exponent).reshape(count, length))
    rows, columns = scales[0][:, :, None], scales[1][:, None, :]
    a = _integers(f"{opcode} a", (count, M, k), _INTEGERS.get(a_type, 8)) * rows
    b = _integers(f"{opcode} b", (count, k, N), _INTEGERS.get(b_type, 8)) * columns
    return [a, b, _integers(f"{opcode} c", (count, M, N), 256) * rows * columns]


def any_operands(opcode: str, count: int) -> Matrices:
    """A, B and C, float64: numbers of all bits of a double."""
    k, out = fragments.depth(opcode), []
    for name, shape in (("a", (count, M, k)), ("b", (count, k, N)), ("c", (count, M, N))):
        size = int(np.prod(shape))
        words = random_words(f"{opcode} any {name}", size)
        fraction = 1 + (words >> np.uint64(12)).astype(np.float64) * 2.0**-52
        power = below(f"{opcode} power {name}", size, 2 * _NEAR + 1) - _NEAR
        sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
        out.append((sign * fraction * np.exp2(power)).reshape(shape))
    return out


def _buffers(opcode: str, matrices: Matrices) -> list[Buffer]:
    types = opcode.split(".")[-3:]
    parts = zip("abc", matrices, types, (place_a, place_b, place_d), strict=True)
    return [
        Buffer(name, fragments.scatter(fragments.codes_of(x, type_), type_, place).ravel())
        for name, x, type_, place in parts
    ]


def _random_buffers(opcode: str, count: int) -> list[Buffer]:
    """Integers: random bits, every other one of C so near an end that sums go beyond it."""
    words = 32 * count * fragments.depth(opcode) // 16
    sizes = {"a": 2 * words, "b": words, "c": 128 * count}
    buffers = [random_buffer(name, opcode, "u4", size) for name, size in sizes.items()]
    c = buffers[-1].data.view(np.int32)
    c[::2] = np.where(c[::2] < 0, -(2**31) + (c[::2] & 0x3FFF), 2**31 - 1 - (c[::2] & 0x3FFF))
    return buffers


def _fragment(access: str, name: str, first: int, count: int) -> tuple[str, list[str]]:
    """(registers in braces, the instructions that load or store them: the warp's matrix of a
    buffer)."""
    names = registers(32, count, first)
    lines = [
        f"mad.lo.u32 %r61, %r60, {count}, 0; shl.b32 %r61, %r61, 5; add.u32 %r61, %r61, %lane;",
        f"mul.wide.u32 %w60, %r61, 4; add.u64 %w60, %w60, %{name};",
    ]
    for k, register in enumerate(names):
        where = f"[%w60+{128 * k}]"
        operands = f"{register}, {where}" if access == "ld" else f"{where}, {register}"
        lines.append(f"{access}.global.b32 {operands};")
    return f"{{{', '.join(names)}}}", lines


def product(form: str, buffers: list[Buffer], count: int, name: str) -> Case:
    """The program of one form on `count` matrices."""
    opcode = f"mma.sync.aligned.{form}"
    body, lists = [f"shr.u32 %r62, %thread, 5; mad.lo.u32 %r60, %cta, {_WARPS}, %r62;"], []
    for k, buffer in enumerate(buffers):
        listed, lines = _fragment("ld", buffer.name, 10 * k, buffer.data.nbytes // 128 // count)
        lists.append(listed)
        body += lines
    halves = opcode.endswith("f16")
    results, lines = _fragment("st", "d", 30, 2 if halves else 4)
    body += [f"{opcode} {results}, {', '.join(lists)};", *lines]
    made = output("d", "u2" if halves else "u4", count * M * N)
    return case(
        f"{name} {form}",
        "mma.sync",
        body,
        [*buffers, made],
        inputs=count,
        grid=(count // _WARPS,),
        block=(32 * _WARPS,),
    )


def _approximate(made: Case) -> Case:
    """The case, judged by the bound of its form."""
    outputs = {k: dataclasses.replace(v, approximate=True) for k, v in made.outputs.items()}
    return dataclasses.replace(made, outputs=outputs, recorded=False)


def products(count: int = MATRICES) -> Iterator[Case]:
    for form in FORMS:
        if form.endswith("s32"):
            yield product(form, _random_buffers(form, count), count, "integers")
            continue
        yield product(form, _buffers(form, exact_operands(form, count)), count, "exact")
        yield _approximate(product(form, _buffers(form, any_operands(form, count)), count, "any"))


def transposed(count: int = MATRICES) -> Case:
    """movmatrix of random bits."""
    body = [
        f"mad.lo.u32 %r60, %cta, {32 * _WARPS}, %thread; mul.wide.u32 %w60, %r60, 4;",
        "add.u64 %w61, %a, %w60; add.u64 %w62, %d, %w60; ld.global.b32 %r0, [%w61];",
        "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0; st.global.b32 [%w62], %r1;",
    ]
    params = [random_buffer("a", "movmatrix", "u4", 32 * count), output("d", "u4", 32 * count)]
    launch = {"grid": (count // _WARPS,), "block": (32 * _WARPS,)}
    return case("movmatrix", "movmatrix", body, params, inputs=count, **launch)


def cases() -> Iterator[Case]:
    yield from itertools.chain(products(), (transposed(),))
