"""Scenarios for the race checker: a small kernel that is right, and variants that lack one thing.

The body of a kernel is PTX in sections. `warp 1:` begins code that only warp 1 executes, `cta 0:`
code of all warps of the CTA of that rank, `cta 0 warp 1:` code of one warp of it, `all:` code of
all warps. The first line of a section may follow the colon. `wait full, 0;` loops until that phase
of an mbarrier is complete; `wait.cluster` is an acquire of the cluster's scope, `wait.cta` one of
the CTA's. Marks may follow a line:

    //:name               name of the line, if the checker is to report it
    //-variant            the variant lacks the line
    //~variant: other     the variant has `other` instead, which may also have a name

`_HEAD` declares what a body can use; pieces that many share are in `parts.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial

import numpy as np

import ptxemu
from lab.silicon.conformance.ptx_program import aligned_copy
from ptxemu.machine import tensor_map
from ptxemu.report import LaunchReport
from tests.ptxemu.check_pairs import parts
from tests.ptxemu.kernels import HEAD

# Every lane has a word: %mine in the tile, %theirs in the peer's tile, %in and %out in input and
# output, which are global memory. %next is the word of the next lane in the tile. a and b: operands
# of an MMA of 128 x 8 x 16 f16, K-major without swizzle, 4096 and 256 bytes; %a, %b and %idesc
# describe it.
_HEAD = (
    HEAD
    + """\
.visible .entry scenario(.param .u64 input, .param .u64 output,
    .param .align 64 .b8 from[128], .param .align 64 .b8 to[128])
{
.shared .align 1024 .b8 tile[1024];
.shared .align 1024 .b8 spare[1024];
.shared .align 1024 .b8 a[4352];
.shared .align 16 .b32 slot[4];
.reg .pred %p<4>, %again, %first, %one;
.reg .b16 %h0;
.reg .b32 %r<32>, %thread, %lane, %warp, %rank, %peer, %mine, %next, %theirs, %zero;
.reg .b32 %tmem, %lanes, %idesc;
.reg .b64 %d<8>, %input, %output, %in, %out, %from, %to, %state, %a, %b;
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
mad.wide.u32 %in, %lane, 4, %input;
mad.wide.u32 %out, %lane, 4, %output;
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
)
_THEIRS = "mapa.shared::cluster.u32 %theirs, %mine, %peer;"
_MARK = re.compile(r"\s*//([:~-])(\w+)(?:: ((?:(?!\s*//~).)*))?")
_WAIT = re.compile(r"wait(\.cluster|\.cta)? (\w+), (\w+);")
_LANES = 32
_OF_A_CLUSTER = re.compile(r"%(peer|theirs)\b|barrier\.cluster|cta_group::2")
_SECTION = re.compile(r"(?:all|(?:cta (\d+))? ?(?:warp (\d+))?):(?:\s+(.*)|$)")


@dataclass(frozen=True)
class Lacks:
    """Variants that lack the same thing, and the expected finding.

    variants: their names.
    missing: a part of what the finding calls missing, or of its message if it names no access.
    earlier, later: named lines of the two accesses.
    check: which check reports it.
    """

    variants: str
    missing: str
    earlier: str = ""
    later: str = ""
    check: str = "race"


class Scenario:
    """A kernel and its variants.

    barriers: counts of mbarriers by name, initialised before the body. Those that the body waits
    for or commits to may be left out: their count is 1 if one thread arrives or commits, else one
    for each lane of a warp. `done` is for the commit after the last MMA or copy; all warps wait for
    it at the end of the body.
    warps: at least one for each section of the body, and four if it uses tensor memory: 32 columns,
    with their address in %tmem, and that of the warp's lanes in %lanes.
    cluster: number of CTAs: two if the body uses a peer, a pair or the cluster's barrier.
    grid: number of CTAs: at least one for each section of the body.
    bare: no barrier of the CTA, or cluster, surrounds the body, which allocates and frees tensor
    memory itself.
    again: whether the kernel is launched a second time, as a dependent of the first launch.
    """

    def __init__(
        self,
        body: str,
        *lacks: Lacks,
        warps: int = 0,
        barriers: dict[str, int] | None = None,
        grid: int = 0,
        bare: bool = False,
        again: bool = False,
    ) -> None:
        code = re.sub(r"^\s*// .*", "", body, flags=re.MULTILINE)
        tensor = re.search(r"%(tmem|lanes)\b", code) is not None
        self.body, self.bare, self.again = body, bare, again
        self.allocates = tensor and not bare
        self.variants = {variant: lack for lack in lacks for variant in lack.variants.split()}
        self.warps = max(warps, 4 if tensor else 1, _sections(code, "warp"))
        self.cluster = 2 if _OF_A_CLUSTER.search(code) else 1
        self.grid = max(grid, self.cluster, _sections(code, "cta"))
        self.barriers = _mbarriers(code) | (barriers or {})


def _sections(code: str, kind: str) -> int:
    """Return the highest section number plus one."""
    return 1 + max((int(number) for number in re.findall(rf"{kind} (\d+)", code)), default=0)


