"""mma.sp, and mma.sync.m8n8k4 of f16: products of small integers, wherever they lie.

Every element is a small integer, so every sum is exact in any order. Every register of metadata
holds a valid pattern. So the programs need not know where a matrix lies in the lanes: if ptxemu
reads an element from another lane or another bit, the results show it. Rows of A that keep elements
in falling order, which the manual allows for mma.sp alone, are separate programs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from lab.silicon.conformance import fragments
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.kernel import case, output
from lab.silicon.conformance.matrices import fragment
from lab.silicon.conformance.patterns import expand
from lab.silicon.conformance.ptx_program import Buffer
from lab.silicon.conformance.values import below, random_words

MATRICES = 256  # of a program
_WARPS = 4  # of a CTA
_FP8 = "{e4m3|e5m2}"
SPARSE = (
    *expand("{m16n8k16|m16n8k32}.row.col.{f32.f16.f16.f32|f16.f16.f16.f16|f32.bf16.bf16.f32}"),
    *expand("{m16n8k8|m16n8k16}.row.col.f32.tf32.tf32.f32"),
    *expand("{m16n8k32|m16n8k64}.row.col{|.satfinite}.s32.{s8|u8}.{s8|u8}.s32"),
    *expand("{m16n8k64|m16n8k128}.row.col{|.satfinite}.s32.{s4|u4}.{s4|u4}.s32"),
    *expand(f"m16n8k64.row.col.f32.{_FP8}.{_FP8}.f32"),
)
QUADS = (*expand("m8n8k4.{row|col}.{row|col}.{f32.f16.f16.f32|f32.f16.f16.f16|f16.f16.f16.f16}"),)
_ORDERED = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)  # which two of four are kept
_FALLING = (0b0001, 0b0010, 0b0011, 0b0110, 0b0111, 0b1011)
_HALVES = (0b0100, 0b1110)  # of tf32, which keeps one of two
_MOST = 3  # magnitude of an element that is no integer


def numbers(seed: str, type_: str, lanes: int, registers: int) -> np.ndarray:
    """uint32 [lanes * registers]: registers full of small numbers of a type, random integers."""
    bits = fragments.BITS[type_]
    if type_[0] in "us" and type_ != "s32":
        return random_words(seed, lanes * registers).astype(np.uint32)
    count = lanes * registers * (32 // bits)
    most = 64 if bits == 32 and type_ != "tf32" else _MOST
    codes = fragments.codes_of((below(seed, count, 2 * most + 1) - most).astype(float), type_)
    if type_ == "s32":  # so near an end that sums go beyond it
        codes[::2] = (0x7FFFFFFF - codes[::2] % 64).astype(np.uint32)
    return codes.astype(f"u{bits // 8}").view(np.uint32)


def metadata(seed: str, lanes: int, choices: tuple[int, ...]) -> np.ndarray:
    """uint32 [lanes]: eight groups of four bits each."""
    groups = np.array(choices, np.uint32)[below(seed, 8 * lanes, len(choices))].reshape(lanes, 8)
    return (groups << 4 * np.arange(8, dtype=np.uint32)).sum(1, dtype=np.uint32)


def _row_bits(type_: str, k: int) -> int:
    """Bits of metadata for a row of A."""
    return {4: k // 2, 32: 2 * k}.get(fragments.BITS[type_], k)


def _case(
    name: str, opcode: str, counts: tuple[int, ...], tails: list[str], words: np.ndarray | None
) -> Case:
    """Make a case.

    counts: registers of D, A, B and C.
    tails: text after C, one for each product.
    words: the last operand register, if there is one more than C's."""
    _, a_type, b_type, c_type = fragments.types_of(opcode)
    lanes = 32 * MATRICES
    buffers = [
        Buffer(letter, numbers(f"{opcode} {letter}", type_, lanes, count))
        for letter, type_, count in zip("abc", (a_type, b_type, c_type), counts[1:], strict=True)
    ]
    if words is not None:
        buffers.append(Buffer("e", words))
    body, lists = [f"shr.u32 %r62, %thread, 5; mad.lo.u32 %r60, %cta, {_WARPS}, %r62;"], []
    for k, buffer in enumerate(buffers):
        listed, lines = fragment("ld", buffer.name, 10 * k, buffer.data.size // lanes, 32)
        lists.append(listed)
        body += lines
    results, lines = fragment("st", "d", 40, counts[0], 32)
    for k, tail in enumerate(tails):
        body += [f"{opcode} {results}, {', '.join(lists[:3])}{tail};", *lines[:2]]
        body += [f"add.u64 %w60, %w60, {4 * lanes * counts[0] * k};", *lines[2:]]
    made = output("d", "u4", lanes * counts[0] * len(tails))
    return case(
        name,
        "mma",
        body,
        [*buffers, made],
        inputs=MATRICES * fragments.rows(opcode) * fragments.N,
        grid=(MATRICES // _WARPS,),
        block=(32 * _WARPS,),
    )


def sparse(form: str, name: str, choices: tuple[int, ...]) -> Case:
    """Make a case with a product for every selector.

    name: mma.sp or mma.sp::ordered_metadata.
    choices: what a group keeps."""
    opcode = f"{name}.sync.aligned.{form}"
    _, a_type, b_type, _ = fragments.types_of(opcode)
    k, bits = fragments.depth(opcode), fragments.BITS[a_type]
    d = 2 if fragments.types_of(opcode)[0] == "f16" else 4
    words = metadata(f"{opcode} {choices}", 32 * MATRICES, choices)
    tails = [f", %r30, {selector}" for selector in range(64 // _row_bits(a_type, k))]
    counts = (d, 16 * k // 2 * bits // 1024, 8 * k * fragments.BITS[b_type] // 1024, d)
    falling = " falling" if choices == _FALLING else ""
    return _case(f"sparse{falling} {name} {form}", opcode, counts, tails, words)


def quads(form: str) -> Case:
    registers = {"f16": 4, "f32": 8}
    opcode = f"mma.sync.aligned.{form}"
    d_type, _, _, c_type = fragments.types_of(opcode)
    return _case(f"quads {form}", opcode, (registers[d_type], 2, 2, registers[c_type]), [""], None)


def cases() -> Iterator[Case]:
    for form, name in itertools.product(SPARSE, ("mma.sp", "mma.sp::ordered_metadata")):
        yield sparse(form, name, _HALVES if ".tf32." in form else _ORDERED)
    for form in SPARSE:
        if ".tf32." not in form:
            yield sparse(form, "mma.sp", _FALLING)
    yield from map(quads, QUADS)
