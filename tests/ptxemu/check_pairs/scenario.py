"""Scenarios for the race checker: a small kernel that is right, and variants that lack one thing.

The body of a kernel is PTX in sections. `warp 1:` begins what warp 1 alone executes, `cta 0:` what
all warps of the CTA of that rank do, `cta 0 warp 1:` what one warp of it does, `all:` what everyone
does. `wait full, 0;` loops until that phase of an mbarrier is complete; `wait.cluster` is
an acquire of the cluster's scope. At the end of a line stand
marks:

    //:name               the line is called so where the checker is to name it
    //-variant            the variant lacks the line
    //~variant: other     the variant has `other` in its place, which may have a name, too

What a body can use is declared in `head`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# a and b: operands of an MMA of 128 x 8 x 16 f16, K-major without swizzle, 4096 and 256 bytes;
# %a, %b and %idesc describe it.
_HEAD = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry scenario(.param .u64 input, .param .u64 output,
    .param .align 64 .b8 from[128], .param .align 64 .b8 to[128])
{
.shared .align 1024 .b8 tile[1024];
.shared .align 1024 .b8 spare[1024];
.shared .align 1024 .b8 a[4352];
.shared .align 16 .b32 slot[4];
.reg .pred %p<4>, %again, %first, %one;
.reg .b16 %h0;
.reg .b32 %r<32>, %thread, %lane, %warp, %rank, %peer, %mine, %next, %zero;
.reg .b32 %tmem, %lanes, %idesc;
.reg .b64 %d<8>, %input, %output, %from, %to, %state, %a, %b;
.reg .b128 %q0;
mov.u32 %thread, %tid.x;
mov.u32 %lane, %laneid;
shr.u32 %warp, %thread, 5;
mov.u32 %rank, %ctaid.x;
xor.b32 %peer, %rank, 1;
mov.u32 %zero, 0;
setp.eq.u32 %one, %thread, 0;
setp.eq.u32 %first, %lane, 0;
mov.u32 %mine, tile;
add.u32 %r0, %lane, 1;
and.b32 %r0, %r0, 31;
mad.lo.u32 %next, %r0, 4, %mine;
mad.lo.u32 %mine, %lane, 4, %mine;
ld.param.u64 %input, [input];
ld.param.u64 %output, [output];
mov.u64 %from, from;
cvta.param.u64 %from, %from;
mov.u64 %to, to;
cvta.param.u64 %to, %to;
mov.u32 %r0, a;
and.b32 %r0, %r0, 0x3ffff;
shr.u32 %r0, %r0, 4;
cvt.u64.u32 %a, %r0;
or.b64 %a, %a, 0x0000401000080000;
add.u64 %b, %a, 256;
mov.u32 %idesc, 0x08020010;
"""
_MEET = {
    False: "bar.sync 0;",
    True: "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
}
_ALLOC = """setp.ne.u32 %p0, %warp, 0;
@%p0 bra ALLOCATED;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [slot], {columns};
tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
ALLOCATED:
"""
_ADDRESS = """ld.shared.b32 %tmem, [slot];
shl.b32 %lanes, %warp, 21;
add.u32 %lanes, %lanes, %tmem;
"""
_DEALLOC = """setp.ne.u32 %p0, %warp, 0;
@%p0 bra FREED;
tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tmem, {columns};
FREED:
"""
_MARK = re.compile(r"\s*//([:~-])(\w+)(?:: ((?:(?!\s*//~).)*))?")
_WAIT = re.compile(r"wait(.cluster)? (\w+), (\w+);")
_SECTION = re.compile(r"(?:cta (\d+))? ?(?:warp (\d+))?:|all:")


@dataclass(frozen=True)
class Lacks:
    """What the checker is to say: a part of what it calls missing, or of its message where it names
    no access; the lines of the two accesses; and which check it is."""

    missing: str
    earlier: str = ""
    later: str = ""
    check: str = "race"


