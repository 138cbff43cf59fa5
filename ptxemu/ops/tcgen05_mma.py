"""tcgen05.mma, its .sp and .ws, tcgen05.commit, .cp and .shift: PTX ISA, their sections.

MMAs, copies, shifts and commits of a CTA (or of the pair whose even CTA issues) form one queue in
order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ptxemu.codegen.lower import Lower, fields
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value, constant
from ptxemu.errors import UnsupportedPtx
from ptxemu.machine.access import AsyncView
from ptxemu.machine.async_ops import Work, WorkQueue
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.mma import Mma, execute, require_sparse
from ptxemu.machine.quick_mma import Plan, ScaledPlan, plan
from ptxemu.machine.scale_factors import Scales
from ptxemu.machine.state import OFFSET_MASK, Cta, Warp
from ptxemu.machine.tensor_core import Launch, require_free_order, sums_of
from ptxemu.machine.tmem import SHIFTED_COLUMNS, require_shifted
from ptxemu.machine.tmem_fill import NARROW, SHAPES, put, read_matrix, require_room, shape_of
from ptxemu.machine.umma_desc import (
    InstrDesc,
    instr_desc,
    require_shape,
    smem_desc,
    stationary_desc,
)
from ptxemu.numerics import PerLane
from ptxemu.numerics.accumulation import Rule
from ptxemu.ops.mbarrier import barrier_address, find
from ptxemu.options import ALIGNED
from ptxemu.syntax.tree import Addr, Imm, Instr, Vec

_GROUPS = "cta_group::1 cta_group::2"
_KINDS = "kind::f16 kind::tf32 kind::f8f6f4 kind::i8"
_SCALED_KINDS = "kind::mxf8f6f4 kind::mxf4 kind::mxf4nvf4"
_BLOCKS = "block16 block32 scale_vec::1X scale_vec::2X scale_vec::4X"
_COLLECTOR = "collector::a::fill collector::a::use collector::a::lastuse collector::a::discard"


_KEEPING = ("collector::a::fill", "collector::a::use")
_NAMES = "tcgen05.mma tcgen05.mma.sp"


@op(_NAMES, flags=f"{_GROUPS} {_KINDS} {_COLLECTOR} ashift")
def multiply(c: Lower, i: Instr, f: Match) -> None:
    """[d], a-desc | [a], b-desc, {[metadata],} idesc, {disable-output-lane}, enable-input-d,
    scale-input-d."""
    (target, a, b, idesc, *rest), metadata = without_metadata(c, i)
    if "ashift" in f.flags and not isinstance(a, Addr):
        raise UnsupportedPtx("tcgen05.mma.ashift with A in shared memory")
    if "ashift" in f.flags and f.flags.intersection(_KEEPING):
        raise UnsupportedPtx("tcgen05.mma.ashift with .collector::a::fill or ::use")
    lanes: tuple[Any, ...] = ()
    if rest and isinstance(rest[0], Vec):
        lanes = rest.pop(0).items
    operands = [*mma_operands(c, target, a, b, idesc, rest[0]), *metadata]
    form = Form(
        kind=f.pick(*_KINDS.split()).removeprefix("kind::"),
        group=int(f.pick(*_GROUPS.split())[-1]),
        a_in_tmem=isinstance(a, Addr),
        scale_d=rest[1].value if len(rest) > 1 else 0,
        shift="ashift" in f.flags,
        sparse=bool(metadata),
    )
    masks = c.srcs(lanes, "u32")
    words = f"({fields(masks, len(operands))}{',' * bool(masks)})"
    c.effect(f"issue_mma(w, {tuple(form)}, ({fields(operands)}), {words})", *operands, *masks)


@op(_NAMES, flags=f"{_GROUPS} {_SCALED_KINDS} block_scale {_BLOCKS} {_COLLECTOR}")
def multiply_scaled(c: Lower, i: Instr, f: Match) -> None:
    """[d], a-desc | [a], b-desc, {[metadata],} idesc, [scale-A], [scale-B], enable-input-d."""
    if "block_scale" not in f.flags:
        raise UnsupportedPtx("tcgen05.mma of a block-scaled kind without .block_scale")
    (target, a, b, idesc, scale_a, scale_b, enable), metadata = without_metadata(c, i)
    kind = f.pick(*_SCALED_KINDS.split()).removeprefix("kind::")
    form = Form(
        kind=kind,
        group=int(f.pick(*_GROUPS.split())[-1]),
        a_in_tmem=isinstance(a, Addr),
        scale_d=0,
        blocks=_blocks(kind, f),
        sparse=bool(metadata),
    )
    operands = mma_operands(c, target, a, b, idesc, enable)
    operands += [c.address(scale_a, 32), c.address(scale_b, 32), *metadata]
    c.effect(f"issue_mma(w, {tuple(form)}, ({fields(operands)}), ())", *operands)


def without_metadata(c: Lower, i: Instr) -> tuple[list[Any], list[Value]]:
    """The operands of the dense form, and the address of a sparse A's metadata."""
    operands = [*i.operands]
    if "sp" not in i.parts[2:4]:
        return operands, []
    if len(operands) < 6 or not isinstance(operands[3], Addr):
        raise UnsupportedPtx(f"{i.opcode} without the address of sparsity metadata after B")
    return operands, [c.address(operands.pop(3), 32)]


