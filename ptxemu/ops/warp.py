"""shfl, vote, match, redux, elect, activemask: PTX ISA "shfl.sync", "vote.sync", "match.sync",
"redux.sync", "elect.sync", "activemask".

The functions below the emitters run on 32-lane arrays; `mb` are the active lanes as bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.namespace import BITS, LANES, NAN, bits_mask, mask_bits
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.errors import HardwareRefusal
from ptxemu.numerics import PerLane
from ptxemu.syntax.tree import Imm, Instr

ALL = 0xFFFFFFFF


def name_lanes(c: Lower, members: object) -> None:
    """Report a member mask to listeners, except a mask of all lanes. Free without listeners."""
    everyone = isinstance(members, Imm) and int(members.value) & ALL == ALL
    if (c.observed or c.analysis) and not everyone:
        c.announce("lanes_named(w, {0})", c.src(members, "u32"))


@op("shfl.sync", types="b32", flags="up down bfly idx")
def shuffle(c: Lower, i: Instr, f: Match) -> None:
    target, valid = c.both(i.operands[0])
    mode = f.pick("up", "down", "bfly", "idx")
    name_lanes(c, i.operands[4])
    value, lane, clamp = c.srcs(i.operands[1:4], "u32")
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
        f"shuffle_lanes({{0}}, '{mode}', {{1}}, {{2}}, <mb>)",
        value,
        lane,
        clamp,
        results=results,
        repeatable=True,
    )
    c.dst(target, out)
    c.dst(valid, found)


@runtime
def pick_lane(value: PerLane, lane: int) -> int:
    """shfl.idx from one lane to all."""
    return value[lane & 31].item() if isinstance(value, np.ndarray) else value


_LANE_NUMBERS = np.arange(32, dtype=np.int64)


@runtime
def shuffle_lanes(
    value: PerLane, mode: str, lane: PerLane, clamp: PerLane, mb: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (value, in range?) as in the manual; a source out of range yields the own value."""
    value, lanes = np.broadcast_to(value, 32), _LANE_NUMBERS
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


@op("vote.sync", types="pred b32", flags="all any uni ballot")
def vote(c: Lower, i: Instr, f: Match) -> Value:
    mode = f.pick("all", "any", "uni", "ballot")
    name_lanes(c, i.operands[2])
    predicate, members = c.src(i.operands[1], "pred"), c.src(i.operands[2], "u32")
    results = [("u32" if mode == "ballot" else "pred", members.uniform)]
    text = f"vote_lanes({{0}}, '{mode}', {{1}}, <mb>)"
    return c.effect(text, predicate, members, results=results, deps=(members,), repeatable=True)[0]


def for_members(members: PerLane, mb: int, answer: Callable[[int], Any], dtype: type) -> Any:
    """Return answer(the executing lanes of a member mask).

    There is one answer if all lanes name the same mask, else an array with one answer per mask
    in the lanes that name it.
    """
    if not isinstance(members, np.ndarray):
        return answer(members & mb)
    active = bits_mask(mb)
    out: np.ndarray = np.zeros(32, dtype)
    for mask in np.unique(members[active]).tolist():
        out[active & (members == mask)] = answer(mask & mb)
    return out


@runtime
def vote_lanes(predicate: PerLane, mode: str, members: PerLane, mb: int) -> Any:
    """The answer for the member lanes that execute."""
    whole = ALL if predicate is True else 0
    votes = mask_bits(predicate) if isinstance(predicate, np.ndarray) else whole
    return for_members(
        members,
        mb,
        lambda named: _VOTES[mode](votes & named, named),
        np.uint32 if mode == "ballot" else np.bool_,
    )


_VOTES: dict[str, Callable[[int, int], int]] = {
    "ballot": lambda true, named: true,
    "all": lambda true, named: true == named,
    "any": lambda true, named: true != 0,
    "uni": lambda true, named: true in (0, named),
}


@op("activemask", types="b32")
def active_mask(c: Lower, i: Instr, f: Match) -> Value:
    return c.effect("<mb>", results=[("u32", True)])[0]


