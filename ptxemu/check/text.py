"""Findings as text that an engineer can act on, a report as JSON values, PTX that is kept."""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from ptxemu.findings import ERROR, MANUAL, Access, Finding, Launch, Launches
from ptxemu.guard import GUARD, warn
from ptxemu.trusted import write_whole

# The PTX of a launch that failed is kept as a file: the lines of a report can be looked up.

FOLDER = "PTXEMU_KEEP"  # environment variable: where to
MACHINE_CODE = (".cubin", ".sass")  # files that commands put next to it
_KEPT_FILES = 32  # kernels that are left in the folder


def folder() -> Path:
    """$PTXEMU_KEEP, or one for each user below the folder of temporary files."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else Path(tempfile.gettempdir()) / f"ptxemu-{os.getuid()}"


def keep(text: str, entry: str) -> Path | None:
    """Write PTX under a name that depends on its text, and remove the oldest kept files.

    Returns None if the folder is not writable, or if other users may write it: they could replace
    our files by links. A failure here must not prevent the report.
    """
    words = "".join(c if c.isalnum() else "_" for c in entry)[:40].strip("_")
    path = folder() / f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.ptx"
    try:
        GUARD.make(path.parent)
        write_whole(path, text.encode())
        kept = sorted(path.parent.glob("*.ptx"), key=_written_at)
        for old in kept[:-_KEPT_FILES]:
            for kind in (".ptx", *MACHINE_CODE):
                old.with_suffix(kind).unlink(missing_ok=True)
    except OSError as error:
        warn(error)
        return None
    return path


def _written_at(path: Path) -> float:
    """Time of the last change; 0 for a file that another process has just removed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


# What each warp of a CTA does, in a few words.

# In the order in which they are told; the first pattern that an opcode matches is what it is.
_DUTIES = (
    (r"tcgen05\.mma|wgmma\.mma", "MMA"),
    (r"tcgen05\.cp", "TMEM copy"),
    (r"cp\.async\.bulk\.tensor\.\dd\.shared|cp\.async\.bulk\.prefetch\.tensor", "TMA load"),
    (r"cp\.async\.bulk\.shared", "bulk load"),
    (r"cp\.async\.(ca|cg)", "cp.async load"),
    (r"ldu?\.", "load"),
    (r"st\.async|red\.async", "store to a peer"),
    (r"clusterlaunchcontrol\.try_cancel", "scheduling"),
    (r"tcgen05\.ld", "TMEM read"),
    (r"tcgen05\.st", "TMEM write"),
    (r"cp\.async\.bulk\.tensor\.\dd\.global", "TMA store"),
    (r"cp\.reduce\.async\.bulk", "TMA reduction"),
    (r"cp\.async\.bulk\.global", "bulk store"),
    (r"(st|red|atom)\.", "store"),
)
_WITHIN = re.compile(r"(ld|st|red|atom)\.(?!async)(\w+\.)*(param|const|local|shared)\b")
_WAITING = re.compile(r"mbarrier|bar\.|barrier|fence")
_MOST_DUTIES = 4


def roles_of(launch: Launch) -> dict[int, str]:
    """Warp index -> name or description, of every warp that executed something."""
    given = launch.options.roles or {}
    return {
        warp: given.get(warp) or describe(opcodes)
        for warp, opcodes in sorted(launch.by_warp.items())
    } | {warp: name for warp, name in given.items() if warp not in launch.by_warp}


def describe(opcodes: Mapping[str, int]) -> str:
    """Describe executed opcodes, such as "TMA load", "MMA" or "TMEM read, epilogue TMA store"."""
    found = {_duty(opcode) for opcode, count in opcodes.items() if count} - {""}
    duties = [name for _, name in _DUTIES if name in found]
    if "TMEM read" in found:
        duties = [f"epilogue {name}" if name.endswith("store") else name for name in duties]
    if duties:
        return ", ".join(duties[:_MOST_DUTIES])
    if any(_WITHIN.match(opcode) and "shared" in opcode for opcode in opcodes):
        return "shared memory only"
    return "barriers only" if any(map(_WAITING.match, opcodes)) else "registers only"


def _duty(opcode: str) -> str:
    if _WITHIN.match(opcode):
        return ""
    return next((name for pattern, name in _DUTIES if re.match(pattern, opcode)), "")


