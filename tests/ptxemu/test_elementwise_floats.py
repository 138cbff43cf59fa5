"""Floating-point arithmetic of every format, min/max, approximations: see `elementwise`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ptxemu import Options, load
from tests.ptxemu.elementwise import Row, program
from workbench.conformance import hw_runner
from workbench.conformance.exact_arithmetic import bf16, exact, halves, to_bf16
from workbench.conformance.ptx_program import check, emulate

_OPERANDS = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2, "rcp": 1, "sqrt": 1}
CANONICAL_32 = 0x7FFFFFFF


def _code(opcode: str, count: int) -> str:
    return f"{opcode} {{d}}, {', '.join(f'{{{x}}}' for x in 'abc'[:count])};"


def _arithmetic() -> list[Row]:
    rows = []
    for kind, count in _OPERANDS.items():
        ieee = kind in ("div", "rcp", "sqrt")
        for how in ("rn", "rz", "rm", "rp"):
            for ftz in (False, True):
                for sat in (False, True)[: 1 if ieee else 2]:
                    if sat and how in ("rm", "rp"):
                        continue
                    flags = f".{how}{'.ftz' * ftz}{'.sat' * sat}.f32"
                    rows.append(
                        Row(
                            _code(kind + flags, count),
                            "f32 " * (count + 1),
                            exact(kind, "f32", how, ftz=ftz, sat=sat),
                        )
                    )
        rows.append(Row(_code(f"{kind}.rn.f64", count), "f64 " * (count + 1), exact(kind, "f64")))
        if not ieee:
            rows.append(
                Row(
                    _code(f"{kind}{'.rn' * (kind == 'fma')}.f32", count),
                    "f32 " * (count + 1),
                    exact(kind),
                )
            )
            rows.append(
                Row(_code(f"{kind}.rz.f64", count), "f64 " * (count + 1), exact(kind, "f64", "rz"))
            )
    return rows


def _by_half(function, dtype: type = np.float16, out=None):
    """A function on arrays of `dtype` -> one on packed words."""

    def call(*words: np.ndarray) -> np.ndarray:
        pairs = [halves(word, dtype) for word in words]
        parts = [np.asarray(function(*(pair[k] for pair in pairs))) for k in (0, 1)]
        parts = [part.astype(dtype) if part.dtype.kind == "f" else part for part in parts]
        codes = [_canonical(part) for part in parts]
        wide = np.uint32 if codes[0].itemsize == 2 else np.uint64
        return codes[0].astype(wide) | codes[1].astype(wide) << wide(8 * codes[0].itemsize)

    return call


def _canonical(values: np.ndarray) -> np.ndarray:
    """The bits, NaN as hardware writes it."""
    if values.dtype.kind != "f":
        return values
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
    return np.where(np.isnan(values), bits.dtype.type((1 << 8 * values.itemsize - 1) - 1), bits)


def _on_bf16(function):
    """A function on f32 values -> one on bf16 codes, rounded to nearest."""
    return lambda *codes: to_bf16(np.asarray(function(*(bf16(code) for code in codes)), np.float64))


def _halves() -> list[Row]:
    rows = []
    for kind, count in list(_OPERANDS.items())[:4]:
        for flags in ("", ".ftz", ".sat", ".ftz.sat") + ((".relu",) if kind == "fma" else ()):
            function = exact(
                kind, "f16", ftz="ftz" in flags, sat="sat" in flags, relu="relu" in flags
            )
            rows.append(Row(_code(f"{kind}.rn{flags}.f16", count), "f16 " * (count + 1), function))
            rows.append(
                Row(
                    _code(f"{kind}.rn{flags}.f16x2", count),
                    "f16x2 " * (count + 1),
                    _by_half(function),
                )
            )
        for flags in ("", ".relu")[: 2 if kind == "fma" else 1]:
            function = _on_bf16(exact(kind, "bf16", relu=bool(flags)))
            rows.append(
                Row(_code(f"{kind}.rn{flags}.bf16", count), "bf16 " * (count + 1), function)
            )
            rows.append(
                Row(
                    _code(f"{kind}.rn{flags}.bf16x2", count),
                    "bf16x2 " * (count + 1),
                    _by_half(function, np.uint16),
                )
            )
    return rows


def _pairs() -> list[Row]:
    rows = []
    for kind, count in list(_OPERANDS.items())[:4]:
        for flags in (".rn", ".rz", ".rm.ftz", ".rp", ".rn.ftz"):
            function = exact(kind, "f32", flags[1:3], ftz="ftz" in flags)
            rows.append(
                Row(
                    _code(f"{kind}{flags}.f32x2", count),
                    "f32x2 " * (count + 1),
                    _by_half(function, np.float32),
                )
            )
    return rows


def _mixed() -> list[Row]:
    rows = []
    for narrow, widen in (("f16", lambda x: x), ("bf16", bf16)):
        for how in ("rn", "rz", "rp"):
            for kind in ("add", "sub"):
                rows.append(
                    Row(
                        _code(f"{kind}.{how}.f32.{narrow}", 2),
                        f"f32 {narrow} f32",
                        lambda a, b, k=kind, h=how, w=widen: exact(k, "f32", h)(w(a), b),
                    )
                )
            rows.append(
                Row(
                    _code(f"fma.{how}.f32.{narrow}", 3),
                    f"f32 {narrow} {narrow} f32",
                    lambda a, b, c, h=how, w=widen: exact("fma", "f32", h)(w(a), w(b), c),
                )
            )
    return rows


def _pick(low: bool, values: tuple[float, ...], nan: bool) -> float:
    """min or max of Python floats: -0 < +0; NaN ignored, or with .NaN returned."""
    numbers = [x for x in values if not math.isnan(x)]
    if not numbers or (nan and len(numbers) < len(values)):
        return math.nan
    return (min if low else max)(numbers, key=lambda x: (x, math.copysign(1, x)))


def _extreme(low: bool, flags: str, least: float = 2.0**-126):
    def call(*operands: np.ndarray) -> np.ndarray:
        rows = zip(*(x.astype(np.float64).tolist() for x in operands), strict=True)
        out = []
        for row in rows:
            if "ftz" in flags:
                row = tuple(math.copysign(0.0, x) if abs(x) < least else x for x in row)
            sign = math.prod(math.copysign(1, x) for x in row)
            if "abs" in flags:
                row = tuple(map(abs, row))
            value = _pick(low, row, "NaN" in flags)
            out.append(
                math.copysign(value, sign)
                if "xorsign" in flags and not math.isnan(value)
                else value
            )
        return np.array(out)

    return call


def _extremes() -> list[Row]:
    rows = []
    for name in ("min", "max"):
        low = name == "min"
        for flags in ("", ".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs"):
            rows.append(Row(_code(f"{name}{flags}.f32", 2), "f32 f32 f32", _extreme(low, flags)))
        for flags in ("", ".ftz", ".NaN", ".abs", ".NaN.abs"):
            rows.append(
                Row(_code(f"{name}{flags}.f32", 3), "f32 f32 f32 f32", _extreme(low, flags))
            )
        for flags in ("", ".NaN", ".NaN.xorsign.abs"):
            rows.append(Row(_code(f"{name}{flags}.f16", 2), "f16 f16 f16", _extreme(low, flags)))
            rows.append(
                Row(
                    _code(f"{name}{flags}.f16x2", 2),
                    "f16x2 f16x2 f16x2",
                    _by_half(_extreme(low, flags)),
                )
            )
            on_codes = _on_bf16(_extreme(low, flags))
            rows.append(Row(_code(f"{name}{flags}.bf16", 2), "bf16 bf16 bf16", on_codes))
            rows.append(
                Row(
                    _code(f"{name}{flags}.bf16x2", 2),
                    "bf16x2 bf16x2 bf16x2",
                    _by_half(on_codes, np.uint16),
                )
            )
        rows.append(Row(_code(f"{name}.ftz.f16", 2), "f16 f16 f16", _extreme(low, "ftz", 2.0**-14)))
        rows.append(Row(_code(f"{name}.f64", 2), "f64 f64 f64", _extreme(low, "")))
    return rows


def _flushed(function):
    def call(*operands: np.ndarray) -> np.ndarray:
        return function(
            *(np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x) for x in operands)
        )

    return call


def _wide(function):
    """In double precision, as the value that an approximation is compared with."""
    return lambda *operands: function(*(x.astype(np.float64) for x in operands))


_TINY = 2.0**-126
APPROXIMATE = [  # operands within the range where the manual bounds the relative error
    Row("ex2.approx.f32 {d}, {a};", "f32 f32", _wide(np.exp2), "small", 2.0**-22),
    Row("ex2.approx.ftz.f32 {d}, {a};", "f32 f32", _wide(np.exp2), "small", 2.0**-22),
    Row("rcp.approx.f32 {d}, {a};", "f32 f32", _wide(lambda a: 1 / a), "rand", 2.0**-22),
    Row(
        "rcp.approx.ftz.f32 {d}, {a};",
        "f32 f32",
        _flushed(_wide(lambda a: 1 / a)),
        "rand",
        2.0**-22,
    ),
    Row("sqrt.approx.f32 {d}, {a};", "f32 f32", _wide(np.sqrt), "rand", 2.0**-21),
    Row(
        "rsqrt.approx.ftz.f32 {d}, {a};",
        "f32 f32",
        _wide(lambda a: 1 / np.sqrt(a)),
        "rand",
        2.0**-22,
    ),
    Row("lg2.approx.ftz.f32 {d}, {a};", "f32 f32", _wide(np.log2), "rand", 2.0**-14),
    Row("sin.approx.f32 {d}, {a};", "f32 f32", _wide(np.sin), "small", 2.0**-17),
    Row("cos.approx.f32 {d}, {a};", "f32 f32", _wide(np.cos), "small", 2.0**-17),
    Row("tanh.approx.f32 {d}, {a};", "f32 f32", _wide(np.tanh), "rand", 2.0**-10),
    Row(
        "div.approx.f32 {d}, {a}, {b};", "f32 f32 f32", _wide(lambda a, b: a / b), "rand", 2.0**-21
    ),
    Row("div.full.f32 {d}, {a}, {b};", "f32 f32 f32", _wide(lambda a, b: a / b), "rand", 2.0**-21),
    Row("ex2.approx.f16 {d}, {a};", "f16 f16", _wide(np.exp2), "small", 2.0**-9),
    Row("tanh.approx.f16 {d}, {a};", "f16 f16", _wide(np.tanh), "rand", 2.0**-9),
]
SIGNS = [
    Row("neg.f32 {d}, {a};", "f32 f32", lambda a: -a),
    Row("abs.f32 {d}, {a};", "f32 f32", np.abs),
    Row("neg.ftz.f32 {d}, {a};", "f32 f32", _flushed(lambda a: -a)),
    Row("neg.f64 {d}, {a};", "f64 f64", lambda a: -a),
    Row("abs.f64 {d}, {a};", "f64 f64", np.abs),
    Row("neg.f16 {d}, {a};", "f16 f16", lambda a: -a),
    Row("abs.f16 {d}, {a};", "f16 f16", np.abs),
    Row(
        "neg.bf16x2 {d}, {a};",
        "bf16x2 bf16x2",
        _by_half(_on_bf16(lambda a: -a), np.uint16),
        "arange",
    ),
    Row("abs.bf16 {d}, {a};", "bf16 bf16", _on_bf16(np.abs), "arange"),
    Row("copysign.f32 {d}, {a}, {b};", "f32 f32 f32", lambda a, b: np.copysign(b, a)),
]
CONSTANT = [
    Row("add.f32 {d}, {a}, 0f3F800000;", "f32 f32", lambda a: exact("add")(a, np.ones_like(a))),
    Row(
        "fma.rn.f32 {d}, {a}, {b}, 0fBF000000;",
        "f32 f32 f32",
        lambda a, b: exact("fma")(a, b, np.full_like(a, -0.5)),
    ),
    Row(
        "mul.f32 {d}, {a}, 0fFF800000;",
        "f32 f32",
        lambda a: exact("mul")(a, np.full_like(a, -np.inf)),
    ),
    Row("max.f32 {d}, {a}, 0f7FC00000;", "f32 f32", lambda a: a),
    Row("sub.f32 {d}, 1.5, {a};", "f32 f32", lambda a: exact("sub")(np.full_like(a, 1.5), a)),
]
_TESTP = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= _TINY) | (x == 0)),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < _TINY),
}
TESTS = [
    Row(
        f"{{{{ .reg .pred %p; testp.{name}.f32 %p, {{a}}; selp.b32 {{d}}, 1, 0, %p; }}}}",
        "u32 f32",
        function,
    )
    for name, function in _TESTP.items()
]
ROWS = [
    *_arithmetic(),
    *_halves(),
    *_pairs(),
    *_mixed(),
    *_extremes(),
    *APPROXIMATE,
    *SIGNS,
    *CONSTANT,
    *TESTS,
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_float(row: Row) -> None:
    built = program(row)
    outputs = emulate(built, load(built.text), Options())
    check(built, outputs)
    if row.types.startswith("f32 ") and row not in SIGNS:
        assert set(outputs["d"][np.isnan(outputs["d"])].view(np.uint32).tolist()) <= {CANONICAL_32}


@pytest.mark.hw
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_float_on_gpu(row: Row) -> None:
    built = program(row)
    check(built, hw_runner.run(built))
