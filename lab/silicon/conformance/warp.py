"""Instructions in which the lanes of a warp meet, as variants for the programs of `elementwise`.

Lanes form the groups of a member mask: the whole warp, or four lanes each (mask %m), so that votes
and matches have all outcomes on random operands.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.silicon.conformance.patterns import Variant, line

_MASKS = {
    "whole warps": "mov.b32 %m, 0xffffffff;",
    "groups of 4": "and.b32 %m, %m, 28; shl.b32 %m, 15, %m;",
}
_HEAD = "{{{{ .reg .pred %x, %y; .reg .b32 %m, %u; mov.u32 %m, %laneid; {mask} "


def _code(mask: str, body: str) -> str:
    """The template of a variant: `body` with {{op}} and so on."""
    return _HEAD.format(mask=mask) + body + " }}"


def _shuffles() -> Iterator[Variant]:
    head = "{{ .reg .pred %x; .reg .b32 %u; "
    tail = " selp.b32 %u, 0x40000000, 0, %x; xor.b32 {d}, {d}, %u; }}"
    pair = head + "{op} {d}|%x, {a}, {b}, {c}, 0xffffffff;" + tail
    text = "shfl.sync.{up|down|bfly|idx}.b32 : u32 u32 "
    yield from line(text + "u32<32 u32<8192", code=pair, detail="any segment")
    for clamp in (0, 31, 0x1F00 | 31, 0x1800, 0x1C1F, 0x101F):
        fixed = "{op} {d}, {a}, {b}, " + f"{clamp:#x}, 0xffffffff;"
        yield from line(text + "u32<32", code=fixed, detail=f"clamp {clamp:#x}")
    for lane in (0, 1, 5, 16, 31):
        fixed = f"{{op}} {{d}}, {{a}}, {lane}, 31, 0xffffffff;"
        yield from line(text.removesuffix(" "), code=fixed, detail=f"lane {lane}")


def variants() -> list[Variant]:
    out = list(_shuffles())
    for title, mask in _MASKS.items():
        bit = "and.b32 %u, {a}, 6; setp.ne.b32 %y, %u, 0; "
        vote = f"{bit}{{op}} %x, %y, %m; selp.b32 {{d}}, 1, 0, %x;"
        out += line("vote.sync.{all|any|uni}.pred : u32 u32", code=_code(mask, vote), detail=title)
        negated = f"{bit}{{op}} %x, !%y, %m; selp.b32 {{d}}, 1, 0, %x;"
        text = "vote.sync.{all|any|uni}.pred : u32 u32"
        out += line(text, code=_code(mask, negated), detail=f"{title}, not")
        ballot = f"{bit}{{op}} {{d}}, %y, %m;"
        out += line("vote.sync.ballot.b32 : u32 u32", code=_code(mask, ballot), detail=title)
        every = "{op} {d}|%x, {a}, %m; selp.b32 %u, 0x40000000, 0, %x; xor.b32 {d}, {d}, %u;"
        for t in ("b32 : u32 u32", "b64 : u32 u64"):
            text = f"match.{{any|all}}.sync.{t}<2"
            some = _code(mask, "{op} {d}, {a}, %m;")
            out += line(text.replace("{any|all}", "any"), code=some, detail=title)
            out += line(text.replace("{any|all}", "all"), code=_code(mask, every), detail=title)
        plain = _code(mask, "{op} {d}, {a}, %m;")
        out += line("redux.sync.{add|min|max}.T : T T", "u32 s32", plain, title)
        out += line("redux.sync.{and|or|xor}.b32 : u32 u32", code=plain, detail=title)
        elect = "{op} {d}|%x, %m; selp.b32 %u, 0x40000000, 0, %x; xor.b32 {d}, {d}, %u;"
        out += line("elect.sync : u32 u32", code=_code(mask, elect), detail=title)
    active = (
        "{{ .reg .pred %x; and.b32 {d}, {a}, 1; setp.eq.b32 %x, {d}, 0; mov.b32 {d}, 0;"
        " @%x {op} {d}; bar.warp.sync 0xffffffff; }}"
    )
    out += line("activemask.b32 : u32 u32", code=active)
    return out
