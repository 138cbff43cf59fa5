"""Sums of a tensor core: the bits it keeps, the products it aligns together, and its rounding.

Each probe is one element of D: chosen products along K and an element of C. Where X and -X cancel,
a small product survives if it was not shifted out beside X, or if it is added later; a sum a part
of an ulp too large tells the rounding. The same programs run in ptxemu, whose answers stand beside.
Background: M. Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021; DeepSeek-V3's report
on FP8 accumulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lab.silicon.conformance import fragments, wgmma
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.copies import brought
from lab.silicon.conformance.fragments import place_a, place_b, place_d
from lab.silicon.conformance.kernel import case, output
from lab.silicon.conformance.matrices import product
from lab.silicon.conformance.ptx_program import Buffer, Program

Run = Callable[[Program], dict[str, np.ndarray]]
_LARGE = 14  # exponent of X
_SHIFTS = range(8, 33)  # how far below X the small product lies
_FAR = 32

MMA = tuple(
    f"mma.sync.aligned.{form}"
    for form in (
        "m16n8k8.row.col.f32.f16.f16.f32",
        "m16n8k16.row.col.f32.f16.f16.f32",
        "m16n8k16.row.col.f16.f16.f16.f16",
        "m16n8k16.row.col.f32.bf16.bf16.f32",
        "m16n8k8.row.col.f32.tf32.tf32.f32",
        "m16n8k32.row.col.f32.e4m3.e4m3.f32",
        "m16n8k32.row.col.f32.e5m2.e5m2.f32",
        "m16n8k32.row.col.f16.e4m3.e4m3.f16",
    )
)
WGMMA = (
    *("f32.f16.f16", "f16.f16.f16", "f32.bf16.bf16", "f32.tf32.tf32"),
    *("f32.e4m3.e4m3", "f32.e5m2.e5m2", "f16.e4m3.e4m3"),
)


@dataclass(frozen=True)
class Probe:
    """products: place along K -> (sign, exponent)."""

    name: str
    products: dict[int, tuple[int, int]] = field(default_factory=dict)
    c: float = 0.0


def probes(k: int, narrow: bool) -> Iterator[Probe]:
    """narrow: D has 11 bits, so that it overflows beyond 2^15 and rounds at 2^(e - 10)."""
    x, bits = _LARGE, 10 if narrow else 23
    for shift in _SHIFTS:
        small = (1, x - shift)
        yield Probe(f"kept {shift}", {0: (1, x), 1: (-1, x), 2: small})
        yield Probe(f"beside C {shift}", {0: (-1, x), 1: small}, 2.0**x)
        yield Probe(f"of C {shift}", {0: (1, x), 1: (-1, x)}, 2.0 ** (x - shift))
    for place in range(2, k):
        yield Probe(f"near {place}", {0: (1, x), 1: (-1, x), place: (1, x - _FAR)})
    for place in range(1, k - 1):
        yield Probe(f"across {place}", {0: (1, x), k - 1: (-1, x), place: (1, x - _FAR)})
    half, quarter = x - bits - 1, x - bits - 2  # of an ulp of X
    for sign in (1, -1):
        top = {0: (sign, x)}
        yield Probe(f"three quarters {sign}", {**top, 1: (sign, half), 2: (sign, quarter)})
        yield Probe(f"a quarter {sign}", {**top, 2: (sign, quarter)})
        parts = {1: (sign, half), 2: (sign, quarter)}
        yield Probe(f"three quarters beside C {sign}", parts, sign * 2.0**x)
    yield Probe("half", {0: (1, x), 1: (1, half)})
    quarters = dict.fromkeys(range(k), (1, quarter))
    yield Probe("quarters beside C", quarters, 2.0**x)
    yield Probe("quarters", {**quarters, 0: (1, x)})


def _matrices(chosen: list[Probe], m: int, n: int, k: int) -> list[np.ndarray]:
    """A, B and C of each probe, zero but for its element in the first row and column."""
    a, b = np.zeros((len(chosen), m, k)), np.zeros((len(chosen), k, n))
    c = np.zeros((len(chosen), m, n))
    for number, probe in enumerate(chosen):
        c[number, 0, 0] = probe.c
        for place, (sign, exponent) in probe.products.items():
            first = -(-exponent // 2)
            a[number, 0, place] = sign * 2.0**first
            b[number, place, 0] = 2.0 ** (exponent - first)
    return [a, b, c]


def mma(opcode: str, chosen: list[Probe], run: Run) -> np.ndarray:
    """float64, D's first element of every probe."""
    m, k = fragments.rows(opcode), fragments.depth(opcode)
    count = -(-len(chosen) // 4) * 4
    padded = [*chosen, *[Probe("")] * (count - len(chosen))]
    buffers = []
    for name, matrix, type_, place in zip(
        "abc",
        _matrices(padded, m, fragments.N, k),
        fragments.types_of(opcode)[1:],
        (place_a, place_b, place_d),
        strict=True,
    ):
        codes = fragments.codes_of(matrix, type_)
        buffers.append(Buffer(name, fragments.scatter(codes, type_, place).ravel()))
    made = product(opcode.removeprefix("mma.sync.aligned."), buffers, count, "probe")
    d_type = fragments.types_of(opcode)[0]
    words = run(made.program)["d"].view(np.uint32)
    words = words.reshape(count, fragments.register_count(d_type, m * fragments.N), 32)
    found = fragments.gather(words, d_type, place_d, (m, fragments.N))
    return fragments.numbers_of(d_type, found[: len(chosen), 0, 0])


def _warpgroup(types: str, chosen: list[Probe]) -> Case:
    """A CTA for each probe; A and B in shared memory, rows along K without a swizzle."""
    d_type, a_type, b_type = types.split(".")
    bits, n = fragments.BITS[a_type], 8
    k = 256 // bits
    a, b, c = _matrices(chosen, wgmma.M, n, k)
    images = []
    for matrix, type_ in ((a, a_type), (b.transpose(0, 2, 1), b_type)):
        lines = wgmma.packed(fragments.codes_of(matrix, type_), bits)
        images.append(np.stack([wgmma.laid_out(one, "none") for one in lines]))
    image = np.concatenate(images, axis=1)
    image = np.pad(image, ((0, 0), (0, -image.shape[1] % 512)))
    count, start = (2 if d_type == "f16" else 4), images[0].shape[1]
    names = [f"%d{k}" for k in range(count)]
    first = np.zeros(len(chosen) * 128, np.uint32)  # of D, in the first register
    first[::128] = fragments.codes_of(c[:, 0, 0], d_type)
    extra = ", 1, 1" + (", 0, 0" if a_type in ("f16", "bf16") else "")
    body = [
        f"mul.wide.u32 %w5, %cta, {image.shape[1]}; add.u64 %w6, %w5, %image;",
        brought(image.shape[1] // 4, "%w6"),
        "fence.proxy.async.shared::cta; bar.sync 0;",
        "mad.lo.u32 %r0, %cta, 128, %thread; mul.wide.u32 %w60, %r0, 4;",
        "add.u64 %w61, %w60, %d; add.u64 %w62, %w60, %out;",
        *(f"mov.b32 {name}, 0;" for name in names),
        "ld.global.b32 %d0, [%w61]; wgmma.fence.sync.aligned;",
        "mov.u32 %r8, slots; shr.u32 %r8, %r8, 4; cvt.u64.u32 %w10, %r8;",
        f"add.u64 %w11, %w10, {wgmma.descriptor(wgmma.M, 'none', False):#x};",
        f"add.u64 %w12, %w10, {wgmma.descriptor(n, 'none', False) + (start >> 4):#x};",
        f"wgmma.mma_async.sync.aligned.m64n8k{k}.{types} {{{', '.join(names)}}}, %w11, %w12, 1"
        f"{extra};",
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        "st.global.b32 [%w62], %d0;",
    ]
    made = case(
        f"probe {types}",
        "wgmma",
        body,
        [Buffer("image", image.reshape(-1)), Buffer("d", first), output("out", "u4", first.size)],
        grid=(len(chosen),),
        declared=f".shared .align 1024 .b8 slots[{image.shape[1]}]; .reg .b32 %d<{count}>;",
    )
    text = made.program.text.replace(".target sm_100a", ".target sm_90a")
    return dataclasses.replace(made, program=dataclasses.replace(made.program, text=text))


def warpgroup(types: str, chosen: list[Probe], run: Run) -> np.ndarray:
    """float64, D's first element of every probe."""
    d_type = types.split(".")[0]
    words = run(_warpgroup(types, chosen).program)["out"][::128]
    return fragments.numbers_of(d_type, words & (0xFFFF if d_type == "f16" else 0xFFFFFFFF))


# -- what the answers mean ------------------------------------------------------------------------


def summary(k: int, narrow: bool, chosen: list[Probe], found: np.ndarray) -> dict[str, str]:
    """Words for a table; `LEGEND` explains the columns."""
    value = dict(zip((probe.name for probe in chosen), found.tolist(), strict=True))
    x, bits = 2.0**_LARGE, 10 if narrow else 23
    ulp = x * 2.0**-bits

    def kept(name: str) -> str:
        lost = [shift for shift in _SHIFTS if value[f"{name} {shift}"] != x * 2.0**-shift]
        return f"{lost[0] - 1}" if lost else f">={_SHIFTS[-1]}"

    def places(name: str, where: range) -> str:
        return "".join("+" if value[f"{name} {place}"] else "." for place in where)

    def steps(name: str, sign: int) -> str:
        return f"{(sign * value[f'{name} {sign}'] - x) / ulp:g}"

    return {
        "kept": kept("kept"),
        "C": kept("beside C"),
        "of C": kept("of C"),
        "3/4": "/".join(steps("three quarters", sign) for sign in (1, -1)),
        "1/4": "/".join(steps("a quarter", sign) for sign in (1, -1)),
        "3/4 C": "/".join(steps("three quarters beside C", sign) for sign in (1, -1)),
        "1/2": f"{(value['half'] - x) / ulp:g}",
        "sum C": f"{(value['quarters beside C'] - x) / ulp:g}",
        "sum": f"{(value['quarters'] - x) / ulp:g}",
        "near": "--" + places("near", range(2, k)),
        "across": "-" + places("across", range(1, k - 1)) + "-",
    }


LEGEND = """kept: bits below the leading bit of X that a product keeps beside X - X; C: the same
beside C - X; of C: those that C keeps beside X - X. 3/4, 1/4, 1/2: ulps that the result has of such
a part of one, of a positive and of a negative sum (1/1 0/0 0: to nearest even; 0/0 0/0 0:
truncated); 3/4 C: beside a large C. sum C, sum: ulps of K (K - 1) quarters beside C or a product X
(exact: K/4). near, across: places along K (-: X and -X) where a product 2^-32 X survives (+), that
is, is not aligned with X and -X."""


def table(run: Run, emulated: Run) -> Iterator[str]:
    """A line of the GPU's answers for each form, and one of ptxemu's where it has others."""
    names: list[str] = []
    for opcode in (*MMA, *WGMMA):
        warp = opcode.startswith("mma")
        types = fragments.types_of(opcode) if warp else opcode.split(".")
        narrow = types[0] == "f16"
        k = fragments.depth(opcode) if warp else 256 // fragments.BITS[types[1]]
        chosen, ask = list(probes(k, narrow)), mma if warp else warpgroup
        answers = [summary(k, narrow, chosen, ask(opcode, chosen, who)) for who in (run, emulated)]
        if not names:
            names = list(answers[0])
            yield f"{'':<44}" + " ".join(f"{name:>7}" for name in names)
        title = opcode.removeprefix("mma.sync.aligned.") if warp else f"wgmma k{k} {opcode}"
        for who, answer in zip(("", "  ptxemu: "), answers, strict=True):
            if not who or answer != answers[0]:
                yield f"{who or title:<44}" + " ".join(f"{answer[name]:>7}" for name in names)
    yield from LEGEND.split("\n")
