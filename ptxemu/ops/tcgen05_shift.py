"""tcgen05.shift: PTX ISA, "tcgen05.shift".

Rows of 32 bytes move by one, those of the one quarter of the lanes that the address names: the
manual says "for a warp", gives the shape as .31x256b ("Data Movement Shape"), and asks for a lane
that is a multiple of 32. That a row becomes the one behind it and the last of a quarter stays was
seen on a B200 with .ashift (CUTLASS, primitives/tcgen05/1cta_mma_a_from_tmem.py); the DSL says the
same of this instruction (cutlass.experimental.primitives, tcgen05_shift).

It runs in the order of the MMAs of its pipe, and tcgen05.commit counts it.
"""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.async_ops import Work
from ptxemu.machine.state import Warp
from ptxemu.machine.tmem import SHIFTED_COLUMNS, require_shifted
from ptxemu.numerics import PerLane
from ptxemu.ops.tcgen05_mma import pipe
from ptxemu.syntax.tree import Instr

_GROUPS = "cta_group::1 cta_group::2"
_BYTES = 31 * SHIFTED_COLUMNS * 4  # that move in one CTA


@op("tcgen05.shift", flags=f"{_GROUPS} down")
def shift(c: Lower, i: Instr, f: Match) -> None:
    """[taddr]."""
    group = f.pick(*_GROUPS.split())
    if "down" not in f.flags or not group:
        raise UnsupportedPtx(f"{i.opcode}: a .cta_group and .down are needed")
    c.effect(f"issue_shift(w, {group[-1]}, {{0}})", c.address(i.operands[0], 32))


@runtime
def issue_shift(w: Warp, group: int, address: PerLane) -> None:
    """Each active lane issues a shift of its own."""
    for (where,) in w.each_lane(address):
        require_shifted(where)
        _issue_one(w, group, where)


def _issue_one(w: Warp, group: int, address: int) -> None:
    ctas, queue = pipe(w, group)

    def run(work: Work) -> None:
        for cta in ctas:
            cta.reached_by(w.cta)
            cta.tmem.check(address & 0xFFFF, SHIFTED_COLUMNS)
        for each in w.listeners:
            each.shift(work, ctas, address)
        for cta in ctas:
            cta.tmem.shift_rows(address)

    label = f"shift of column {address & 0xFFFF}"
    work = Work("tensor core", label, run, size=_BYTES, stream="tensor core")
    w.machine.issue(w, work, queue)
