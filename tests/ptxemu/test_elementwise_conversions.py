"""cvt in all its forms, and prmt's neighbour mov with packing: see `elementwise`."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from ptxemu import Options, load
from tests.ptxemu.elementwise import Row, program
from workbench.conformance import hw_runner
from workbench.conformance.exact_arithmetic import (
    bf16,
    clamp,
    code_of,
    decoded,
    each,
    halves,
    narrow,
    packed,
    rounded,
    to_bf16,
)
from workbench.conformance.ptx_program import check, emulate

_INT = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_NARROW = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6}


def _held(t: str) -> str:
    """The type of the register that holds `t`: there are no 8-bit ones worth naming."""
    return t.replace("8", "16") if t in ("u8", "s8") else t


def _range(t: str) -> tuple[int, int]:
    bits = int(t[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if t[0] == "s" else (0, (1 << bits) - 1)


def _wrapped(t: str):
    bits, signed = int(t[1:]), t[0] == "s"

    def call(x: int) -> int:
        x &= (1 << bits) - 1
        return x - (1 << bits) if signed and x >> bits - 1 else x

    return call


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _between_integers() -> list[Row]:
    rows = []
    for to in _INT:
        for source in _INT:
            read, wrap, limit = _wrapped(source), _wrapped(to), clamp(*_range(to))
            types = f"{_held(to)} {_held(source)}"
            rows.append(
                Row(
                    f"cvt.{to}.{source} {{d}}, {{a}};",
                    types,
                    lambda a, r=read, w=wrap: each(lambda x: w(r(x)), a),
                )
            )
            if _within(_range(source), _range(to)):
                continue  # .sat is illegal where nothing can saturate
            rows.append(
                Row(
                    f"cvt.sat.{to}.{source} {{d}}, {{a}};",
                    types,
                    lambda a, r=read, w=limit: each(lambda x: w(r(x)), a),
                )
            )
    return rows


_WHOLE = {"rni": round, "rzi": int, "rmi": math.floor, "rpi": math.ceil}


def _to_integer(source: str, to: str, how: str):
    low, high = _range(to)

    def one(x: float) -> int:
        if math.isnan(x):
            return 0 if source != "f64" and to[1:] != "64" else _wrapped(to)(1 << int(to[1:]) - 1)
        if math.isinf(x):
            return high if x > 0 else low
        return max(low, min(high, _WHOLE[how](x)))

    return lambda a: each(one, bf16(a) if source == "bf16" else a)


def _float_to_integers() -> list[Row]:
    rows = []
    for source in ("f32", "f64", "f16", "bf16"):
        for to in _INT if source != "bf16" else _INT[2:]:  # bf16 has no 8-bit forms
            for how in _WHOLE if to in ("s32", "u32", "s8", "u64") else ("rzi",):
                rows.append(
                    Row(
                        f"cvt.{how}.{to}.{source} {{d}}, {{a}};",
                        f"{_held(to)} {source}",
                        _to_integer(source, to, how),
                    )
                )
    rows.append(
        Row(
            "cvt.rpi.ftz.s32.f32 {d}, {a};",
            "s32 f32",
            lambda a: _to_integer("f32", "s32", "rpi")(np.where(np.abs(a) < 2.0**-126, 0, a)),
        )
    )
    return rows


def _integer_to_floats() -> list[Row]:
    rows = []
    for source in _INT:
        read = _wrapped(source)
        for to in ("f32", "f64", "f16", "bf16")[: 3 if source[1:] == "8" else 4]:
            for how in ("rn", "rz", "rm", "rp"):

                def values(a, r=read, t=to, h=how):
                    return each(lambda x: rounded(Fraction(r(x)), t, h), a).astype(np.float64)

                rows.append(
                    Row(
                        f"cvt.{how}.{to}.{source} {{d}}, {{a}};",
                        f"{to} {_held(source)}",
                        (lambda a, v=values: to_bf16(v(a))) if to == "bf16" else values,
                    )
                )
    return rows


def _flush(a: np.ndarray) -> np.ndarray:
    return np.where(np.abs(a) < 2.0**-126, np.copysign(np.float32(0), a), a)


def _integral(how: str):
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[how]
    return lambda a: function(a)


def _to_halves(how: str, relu: bool, satfinite: bool) -> list[Row]:
    flags = f"{how}{'.relu' * relu}{'.satfinite' * satfinite}"
    half = narrow("f16", how, satfinite=satfinite, relu=relu)
    to_brain = narrow("bf16", how, satfinite=satfinite, relu=relu)

    def brain(a: np.ndarray) -> np.ndarray:
        return to_bf16(to_brain(a))

    one, two = "f32 {d}, {a};", "f32 {d}, {a}, {b};"
    return [
        Row(f"cvt.{flags}.f16.{one}", "f16 f32", half),
        Row(f"cvt.{flags}.bf16.{one}", "bf16 f32", brain),
        Row(f"cvt.{flags}.f16x2.{two}", "u32 f32 f32", lambda a, b: _words(half(b), half(a))),
        Row(
            f"cvt.{flags}.bf16x2.{two}",
            "u32 f32 f32",
            lambda a, b: packed(brain(b), brain(a), np.uint16),
        ),
    ]


def _integral_rows(how: str) -> list[Row]:
    function = _integral(how)
    rows = [
        Row(f"cvt.{how}.{t}.{t} {{d}}, {{a}};", f"{t} {t}", function) for t in ("f32", "f64", "f16")
    ]
    return [
        *rows,
        Row(f"cvt.{how}.ftz.f32.f32 {{d}}, {{a}};", "f32 f32", lambda a: function(_flush(a))),
    ]


def _to_tf32(flags: str) -> Row:
    how = flags.split(".")[0]
    function = narrow("tf32", how, satfinite="satfinite" in flags, relu="relu" in flags)
    return Row(f"cvt.{flags}.tf32.f32 {{d}}, {{a}};", "f32 f32", function)


def _saturated(a: np.ndarray) -> np.ndarray:
    return np.where(a > 0, np.minimum(a, 1), 0)


def _float_to_float() -> list[Row]:
    rows = [
        Row(f"cvt.{how}.{t}.f64 {{d}}, {{a}};", f"{t} f64", narrow(t, how))
        for how in ("rn", "rz", "rm", "rp")
        for t in ("f32", "f16")
    ]
    for relu, satfinite in itertools.product((False, True), repeat=2):
        rows += [row for how in ("rn", "rz") for row in _to_halves(how, relu, satfinite)]
    return [
        *rows,
        *[row for how in _WHOLE for row in _integral_rows(how)],
        *[_to_tf32(flags) for flags in ("rna", "rn", "rz", "rn.relu", "rna.satfinite")],
        Row("cvt.f32.f16 {d}, {a};", "f32 f16", lambda a: a),
        Row("cvt.f32.bf16 {d}, {a};", "f32 bf16", bf16),
        Row("cvt.f64.f32 {d}, {a};", "f64 f32", lambda a: a),
        Row("cvt.f64.f16 {d}, {a};", "f64 f16", lambda a: a),
        Row("cvt.sat.f32.f32 {d}, {a};", "f32 f32", _saturated),
        Row("cvt.ftz.sat.f32.f32 {d}, {a};", "f32 f32", lambda a: _saturated(_flush(a))),
        Row("cvt.ftz.f32.f32 {d}, {a};", "f32 f32", _flush),
        Row("cvt.ftz.f32.f16 {d}, {a};", "f32 f16", lambda a: a),
    ]


def _words(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """f16 values, packed, NaN as hardware writes it."""
    codes = [
        np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))
        for x in (low, high)
    ]
    return packed(*codes, np.uint16)


def _narrow_rows(form: str, relu: bool) -> list[Row]:
    """To and from a format of 8 (or 6) bits."""

    def encode(x: np.ndarray) -> np.ndarray:
        return code_of(form)(narrow(form, satfinite=True, relu=relu)(x))

    def decode(codes: np.ndarray) -> np.ndarray:
        values = decoded(form)(codes & (1 << _NARROW[form]) - 1)
        return np.where(values <= 0, 0, values) if relu else values

    suffix = ".relu" * relu
    rows = [
        Row(
            f"cvt.rn.satfinite{suffix}.{form}x2.f32 {{d}}, {{a}}, {{b}};",
            "u16 f32 f32",
            lambda a, b: encode(b) | encode(a) << 8,
        ),
        Row(
            f"cvt.rn{suffix}.f16x2.{form}x2 {{d}}, {{a}};",
            "u32 u16",
            lambda a: _words(decode(a), decode(a >> 8)),
        ),
    ]
    if _NARROW[form] == 8:
        rows.append(
            Row(
                f"cvt.rn.satfinite{suffix}.{form}x2.f16x2 {{d}}, {{a}};",
                "u16 u32",
                lambda a: encode(halves(a)[0]) | encode(halves(a)[1]) << 8,
            )
        )
    return rows


def _packed_integers(t: str) -> Row:
    """cvt.pack.sat: a above b; 8-bit forms shift a third source in above them."""
    low, high = _range(t)
    kind = np.uint16 if t[1:] == "16" else np.uint8

    def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return packed(*(np.clip(x, low, high).astype(kind) for x in (b, a)), kind)

    if kind is np.uint16:
        return Row(f"cvt.pack.sat.{t}.s32 {{d}}, {{a}}, {{b}};", "u32 s32 s32", both)
    return Row(
        f"cvt.pack.sat.{t}.s32.b32 {{d}}, {{a}}, {{b}}, {{c}};",
        "u32 s32 s32 u32",
        lambda a, b, c: c << 16 | both(a, b),
    )


PACKED = [
    *[row for form in _NARROW for relu in (False, True) for row in _narrow_rows(form, relu)],
    *[_packed_integers(t) for t in ("u16", "s16", "u8", "s8")],
    Row(
        "{{ .reg .b8 %x; cvt.rn.satfinite.e2m1x2.f32 %x, {a}, {b}; mov.b16 {d}, {{%x, 0}}; }}",
        "u16 f32 f32",
        lambda a, b: _e2m1(b) | _e2m1(a) << 4,
    ),
    Row(
        "{{ .reg .b8 %x; cvt.rn.satfinite.relu.e2m1x2.f32 %x, {a}, {b}; mov.b16 {d}, {{%x, 0}}; }}",
        "u16 f32 f32",
        lambda a, b: _e2m1(b, relu=True) | _e2m1(a, relu=True) << 4,
    ),
    Row(
        "{{ .reg .b8 %x, %y; mov.b16 {{%x, %y}}, {a}; cvt.rn.f16x2.e2m1x2 {d}, %x; }}",
        "u32 u16",
        lambda a: _words(decoded("e2m1")(a & 15), decoded("e2m1")(a >> 4 & 15)),
    ),
    Row(
        "cvt.rz.satfinite.ue8m0x2.f32 {d}, {a}, {b};",
        "u16 f32 f32",
        lambda a, b: _scale(b, False) | _scale(a, False) << 8,
    ),
    Row(
        "cvt.rp.satfinite.ue8m0x2.f32 {d}, {a}, {b};",
        "u16 f32 f32",
        lambda a, b: _scale(b, True) | _scale(a, True) << 8,
    ),
    Row(
        "cvt.rn.bf16x2.ue8m0x2 {d}, {a};",
        "u32 u16",
        lambda a: packed(_power(a & 255), _power(a >> 8), np.uint16),
    ),
]


def _e2m1(values: np.ndarray, *, relu: bool = False) -> np.ndarray:
    """f32 -> e2m1, which has no NaN: the largest value stands for it."""
    whole = np.where(np.isnan(values), np.inf, values)
    return code_of("e2m1")(narrow("e2m1", satfinite=True, relu=relu)(whole))


def _scale(values: np.ndarray, up: bool) -> np.ndarray:
    """f32 -> ue8m0 of its magnitude; NaN is 255, infinity saturates."""

    def one(x: float) -> int:
        if math.isnan(x):
            return 255
        if math.isinf(x):
            return 254
        x = abs(x)
        if x < 2.0**-127:
            return 0
        power = math.frexp(x)[1] - 1
        return max(0, min(254, power + 127 + (up and x > 2.0**power)))

    return each(one, values).astype(np.int64)


def _power(codes: np.ndarray) -> np.ndarray:
    """ue8m0 -> bf16 codes."""
    return np.where(
        codes == 255, 0x7FFF, np.where(codes == 0, 0x40, codes.astype(np.uint32) << 7)
    ).astype(np.uint16)


MOVES = [
    Row("mov.b32 {d}, {a};", "u32 u32", lambda a: a),
    Row("mov.b64 {d}, {a};", "u64 u64", lambda a: a),
    Row("mov.b16 {d}, {a};", "u16 u16", lambda a: a),
    Row("mov.f32 {d}, {a};", "f32 f32", lambda a: a),
    Row("mov.u32 {d}, 4294967295;", "u32 u32", lambda a: np.full_like(a, 0xFFFFFFFF)),
    Row("mov.s32 {d}, -5;", "s32 u32", lambda a: np.full(len(a), -5)),
    Row("mov.f32 {d}, 0f7FC00001;", "u32 u32", lambda a: np.full_like(a, 0x7FC00001)),
    Row("mov.b32 {d}, {{ {a}, {b} }};", "u32 u16 u16", lambda a, b: packed(a, b, np.uint16)),
    Row("mov.b64 {d}, {{ {a}, {b} }};", "u64 u32 u32", lambda a, b: packed(a, b, np.uint32)),
    Row(
        "mov.b64 {d}, {{ {a}, {b}, {c}, {a} }};",
        "u64 u16 u16 u16",
        lambda a, b, c: packed(packed(a, b, np.uint16), packed(c, a, np.uint16), np.uint32),
    ),
    Row("{{ .reg .b16 %x; mov.b32 {{%x, {d} }}, {a}; }}", "u16 u32", lambda a: a >> 16),
    Row("{{ .reg .b16 %x; mov.b32 {{ {d}, _}}, {a}; }}", "u16 u32", lambda a: a & 0xFFFF),
    Row(
        "{{ .reg .b32 %x; mov.b64 {{%x, {d} }}, {a}; add.u32 {d}, {d}, %x; }}",
        "u32 u64",
        lambda a: (a >> np.uint64(32)) + (a & np.uint64(0xFFFFFFFF)) & np.uint64(0xFFFFFFFF),
    ),
    Row(
        "{{ .reg .b16 %x<4>; mov.b64 {{%x0, %x1, %x2, %x3}}, {a}; mov.b32 {d}, {{%x3, %x1}}; }}",
        "u32 u64",
        lambda a: packed(
            (a >> np.uint64(48)).astype(np.uint16),
            (a >> np.uint64(16)).astype(np.uint16),
            np.uint16,
        ),
    ),
    Row(
        (
            "{{ .reg .b128 %q; .reg .b64 %x; mov.b128 %q, {{ {a}, {b} }}; "
            "mov.b128 {{%x, {d} }}, %q; xor.b64 {d}, {d}, %x; }}"
        ),
        "u64 u64 u64",
        lambda a, b: a ^ b,
    ),
]
ROWS = [
    *_between_integers(),
    *_float_to_integers(),
    *_integer_to_floats(),
    *_float_to_float(),
    *PACKED,
    *MOVES,
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_conversion(row: Row) -> None:
    built = program(row)
    check(built, emulate(built, load(built.text), Options()))


@pytest.mark.hw
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_conversion_on_gpu(row: Row) -> None:
    built = program(row)
    check(built, hw_runner.run(built))
