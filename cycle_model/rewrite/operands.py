"""Which registers an instruction writes and reads, as far as its text says; rather one too many."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from cycle_model.sass.instruction import Instruction

# What has no result in a register; of all others the first operand is one.
_NO_RESULT = (
    *("ST", "RED.", "REDG", "REDAS", "BAR", "BRA", "BRX", "BSSY", "BSYNC", "BREAK", "EXIT", "NOP"),
    *("FENCE", "MEMBAR"),
    *("UTC", "UTMA", "UBLK", "DEPBAR", "LDGDEPBAR", "LDGSTS", "ARRIVES", "SYNCS.EXCH", "WARPSYNC"),
    *("SYNCS.ARRIVE", "ERRBAR", "CCTL", "NANOSLEEP", "UCGABAR", "ACQBULK", "PREEXIT", "WARPGROUP"),
)
_NAME = re.compile(r"\b(UR|R|UP|P)(\d+)((?:\.\w+)*)")
_MATRIX, _DESCRIPTORS = 4, 8  # registers of an operand of mma.sync, of a tensor copy
_WIDTH = re.compile(r"\.(64|128|256)\b")


class Registers(NamedTuple):
    writes: frozenset[str]
    reads: frozenset[str]


@cache
def registers_of(item: Instruction) -> Registers:
    """Names such as R4, UR4, P0, UP0; those that are always zero or true are none."""
    parts = [part.strip() for part in item.operands.split(",")]
    results = 0 if item.opcode.startswith(_NO_RESULT) else 1
    while results and results < len(parts) and re.fullmatch(r"!?U?P(T|\d+)", parts[results]):
        results += 1  # carries and second predicates stand behind the first result
    if results and re.fullmatch(r"U?P(T|\d+)", parts[0]) and len(parts) > 1:
        results = max(results, 2)
    writes = {name for part in parts[:results] for name in _names(item, part)}
    reads = {name for part in parts[results:] for name in _names(item, part)}
    if item.opcode.startswith("R2P"):
        writes |= {f"P{k}" for k in range(7)}
    reads |= {item.guard.lstrip("!")} if item.guard else set()
    return Registers(frozenset(writes), frozenset(reads))


def _names(item: Instruction, part: str) -> set[str]:
    found: set[str] = set()
    for kind, number, modifiers in _NAME.findall(part):
        width = 1 if "P" in kind else _width(item, part, modifiers)
        found |= {f"{kind}{int(number) + k}" for k in range(width)}
    return found


def _width(item: Instruction, part: str, modifiers: str) -> int:
    """Registers of an operand, from the first on."""
    if item.word in ("LDTM", "STTM"):
        return 1 if "tmem" in part else item.repetition
    if item.word.startswith(("UTMA", "UBLK")):
        return _DESCRIPTORS
    if "[" in part:
        return 2 if ".64" in modifiers or "desc" in part else 1
    if item.word.endswith("MMA"):
        return _MATRIX
    if "HI_LO" in modifiers or ".WIDE" in item.opcode or item.word in ("FFMA2", "FADD2", "FMUL2"):
        return 2
    found = _WIDTH.search(item.opcode)
    return int(found[1]) // 32 if found else 1


def between(first: Instruction, then: Instruction) -> str:
    """A register for whose sake two instructions have to keep their order, "" where there is
    none."""
    one, other = registers_of(first), registers_of(then)
    shared = one.writes & (other.reads | other.writes) | one.reads & other.writes
    return min(shared, default="")
