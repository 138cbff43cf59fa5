"""Flat statement list -> basic blocks.

A block starts at a label, after a branch, and before an instruction that may park the warp. It also
starts before the first instruction that needs the lanes of the warp together: within a block the
active mask never changes, so one check at its start serves all of its instructions. A guarded
instruction other than a branch becomes a branch around a separate block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from ptxemu.codegen import registry
from ptxemu.errors import PtxSyntaxError, UnsupportedPtx
from ptxemu.syntax.tree import Addr, Entry, Instr, Not, Pair, Reg, Special, Sym, Vec

# Which instructions a `.target` does not have, by their opcodes.
#
# Sources: the "Target ISA Notes" of each instruction in the PTX ISA; ptxas of CUDA 13.5 was asked
# about 1,131 forms for sm_80 to sm_121a. A module without a `.target` is not judged.

_TENSOR_CORE = (100, 101, 103, 110)  # data-centre Blackwell
_BLACKWELL = (*_TENSOR_CORE, 120, 121)
# opcodes; the first sm that has them, or those whose own targets, sm_90a and its like, have them
_NEEDS: tuple[tuple[re.Pattern[str], int | tuple[int, ...]], ...] = tuple(
    (re.compile(pattern), needs)
    for pattern, needs in (
        (r"tcgen05\.|.*\.cta_group::[12]", _TENSOR_CORE),
        (r"tcgen05\.mma\..*kind::i8", (100, 101, 110)),
        (r"wgmma\.", (90,)),
        (r"(setmaxnreg|tensormap\.replace)\.", (90, *_BLACKWELL)),
        (r"mma\..*\.kind::|mma\.sp.*\.f16\.e[45]m[23]\.", (120, 121)),
        (r"(ldmatrix|stmatrix)\..*\.b8(x16\.|$)", _BLACKWELL),
        (r"cvt\..*\.(e2m1|e2m3|e3m2|ue8m0)x2", _BLACKWELL),
        (r"redux\..*\.f32|cvt\.rs\.", (100, 103)),
        (r"cp\.async\.bulk\.tensor\..*tile::scatter4", _TENSOR_CORE),
        (r"cp\.async\.bulk\.tensor\..*shared::cluster.*tile::gather4", _TENSOR_CORE),
        (r"clusterlaunchcontrol\..*\.multicast::cluster::all\.", _BLACKWELL),
        (r"cp\.async\.bulk\..*tile::gather4|clusterlaunchcontrol\.", 100),
        (r"(add|sub|mul|fma)\.(.*\.)?f32x2|(ld|st)\..*\.(v8\.|v4\.[busf]64)", 100),
        (r"(add|sub|fma)\.(.*\.)?f32\.b?f16$|cvt\.r[nz]\.(relu\.)?satfinite\.tf32\.", 100),
        (r"(min|max)\..* of three$", 100),
        (r"mma\..*\.m16n8k\d+\..*\.f64$", 90),
        (r"cp\.(reduce\.)?async\.bulk|st\.async|(stmatrix|mapa|elect|griddepcontrol)\.", 90),
        (r"red\.async|(add|min|max)\.(relu\.)?[us]16x2|(min|max)\.relu\.s32|atom\..*b128", 90),
        (r"getctarank\.|prefetch\.tensormap|tensormap\.cp_fenceproxy|multimem\.", 90),
        (r".*\.(shared::)?cluster(\.|$)|.* of %(n?cluster|is_explicit|aggr_smem)", 90),
        (r"fence\.(proxy\.(async|tensormap)|mbarrier_init|acquire|release|.*sync_restrict)", 90),
        (r"mbarrier\.((.*\.)?(expect_tx|complete_tx|relaxed)\.|try_wait\.|.* with a count$)", 90),
        (r"(red|atom)\..*(\.v[248]\.|\.bf16(x2)?$)", 90),
        (r"(add|sub|mul|ex2|tanh)\.(.*\.)?bf16(x2)?$|setp?\..*\.bf16(x2)?(\.|$)", 90),
        (r"cvt\.(?!.*\.bf16(x2)?\.f32$|(.*\.)?f32\.bf16$).*\.bf16(\.|$)", 90),
        (r"cvt\.r[nz]\.(.*\.)?tf32\.", 90),
        (r"(mma|cvt)\..*\.(e4m3|e5m2)(x2)?(\.|$)", 89),
        (r"(min|max)\.(.*\.)?xorsign\.abs\.", 86),
    )
)
# what sm_100f and its like do not have
_NO_FAMILY = re.compile(
    r"tcgen05\.(shift\.|mma\..*(kind::i8|scale_vec::)|mma\.sp\..*kind::mxf4)|cvt\.rs\.",
)
_TARGET = re.compile(r"sm_(\d+)([af]?)$")


def require_target(instr: Instr, target: str) -> None:
    """Raise UnsupportedPtx, with the line, if `target` does not have the instruction."""
    what = instr.opcode + _more(instr)
    needed = _missing(what, target)
    if needed:
        raise UnsupportedPtx(
            f"{what} needs {needed}, but the module is of .target {target}",
            line=instr.line,
            text=instr.text,
        )


def _more(instr: Instr) -> str:
    """Return what operands say beyond the opcode."""
    special = next((x.name for x in instr.operands if isinstance(x, Special)), "")
    if special:
        return f" of {special}"
    if instr.root in ("min", "max"):
        return " of three" * (len(instr.operands) > 3)
    arrives = instr.root == "mbarrier" and instr.parts[1] in ("arrive", "arrive_drop")
    if arrives and instr.operands and not {"noComplete", "expect_tx"} & set(instr.parts):
        return " with a count" * (not isinstance(instr.operands[-1], Addr))
    return ""


@cache
def _missing(opcode: str, target: str) -> str:
    """Return the target that the opcode needs, "" if `target` supports it."""
    found = _TARGET.match(target)
    if found is None:
        return ""
    number, own = int(found[1]), bool(found[2])
    for pattern, needs in _NEEDS:
        if not pattern.match(opcode):
            continue
        if isinstance(needs, int):
            if number < needs:
                return f"sm_{needs}"
        elif not (own and number in needs) or (found[2] == "f" and _NO_FAMILY.match(opcode)):
            return " or ".join(f"sm_{each}a" for each in needs)
    return ""


BRANCHES = ("bra", "brx")
EXITS = ("exit", "ret", "trap")


@dataclass
class Step:
    """An instruction with its emitter, or with the error that executing it must raise."""

    instr: Instr
    match: registry.Match | None  # None: executing it raises `error`
    error: UnsupportedPtx | None = None

    def emit(self, lower: Any) -> None:
        """State to a `lower.Lower` what the instruction does."""
        if self.match is None:
            raise self.error or UnsupportedPtx("no form", line=self.instr.line)
        result = self.match.form.emit(lower, self.instr, self.match)
        if isinstance(result, list):
            for target, value in zip(lower.each(self.instr.operands[0]), result, strict=True):
                lower.dst(target, value)
        elif result is not None:
            lower.dst(self.instr.operands[0], result)


@dataclass
class Block:
    """Straight-line code and its terminator, which branches, exits, or falls through."""

    index: int
    steps: list[Step] = field(default_factory=list)
    label: str | None = None
    guard: Reg | Not | None = None  # of the terminator
    branch: str | int | None = None  # label, then block index once linked
    # of a terminator with several targets: "brx", "call" or "ret", and labels, which are block
    # indices once linked; those of a call are where it returns to, then functions
    jump: str = ""
    targets: tuple[Any, ...] = ()
    exits: bool = False  # the terminator ends the thread (guarded by `guard` where there is one)
    trap: bool = False
    # member-mask operands; None means all live lanes
    members: list[Any] = field(default_factory=list[Any])
    live_in: set[str] = field(default_factory=set)
    live_out: set[str] = field(default_factory=set)

    @cached_property
    def join(self) -> int:
        """The next block, where this one always comes to it, and at once; else -1."""
        at_once = all(step.match and not step.match.form.blocking for step in self.steps)
        straight = self.guard is None and self.branch is None and not self.exits
        straight = straight and not self.jump
        return self.index + 1 if straight and at_once and not self.members else -1

    @cached_property
    def election(self) -> int:
        """Number of steps at the end by which all lanes but one of the warp skip the next block.

        They are elect.sync among all lanes, perhaps not.pred, and the branch; 0 if the block ends
        in another way, or if something else reads their results.
        """
        if self.guard is None or self.branch != self.index + 2:
            return 0
        negated = isinstance(self.guard, Not)
        register = self.guard.reg if isinstance(self.guard, Not) else self.guard
        written, count = [register.name], 2
        instrs = [step.instr for step in self.steps[-3:]]
        if len(instrs) > 2 and instrs[1].opcode == "not.pred" and instrs[1].operands[0] == register:
            register, negated, count = instrs[1].operands[1], not negated, 3
            written += [register.name] if isinstance(register, Reg) else []
        # The guard of a single instruction is no step of the block before it.
        if not negated or len(instrs) < count or instrs[-1].root != "bra":
            return 0
        if not _elects(instrs[-count], register):
            return 0
        leader = instrs[-count].operands[0].first
        written += [leader.name] if leader is not None else []
        return 0 if self.live_out.intersection(written) else count

    @property
    def successors(self) -> list[int]:
        after = list(dict.fromkeys(self.targets))
        if isinstance(self.branch, int):
            after.append(self.branch)
        if self.jump:
            return after
        if (self.branch is None and not self.exits) or self.guard is not None:
            after.append(self.index + 1)
        return after


def _elects(instr: Instr, register: object) -> bool:
    """Whether an instruction writes to the register which of all lanes is elected."""
    target = instr.operands[0] if instr.operands else None
    chosen = isinstance(target, Pair) and isinstance(register, Reg) and target.second == register
    return instr.root == "elect" and chosen and _member_mask(instr, "elect.sync") is None


class _Builder:
    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.blocks: list[Block] = [Block(0)]

    @property
    def current(self) -> Block:
        return self.blocks[-1]

    def cut(self) -> Block:
        """A fresh block, unless the current one is still empty."""
        block = self.current
        if block.steps or block.branch is not None or block.exits or block.jump:
            self.blocks.append(Block(len(self.blocks)))
        return self.current

    def add(self, item: Instr | str) -> None:
        if isinstance(item, str):
            self.label(item)
        elif item.root == "bra":
            self.branch(item)
        elif item.opcode in ("call.frame", "ret.frame"):
            self.jump(item, [x for x in item.operands[1:] if isinstance(x, (Sym, Vec))])
        elif item.root in EXITS and not (item.root == "trap" and item.guard):
            self.exit(item)
        elif item.guard is not None:
            self.guarded(item)
        else:
            self.unguarded(item)

    def unguarded(self, instr: Instr) -> None:
        if instr.root == "brx":
            self.branch_by_index(instr)
        else:
            self.plain(instr)

    def label(self, name: str) -> None:
        block = self.cut()
        if block.label is not None:  # two labels at one place: an empty block carries the first
            self.blocks.append(Block(len(self.blocks)))
        self.current.label = name

    def branch(self, instr: Instr) -> None:
        if not (len(instr.operands) == 1 and isinstance(instr.operands[0], Sym)):
            raise PtxSyntaxError("bra needs one label", line=instr.line, text=instr.text)
        self.current.steps.append(Step(instr, registry.match(instr)))
        self.current.guard = instr.guard
        self.current.branch = instr.operands[0].name
        self.blocks.append(Block(len(self.blocks)))

    def branch_by_index(self, instr: Instr) -> None:
        """brx.idx index, list: a branch to one of the labels of the list."""
        named = instr.operands[-1]
        labels = self.entry.lists.get(named.name) if isinstance(named, Sym) else None
        if len(instr.operands) != 2 or labels is None:
            what = "brx.idx needs an index and the label of .branchtargets"
            raise PtxSyntaxError(what, line=instr.line, text=instr.text)
        self.jump(instr, [Sym(label) for label in labels])

    def jump(self, instr: Instr, targets: list[Sym | Vec]) -> None:
        """A terminator with any number of targets."""
        self.current.steps.append(Step(instr, registry.match(instr)))
        self.current.jump = instr.root
        self.current.targets = tuple(
            label.name
            for each in targets
            for label in (each.items if isinstance(each, Vec) else (each,))
        )
        self.blocks.append(Block(len(self.blocks)))

    def exit(self, instr: Instr) -> None:
        self.current.steps.append(Step(instr, registry.match(instr)))
        self.current.guard = instr.guard
        self.current.exits = True
        self.current.trap = instr.opcode == "trap"
        self.blocks.append(Block(len(self.blocks)))

    def guarded(self, instr: Instr) -> None:
        """`@p op` -> branch over op when p is false."""
        guard = instr.guard
        assert guard is not None
        inverse = guard.reg if isinstance(guard, Not) else Not(guard)
        skip = f"{instr.line}@{len(self.blocks)}@skip"
        block = self.current
        block.guard, block.branch = inverse, skip
        self.blocks.append(Block(len(self.blocks)))
        if instr.root == "trap":
            self.current.steps.append(Step(instr, registry.match(instr)))
            self.current.exits = self.current.trap = True
        else:
            self.unguarded(instr)
        self.blocks.append(Block(len(self.blocks), label=skip))

    def plain(self, instr: Instr) -> None:
        try:
            step = Step(instr, registry.match(instr))
            require_target(instr, self.entry.target)
        except UnsupportedPtx as error:
            step = Step(instr, None, error)
        form = step.match.form if step.match else None
        if form and form.blocking:
            self.cut()
        if form and form.convergent:
            member = _member_mask(instr, form.name)
            if not self.current.members or isinstance(member, Reg):  # the register is read before
                self.cut()  # the block runs, so nothing in the block may write it
            self.current.members.append(member)
        self.current.steps.append(step)


def _member_mask(instr: Instr, name: str) -> object:
    """Return the operand that selects the lanes that take part; None for all live lanes."""
    position = {
        "shfl.sync": 4,
        "vote.sync": -1,
        "match.any.sync": 2,
        "match.all.sync": 2,
        "redux.sync": 2,
        "elect.sync": 1,
        "bar.warp.sync": 0,
    }.get(name)
    if position is None:
        return None
    if len(instr.operands) <= max(position, 0):
        message = f"{name} lacks an operand: the lanes that take part"
        raise PtxSyntaxError(message, line=instr.line, text=instr.text)
    operand = instr.operands[position]
    return None if getattr(operand, "value", None) in (-1, 0xFFFFFFFF) else operand


def build_blocks(entry: Entry) -> list[Block]:
    """The basic blocks of `entry`, linked by index; the last one always exits."""
    builder = _Builder(entry)
    for item in entry.body:
        builder.add(item)
    last = builder.cut()
    if not last.exits:
        last.exits = True
    blocks = builder.blocks
    labels = {block.label: block.index for block in blocks if block.label is not None}
    for block in blocks:
        for label in (block.branch, *block.targets):
            if isinstance(label, str) and label not in labels:
                instr = block.steps[-1].instr
                name = label.split("@")[0]
                raise PtxSyntaxError(f"unknown label {name!r}", line=instr.line, text=instr.text)
        if isinstance(block.branch, str):
            block.branch = labels[block.branch]
        block.targets = tuple(labels[label] for label in block.targets)
    return blocks


def liveness(blocks: list[Block], uses: list[set[str]], defs: list[set[str]]) -> None:
    """Fill live_in and live_out from each block's upward-exposed uses and its definitions."""
    before: list[list[int]] = [[] for _ in blocks]
    for block in blocks:
        for after in block.successors:
            before[after].append(block.index)
    pending = list(range(len(blocks)))
    queued = set(pending)
    while pending:
        index = pending.pop()
        queued.discard(index)
        block = blocks[index]
        block.live_out = set().union(*(blocks[s].live_in for s in block.successors))
        live_in = uses[index] | (block.live_out - defs[index])
        if live_in != block.live_in:
            block.live_in = live_in
            for p in before[index]:
                if p not in queued:
                    queued.add(p)
                    pending.append(p)