def _mbarriers(code: str) -> dict[str, int]:
    """Counts of the mbarriers that a body waits for or commits to, and does not initialise
    itself."""
    own = re.findall(r"mbarrier\.init\S* \[(\w+)\]", code)
    commits = re.findall(r"tcgen05\.commit.*?\[(\w+)\]", code)
    alone = re.findall(r"@%(?:first|one) mbarrier\.arrive.*?\[(\w+)\]", code) + commits
    names = re.findall(r"\bwait(?:\.cluster|\.cta)? (\w+),|_wait\S* %\w+, \[(\w+)\]", code)
    names = [name or other for name, other in names] + commits
    return {name: 1 if name in alone else _LANES for name in names if name not in own}


def handed_over(
    *lacks: Lacks,
    wait: str,
    signal: str = "",
    fill: str = "st.shared.b32 [%mine], %lane; //:fill",
    use: str = "ld.shared.b32 %r1, [%mine]; //:use",
    barriers: dict[str, int] | None = None,
) -> Scenario:
    """Warp 0 fills a word per lane and signals; warp 1 waits, and uses them."""
    body = f"""
        warp 0:
            {fill}
            {signal}
        warp 1:
            {wait}
            {use}
    """
    return Scenario(body, *lacks, barriers=barriers)


@dataclass
class Written:
    """PTX, with its named lines."""

    lines: list[str]
    names: dict[str, int] = field(default_factory=dict)
    sections: int = 0

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def write(scenario: Scenario, variant: str = "") -> Written:
    """Write the kernel, or one of its variants."""
    written = Written(_HEAD.splitlines())
    for line in _whole(scenario).splitlines():
        _write_line(written, line.strip(), variant)
    return written


def _whole(scenario: Scenario) -> str:
    """Return the body with the code before and after it."""
    barriers, ctas = scenario.barriers, scenario.cluster
    meet = "" if scenario.bare else parts.MEET if ctas > 1 else "bar.sync 0;"
    before = [f".shared .align 8 .b64 {name};" for name in barriers]
    before += [f"@%one mbarrier.init.shared.b64 [{name}], {barriers[name]};" for name in barriers]
    if barriers:
        before.append("@%one fence.mbarrier_init.release.cluster;")
    if scenario.allocates:
        before += [f"warp 0: {parts.alloc(ctas)}", "all:"]
    before.append(meet)
    if ctas > 1:
        before.append(_THEIRS)
    if scenario.allocates:
        before.append(parts.ADDRESS)
    behind = ["all:"]
    if "done" in barriers and not scenario.bare:
        behind.append("wait.cluster done, 0;" if ctas > 1 else "wait done, 0;")
    behind.append(meet)
    if scenario.allocates:
        behind += [f"warp 0: {parts.dealloc(ctas)}", "all:"]
    return "\n".join([*before, scenario.body, *behind, "ret;", "}"])


def _write_line(written: Written, line: str, variant: str) -> None:
    """Write one line of a body, and apply its marks."""
    if section := _SECTION.match(line):
        cta, warp, line = section.groups(default="")
        written.lines.append(_begun(written, cta, warp))
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
        assert name not in written.names, f"two lines are called {name}"
        written.names[name] = len(written.lines)


def _expanded(written: Written, line: str) -> str:
    """Return the PTX of `wait`."""
    waits = _WAIT.fullmatch(line)
    if not waits:
        return line
    scope, barrier, parity = waits.groups()
    form = f"parity.acquire{scope}.shared::cta" if scope else "parity.shared"
    test = f"mbarrier.try_wait.{form}.b64 %again, [{barrier}], {parity};"
    label = f"L{len(written.lines)}"
    return f"{label}: {test} @!%again bra {label};"


def _begun(written: Written, cta: str, warp: str) -> str:
    """End the previous section, and let all other warps branch around this one."""
    text = f"S{written.sections}:"
    written.sections += 1
    for what, number in (("rank", cta), ("warp", warp)):
        if number:
            text += f" setp.ne.u32 %p0, %{what}, {number}; @%p0 bra S{written.sections};"
    return text


_ROWS, _COLUMNS = 128, 32  # words; a box is one row


def _tensor(buffer: np.ndarray) -> bytes:
    shape, box = (_COLUMNS, _ROWS), (_COLUMNS, 1)
    return bytes(tensor_map.encode(buffer.ctypes.data, shape, (4 * _COLUMNS,), box, "u32", "none"))


def launch(
    scenario: Scenario,
    module: ptxemu.Module,
    policy: str = "round-robin",
    *,
    dependent: bool = True,
    freed: slice = slice(0),
    check: bool = True,
    strict: bool = False,
) -> LaunchReport:
    """Launch a scenario, again if it asks for that.

    freed: which of the two buffers count as new when the second launch begins.
    """
    source, target = (aligned_copy(np.zeros(_ROWS * _COLUMNS, np.uint32)) for _ in range(2))
    launched = partial(
        module.launch,
        grid=(scenario.grid,),
        block=(32 * scenario.warps,),
        cluster=(scenario.cluster, 1, 1),
        params=[
            *(buffer.ctypes.data.to_bytes(8, "little") for buffer in (source, target)),
            *(_tensor(buffer) for buffer in (source, target)),
        ],
        memory=[source, target],
        options=ptxemu.Options(policy=policy, check=check, strict=strict, limit=20),
    )
    report = launched()
    if not scenario.again:
        return report
    ranges = [(b.ctypes.data, b.ctypes.data + b.nbytes, True) for b in (source, target)]
    return launched(dependent=dependent, freed=ranges[freed])