@op("match.any.sync match.all.sync", types="b32 b64", section="match.sync")
def match_lanes(c: Lower, i: Instr, f: Match) -> None:
    target, agree = c.both(i.operands[0])
    name_lanes(c, i.operands[2])
    value, members = c.src(i.operands[1], f.type.replace("b", "u")), c.src(i.operands[2], "u32")
    text = f"match_values({{0}}, {f.form.name == 'match.all.sync'}, {{1}}, <mb>)"
    out, same = c.effect(text, value, members, results=[("u32", False), ("pred", False)])
    c.dst(target, out)
    c.dst(agree, same)


@runtime
def match_values(value: PerLane, everyone: bool, members: PerLane, mb: int) -> tuple[Any, ...]:
    """Per lane, the member lanes with its value; for .all, all members or none."""
    named = np.broadcast_to(np.asarray(members, np.uint32) & np.uint32(mb), 32)
    value = np.broadcast_to(value, 32)
    equal = np.equal.outer(value, value) & ((named[:, None] & BITS) != 0)
    masks = (equal * BITS).sum(1, dtype=np.uint32)
    if not everyone:
        return masks, masks != 0
    agree = masks == named
    return np.where(agree, named, np.uint32(0)), agree


_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@op("redux.sync", types="u32 s32 b32 f32", flags="add min max and or xor abs NaN")
def reduce(c: Lower, i: Instr, f: Match) -> Value:
    mode = f.pick(*_REDUCE)
    kind = f.type.replace("b", "u")
    name_lanes(c, i.operands[2])
    value, members = c.src(i.operands[1], kind), c.src(i.operands[2], "u32")
    flags = f"{'abs' in f.flags}, {'NaN' in f.flags}, {kind == 's32'}"
    text = f"reduce_lanes({{0}}, '{mode}', {{1}}, <mb>, {flags})"
    results = [(kind, members.uniform)]
    return c.effect(text, value, members, results=results, deps=(members,), repeatable=True)[0]


@runtime
def reduce_lanes(
    value: PerLane,
    mode: str,
    members: PerLane,
    mb: int,
    absolute: bool,
    nan: bool,
    signed: bool,
) -> PerLane:
    """The reduction over the member lanes, as a Python scalar of the operand's type."""
    values = np.broadcast_to(value, 32)
    if isinstance(value, int):
        values = values.astype(np.int64)
    if values.dtype.kind == "f":
        values = np.abs(values) if absolute else values
        return for_members(
            members, mb, lambda named: _extreme(mode, values[bits_mask(named)], nan), np.float32
        )
    dtype = values.dtype.type if isinstance(value, np.ndarray) else np.int64

    def total(named: int) -> int:
        out = int(_REDUCE[mode].reduce(values[bits_mask(named)]))
        if mode != "add":
            return out
        out &= ALL
        return (out ^ 0x80000000) - 0x80000000 if signed else out

    found = for_members(members, mb, total, dtype)
    scalar = isinstance(found, np.ndarray) and not isinstance(value, np.ndarray)
    return found.astype(np.uint32) if scalar else found


def _extreme(mode: str, values: np.ndarray, nan: bool) -> float:
    """min or max with the NaN rule; -0 is below +0."""
    functions = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}
    out = float(functions[mode][nan].reduce(values))
    if out == 0:
        signs = np.signbit(values[values == 0])
        negative = signs.any() if mode == "min" else signs.all()
        return -0.0 if negative else 0.0
    return out if out == out else NAN


@op("elect.sync")
def elect(c: Lower, i: Instr, f: Match) -> list[Value]:
    """The lowest member lane that executes is the leader."""
    name_lanes(c, i.operands[1])
    members = c.src(i.operands[1], "u32")
    results = [("u32", members.uniform), ("pred", False)]
    return c.effect("elect_lane({0}, <mb>)", members, results=results, repeatable=True)


_LEADERS = [lane == LANES for lane in range(32)]


@runtime
def elect_lane(members: PerLane, mb: int) -> tuple[Any, np.ndarray]:
    """(the leader of each lane's member mask, is it this lane?)"""
    leader = for_members(members, mb, _lowest, np.uint32)
    return leader, leader == LANES if isinstance(leader, np.ndarray) else _LEADERS[leader]


def _lowest(named: int) -> int:
    if not named:
        raise HardwareRefusal("elect.sync: no lane of the member mask executes it")
    return (named & -named).bit_length() - 1
