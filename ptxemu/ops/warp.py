"""shfl, vote, match, redux, elect, activemask: PTX ISA "shfl.sync", "vote.sync", "match.sync",
"redux.sync", "elect.sync", "activemask".

The functions below the emitters run on 32-lane arrays; `mb` are the active lanes as bits.
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.namespace import BITS, LANES, bits_mask, mask_bits
from ptxemu.errors import HardwareRefusal
from ptxemu.ops.registry import Match, op, runtime
from ptxemu.syntax.tree import Imm, Instr, Pair


@op("shfl.sync", types="b32", flags="up down bfly idx", section="shfl.sync", convergent=True)
def shuffle(c: Lower, i: Instr, f: Match) -> None:
    targets = i.operands[0]
    target, valid = (
        (targets.first, targets.second) if isinstance(targets, Pair) else (targets, None)
    )
    mode = f.pick("up", "down", "bfly", "idx")
    value, lane, clamp = (
        c.src(i.operands[1], "u32"),
        c.src(i.operands[2], "u32"),
        c.src(i.operands[3], "u32"),
    )
    if value.uniform and valid is None and not c.analysis:
        c.dst(target, value)
        return
    whole = isinstance(i.operands[3], Imm) and i.operands[3].value == 31
    if mode == "idx" and whole and valid is None and lane.uniform:
        text = "pick_lane({0}, {1})"
        c.dst(target, c.effect(text, value, lane, results=[("u32", True)], deps=(lane,))[0])
        return
    results = [("u32", False), ("pred", False)]
    out, found = c.effect(
        f"shuffle_lanes({{0}}, '{mode}', {{1}}, {{2}}, <mb>)", value, lane, clamp, results=results
    )
    c.dst(target, out)
    c.dst(valid, found)


@runtime
def pick_lane(value: object, lane: int) -> int:
    """shfl.idx from one lane to all."""
    return value[lane & 31].item() if np.ndim(value) else value


@runtime
def shuffle_lanes(value: object, mode: str, lane: object, clamp: object, mb: int) -> tuple:
    """(value, in range?) after the manual's pseudocode; a source out of range yields the own
    value.
    """
    value, lanes = np.broadcast_to(value, 32), LANES.astype(np.int64)
    lane, clamp = (
        np.broadcast_to(lane, 32).astype(np.int64),
        np.broadcast_to(clamp, 32).astype(np.int64),
    )
    step, bound, segment = lane & 31, clamp & 31, clamp >> 8 & 31
    low = lanes & segment
    high = low | bound & ~segment
    if mode == "up":
        source = lanes - step
        valid = source >= high
    elif mode == "down":
        source = lanes + step
        valid = source <= high
    elif mode == "bfly":
        source = lanes ^ step
        valid = source <= high
    else:
        source = low | step & ~segment
        valid = source <= high
    source = np.where(valid, source, lanes) & 31
    return np.asarray(value, np.uint32)[source], valid


@op("vote.sync", types="pred b32", flags="all any uni ballot", section="vote.sync", convergent=True)
def vote(c: Lower, i: Instr, f: Match) -> None:
    mode = f.pick("all", "any", "uni", "ballot")
    predicate, members = c.src(i.operands[1], "pred"), c.src(i.operands[2], "u32")
    kind = "u32" if mode == "ballot" else "pred"
    uniform = members.uniform
    out = c.effect(
        f"vote_lanes({{0}}, '{mode}', {{1}}, <mb>)",
        predicate,
        members,
        results=[(kind, uniform)],
        deps=(members,),
    )
    c.dst(i.operands[0], out[0])


@runtime
def vote_lanes(predicate: object, mode: str, members: object, mb: int) -> int | bool:
    """One answer for the member lanes that execute."""
    named = members if np.ndim(members) == 0 else int(members[(mb & -mb).bit_length() - 1])
    named &= mb
    if np.ndim(predicate) == 0:
        true = named if predicate else 0
    else:
        true = mask_bits(predicate) & named
    if mode == "ballot":
        return true
    return {"all": true == named, "any": true != 0, "uni": true in (0, named)}[mode]


@op("activemask", types="b32", section="activemask")
def active_mask(c: Lower, i: Instr, f: Match) -> None:
    c.dst(i.operands[0], c.effect("<mb>", results=[("u32", True)])[0])


@op("match.any.sync match.all.sync", types="b32 b64", section="match.sync", convergent=True)
def match_lanes(c: Lower, i: Instr, f: Match) -> None:
    targets = i.operands[0]
    target, agree = (
        (targets.first, targets.second) if isinstance(targets, Pair) else (targets, None)
    )
    value, members = c.src(i.operands[1], f.type.replace("b", "u")), c.src(i.operands[2], "u32")
    everyone = f.form.name == "match.all.sync"
    out, same = c.effect(
        f"match_values({{0}}, {everyone}, {{1}}, <mb>)",
        value,
        members,
        results=[("u32", False), ("pred", False)],
    )
    c.dst(target, out)
    c.dst(agree, same)


@runtime
def match_values(value: object, everyone: bool, members: object, mb: int) -> tuple:
    """Per lane, the member lanes with its value; for .all, all members or none."""
    named = int(np.broadcast_to(members, 32)[(mb & -mb).bit_length() - 1]) & mb
    equal = np.equal.outer(np.broadcast_to(value, 32), np.broadcast_to(value, 32)) & bits_mask(
        named
    )
    masks = (equal * BITS).sum(1, dtype=np.uint32)
    if not everyone:
        return masks, masks != 0
    agree = masks == named
    return np.where(agree, np.uint32(named), np.uint32(0)), agree


_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@op(
    "redux.sync",
    types="u32 s32 b32 f32",
    flags="add min max and or xor abs NaN",
    section="redux.sync",
    convergent=True,
)
def reduce(c: Lower, i: Instr, f: Match) -> None:
    mode = f.pick(*_REDUCE)
    kind = f.type.replace("b", "u")
    value, members = c.src(i.operands[1], kind), c.src(i.operands[2], "u32")
    flags = f"'abs' in {sorted(f.flags)!r}, 'NaN' in {sorted(f.flags)!r}"
    out = c.effect(
        f"reduce_lanes({{0}}, '{mode}', {{1}}, <mb>, {flags})",
        value,
        members,
        results=[(kind, members.uniform)],
        deps=(members,),
    )
    c.dst(i.operands[0], out[0])


@runtime
def reduce_lanes(
    value: object, mode: str, members: object, mb: int, absolute: bool, nan: bool
) -> object:
    """The reduction over the member lanes, as a Python scalar of the operand's type."""
    named = members if np.ndim(members) == 0 else int(members[(mb & -mb).bit_length() - 1])
    chosen = np.broadcast_to(value, 32)[bits_mask(named & mb)]
    if isinstance(value, int):
        chosen = chosen.astype(np.int64)
    if chosen.dtype.kind == "f":
        chosen = np.abs(chosen) if absolute else chosen
        if not nan:
            function = {"min": np.fmin, "max": np.fmax}[mode]
        else:
            function = {"min": np.minimum, "max": np.maximum}[mode]
        return float(function.reduce(chosen))
    out = int(_REDUCE[mode].reduce(chosen))
    if mode == "add":
        signed = value.dtype.kind == "i" if np.ndim(value) else out < 0
        out &= 0xFFFFFFFF
        return (out ^ 0x80000000) - 0x80000000 if signed else out
    return out


@op("elect.sync", section="elect.sync", convergent=True)
def elect(c: Lower, i: Instr, f: Match) -> None:
    """The lowest member lane that executes is the leader."""
    leader, chosen = i.operands[0].first, i.operands[0].second
    members = c.src(i.operands[1], "u32")
    lane, predicate = c.effect(
        "elect_lane({0}, <mb>)", members, results=[("u32", members.uniform), ("pred", False)]
    )
    c.dst(leader, lane)
    c.dst(chosen, predicate)


_LEADERS = [lane == LANES for lane in range(32)]


@runtime
def elect_lane(members: object, mb: int) -> tuple[int, np.ndarray]:
    named = int(np.broadcast_to(members, 32)[(mb & -mb).bit_length() - 1]) & mb
    if not named:
        raise HardwareRefusal(f"elect.sync: no member of {members!r} is active")
    lane = (named & -named).bit_length() - 1
    return lane, _LEADERS[lane]