def _blocks(kind: str, f: Match) -> int:
    """Return the number of scale factors of a row along K of one MMA.

    .block16 and .block32 are the number of elements that share one (for a sparse row, of kept
    elements). .scale_vec is the number itself. Otherwise the kind implies it.
    """
    name = f.pick(*_BLOCKS.split())
    if not name:
        if kind == "mxf4nvf4":
            raise UnsupportedPtx("tcgen05.mma.kind::mxf4nvf4 without a block size")
        return 1 if kind == "mxf8f6f4" else 2
    if name.startswith("scale_vec"):
        return int(name[-2])
    return (32 if kind == "mxf8f6f4" else 64) // int(name.removeprefix("block"))


def mma_operands(
    c: Lower, target: Addr, a: object, b: object, idesc: object, enable: object
) -> list[Value]:
    """D, A, B, the instruction descriptor and enable-input-d."""
    return [
        c.address(target, 32),
        c.address(a, 32) if isinstance(a, Addr) else c.src(a, "u64"),
        c.src(b, "u64"),
        c.src(idesc, "u32"),
        constant(bool(enable.value), "pred") if isinstance(enable, Imm) else c.src(enable, "pred"),
    ]


@op(
    "tcgen05.commit",
    types="b64",
    flags=f"{_GROUPS} mbarrier::arrive::one shared::cluster multicast::cluster",
)
def commit(c: Lower, i: Instr, f: Match) -> None:
    multicast = "multicast::cluster" in f.flags
    mask = c.src(i.operands[1], "u16") if multicast else constant(0, "u16")
    group = int(f.pick(*_GROUPS.split())[-1])
    text = f"issue_commit(w, {group}, {{0}}, {'{1}' if multicast else None})"
    c.effect(text, barrier_address(c, i.operands[0]), mask)


# -- what they do ---------------------------------------------------------------------------


def pipe(w: Warp, group: int) -> tuple[list[Any], WorkQueue]:
    """Return (the CTAs of the operation in rank order, their in-order queue)."""
    if group == 1:
        return [w.cta], w.cta.tensor_pipe
    even = w.cta.rank & ~1
    ctas = [w.cluster.cta(even), w.cluster.cta(even + 1)]
    return ctas, ctas[0].tensor_pipe


class Form(NamedTuple):
    """The static part of an MMA; `scale_d` is the scale-input-d immediate, `blocks` the number of
    scale factors of a row, 0 without, `shift` whether the rows of A move, `sparse` whether A has
    metadata, `stationary` whether it is tcgen05.mma.ws."""

    kind: str
    group: int
    a_in_tmem: bool
    scale_d: int
    blocks: int = 0
    shift: bool = False
    sparse: bool = False
    stationary: bool = False


@runtime
def issue_mma(
    w: Warp, form: tuple[Any, ...], operands: tuple[Any, ...], lanes: tuple[Any, ...]
) -> None:
    """Issue one MMA per active lane, as each lane issues its own.

    operands: D address, A (descriptor or TMEM address), B descriptor, idesc, enable-input-d.
        Block-scaled kinds add the addresses of the scale factors, a sparse A that of its
        metadata.
    lanes: the words of disable-output-lane.
    """
    if np.ndarray not in map(type, operands + lanes):  # nearly always, of one elected lane
        issue = _described(form, operands, lanes)
        for _ in range(w.frag.mask.bit_count()):
            if not _done_at_once(w, issue):
                _issue_one(w, issue)
        return
    words = next(w.each_lane(*lanes)) if lanes else ()
    for values in w.each_lane(*operands):
        issue = _described(form, values, words)
        if not _done_at_once(w, issue):
            _issue_one(w, issue)


class Issue(NamedTuple):
    """Data of an MMA that is known before it is issued.

    flops: those of all CTAs.
    plan: how machine code computes it, if it does.
    """

    what: Mma
    form: Form
    flops: int
    label: str
    plan: Plan | ScaledPlan | None