# Findings with one cause, put together.

# Checks in the order in which their findings are read: what explains others comes first.
_ORDER = ("out-of-bounds", "race", "store-source", "uninitialised", "exited", "mbarrier", "barrier")


@dataclass
class Group:
    """Findings with one cause. `first` represents all; `launches` are those with it, in order."""

    first: Finding
    findings: list[Finding] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def add(self, finding: Finding, launch: Launch) -> None:
        self.findings.append(finding)
        if not any(launch is known for known in self.launches):
            self.launches.append(launch)

    def side(self, index: int) -> list[Access]:
        """The access at `index` of the first finding, and its like in each of the others."""
        place = self.first.accesses[index].place
        return [
            next(a for a in (f.accesses[index], *f.accesses) if a.place == place)
            for f in self.findings
        ]

    @property
    def ctas(self) -> int:
        """CTAs that an access names."""
        return len({access.cta for f in self.findings for access in f.accesses} - {""})

    @property
    def schedules(self) -> list[str]:
        """Names of the launches' schedules, such as "adversarial, seed 1"."""
        return list(dict.fromkeys(map(schedule, self.launches)))


def grouped(launches: Iterable[Launch]) -> list[Group]:
    """Group the findings of launches: errors first, then by check, then in order."""
    groups: dict[tuple[Any, ...], Group] = {}
    for launch in launches:
        for finding in launch.findings:
            key = (launch.entry, *_kind(finding, launch))
            groups.setdefault(key, Group(finding)).add(finding, launch)
    return sorted(groups.values(), key=lambda group: _rank(group.first))


def _kind(finding: Finding, launch: Launch) -> tuple[Any, ...]:
    """Return a key that is equal for findings reported together, as they have one cause.

    Without `strict`, notes on one rule of the manual share a key, however many lines break it.
    """
    alone = finding.check == MANUAL and not finding.accesses
    return (MANUAL, finding.missing) if alone and not launch.options.strict else finding.place


def _rank(finding: Finding) -> tuple[bool, int, bool]:
    """Return the rank of a finding: an early read explains an early overwrite, not the reverse."""
    known = finding.check in _ORDER
    place = _ORDER.index(finding.check) if known else len(_ORDER)
    early = finding.accesses and finding.check == "race" and finding.accesses[0].what == "read"
    return finding.severity != ERROR, place, bool(early)


def schedule(launch: Launch) -> str:
    """Policy and, where there is chance in it, the seed."""
    options = launch.options
    seed = "" if options.policy == "round-robin" else f", seed {options.seed}"
    return options.policy + seed


_IN_FULL = 3  # findings with one missing item; further ones are shortened
_LISTED = 4  # lines of Python that lack the same
_COUNTED = {"by_warp", "bytes", "counts"}
_LONGEST = 100  # characters that are shown of a name, an instruction, a line of Python


def render(report: Launches[Any]) -> str:
    """Return all findings, grouped by cause and kernel; then the verdict."""
    blocks = []
    for launches in _by_entry(report.launches):
        groups = grouped(launches)
        stops = dict.fromkeys(launch.stopped for launch in launches if launch.stopped)
        if groups or stops:
            blocks.append("\n".join(_headline(launches)))
        told: Counter[tuple[str, str, str]] = Counter()
        for group in groups:
            first = group.first
            told[first.severity, first.check, first.missing] += 1
            again = told[first.severity, first.check, first.missing] > _IN_FULL
            lines = _again(group) if again and first.accesses else _group(group, launches)
            blocks.append("\n".join(lines))
        blocks += [f"stopped: {stop}" for stop in stops]
    return "\n\n".join([*blocks, verdict(report)])


def single(finding: Finding) -> str:
    """A finding in one line, as it arises."""
    where = _short(finding.source) if finding.source else f"PTX line {finding.line}"
    names = dict.fromkeys(access.known_as for access in finding.accesses if access.known_as)
    told = [*names, *[where] * bool(finding.source or finding.line)]
    place = f" [{'; '.join(told)}]" * bool(told)
    return f"ptxemu found: {finding.severity}: {finding.check}: {finding.message}{place}"


