"""How the floating-point sums of a launch's MMAs are made: fast, or as the tensor core does."""

from __future__ import annotations

from typing import Protocol

from ptxemu.codegen.program import Program
from ptxemu.numerics.accumulation import Rule, Types, rule, unknown
from ptxemu.options import ALIGNED, Options


class Launch(Protocol):
    """What is asked of a machine."""

    options: Options
    program: Program


def sums_of(launch: Launch, instruction: str, d: str, a: str, b: str) -> Rule | None:
    """The rule of an instruction with these types of D, A and B, None where the order is free or
    the sums are exact. Raises UnsupportedPtx where nobody knows it."""
    if launch.options.accumulation != ALIGNED or d not in ("f16", "f32"):
        return None
    return rule(instruction, launch.program.entry.target, Types(d, a, b))


def require_free_order(launch: Launch, instruction: str, d: str) -> None:
    """Refuse aligned sums of an instruction of which no GPU and no publication has said how."""
    if launch.options.accumulation == ALIGNED and d in ("f16", "f32"):
        raise unknown(instruction)
