"""Variants of `patterns` -> programs: one thread per input, or one warp per input.

ptxemu computes with arrays where lanes differ and with Python scalars where they agree, two
implementations of each instruction; so each variant runs in a program of both kinds. A GPU uses
its uniform datapath for some of the latter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lab.silicon.conformance.bounds import bounds_of
from lab.silicon.conformance.case import Case, Output
from lab.silicon.conformance.patterns import Variant
from lab.silicon.conformance.ptx_program import Buffer, Program
from lab.silicon.conformance.values import operands, width

VERSION = "8.8"
HEADER = f".version {VERSION}\n.target sm_100a\n.address_size 64\n"
INPUTS = 4096  # of a program with one input per thread
UNIFORM = 1024  # of a program with one input per warp
TOGETHER = 24  # variants of one program
_THREADS = 128
_LETTERS = "abce"


def module(params: Iterable[str], body: Iterable[str], before: str = "") -> str:
    """The text of one kernel; before: what is declared in front of it."""
    inside = "\n    ".join([*body, "ret;"])
    return f"{HEADER}{before}.visible .entry test({', '.join(params)})\n{{\n    {inside}\n}}\n"


def register_bits(kind: str) -> int:
    """Bits of the register that holds a value: a predicate leaves as 0 or 1."""
    return 32 if kind == "pred" else max(width(kind), 16)


def grouped(variants: list[Variant]) -> Iterator[tuple[Variant, ...]]:
    """Variants with the same operands and the same width of result, at most TOGETHER at a time."""

    def key(v: Variant) -> tuple:
        return (v.sources, register_bits(v.target))

    chosen = sorted(variants, key=lambda v: (key(v), v.opcode.split(".")[0]))
    for _, group in itertools.groupby(chosen, key):
        members = list(group)
        for k in range(0, len(members), TOGETHER):
            yield tuple(members[k : k + TOGETHER])


def lines(variants: tuple[Variant, ...]) -> list[str]:
    """The instructions: sources in %a, %b, ..., results in %d0, %d1, ..."""
    return [
        v.text(f"%d{k}", [f"%{letter}" for letter in _LETTERS[: len(v.sources)]])
        for k, v in enumerate(variants)
    ]


def _registers(variants: tuple[Variant, ...]) -> list[str]:
    sources = zip(_LETTERS, variants[0].sources, strict=False)
    names = "".join(f".reg .b{register_bits(kind)} %{letter}; " for letter, kind in sources)
    out = register_bits(variants[0].target)
    return [f"{names}.reg .b{out} %d<{len(variants)}>;"]


def _text(variants: tuple[Variant, ...], uniform: bool) -> str:
    letters = _LETTERS[: len(variants[0].sources)]
    body = [
        *_registers(variants),
        ".reg .b32 %i, %n, %t; .reg .b64 %p, %q;",
        "mov.u32 %i, %ctaid.x;",
        *([] if uniform else [f"mov.u32 %t, %tid.x; mad.lo.u32 %i, %i, {_THREADS}, %t;"]),
    ]
    for letter, kind in zip(letters, variants[0].sources, strict=True):
        bits = register_bits(kind)
        body.append(f"ld.param.u64 %p, [{letter}]; mad.wide.u32 %q, %i, {bits // 8}, %p;")
        body.append(f"ld.global.b{bits} %{letter}, [%q];")
    body += lines(variants)
    bits = register_bits(variants[0].target)
    if uniform:  # where lanes differ in spite of equal operands, the first one speaks
        body.append(".reg .pred %z; mov.u32 %t, %laneid; setp.eq.u32 %z, %t, 0;")
    for k in range(len(variants)):
        body.append(f"ld.param.u64 %p, [d{k}]; mad.wide.u32 %q, %i, {bits // 8}, %p;")
        body.append(f"{'@%z ' if uniform else ''}st.global.b{bits} [%q], %d{k};")
    names = [*letters, *(f"d{k}" for k in range(len(variants)))]
    return module((f".param .u64 {name}" for name in names), body)


def case(variants: tuple[Variant, ...], uniform: bool) -> Case:
    """The program of a group, its inputs, and which form each output witnesses."""
    count = UNIFORM if uniform else INPUTS
    first = variants[0]
    # the same inputs for both kinds, where a prefix serves the smaller one: they are shuffled
    sources = [x[:count] for x in operands(first.sources, " ".join(first.sources), INPUTS)]
    params = [Buffer(x, data) for x, data in zip(_LETTERS, sources, strict=False)]
    outputs, kind = {}, "warps" if uniform else "threads"
    for k, variant in enumerate(variants):
        data = np.zeros(count, f"u{register_bits(variant.target) // 8}")
        params.append(Buffer(f"d{k}", data, data))
        label = f"{kind} {variant.opcode} {variant.detail}".rstrip()
        approximate = bool(bounds_of(variant.opcode))
        outputs[f"d{k}"] = Output(label, (variant.key,), count, approximate)
    name = f"{kind} {first.opcode}{f' {first.detail}' if first.detail else ''}"
    launch = {"grid": (count,)} if uniform else {"grid": (count // _THREADS,), "block": (_THREADS,)}
    return Case(name, Program(name, _text(variants, uniform), params=params, **launch), outputs)


def cases(variants: list[Variant]) -> Iterator[Case]:
    for group in grouped(variants):
        for uniform in (False, True):
            yield case(group, uniform)


def question(variants: Sequence[Variant]) -> tuple[str, int]:
    """A module with one variant per line, and the line of the first; see `campaign.refusals`."""
    body = []
    for variant in variants:
        registers = "".join(_registers((variant,)))
        body.append(f"{{ {registers} {lines((variant,))[0]} }}")
    return module((), body), HEADER.count("\n") + 3