@lru_cache(maxsize=4096)
def _described(fields: tuple[Any, ...], values: tuple[Any, ...], words: tuple[int, ...]) -> Issue:
    """Decode an MMA.

    Args:
        fields: of its form.
        values: operands, in the order of `issue_mma`.
        words: words that protect lanes.
    """
    form = Form(*fields)
    d, a, b, description, accumulate, *more = values
    metadata = more.pop() if form.sparse else None
    decode = stationary_desc if form.stationary else instr_desc
    instr = decode(form.kind, description)
    require_shape(instr, form.group)
    what = Mma(
        d,
        a if form.a_in_tmem else smem_desc(a),
        smem_desc(b),
        instr,
        accumulate=bool(accumulate),
        disable_lanes=words,
        scale_input_d=form.scale_d,
        scales=Scales(more[0], more[1], form.blocks) if form.blocks else None,
        shift=form.shift,
        metadata=metadata,
    )
    require_sparse(what)
    name = f"mma{'.ws' * form.stationary}{'.sp' * form.sparse} {form.kind}"
    label = f"{name} {instr.m}x{instr.n}x{instr.k} to column {d & 0xFFFF}"
    flops = 2 * instr.m * instr.n * instr.a_k
    return Issue(what, form, flops, label, plan(what, form.group))


def _done_at_once(w: Warp, issue: Issue) -> bool:
    """Execute an MMA now in machine code, if that is all there is to it."""
    quick, machine, heard = issue.plan, w.machine, w.immediate
    ctas, queue = pipe(w, issue.form.group)
    if quick is None or (w.listeners and heard is None) or not machine.units.at_once(queue):
        return False
    if machine.options.accumulation == ALIGNED:
        return False
    for cta in ctas:
        if cta is not w.cta:
            cta.reached_by(w.cta)
    if heard is not None:
        heard.multiplies_now(w, ctas, issue.what)
    if not quick.run(ctas):
        if heard is None:
            return False
        execute(ctas, issue.what, None)
    machine.counts["mma"] += 1
    machine.counts["mma.flops"] += issue.flops
    machine.note_progress()
    return True