def verdict(report: Launches[Any]) -> str:
    """Return one line: the number of findings by severity, of launches, and the rules."""
    groups = [group for some in _by_entry(report.launches) for group in grouped(some)]
    kinds = [
        f"{count(len(list(some)), severity)}"
        for severity, some in groupby(sorted(g.first.severity for g in groups))
    ]
    stopped = sum(bool(launch.stopped) for launch in report.launches)
    kinds += [f"{count(stopped, 'launch', 'launches')} stopped early"] * bool(stopped)
    rules = " and ".join(dict.fromkeys(map(rules_of, report.launches))) or "none"
    launches = count(len(report.launches), "launch", "launches")
    return f"{', '.join(kinds) or 'no findings'} in {launches}; rules: {rules}"


def document(report: Launches[Any], *, counts: bool = True) -> dict[str, Any]:
    """The report as plain JSON values, with what was counted or without; no timelines."""
    return {
        "errors": len(report.errors),
        "notes": len(report.findings) - len(report.errors),
        "launches": [_launch(launch, counts) for launch in report.launches],
    }


def rules_of(launch: Launch) -> str:
    """The rule sets that a launch was checked by."""
    if not launch.options.check:
        return "none"
    return "hardware, manual" if launch.options.strict else "hardware"


def _launch(launch: Launch, counts: bool) -> dict[str, Any]:
    apart = {"findings", "trace", "options"} | (set() if counts else _COUNTED)
    plain = [f.name for f in fields(launch) if f.name not in apart]
    return {
        **{name: getattr(launch, name) for name in plain},
        "policy": launch.options.policy,
        "seed": launch.options.seed,
        "rules": rules_of(launch),
        "roles": roles_of(launch),
        "warp_instructions": launch.warp_instructions,
        "findings": [finding.to_json() for finding in launch.findings],
    }


def _by_entry(launches: Iterable[Launch]) -> list[list[Launch]]:
    """The launches of each kernel, kernels in the order of their first launch."""
    found: dict[str, list[Launch]] = {}
    for launch in launches:
        found.setdefault(launch.entry, []).append(launch)
    return list(found.values())


# ---- lines


def _headline(launches: list[Launch]) -> Iterator[str]:
    shapes = dict.fromkeys((x.grid, x.block, x.cluster) for x in launches)
    grid, block, cluster = next(iter(shapes))
    more = f", and {count(len(shapes) - 1, 'other shape')}" if len(shapes) > 1 else ""
    yield f"kernel {cut(launches[0].entry)}"
    yield f"  grid {grid}, block {block}, cluster {cluster}{more}".replace(", 1, 1)", ")")


def _group(group: Group, launches: list[Launch]) -> Iterator[str]:
    finding = group.first
    yield f"{finding.severity}: {finding.check}: {finding.message}"
    repeated = [f"{len(group.findings)} times"] * (len(group.findings) > 1)
    repeated += [f"in {group.ctas} CTAs"] * (group.ctas > 1)
    if len(group.launches) < len(launches):
        repeated.append(f"in {len(group.launches)} of {len(launches)} launches")
        if len(set(map(schedule, launches))) > 1:
            repeated.append(f"under {'; '.join(group.schedules)}")
    elif len(launches) > 1:
        repeated.append(f"in all {len(launches)} launches")
    if repeated:
        yield f"  seen {', '.join(repeated)}"
    for index in range(len(finding.accesses)):
        yield from _side(group.side(index), group.launches[0])
    if not any(access.line == finding.line for access in finding.accesses):
        yield from (f"  {line}" for line in _place(group.findings))
        yield from _elsewhere(group.findings)
    yield from (f"  why: {finding.why}",) * bool(finding.why)
    yield from (f"  missing: {finding.missing}",) * bool(finding.missing)
    yield from (f"  rule: {finding.rule}",) * bool(finding.rule)


def _again(group: Group) -> Iterator[str]:
    """Yield a short report of a finding that lacks what several before it lack."""
    finding = group.first
    yield f"{finding.severity}: {finding.check}: {finding.message}"
    for access in finding.accesses:
        where = at_source(access.source) if access.source else f"at PTX line {access.line}"
        yield f"  {access.what or 'access'} {where}"
    yield "  missing: as above"


