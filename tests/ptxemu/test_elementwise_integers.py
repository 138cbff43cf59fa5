"""Integer arithmetic, bit operations and shifts, each in every operand form (see `elementwise`)."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu import Options, load
from tests.ptxemu.elementwise import Row, program
from workbench.conformance import hw_runner
from workbench.conformance.exact_arithmetic import (
    clamp,
    each,
    extract_field,
    funnel,
    insert_field,
    lookup,
    permute,
    reversed_bits,
    truncated_divide,
    truncated_remainder,
    wrap,
)
from workbench.conformance.ptx_program import check, emulate

_BITS = {"u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64}
S32 = clamp(-(1 << 31), (1 << 31) - 1)


def _rows(
    name: str, function, types: str = "u16 s16 u32 s32 u64 s64", data: str = "special"
) -> list[Row]:
    """Two-operand instructions whose operands and result have one type."""
    return [
        Row(
            f"{name}.{t} {{d}}, {{a}}, {{b}};",
            f"{t} {t} {t}",
            wrap(function, _BITS[t], t[0] == "s"),
            data,
        )
        for t in types.split()
    ]


def _unary(name: str, function, types: str) -> list[Row]:
    return [
        Row(
            f"{name}.{t} {{d}}, {{a}};", f"{t.replace('b', 'u')} {t.replace('b', 'u')}", function(t)
        )
        for t in types.split()
    ]


def _width(t: str) -> int:
    return int(t[1:])


def _products(t: str) -> list[Row]:
    n, signed = _BITS[t], t[0] == "s"
    wide = f"{t[0]}{2 * n}"
    abc = "{d}, {a}, {b}, {c};"
    rows = [
        Row(
            f"mul.lo.{t} {{d}}, {{a}}, {{b}};", f"{t} {t} {t}", wrap(lambda a, b: a * b, n, signed)
        ),
        Row(
            f"mul.hi.{t} {{d}}, {{a}}, {{b}};",
            f"{t} {t} {t}",
            wrap(lambda a, b: a * b >> n, n, signed),
        ),
        Row(f"mad.lo.{t} {abc}", f"{t} {t} {t} {t}", wrap(lambda a, b, c: a * b + c, n, signed)),
        Row(
            f"mad.hi.{t} {abc}",
            f"{t} {t} {t} {t}",
            wrap(lambda a, b, c: (a * b >> n) + c, n, signed),
        ),
    ]
    if n < 64:
        rows += [
            Row(
                f"mul.wide.{t} {{d}}, {{a}}, {{b}};",
                f"{wide} {t} {t}",
                wrap(lambda a, b: a * b, 2 * n, signed),
            ),
            Row(
                f"mad.wide.{t} {abc}",
                f"{wide} {t} {t} {wide}",
                wrap(lambda a, b, c: a * b + c, 2 * n, signed),
            ),
        ]
    return rows


def _shifts() -> list[Row]:
    rows = []
    for t in ("b16", "b32", "b64"):
        n, u = _width(t), t.replace("b", "u")
        rows.append(
            Row(
                f"shl.{t} {{d}}, {{a}}, {{b}};",
                f"{u} {u} u32",
                wrap(lambda a, b: a << min(b, 64), n),
            )
        )
        rows.append(Row(f"shl.{t} {{d}}, {{a}}, 7;", f"{u} {u}", wrap(lambda a: a << 7, n)))
        for kind in (t, u, t.replace("b", "s")):
            s = kind if kind[0] == "s" else u
            rows.append(
                Row(
                    f"shr.{kind} {{d}}, {{a}}, {{b}};",
                    f"{s} {s} u32",
                    wrap(lambda a, b: a >> min(b, 64), n, s[0] == "s"),
                )
            )
            rows.append(
                Row(
                    f"shr.{kind} {{d}}, {{a}}, 3;",
                    f"{s} {s}",
                    wrap(lambda a: a >> 3, n, s[0] == "s"),
                )
            )
    for mode, limit in (("wrap", lambda c: c & 31), ("clamp", lambda c: min(c, 32))):
        rows.append(
            Row(
                f"shf.l.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};",
                "u32 u32 u32 u32",
                wrap(lambda a, b, c, limit=limit: funnel(a, b, limit(c)), 32),
            )
        )
        rows.append(
            Row(
                f"shf.r.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};",
                "u32 u32 u32 u32",
                wrap(lambda a, b, c, limit=limit: (b << 32 | a) >> limit(c), 32),
            )
        )
    return rows


def _logic(t: str) -> list[Row]:
    n, u = _width(t), t.replace("b", "u")
    two, one = f"{t} {{d}}, {{a}}, {{b}};", f"{t} {{d}}, {{a}};"
    return [
        Row(f"and.{two}", f"{u} {u} {u}", wrap(lambda a, b: a & b, n)),
        Row(f"or.{two}", f"{u} {u} {u}", wrap(lambda a, b: a | b, n)),
        Row(f"xor.{two}", f"{u} {u} {u}", wrap(lambda a, b: a ^ b, n)),
        Row(f"not.{one}", f"{u} {u}", wrap(lambda a: ~a, n)),
        Row(f"cnot.{one}", f"{u} {u}", wrap(lambda a: int(a == 0), n)),
    ]


def _counts(t: str) -> list[Row]:
    n, u, s = _width(t), t.replace("b", "u"), t.replace("b", "s")
    one = f"{t} {{d}}, {{a}};"

    def leading(a: int) -> int:
        """The most significant bit that is not a copy of the sign, -1 if there is none."""
        return (~a if a < 0 else a).bit_length() - 1

    def distance(a: int) -> int:
        return -1 if leading(a) < 0 else n - 1 - leading(a)

    return [
        Row(f"popc.{one}", f"u32 {u}", wrap(int.bit_count, 32)),
        Row(f"clz.{one}", f"u32 {u}", wrap(lambda a: n - a.bit_length(), 32)),
        Row(f"brev.{one}", f"{u} {u}", wrap(lambda a: reversed_bits(a, n), n)),
        *[Row(f"bfind.{k} {{d}}, {{a}};", f"u32 {k}", wrap(leading, 32)) for k in (u, s)],
        *[Row(f"bfind.shiftamt.{k} {{d}}, {{a}};", f"u32 {k}", wrap(distance, 32)) for k in (u, s)],
    ]


def _fields(t: str) -> list[Row]:
    """bfe and bfi; positions and lengths above 255 are not defined."""
    n, u = _width(t), t.replace("b", "u")
    head = "{{ .reg .b32 %x, %y; and.b32 %x, {b}, 255; and.b32 %y, {c}, 255; "
    bits = (1 << n) - 1

    def extract(signed: bool):
        return wrap(lambda a, b, c: extract_field(a, b, c, n, signed), n)

    return [
        Row(f"{head}bfe.{u} {{d}}, {{a}}, %x, %y; }}}}", f"{u} {u} u32 u32", extract(False)),
        Row(
            f"{head}bfe.{t.replace('b', 's')} {{d}}, {{a}}, %x, %y; }}}}",
            f"{u} {u} u32 u32",
            extract(True),
        ),
        Row(
            f"{head}bfi.{t} {{d}}, {{a}}, {bits >> 3}, %x, %y; }}}}",
            f"{u} {u} u32 u32",
            wrap(lambda a, b, c: insert_field(a, bits >> 3, b, c, n), n),
        ),
        Row(
            f"{head}bfi.{t} {{d}}, 1234567, {{a}}, %x, 9; }}}}",
            f"{u} {u} u32 u32",
            wrap(lambda a, b, c: insert_field(1234567, a, b, 9, n), n),
        ),
    ]


ROWS = [
    *_rows("add", lambda a, b: a + b),
    *_rows("sub", lambda a, b: a - b),
    *_rows("min", min),
    *_rows("max", max),
    *_rows("div", truncated_divide, data="special"),
    *_rows("rem", truncated_remainder),
    *[row for t in _BITS for row in _products(t)],
    *_unary("abs", lambda t: wrap(abs, _width(t), True), "s16 s32 s64"),
    *_unary("neg", lambda t: wrap(lambda a: -a, _width(t), True), "s16 s32 s64"),
    *_shifts(),
    *[row for t in ("b16", "b32", "b64") for row in _logic(t)],
    *[row for t in ("b32", "b64") for row in (*_counts(t), *_fields(t))],
    Row("add.s32 {d}, {a}, -7;", "s32 s32", wrap(lambda a: a - 7, 32, True)),
    Row("sub.u32 {d}, 5, {a};", "u32 u32", wrap(lambda a: 5 - a, 32)),
    Row("add.s64 {d}, {a}, -1;", "s64 s64", wrap(lambda a: a - 1, 64, True)),
    Row("mul.wide.u32 {d}, {a}, 48;", "u64 u32", wrap(lambda a: a * 48, 64)),
    Row("mad.lo.s32 {d}, {a}, -3, {b};", "s32 s32 s32", wrap(lambda a, b: b - 3 * a, 32, True)),
    Row("and.b32 {d}, {a}, -16;", "u32 u32", wrap(lambda a: a & ~15, 32)),
    Row(
        "add.sat.s32 {d}, {a}, {b};",
        "s32 s32 s32",
        lambda a, b: each(lambda x, y: S32(x + y), a, b),
    ),
    Row(
        "sub.sat.s32 {d}, {a}, {b};",
        "s32 s32 s32",
        lambda a, b: each(lambda x, y: S32(x - y), a, b),
    ),
    Row(
        "mad.hi.sat.s32 {d}, {a}, {b}, {c};",
        "s32 s32 s32 s32",
        lambda a, b, c: each(lambda x, y, z: S32((x * y >> 32) + z), a, b, c),
    ),
    Row("min.relu.s32 {d}, {a}, {b};", "s32 s32 s32", lambda a, b: np.maximum(np.minimum(a, b), 0)),
    Row("max.relu.s32 {d}, {a}, {b};", "s32 s32 s32", lambda a, b: np.maximum(np.maximum(a, b), 0)),
    *[
        Row(
            f"sad.{t} {{d}}, {{a}}, {{b}}, {{c}};",
            f"{t} {t} {t} {t}",
            wrap(lambda a, b, c: c + abs(a - b), _BITS[t], t[0] == "s"),
        )
        for t in _BITS
    ],
    *[
        Row(
            f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table:#x};",
            "u32 u32 u32 u32",
            wrap(lambda a, b, c, table=table: lookup(a, b, c, table), 32),
        )
        for table in (0x00, 0xC0, 0xF8, 0x96, 0xE2, 0x1B, 0xFF, 0xF0)
    ],
    Row("prmt.b32 {d}, {a}, {b}, {c};", "u32 u32 u32 u32", wrap(permute, 32)),
    Row(
        "prmt.b32 {d}, {a}, {b}, 0x5410;",
        "u32 u32 u32",
        wrap(lambda a, b: permute(a, b, 0x5410), 32),
    ),
    Row("prmt.b32 {d}, {a}, 0, 0xba98;", "u32 u32", wrap(lambda a: permute(a, 0, 0xBA98), 32)),
    *[
        Row(
            f"prmt.b32.{mode} {{d}}, {{a}}, {{b}}, {{c}};",
            "u32 u32 u32 u32",
            wrap(lambda a, b, c, table=table: permute(a, b, table[c & 3]), 32),
        )
        for mode, table in {
            "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
            "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
            "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
            "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
            "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
            "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
        }.items()
    ],
    *[
        Row(
            f"mul24.{half}.{t} {{d}}, {{a}}, {{b}};",
            f"{t} {t} {t}",
            wrap(
                lambda a, b, s=shift, g=t[0] == "s": _low24(a, g) * _low24(b, g) >> s,
                32,
                t[0] == "s",
            ),
        )
        for t in ("u32", "s32")
        for half, shift in (("lo", 0), ("hi", 16))
    ],
    *[
        Row(
            f"dp4a.{x}32.{y}32 {{d}}, {{a}}, {{b}}, {{c}};",
            "u32 u32 u32 u32",
            wrap(
                lambda a, b, c, x=x, y=y: (
                    c + sum(p * q for p, q in zip(_parts(a, 4, x), _parts(b, 4, y), strict=True))
                ),
                32,
            ),
        )
        for x in "us"
        for y in "us"
    ],
    Row(
        "dp2a.hi.s32.u32 {d}, {a}, {b}, {c};",
        "u32 u32 u32 u32",
        wrap(
            lambda a, b, c: (
                c
                + sum(p * q for p, q in zip(_parts(a, 2, "s"), _parts(b, 4, "u")[2:], strict=True))
            ),
            32,
        ),
    ),
    Row(
        "bmsk.clamp.b32 {d}, {a}, {b};",
        "u32 u32 u32",
        wrap(lambda a, b: ((1 << min(b, 32)) - 1) << min(a, 32), 32),
    ),
    Row(
        "szext.wrap.s32 {d}, {a}, {b};",
        "s32 s32 u32",
        wrap(lambda a, b: extract_field(a & 0xFFFFFFFF, 0, b & 31, 32, True), 32, True),
    ),
    Row(
        "{{ .reg .b32 %x; .reg .b64 %y; add.cc.u32 %x, {a}, {b}; addc.u32 {d}, {c}, 0; }}",
        "u32 u32 u32 u32",
        wrap(lambda a, b, c: c + (a + b >> 32), 32),
    ),
    Row(
        "{{ .reg .b64 %x; sub.cc.u64 %x, {a}, {b}; subc.u64 {d}, {c}, 0; }}",
        "u64 u64 u64 u64",
        wrap(lambda a, b, c: c - (a < b), 64),
    ),
    Row(
        "{{ .reg .b32 %x; mad.lo.cc.u32 %x, {a}, {b}, {c}; madc.hi.u32 {d}, {a}, {b}, 0; }}",
        "u32 u32 u32 u32",
        wrap(lambda a, b, c: a * b + c >> 32, 32),
    ),
]


def _low24(x: int, signed: bool) -> int:
    x &= 0xFFFFFF
    return x - (1 << 24) if signed and x >> 23 else x


def _parts(x: int, count: int, kind: str) -> list[int]:
    size = 4 // count
    return [
        int.from_bytes(x.to_bytes(4, "little")[i * size :][:size], "little", signed=kind == "s")
        for i in range(count)
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_integer(row: Row) -> None:
    built = program(row)
    check(built, emulate(built, load(built.text), Options()))


@pytest.mark.hw
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_integer_on_gpu(row: Row) -> None:
    built = program(row)
    check(built, hw_runner.run(built))