def _issue_one(w: Warp, issue: Issue) -> None:
    what, form, flops, label, quick = issue
    machine = w.machine
    ctas, queue = pipe(w, form.group)
    machine.counts["mma"] += 1
    machine.counts["mma.flops"] += flops
    sums = _sums(machine, form, what.instr)

    def run(work: Work) -> None:
        for cta in ctas:
            cta.reached_by(w.cta)
        for each in w.listeners:
            each.multiply(work, ctas, what)
        seen = [AsyncView(cta) if cta.any_unfenced else cta for cta in ctas]
        if sums is not None or quick is None or not quick.run(seen):
            execute(seen, what, sums)

    work = Work("tensor core", label, run, size=flops // form.group, stream="tensor core")
    w.machine.issue(w, work, queue)


def _sums(launch: Launch, form: Form, instr: InstrDesc) -> Rule | None:
    """Return the rule of sums, None if their order is free.

    No source documents the sums of weight-stationary, sparse and block-scaled MMAs, and
    of a D that is scaled first.
    """
    if form.scale_d or form.stationary or form.sparse or form.blocks:
        name = f"tcgen05.mma{'.ws' * form.stationary}{'.sp' * form.sparse} kind::{form.kind}"
        scaled = " with scale-input-d" if form.scale_d else ""
        require_free_order(launch, f"{name}{scaled}", instr.d_format)
        return None
    return sums_of(launch, "tcgen05.mma", instr.d_format, instr.a_format, instr.b_format)


@runtime
def issue_commit(w: Warp, group: int, barrier: PerLane, mask: PerLane | None) -> None:
    """Arrive once all earlier work of the pipe has completed."""
    _, queue = pipe(w, group)
    if mask is None and barrier.__class__ is int and w.frag.mask.bit_count() == 1:
        heard = w.immediate
        if (heard is not None or not w.listeners) and w.machine.units.at_once(queue):
            if heard is not None:
                heard.commits_now(w, w.cta, find(w, barrier))
            find(w, barrier).arrive(by="tensor core", of=w.label, site=w.at)
            w.machine.note_progress()
            return
    for address, chosen in w.each_lane(barrier, 0 if mask is None else mask):
        if mask is None:
            signals = [(w.cta, find(w, address))]
        else:
            offset = address & OFFSET_MASK
            ctas = [w.cluster.cta(rank) for rank in range(16) if chosen >> rank & 1]
            signals = [(cta, cta.mbarrier(offset)) for cta in ctas]

        def run(work: Work, signals: list[tuple[Cta, MBarrier]] = signals) -> None:
            for cta, signal in signals:
                for each in w.listeners:
                    each.commit_arrival(work, cta, signal)
                if not w.machine.options.check:  # or it is known which commits are waited for
                    cta.reached_by(w.cta)
                signal.arrive(by="tensor core")

        w.machine.issue(w, Work("tensor core", "commit", run, stream="tensor core"), queue)


# -- tcgen05.cp ------------------------------------------------------------------------------


_SHAPES = " ".join(dict.fromkeys(shape for shape, _ in SHAPES))
_MULTICAST = " ".join(dict.fromkeys(multicast for _, multicast in SHAPES if multicast))
_WIDENING = " ".join(("b8x16", *NARROW))


@op("tcgen05.cp", flags=f"{_GROUPS} {_SHAPES} {_MULTICAST} {_WIDENING}")
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
    """Issue a copy for each active lane; form: shape, multicast, source format."""
    for where, source in w.each_lane(address, desc):
        _issue_fill(w, form, group, where, source)


def _issue_fill(w: Warp, form: tuple[Any, ...], group: int, address: int, source: int) -> None:
    (ctas, queue), heard = pipe(w, group), w.immediate
    shape, desc = shape_of(*form), smem_desc(source)

    def run(work: Work | None) -> None:
        for cta in ctas:
            cta.reached_by(w.cta)
            require_room(cta.tmem, address, shape)
        views = (AsyncView(cta) if cta.any_unfenced else cta for cta in ctas)
        matrices = [read_matrix(view.smem, desc, shape) for view in views]
        if work is None and heard is not None:  # of what lies inside both memories
            heard.fills_now(w, ctas, address, desc, shape)
        for each in w.listeners if work is not None else ():
            each.fill(work, ctas, address, desc, shape)
        for cta, words in zip(ctas, matrices, strict=True):
            put(cta.tmem, address, shape, words)

    nbytes = shape.rows * shape.nbytes * group
    w.machine.bytes["tmem.cp"] += nbytes
    if (heard is not None or not w.listeners) and w.machine.units.at_once(queue):
        run(None)
        w.machine.note_progress()
        return
    label = f"cp {form[0]} to column {address & 0xFFFF}"
    work = Work("tensor core", label, run, size=nbytes // group, stream="tensor core")
    w.machine.issue(w, work, queue)


# tcgen05.mma.ws and tcgen05.mma.ws.sp: PTX ISA, the sections of these names.
#
# D of M = 32 and 64 takes all lanes, by parts of N (machine/umma_desc.py, `data_path`). Which
# buffer collects B makes no difference to what is computed. The mask of columns of B that count as
# zero, and the shift of the instruction descriptor, are refused unless they are zero.

_COLLECTOR_B = " ".join(
    f"collector::b{buffer}::{use}"
    for buffer in range(4)
    for use in ("fill", "use", "lastuse", "discard")
)


@op("tcgen05.mma.ws tcgen05.mma.ws.sp", flags=f"cta_group::1 {_KINDS} {_COLLECTOR_B}")
def multiply_stationary(c: Lower, i: Instr, f: Match) -> None:
    """[d], a-desc | [a], b-desc, {[metadata],} idesc, enable-input-d, {zero-column-mask}."""
    (target, a, b, idesc, enable, *mask), metadata = without_metadata(c, i)
    kind = f.pick(*_KINDS.split()).removeprefix("kind::")
    if not kind or "cta_group::1" not in f.flags:
        raise UnsupportedPtx(f"{i.opcode}: .cta_group::1 and a .kind are needed")
    form = Form(kind, 1, isinstance(a, Addr), scale_d=0, sparse=bool(metadata), stationary=True)
    if mask and not (isinstance(mask[0], Imm) and mask[0].value == 0):
        c.effect("require_no_mask(w, {0})", c.src(mask[0], "u64"))
    operands = [*mma_operands(c, target, a, b, idesc, enable), *metadata]
    c.effect(f"issue_mma(w, {tuple(form)}, ({fields(operands)}), ())", *operands)


@runtime
def require_no_mask(w: Warp, mask: PerLane) -> None:
    """Raise UnsupportedPtx if columns of B are masked."""
    for (value,) in w.each_lane(mask):
        if value:
            raise UnsupportedPtx(f"tcgen05.mma.ws with zero-column mask {value:#x}")


# tcgen05.shift: PTX ISA, "tcgen05.shift".
#
# Rows of 32 bytes move by one, those of the one quarter of the lanes that the address names: the
# manual says "for a warp", gives the shape as .31x256b ("Data Movement Shape"), and asks for a lane
# that is a multiple of 32. That a row becomes the one behind it and the last of a quarter stays was
# seen on a B200 with .ashift (CUTLASS, primitives/tcgen05/1cta_mma_a_from_tmem.py); the DSL says
# the same of this instruction (cutlass.experimental.primitives, tcgen05_shift).
#
# It runs in the order of the MMAs of its pipe, and tcgen05.commit counts it.

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
        _issue_one_shift(w, group, where)


def _issue_one_shift(w: Warp, group: int, address: int) -> None:
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
