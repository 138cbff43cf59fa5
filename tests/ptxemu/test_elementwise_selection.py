"""setp, set, selp, slct and predicate logic: see `elementwise`."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu import Options, load
from tests.ptxemu.elementwise import Row, program
from workbench.conformance import hw_runner
from workbench.conformance.exact_arithmetic import bf16, halves
from workbench.conformance.ptx_program import check, emulate

_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _setp(how: str, t: str, function, data: str = "special small") -> Row:
    u = {"b": "u"}.get(t[0], t[0]) + t[1:] if t[0] == "b" and t != "bf16" else t
    return Row(
        f"{{{{ .reg .pred %p; setp.{how}.{t} %p, {{a}}, {{b}}; selp.b32 {{d}}, 1, 0, %p; }}}}",
        f"u32 {u} {u}",
        function,
        data,
    )


def _ordered(function):
    return lambda a, b: function(a, b) & ~np.isnan(a) & ~np.isnan(b)


def _unordered(function):
    return lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b)


def _comparisons() -> list[Row]:
    rows = []
    for how, function in _COMPARE.items():
        for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
            for data in ("special", "small"):
                rows.append(_setp(how, t, function, data))
        for t in ("f32", "f64", "f16", "bf16"):
            widen = bf16 if t == "bf16" else np.asarray
            for name, holds in ((how, _ordered(function)), (f"{how}u", _unordered(function))):
                rows.append(_setp(name, t, lambda a, b, w=widen, r=holds: r(w(a), w(b))))
    for t in ("b16", "b32", "b64"):
        rows += [_setp(how, t, _COMPARE[how], "small") for how in ("eq", "ne")]
    rows += [
        _setp(how, t, function, "small")
        for how, function in _UNSIGNED.items()
        for t in ("u16", "u32", "u64")
    ]
    rows.append(_setp("num", "f32", lambda a, b: ~(np.isnan(a) | np.isnan(b))))
    rows.append(_setp("nan", "f64", lambda a, b: np.isnan(a) | np.isnan(b)))
    flush = lambda a: np.where(np.abs(a) < 2.0**-126, 0, a)  # noqa: E731
    rows.append(_setp("eq.ftz", "f32", lambda a, b: flush(a) == flush(b), "special"))
    return rows


def _joined(name: str) -> list[Row]:
    """The two results of p|q with a third predicate, and its negation."""
    join = _JOIN[name]
    head = "{{ .reg .pred %p, %q, %r; setp.gt.u32 %r, {c}, 4; "
    tail = " selp.b32 {d}, 1, 0, %p; @%q or.b32 {d}, {d}, 2; }}"
    return [
        Row(
            f"{head}setp.lt.{name}.s32 %p|%q, {{a}}, {{b}}, %r;{tail}",
            "u32 s32 s32 u32",
            lambda a, b, c: join(a < b, c > 4) | join(~(a < b), c > 4).astype(int) << 1,
            "small",
        ),
        Row(
            f"{head}setp.geu.{name}.f32 %p|%q, {{a}}, {{b}}, !%r;{tail}",
            "u32 f32 f32 u32",
            lambda a, b, c: join(~(a < b), c <= 4) | join(a < b, c <= 4).astype(int) << 1,
            "special small small",
        ),
    ]


def _set() -> list[Row]:
    ones = lambda x: np.where(x, 0xFFFFFFFF, 0)  # noqa: E731
    return [
        Row("set.lt.u32.s32 {d}, {a}, {b};", "u32 s32 s32", lambda a, b: ones(a < b)),
        Row("set.eq.s32.u16 {d}, {a}, {b};", "u32 u16 u16", lambda a, b: ones(a == b), "small"),
        Row("set.geu.f32.f32 {d}, {a}, {b};", "f32 f32 f32", lambda a, b: ~(a < b)),
        Row(
            "{{ .reg .pred %r; setp.gt.u32 %r, {c}, 4; set.gt.and.u32.f32 {d}, {a}, {b}, %r; }}",
            "u32 f32 f32 u32",
            lambda a, b, c: ones((a > b) & (c > 4)),
            "special small small",
        ),
    ]


def _select() -> list[Row]:
    rows = []
    for t in ("u16", "u32", "u64", "f32", "f64"):
        rows.append(
            Row(
                (
                    f"{{{{ .reg .pred %p; setp.ne.u32 %p, {{c}}, 3; "
                    f"selp.{t} {{d}}, {{a}}, {{b}}, %p; }}}}"
                ),
                f"{t} {t} {t} u32",
                lambda a, b, c: np.where(c != 3, a, b),
                "special special small",
            )
        )
        rows.append(
            Row(
                f"slct.{t}.s32 {{d}}, {{a}}, {{b}}, {{c}};",
                f"{t} {t} {t} s32",
                lambda a, b, c: np.where(c >= 0, a, b),
            )
        )
    return [
        *rows,
        Row(
            "slct.f32.f32 {d}, {a}, {b}, {c};",
            "f32 f32 f32 f32",
            lambda a, b, c: np.where(c >= 0, a, b),
        ),
        Row(
            "slct.ftz.u32.f32 {d}, {a}, {b}, {c};",
            "u32 u32 u32 f32",
            lambda a, b, c: np.where((c >= 0) | (np.abs(c) < 2.0**-126), a, b),
        ),
        Row(
            "{{ .reg .pred %p; setp.lt.s32 %p, {a}, 0; selp.b32 {d}, {a}, -1, %p; }}",
            "s32 s32",
            lambda a: np.where(a < 0, a, -1),
        ),
        Row(
            (
                "{{ .reg .pred %p; setp.lt.s32 %p, {a}, 0; "
                "selp.f32 {d}, 0fFF800000, 0f3F800000, %p; }}"
            ),
            "f32 s32",
            lambda a: np.where(a < 0, -np.inf, 1),
        ),
    ]


def _predicates() -> list[Row]:
    head = "{{ .reg .pred %p, %q, %r; setp.lt.s32 %p, {a}, 0; setp.gt.s32 %q, {b}, 1; "
    rows = [
        Row(
            f"{head}{name}.pred %r, %p, %q; selp.b32 {{d}}, 7, 9, %r; }}}}",
            "u32 s32 s32",
            lambda a, b, f=function: np.where(f(a < 0, b > 1), 7, 9),
            "small",
        )
        for name, function in _JOIN.items()
    ]
    return [
        *rows,
        Row(
            head + "not.pred %r, %p; mov.pred %q, %r; selp.b32 {d}, 7, 9, %q; }}",
            "u32 s32 s32",
            lambda a, b: np.where(a >= 0, 7, 9),
            "small",
        ),
        Row(
            head + "@!%p mov.pred %q, 0; selp.b32 {d}, 7, 9, %q; }}",
            "u32 s32 s32",
            lambda a, b: np.where((a < 0) & (b > 1), 7, 9),
            "small",
        ),
        Row(
            (
                "{{ .reg .pred %p, %q; setp.eq.f16x2 %p|%q, {a}, {b}; selp.b32 {d}, 1, 0, %p; "
                "@%q or.b32 {d}, {d}, 2; }}"
            ),
            "u32 f16x2 f16x2",
            lambda a, b: (
                (halves(a)[0] == halves(b)[0]) | (halves(a)[1] == halves(b)[1]).astype(int) << 1
            ),
            "arange",
        ),
    ]


ROWS = [
    *_comparisons(),
    *[row for name in _JOIN for row in _joined(name)],
    *_set(),
    *_select(),
    *_predicates(),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_selection(row: Row) -> None:
    built = program(row)
    check(built, emulate(built, load(built.text), Options()))


@pytest.mark.hw
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_selection_on_gpu(row: Row) -> None:
    built = program(row)
    check(built, hw_runner.run(built))