def _side(accesses: list[Access], launch: Launch) -> Iterator[str]:
    """Yield the agents, actions and ranges of a group's findings, then the places."""
    first = accesses[0]
    ranges = list(dict.fromkeys(map(_range, accesses)))
    more = f" (and {count(len(ranges) - 1, 'other range')})" if len(ranges) > 1 else ""
    known_as = f" ({first.known_as})" * bool(first.known_as)
    where = f" of {ranges[0]}{known_as}{more}" if first.space else ""
    yield f"  {first.what or 'access'}{where} by {_agents(accesses, launch)}"
    yield from (f"    {line}" for line in _place(accesses))


def _agents(accesses: list[Access], launch: Launch) -> str:
    """Return text such as "tensor core of warp 4 (mma) of cta(0,0,0)"."""
    first = accesses[0]
    unit = f"{first.role} of " if first.role not in first.agent + first.text else ""
    if first.warp is None:
        issuers = _executing(first.text, launch)
        issued = f", issued by {_warps(issuers, launch)}" if issuers else ""
        return f"{unit}{first.agent}{issued}"
    unit += first.agent.partition("warp ")[0]
    warps = sorted({access.warp for access in accesses if access.warp is not None})
    ctas = {access.cta for access in accesses} - {""}
    where = f" of {count(len(ctas), 'CTA')}" if len(ctas) > 1 else f" of {first.cta}"
    told = not ctas or (ctas == {first.cta} and first.cta in first.space)
    return f"{unit}{_warps(warps, launch)}{'' if told else where}"


def _executing(text: str, launch: Launch) -> list[int]:
    """The warps that executed an opcode of this instruction."""
    words = set(text.replace(";", " ").split())
    return [warp for warp, opcodes in sorted(launch.by_warp.items()) if words & opcodes.keys()]


def _warps(warps: list[int], launch: Launch) -> str:
    """Return text such as "warp 4 (mma)" or "warps 0-3, 8 (TMEM read; load)"."""
    roles = roles_of(launch)
    names = "; ".join(dict.fromkeys(roles[warp] for warp in warps if warp in roles))
    return ranges_of(warps) + f" ({names})" * bool(names)


def ranges_of(warps: Sequence[int]) -> str:
    """Return text such as "warp 4" or "warps 0-3, 8"."""
    runs: list[list[int]] = []
    for warp in warps:
        if runs and runs[-1][-1] == warp - 1:
            runs[-1].append(warp)
        else:
            runs.append([warp])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"warp{'s' * (len(warps) > 1)} {', '.join(texts)}"


def _range(access: Access) -> str:
    """Return text such as "shared memory, bytes 0x400 to 0x4ff"."""
    unit, form = ("column", "d") if access.space.startswith("tensor") else ("byte", "#x")
    extent = f"{unit} {access.first:{form}}"
    if access.last != access.first:
        extent = f"{unit}s {access.first:{form}} to {access.last:{form}}"
    space = access.space if "memory" in access.space else f"{access.space} memory"
    return f"{space.strip()}, {extent}"


def _place(items: Sequence[Access | Finding]) -> Iterator[str]:
    first = items[0]
    if first.line:
        others = len({item.line for item in items} - {first.line})
        more = f" (and {count(others, 'other')})" if others else ""
        yield f"PTX line {first.line}{more}: {cut(' '.join(first.text.split()))}"
    if first.source:
        yield at_source(first.source)


def _elsewhere(findings: list[Finding]) -> Iterator[str]:
    """Yield the Python lines of all but the first finding, if they differ."""
    others = list(dict.fromkeys(finding.source for finding in findings))[1:]
    if others:
        more = f" and {count(len(others) - _LISTED, 'other')}" * (len(others) > _LISTED)
        yield f"  also at {', '.join(map(_short, others[:_LISTED]))}{more}"


def at_source(source: str) -> str:
    """ "at path/file.py:123: the code there", as far as it can be read."""
    path, _, line = source.rpartition(":")
    code = linecache.getline(path, int(line)).strip() if line.isdigit() else ""
    return f"at {_short(source)}" + f": {cut(code)}" * bool(code)


def cut(text: str) -> str:
    """Shorten a long text."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _short(source: str) -> str:
    """A path below the working directory as it is from there."""
    path, colon, line = source.rpartition(":")
    try:
        return f"{Path(path).relative_to(Path.cwd())}{colon}{line}"
    except ValueError:
        return source


def count(number: int, single: str, many: str = "") -> str:
    """Return text such as "1 CTA" or "2 CTAs"."""
    return f"{number} {single if number == 1 else many or single + 's'}"
