"""Facts about all blocks of an entry, known before a block is executed.

They are how its registers are kept, which are alive where, and which may hold data that has not
arrived. The facts follow from the text alone, so they serve every way to run the entry, and the
next process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ptxemu.codegen.blocks import Block, Step, liveness
from ptxemu.codegen.lower import Lower
from ptxemu.codegen.values import RegisterFile
from ptxemu.errors import PtxEmuError, PtxSyntaxError
from ptxemu.syntax.tree import Entry


@dataclass
class Analysis:
    """Registers of an entry, by block.

    live_in, live_out: registers alive at the begin and end of a block.
    defs: registers that the block writes.
    live_scalars: registers of live_in that may be scalars.
    pending: roots of registers whose tcgen05.ld or wgmma may be incomplete when the block begins.
    """

    registers: RegisterFile
    live_in: list[set[str]]
    live_out: list[set[str]]
    defs: list[set[str]]
    live_scalars: list[frozenset[str]]
    pending: list[frozenset[str]]


def analysed(entry: Entry, blocks: list[Block], symbols: dict[str, tuple[str, int]]) -> Analysis:
    """blocks: of the entry; their live_in and live_out are filled."""
    registers = RegisterFile(entry.registers)
    registers.vary(entry.framed)
    lowered = [_lowered(block, registers, symbols) for block in blocks]
    registers.settle()
    defs = [lower.defs for lower in lowered]
    liveness(blocks, [lower.uses for lower in lowered], defs)
    registers.put_first(set().union(*(block.live_in for block in blocks)))
    live_scalars = [
        frozenset(n for n in block.live_in if not registers.always_varying(n)) for block in blocks
    ]
    return Analysis(
        registers,
        [block.live_in for block in blocks],
        [block.live_out for block in blocks],
        defs,
        live_scalars,
        _pending(blocks, lowered),
    )


def _lowered(block: Block, registers: RegisterFile, symbols: dict[str, tuple[str, int]]) -> Lower:
    lower = Lower(block, registers, symbols, analysis=True)
    try:
        lower_steps(lower)
        if block.guard is not None:
            lower.src(block.guard, "pred")
    except PtxEmuError:
        pass  # raised again, with its line, if the block is ever executed
    return lower


def lower_steps(
    lower: Lower,
    emit: Callable[[Step], None] | None = None,
    before: Callable[[Lower, int], None] | None = None,
    without: int = 0,
) -> None:
    """Emit the steps of a block, up to the first one that is an error, which is raised.

    Args:
        lower: context of the block.
        emit: called instead of `Step.emit`.
        before: called with the position of each step.
        without: number of steps at the end that are left out.
    """
    steps = lower.block.steps
    for position, step in enumerate(steps[: len(steps) - without]):
        if step.error is not None:
            raise step.error
        if before is not None:
            before(lower, position)
        lower.instr = step.instr
        try:
            if emit:
                emit(step)
            else:
                step.emit(lower)
        except PtxEmuError as error:
            raise error.at(line=step.instr.line, text=step.instr.text) from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise PtxSyntaxError(
                f"the operands do not fit {step.instr.opcode!r} ({_reason(error)})",
                line=step.instr.line,
                text=step.instr.text,
            ) from error


def _reason(error: Exception) -> str:
    return f"no place for {error}" if isinstance(error, KeyError) else str(error)


def _pending(blocks: list[Block], lowered: list[Lower]) -> list[frozenset[str]]:
    made = [frozenset(lower.unsettled()) for lower in lowered]
    before: list[frozenset[str]] = [frozenset()] * len(blocks)
    ahead = [k for k, names in enumerate(made) if names]
    while ahead:
        index = ahead.pop()
        after = made[index] if lowered[index].waits else made[index] | before[index]
        for successor in blocks[index].successors:
            if not after <= before[successor]:
                before[successor] |= after
                ahead.append(successor)
    return before
