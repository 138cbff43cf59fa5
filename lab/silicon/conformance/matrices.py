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

from lab.silicon.conformance import fragments
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.fragments import N, place_a, place_b, place_d
from lab.silicon.conformance.kernel import case, output, random_buffer, registers
from lab.silicon.conformance.patterns import expand
from lab.silicon.conformance.ptx_program import Buffer
from lab.silicon.conformance.values import below, random_words

MATRICES = 1024  # of a program
DOUBLES = 128  # of one of f64, whose inputs are the elements of D
_WARPS = 4  # of a CTA
_FP8 = "{e4m3|e5m2}"
FORMS = (
    *expand("m16n8{k8|k16}.row.col.{f32.f16.f16.f32|f16.f16.f16.f16|f32.bf16.bf16.f32}"),
    *expand("m16n8{k4|k8}.row.col.f32.tf32.tf32.f32"),
    *expand(f"m16n8{{k16|k32}}.row.col.f32.{_FP8}.{_FP8}.f32"),
    *expand(f"m16n8{{k16|k32}}.row.col.f16.{_FP8}.{_FP8}.f16"),
    *expand("m16n8{k16|k32}.row.col{|.satfinite}.s32.{s8|u8}.{s8|u8}.s32"),
    *expand("m8n8k16.row.col{|.satfinite}.s32.{s8|u8}.{s8|u8}.s32"),
    *expand("{m8n8k32|m16n8k32|m16n8k64}.row.col{|.satfinite}.s32.{s4|u4}.{s4|u4}.s32"),
    *expand("{m8n8k128|m16n8k128|m16n8k256}.row.col.s32.b1.b1.s32.{xor|and}.popc"),
    *expand("{m8n8k4|m16n8k4|m16n8k8|m16n8k16}.row.col{|.rn|.rz|.rm|.rp}.f64.f64.f64.f64"),
)
# the powers of two of rows and columns: down to the subnormal numbers of narrow types, and so far
# up that f16 holds each sum
_POWERS = {
    "f16": (-24, 8),
    "bf16": (-40, 40),
    "tf32": (-40, 40),
    "e4m3": (-9, 6),
    "e5m2": (-16, 12),
    "f64": (-500, 480),
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
    d_type, a_type, b_type, _ = fragments.types_of(opcode)
    m, k = fragments.rows(opcode), fragments.depth(opcode)
    powers = _POWERS_OF_HALVES if d_type == "f16" else _POWERS
    scales = []
    for type_, length, name in ((a_type, m, "rows"), (b_type, N, "columns")):
        low, high = powers[type_]
        exponent = low + below(f"{opcode} {name}", count * length, high - low + 1)
        scales.append(np.exp2(exponent).reshape(count, length))
    rows, columns = scales[0][:, :, None], scales[1][:, None, :]
    a = _integers(f"{opcode} a", (count, m, k), _INTEGERS.get(a_type, 8)) * rows
    b = _integers(f"{opcode} b", (count, k, N), _INTEGERS.get(b_type, 8)) * columns
    return [a, b, _integers(f"{opcode} c", (count, m, N), 256) * rows * columns]


def any_operands(opcode: str, count: int) -> Matrices:
    """A, B and C, float64: numbers of all bits of a double."""
    m, k, out = fragments.rows(opcode), fragments.depth(opcode), []
    for name, shape in (("a", (count, m, k)), ("b", (count, k, N)), ("c", (count, m, N))):
        size = int(np.prod(shape))
        words = random_words(f"{opcode} any {name}", size)
        fraction = 1 + (words >> np.uint64(12)).astype(np.float64) * 2.0**-52
        power = below(f"{opcode} power {name}", size, 2 * _NEAR + 1) - _NEAR
        sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
        out.append((sign * fraction * np.exp2(power)).reshape(shape))
    return out


def _buffers(opcode: str, matrices: Matrices) -> list[Buffer]:
    types = fragments.types_of(opcode)[1:]
    parts = zip("abc", matrices, types, (place_a, place_b, place_d), strict=True)
    return [
        Buffer(name, fragments.scatter(fragments.codes_of(x, type_), type_, place).ravel())
        for name, x, type_, place in parts
    ]


def _random_buffers(opcode: str, count: int) -> list[Buffer]:
    """Integers: random bits, every other one of C so near an end that sums go beyond it."""
    m, bits = fragments.rows(opcode), fragments.BITS[fragments.types_of(opcode)[1]]
    words = count * fragments.depth(opcode) * bits // 32  # of a row of A, a column of B
    sizes = {"a": m * words, "b": N * words, "c": m * N * count}
    buffers = [random_buffer(name, opcode, "u4", size) for name, size in sizes.items()]
    c = buffers[-1].data.view(np.int32)
    c[::2] = np.where(c[::2] < 0, -(2**31) + (c[::2] & 0x3FFF), 2**31 - 1 - (c[::2] & 0x3FFF))
    return buffers


def fragment(access: str, name: str, first: int, count: int, bits: int) -> tuple[str, list[str]]:
    """(registers in braces, the instructions that load or store them: the warp's matrix of a
    buffer); bits: of a register."""
    names = registers(bits, count, first)
    lines = [
        f"mad.lo.u32 %r61, %r60, {count}, 0; shl.b32 %r61, %r61, 5; add.u32 %r61, %r61, %lane;",
        f"mul.wide.u32 %w60, %r61, {bits // 8}; add.u64 %w60, %w60, %{name};",
    ]
    for k, register in enumerate(names):
        where = f"[%w60+{4 * bits * k}]"
        operands = f"{register}, {where}" if access == "ld" else f"{where}, {register}"
        lines.append(f"{access}.global.b{bits} {operands};")
    return f"{{{', '.join(names)}}}", lines


def product(form: str, buffers: list[Buffer], count: int, name: str) -> Case:
    """The program of one form on `count` matrices."""
    opcode = f"mma.sync.aligned.{form}"
    body, lists = [f"shr.u32 %r62, %thread, 5; mad.lo.u32 %r60, %cta, {_WARPS}, %r62;"], []
    d_type, elements = fragments.types_of(opcode)[0], fragments.rows(opcode) * N
    bits = 64 if d_type == "f64" else 32
    for k, buffer in enumerate(buffers):
        held = buffer.data.nbytes // (4 * bits) // count
        listed, lines = fragment("ld", buffer.name, 10 * k, held, bits)
        lists.append(listed)
        body += lines
    results, lines = fragment("st", "d", 30, fragments.register_count(d_type, elements), bits)
    body += [f"{opcode} {results}, {', '.join(lists)};", *lines]
    made = output("d", f"u{fragments.BITS[d_type] // 8}", count * elements)
    return case(
        f"{name} {form}",
        "mma.sync",
        body,
        [*buffers, made],
        inputs=count * elements if d_type == "f64" else count,
        grid=(count // _WARPS,),
        block=(32 * _WARPS,),
    )


def _approximate(made: Case) -> Case:
    """The case, judged by the bound of its form."""
    outputs = {k: dataclasses.replace(v, approximate=True) for k, v in made.outputs.items()}
    return dataclasses.replace(made, outputs=outputs, recorded=False, sums=True)


def products(most: int = MATRICES) -> Iterator[Case]:
    for form in FORMS:
        count = min(most, DOUBLES) if ".f64." in form else most
        if ".s32." in form:
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
