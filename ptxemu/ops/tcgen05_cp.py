"""tcgen05.cp: PTX ISA "tcgen05.cp". It stands in the queue of the MMAs, in order with them."""

from __future__ import annotations

from typing import Any

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.async_ops import Work
from ptxemu.machine.cta import AsyncView
from ptxemu.machine.tmem_fill import NARROW, SHAPES, fill, read_matrix, shape_of
from ptxemu.machine.umma_desc import smem_desc
from ptxemu.machine.warp import Warp
from ptxemu.numerics.lanes import PerLane
from ptxemu.ops.tcgen05_mma import pipe
from ptxemu.syntax.tree import Instr

_GROUPS = "cta_group::1 cta_group::2"
_SHAPES = " ".join(dict.fromkeys(shape for shape, _ in SHAPES))
_MULTICAST = " ".join(dict.fromkeys(multicast for _, multicast in SHAPES if multicast))
_WIDENING = " ".join(("b8x16", *NARROW))


@op("tcgen05.cp", flags=f"{_GROUPS} {_SHAPES} {_MULTICAST} {_WIDENING}", section="tcgen05.cp")
def copy(c: Lower, i: Instr, f: Match) -> None:
    """[taddr], s-desc."""
    form = f.pick(*_SHAPES.split()), f.pick(*_MULTICAST.split()), f.pick(*NARROW)
    if form[:2] not in SHAPES:
        raise UnsupportedPtx(f"tcgen05.cp.{form[0]} with multicast {form[1] or 'none'}")
    widening = f.flags.intersection(_WIDENING.split())
    if widening and widening != {"b8x16", form[2]}:
        raise UnsupportedPtx(f"tcgen05.cp with formats {', '.join(sorted(widening))}")
    group = int(f.pick(*_GROUPS.split())[-1])
    c.effect(
        f"issue_fill(w, {form}, {group}, {{0}}, {{1}})",
        c.address(i.operands[0], 32),
        c.src(i.operands[1], "u64"),
    )


@runtime
def issue_fill(w: Warp, form: tuple[Any, ...], group: int, address: PerLane, desc: PerLane) -> None:
    """form: shape, multicast, source format. One copy per active lane, as each lane issues its
    own."""
    for where, source in w.each_lane(address, desc):
        _issue_one(w, form, group, where, source)


def _issue_one(w: Warp, form: tuple[Any, ...], group: int, address: int, source: int) -> None:
    ctas, queue = pipe(w, group)
    shape, desc = shape_of(*form), smem_desc(source)

    def run(work: Work) -> None:
        for cta in ctas:
            cta.reached_by(w.cta)
        for each in w.listeners:
            each.fill(work, ctas, address, desc, shape)
        for cta in ctas:
            view = AsyncView(cta) if cta.any_unfenced else cta
            fill(cta.tmem, address, shape, read_matrix(view.smem, desc, shape))

    nbytes = shape.rows * shape.nbytes * group
    w.machine.bytes["tmem.cp"] += nbytes
    label = f"cp {form[0]} to column {address & 0xFFFF}"
    work = Work("tensor core", label, run, size=nbytes // group, stream="tensor core")
    w.machine.issue(w, work, queue)
