"""Every elementwise form as one instruction with its operands, from one line per manual syntax.

A line reads `opcode pattern : destination source source ...`: {a|b} in the pattern is either, T
stands for each type of the line's `of`. A destination is a type or `pred`. What an assembler does
not take on the target at hand, it says; so a pattern may name more than one architecture has.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

_ALTERNATIVES = re.compile(r"\{([^{}|]*\|[^{}]*)\}")  # not the braces of registers

PLAIN = "{op} {d}, {operands};"


@dataclass(frozen=True)
class Variant:
    """An instruction: `code` with {op}, {d}, {operands} and {a} to {e}."""

    opcode: str
    target: str
    sources: tuple[str, ...]
    code: str = PLAIN
    detail: str = ""  # what else of the instruction varies, as an immediate

    @property
    def key(self) -> str:
        """The opcode, and that it has an operand more than others of its name: a GPU may lack that
        form alone."""
        third = self.opcode.split(".")[0] in ("min", "max") and len(self.sources) > 2
        return f"{self.opcode} of three" if third else self.opcode

    def text(self, d: str, operands: list[str]) -> str:
        named = dict(zip("abcef", operands, strict=False))
        return self.code.format(op=self.opcode, d=d, operands=", ".join(operands), **named)


def expand(pattern: str) -> Iterator[str]:
    """Every choice of the {a|b} of a pattern, the first ones first."""
    parts = _ALTERNATIVES.split(pattern)
    choices = [part.split("|") if k % 2 else [part] for k, part in enumerate(parts)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def line(text: str, of: str = "", code: str = PLAIN, detail: str = "") -> Iterator[Variant]:
    """The variants of one line."""
    pattern, _, types = text.partition(" : ")
    for t in of.split() or ["T"]:
        wide = f"{t[0]}{2 * int(t[1:])}" if t[1:].isdigit() else ""
        target, *sources = types.replace("W", wide).replace("T", t).split()
        for opcode in expand(re.sub(r"\bT\b", t, pattern)):
            yield Variant(opcode, target, tuple(sources), code, detail)


_INT = "u16 s16 u32 s32 u64 s64"
_WORDS = "u32 s32 u64 s64"
_BITS = "b16 b32 b64"
_HALVES = "f16 bf16 f16x2 bf16x2"
_ROUND = "{|.rn|.rz|.rm|.rp}"
_ROUNDED = "{.rn|.rz|.rm|.rp}"
_PRED = "{{ .reg .pred %x; {op} %x, {operands}; selp.b32 {d}, 1, 0, %x; }}"
_PAIR = (
    "{{ .reg .pred %x, %y; .reg .b32 %u; {op} %x|%y, {operands}; selp.b32 {d}, 1, 0, %x;"
    " selp.b32 %u, 2, 0, %y; or.b32 {d}, {d}, %u; }}"
)
_JOINED = (
    "{{ .reg .pred %x, %y, %z; .reg .b32 %u; setp.ne.b32 %z, {c}, 0; {op} %x|%y, {a}, {b}, %z;"
    " selp.b32 {d}, 1, 0, %x; selp.b32 %u, 2, 0, %y; or.b32 {d}, {d}, %u; }}"
)
_JOINED_VALUE = "{{ .reg .pred %z; setp.ne.b32 %z, {c}, 0; {op} {d}, {a}, {b}, !%z; }}"


def integers() -> Iterator[Variant]:
    yield from line("{add|sub|min|max|mul.lo|mul.hi}.T : T T T", _INT)
    yield from line("{div|rem}.T : T T T!0", _INT)
    yield from line("mul.wide.T : W T T", "u16 s16 u32 s32")
    yield from line("mad.{lo|hi}.T : T T T T", _INT)
    yield from line("mad.wide.T : W T T W", "u16 s16 u32 s32")
    yield from line("sad.T : T T T T", _INT)
    yield from line("{abs|neg}.T : T T", "s16 s32 s64")
    yield from line("{add|sub}.sat.s32 : s32 s32 s32")
    yield from line("mad.hi.sat.s32 : s32 s32 s32 s32")
    yield from line("{min|max}.relu.s32 : s32 s32 s32")
    yield from line("{add|min|max}.T : T T T", "u16x2 s16x2")
    yield from line("{min|max}.relu.s16x2 : s16x2 s16x2 s16x2")
    yield from line("mad24.hi.sat.s32 : s32 s32 s32 s32")
    yield from line("mul24.{lo|hi}.T : T T T", "u32 s32")
    yield from line("mad24.{lo|hi}.T : T T T T", "u32 s32")
    yield from line("dp4a.{u32|s32}.{u32|s32} : u32 u8x4 u8x4 u32")
    yield from line("dp2a.{lo|hi}.{u32|s32}.{u32|s32} : u32 u32 u8x4 u32")
    yield from line("{and|or|xor}.T : T T T", _BITS)
    yield from line("{not|cnot}.T : T T", _BITS)
    yield from line("shl.T : T T u32", _BITS)
    yield from line("shr.T : T T u32", f"{_BITS} {_INT}")
    yield from line("shf.{l|r}.{clamp|wrap}.b32 : u32 u32 u32 u32")
    yield from line("{popc|clz}.T : u32 T", "b32 b64")
    yield from line("brev.T : T T", "b32 b64")
    yield from line("bfind{|.shiftamt}.T : u32 T", _WORDS)
    yield from line("bfe.T : T T u32<256 u32<256", _WORDS)
    yield from line("bfi.T : T T T u32<256 u32<256", "b32 b64")
    yield from line("fns.b32 : u32 u32 u32<32 u32")
    yield from line("bmsk.{clamp|wrap}.b32 : u32 u32 u32")
    yield from line("szext.{clamp|wrap}.T : T T u32", "u32 s32")
    yield from line("prmt.b32{|.f4e|.b4e|.rc8|.ecl|.ecr|.rc16} : u32 u32 u32 u32")
    for table in range(256):
        code = f"{{op}} {{d}}, {{operands}}, {table:#04x};"
        yield from line("lop3.b32 : u32 u32 u32 u32", code=code, detail=f"{table:#04x}")
    for table in (0x00, 0x1B, 0x80, 0xE8):
        code = (
            "{{ .reg .pred %x, %y; .reg .b32 %u; setp.ne.b32 %y, {e}, 0; "
            f"{{op}} {{d}}|%x, {{a}}, {{b}}, {{c}}, {table:#04x}, %y; "
            "selp.b32 %u, 1, 0, %x; xor.b32 {d}, {d}, %u; }}"
        )
        kinds = "u32 u32 u32 u32 u32<2"
        yield from line(f"lop3.{{and|or}}.b32 : {kinds}", code=code, detail=f"{table:#04x}")
    yield from line("cvt.pack.sat.{u16|s16}.s32 : u32 s32 s32")
    yield from line("cvt.pack.sat.{u8|s8|u4|s4|u2|s2}.s32.b32 : u32 s32 s32 u32")
    yield from _carries()
    yield from _predicate_logic()


def _carries() -> Iterator[Variant]:
    """A carry is made by comparing operands, taken, and its successor is taken once more."""
    for t in _WORDS.split():
        for make, take in (("add", "addc"), ("sub", "subc")):
            code = (
                f"{{{{ .reg .{t} %x; {make}.cc.{t} %x, {{a}}, {{b}}; {take}.cc.{t} %x, {{b}}, %x;"
                f" {{op}} {{d}}, {{c}}, %x; }}}}"
            )
            yield from line(f"{take}.{t} : {t} {t} {t} {t}", code=code)
            joined = (
                f"{{{{ .reg .{t} %x, %y; {{op}} %x, {{a}}, {{b}}; {take}.{t} %y, {{c}}, 0;"
                f" xor.b{t[1:]} {{d}}, %x, %y; }}}}"
            )
            yield from line(f"{make}.cc.{t} : {t} {t} {t} {t}", code=joined)
            chained = joined.replace("{op}", f"{make}.cc.{t} %x, {{b}}, {{c}}; {{op}}")
            yield from line(f"{take}.cc.{t} : {t} {t} {t} {t}", code=chained)
        for half in ("lo", "hi"):
            tail = f"addc.{t} %y, {{a}}, 0; xor.b{t[1:]} {{d}}, %x, %y; }}}}"
            head = f"{{{{ .reg .{t} %x, %y; "
            make = f"add.cc.{t} %x, {{a}}, {{b}}; "
            body = "{op} %x, {a}, {b}, {c}; "
            kinds = f"{t} {t} {t} {t}"
            yield from line(f"mad.{half}.cc.{t} : {kinds}", code=head + body + tail)
            yield from line(f"madc.{half}.cc.{t} : {kinds}", code=head + make + body + tail)
            code = head + make + "{op} {d}, {a}, {b}, {c}; }}"
            yield from line(f"madc.{half}.{t} : {kinds}", code=code)


def _predicate_logic() -> Iterator[Variant]:
    head = "{{ .reg .pred %x, %y; setp.ne.b32 %x, {a}, 0; setp.ne.b32 %y, {b}, 0; "
    tail = " selp.b32 {d}, 1, 0, %x; }}"
    yield from line("{and|or|xor}.pred : u32 u32<2 u32<2", code=f"{head}{{op}} %x, %x, %y;{tail}")
    yield from line("{not|mov}.pred : u32 u32<2 u32<2", code=f"{head}{{op}} %x, %y;{tail}")


def floats() -> Iterator[Variant]:
    yield from line(f"{{add|sub|mul}}{_ROUND}{{|.ftz}}{{|.sat}}.f32 : f32 f32 f32")
    yield from line(f"{{fma|mad}}{_ROUNDED}{{|.ftz}}{{|.sat}}.f32 : f32 f32 f32 f32")
    yield from line(f"{{add|sub|mul}}{_ROUND}.f64 : f64 f64 f64")
    yield from line(f"{{fma|mad}}{_ROUNDED}.f64 : f64 f64 f64 f64")
    yield from line(f"{{add|sub|mul}}{_ROUND}{{|.ftz}}.f32x2 : f32x2 f32x2 f32x2")
    yield from line(f"fma{_ROUNDED}{{|.ftz}}.f32x2 : f32x2 f32x2 f32x2 f32x2")
    yield from line("{add|sub|mul}{|.rn}{|.ftz}{|.sat}.T : T T T", "f16 f16x2")
    yield from line("{add|sub|mul}{|.rn}.T : T T T", "bf16 bf16x2")
    yield from line("fma.rn{|.ftz}{|.sat|.relu}.T : T T T T", "f16 f16x2")
    yield from line("fma.rn{|.relu}.T : T T T T", "bf16 bf16x2")
    yield from line(f"{{add|sub}}{_ROUND}{{|.sat}}.f32.T : f32 T f32", "f16 bf16")
    yield from line(f"fma{_ROUNDED}{{|.sat}}.f32.T : f32 T T f32", "f16 bf16")
    yield from line("{min|max}{|.ftz}{|.NaN}{|.xorsign.abs}.f32 : f32 f32 f32")
    yield from line("{min|max}{|.ftz}{|.NaN}{|.abs}.f32 : f32 f32 f32 f32")
    yield from line("{min|max}{|.ftz}{|.NaN}{|.xorsign.abs}.T : T T T", "f16 f16x2")
    yield from line("{min|max}{|.NaN}{|.xorsign.abs}.T : T T T", "bf16 bf16x2")
    yield from line("{min|max}.f64 : f64 f64 f64")
    yield from line("{abs|neg}{|.ftz}.T : T T", "f32 f16 f16x2")
    yield from line("{abs|neg}.T : T T", "f64 bf16 bf16x2")
    yield from line("copysign.T : T T T", "f32 f64")
    yield from line(f"div{_ROUNDED}{{|.ftz}}.f32 : f32 f32 f32")
    yield from line("div.{approx|full}{|.ftz}.f32 : f32 f32 f32")
    yield from line("{rcp|sqrt}{.approx|.rn|.rz|.rm|.rp}{|.ftz}.f32 : f32 f32")
    yield from line("{rsqrt|sin|cos|lg2|ex2}.approx{|.ftz}.f32 : f32 f32")
    yield from line("tanh.approx.T : T T", f"f32 {_HALVES}")
    yield from line("ex2.approx.T : T T", "f16 f16x2")
    yield from line("ex2.approx.ftz.T : T T", "bf16 bf16x2")
    yield from line(f"div{_ROUNDED}.f64 : f64 f64 f64")
    yield from line(f"{{rcp|sqrt}}{_ROUNDED}.f64 : f64 f64")
    properties = "{finite|infinite|number|notanumber|normal|subnormal}"
    yield from line(f"testp.{properties}.T : pred T", "f32 f64", code=_PRED)


_EQUAL = "eq|ne"
_ORDER = f"{_EQUAL}|lt|le|gt|ge"
_UNSIGNED = f"{_ORDER}|lo|ls|hi|hs"
_FLOAT = f"{_ORDER}|equ|neu|ltu|leu|gtu|geu|num|nan"
_COMPARED = {
    **dict.fromkeys(("b16", "b32", "b64"), _EQUAL),
    **dict.fromkeys(("u16", "u32", "u64"), _UNSIGNED),
    **dict.fromkeys(("s16", "s32", "s64"), _ORDER),
    **dict.fromkeys(("f16", "f32", "f64", "bf16", "f16x2", "bf16x2"), _FLOAT),
}
_FLUSHED = ("f16", "f32", "f16x2")
_ONE_JOINED = (
    "{{ .reg .pred %x, %z; setp.ne.b32 %z, {c}, 0; {op} %x, {a}, {b}, %z;"
    " selp.b32 {d}, 1, 0, %x; }}"
)


def selection() -> Iterator[Variant]:
    for t, how in _COMPARED.items():
        ftz = "{|.ftz}" if t in _FLUSHED else ""
        half = t in ("f16", "bf16")  # these set one predicate
        yield from line(f"setp.{{{how}}}{ftz}.{t} : pred {t} {t}", code=_PRED if half else _PAIR)
        joined = f"setp.{{{how}}}.{{and|or|xor}}{ftz}.{t} : pred {t} {t} u32<2"
        yield from line(joined, code=_ONE_JOINED if half else _JOINED)
        if not t.endswith("x2"):
            kinds = "{u32|s32}" if half else "{u32|s32|f32}"
            yield from line(f"set.{{{how}}}{ftz}.{kinds}.{t} : u32 {t} {t}")
            joined = f"set.{{{how}}}.{{and|or|xor}}{ftz}.{kinds}.{t} : u32 {t} {t} u32<2"
            yield from line(joined, code=_JOINED_VALUE)
            yield from line(f"set.ne.{'bf16' if t == 'bf16' else '{f16|bf16}'}.{t} : u16 {t} {t}")
            if t in ("u32", "f32"):
                yield from line(f"set.{{{how}}}{ftz}.f16.{t} : u16 {t} {t}")
                yield from line(f"set.{{{how}}}.bf16.{t} : u16 {t} {t}")
                joined = f"set.ne.{{and|or|xor}}.{{f16|bf16}}.{t} : u16 {t} {t} u32<2"
                yield from line(joined, code=_JOINED_VALUE)
        if half or t.endswith("x2"):
            yield from _packed_sets(t, how, ftz)
    types = f"{_BITS} {_INT} f32 f64"
    code = "{{ .reg .pred %x; setp.ne.b32 %x, {c}, 0; {op} {d}, {a}, {b}, %x; }}"
    yield from line("selp.T : T T T u32<2", types, code)
    yield from line("slct.T.s32 : T T T s32", types)
    yield from line("slct{|.ftz}.T.f32 : T T T f32", types)


def _packed_sets(t: str, how: str, ftz: str) -> Iterator[Variant]:
    """set on halves, to a type of their own size."""
    unsigned, signed, word = ("u32", "s32", "u32") if t.endswith("x2") else ("u16", "s16", "u16")
    yield from line(f"set.{{{how}}}{ftz}.{unsigned}.{t} : {word} {t} {t}")
    yield from line(f"set.gtu{ftz}.{{{signed}|{t}}}.{t} : {word} {t} {t}")
    joined = f"set.le.{{and|or|xor}}{ftz}.{{{unsigned}|{t}}}.{t} : {word} {t} {t} u32<2"
    yield from line(joined, code=_JOINED_VALUE)


def _range(t: str) -> range:
    """The values of an integer type."""
    half = 1 << int(t[1:]) - 1
    return range(-half, half) if t[0] == "s" else range(2 * half)


def conversions() -> Iterator[Variant]:
    whole, all_int = "{.rni|.rzi|.rmi|.rpi}", f"u8 s8 {_INT}"
    for source in all_int.split():
        for target in all_int.split():
            inside = _range(source)[0] in _range(target) and _range(source)[-1] in _range(target)
            saturation = "" if inside else "{|.sat}"
            yield from line(f"cvt{saturation}.{target}.{source} : {target} {source}")
        for real, flags in (("f16", "{|.sat}"), ("f32", "{|.ftz}{|.sat}"), ("f64", "{|.sat}")):
            yield from line(f"cvt{_ROUNDED}.{real}.{source} : {real} {source}")
            yield from line(f"cvt{whole}{flags}.{source}.{real} : {source} {real}")
        if _range(source)[-1] > 255:
            yield from line(f"cvt{_ROUNDED}.bf16.{source} : bf16 {source}")
            yield from line(f"cvt{whole}.{source}.bf16 : {source} bf16")
    yield from _float_to_float()
    for pair in ("f16x2", "bf16x2"):
        yield from line(f"cvt.rn.satfinite{{|.relu}}.{{e4m3x2|e5m2x2}}.{pair} : u16 {pair}")
        yield from line(f"cvt{{.rn|.rz}}{{|.relu}}{{|.satfinite}}.{pair}.f32 : u32 f32 f32")
    yield from line("cvt.rn.satfinite{|.relu}.{e4m3x2|e5m2x2}.f32 : u16 f32 f32")
    yield from line("cvt.rn.satfinite{|.relu}.{e2m3x2|e3m2x2}.f32 : u16 f32 f32")
    yield from line("cvt.rn{|.relu}.f16x2.T : u32 T", "e4m3x2 e5m2x2")
    yield from line("cvt.rn{|.relu}.f16x2.{e2m3x2|e3m2x2} : u32 u16")
    yield from line("cvt{.rz|.rp}{|.satfinite}.ue8m0x2.f32 : u16 f32 f32")
    yield from line("cvt.rn.bf16x2.ue8m0x2 : u32 u16")
    byte = "{{ .reg .b8 %x; {op} %x, {operands}; mov.b16 {d}, {{%x, 0}}; }}"
    yield from line("cvt.rn.satfinite{|.relu}.e2m1x2.f32 : u16 f32 f32", code=byte)
    byte = "{{ .reg .b8 %x, %y; mov.b16 {{%x, %y}}, {a}; {op} {d}, %x; }}"
    yield from line("cvt.rn{|.relu}.f16x2.e2m1x2 : u32 u16", code=byte)
    scaled = "cvt.rn{|.satfinite}{|.relu}.scaled::n2::ue8m0.bf16x2.s2f6x2 : u32 u16 u16"
    yield from line(scaled)


def _float_to_float() -> Iterator[Variant]:
    whole = "{|.rni|.rzi|.rmi|.rpi}"
    yield from line(f"cvt{whole}{{|.ftz}}{{|.sat}}.f32.f32 : f32 f32")
    yield from line(f"cvt{whole}{{|.sat}}.T.T : T T", "f64 f16")
    yield from line("cvt{.rni|.rzi|.rmi|.rpi}.bf16.bf16 : bf16 bf16")
    yield from line(f"cvt{_ROUNDED}{{|.ftz}}{{|.sat}}.f32.f64 : f32 f64")
    yield from line("cvt{|.ftz}{|.sat}.f64.f32 : f64 f32")
    yield from line("cvt{|.ftz}{|.sat}.f32.f16 : f32 f16")
    yield from line("cvt{|.ftz}.f32.bf16 : f32 bf16")
    yield from line("cvt{|.sat}.f64.f16 : f64 f16")
    yield from line("cvt.f64.bf16 : f64 bf16")
    yield from line(f"cvt{_ROUNDED}{{|.ftz}}{{|.sat}}.f16.f32 : f16 f32")
    yield from line(f"cvt{_ROUNDED}{{|.ftz}}.bf16.f32 : bf16 f32")
    yield from line("cvt{.rn|.rz}{|.relu}{|.satfinite}.T.f32 : T f32", "f16 bf16")
    yield from line(f"cvt{_ROUNDED}{{|.sat}}.f16.f64 : f16 f64")
    yield from line(f"cvt{_ROUNDED}.bf16.f64 : bf16 f64")
    yield from line(f"cvt{_ROUNDED}.f16.bf16 : f16 bf16")
    yield from line(f"cvt{_ROUNDED}.bf16.f16 : bf16 f16")
    yield from line("cvt{.rn|.rz}{|.relu}{|.satfinite}.tf32.f32 : u32 f32")
    yield from line("cvt.rna{|.satfinite}.tf32.f32 : u32 f32")


def moves() -> Iterator[Variant]:
    yield from line("mov.T : T T", "b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64")
    yield from line("mov.b32 : u32 u16 u16", code="{op} {d}, {{{a}, {b}}};", detail="2 x b16")
    yield from line("mov.b64 : u64 u32 u32", code="{op} {d}, {{{a}, {b}}};", detail="2 x b32")
    four = "{op} {d}, {{{a}, {b}, {c}, {e}}};"
    yield from line("mov.b64 : u64 u16 u16 u16 u16", code=four, detail="4 x b16")
    unpack = "{{ .reg .b16 %x, %y; {op} {{%x, %y}}, {a}; mov.b32 {d}, {{%y, %x}}; }}"
    yield from line("mov.b32 : u32 u32", code=unpack, detail="to 2 x b16")
    unpack = "{{ .reg .b32 %x, %y; {op} {{%x, %y}}, {a}; mov.b64 {d}, {{%y, %x}}; }}"
    yield from line("mov.b64 : u64 u64", code=unpack, detail="to 2 x b32")
    bytes4 = (
        "{{ .reg .b8 %w, %x, %y, %z; {op} {{%w, %x, %y, %z}}, {a};"
        " mov.b32 {d}, {{%x, %z, %w, %y}}; }}"
    )
    yield from line("mov.b32 : u32 u32", code=bytes4, detail="4 x b8")
    wide = (
        "{{ .reg .b128 %w; .reg .b64 %x, %y; {op} %w, {{{a}, {b}}}; {op} {{%x, %y}}, %w;"
        " sub.u64 {d}, %x, %y; }}"
    )
    yield from line("mov.b128 : u64 u64 u64", code=wide)


def variants() -> list[Variant]:
    """Every elementwise variant, without repetition."""
    everything = (integers(), floats(), selection(), conversions(), moves())
    return list(dict.fromkeys(itertools.chain(*everything)))