@dataclass
class Scenario:
    """A kernel and its variants, those that lack the same under one key with their names.

    barriers  mbarriers by name with their counts, initialised before the body.
    warps     as many as the body has sections for, and four where it uses tensor memory.
    columns   of tensor memory, allocated before the body and freed behind it; address in %tmem, and
              with the lanes of the warp in %lanes. 32 where the body has one of the two.
    bare      the CTA, or cluster, does not meet before and behind the body.
    grid      CTAs; one cluster if 0.
    again     launched a second time, as a dependent of the first launch.
    """

    name: str
    body: str
    variants: dict[str, Lacks]
    warps: int = 0
    cluster: int = 1
    barriers: dict[str, int] = field(default_factory=dict)
    columns: int = -1
    bare: bool = False
    grid: int = 0
    again: bool = False

    def __post_init__(self) -> None:
        self.variants = {n: lacks for key, lacks in self.variants.items() for n in key.split()}
        code = re.sub(r"^\s*// .*", "", self.body, flags=re.MULTILINE)
        if self.columns < 0:
            self.columns = 32 if re.search(r"%(tmem|lanes)\b", code) else 0
        named = (int(number) for number in re.findall(r"warp (\d+):", code))
        self.warps = self.warps or max(4 if self.columns else 1, 1 + max(named, default=0))


@dataclass
class Written:
    """PTX, and the lines that have names."""

    lines: list[str]
    names: dict[str, int] = field(default_factory=dict)
    sections: int = 0
    loops: int = 0

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def write(scenario: Scenario, variant: str = "") -> Written:
    """The kernel, or one of its variants."""
    written = Written([*_HEAD.splitlines(), *_before(scenario).splitlines()])
    for line in scenario.body.strip().splitlines():
        _write_line(written, line.strip(), variant)
    _write_line(written, "all:", variant)
    written.lines += _behind(scenario).splitlines()
    return written


def _before(scenario: Scenario) -> str:
    barriers = scenario.barriers
    text = "".join(f".shared .align 8 .b64 {name};\n" for name in barriers)
    for name, count in barriers.items():
        text += f"@%one mbarrier.init.shared.b64 [{name}], {count};\n"
    if barriers:
        text += "@%one fence.mbarrier_init.release.cluster;\n"
    if scenario.columns:
        text += _ALLOC.format(group=scenario.cluster, columns=scenario.columns)
    if not scenario.bare:
        text += _MEET[scenario.cluster > 1] + "\n"
    return text + (_ADDRESS if scenario.columns else "")


def _behind(scenario: Scenario) -> str:
    text = "" if scenario.bare else _MEET[scenario.cluster > 1] + "\n"
    if scenario.columns:
        text += _DEALLOC.format(group=scenario.cluster, columns=scenario.columns)
    return text + "ret;\n}"


def _write_line(written: Written, line: str, variant: str) -> None:
    """One line of a body, with its marks obeyed."""
    name = ""
    while mark := _MARK.search(line):
        kind, word, rest = mark.groups()
        if word == variant and kind == "~":
            _write_line(written, rest, variant)
            return
        if word == variant and kind == "-":
            return
        name = word if kind == ":" else name
        line = line[: mark.start()] + line[mark.end() :]
    if not line:
        return
    written.lines.append(_expanded(written, line))
    if name:
        written.names[name] = len(written.lines)


def _expanded(written: Written, line: str) -> str:
    """PTX for the beginning of a section and for `wait`."""
    section = _SECTION.fullmatch(line)
    if section:
        return _begun(written, *section.groups())
    waits = _WAIT.fullmatch(line)
    if waits:
        written.loops += 1
        cluster, barrier, parity = waits.groups()
        form = "parity.acquire.cluster.shared::cta" if cluster else "parity.shared"
        loop = f"L{written.loops}"
        return (
            f"{loop}: mbarrier.try_wait.{form}.b64 %again, [{barrier}], {parity}; "
            f"@!%again bra {loop};"
        )
    return line


def _begun(written: Written, cta: str | None, warp: str | None) -> str:
    """The end of the section before, and a branch of all others around this one."""
    text = f"S{written.sections}:"
    written.sections += 1
    for what, number in (("rank", cta), ("warp", warp)):
        if number is not None:
            text += f" setp.ne.u32 %p0, %{what}, {number}; @%p0 bra S{written.sections};"
    return text
