"""wgmma.mma_async, dense and .sp, .fence, .commit_group and .wait_group of sm_90a: PTX ISA, the
sections of these names.

The registers of D are late in the sense of `Lower.settle`: a move passes them on, and what else
reads them before the wait finds poison, or whatever the schedule has brought by then.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Late, Value, constant
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.access import AsyncView
from ptxemu.machine.async_ops import Work
from ptxemu.machine.fragment import ALL
from ptxemu.machine.state import WARPS, Multiplication, Part, Registers, Warp, Warpgroup
from ptxemu.machine.tensor_core import Launch, require_free_order, selectors, sums_of
from ptxemu.machine.tmem import POISON
from ptxemu.machine.wgmma import (
    Form,
    M,
    a_of_fragments,
    product,
    read_a,
    read_b,
    smem_desc,
    with_zeros,
)
from ptxemu.numerics import PerLane
from ptxemu.numerics.accumulation import Rule
from ptxemu.syntax.tree import Imm, Instr, Vec

_TARGET = "sm_90a"
_FP8 = "e4m3 e5m2"
_INT8 = "s8 u8"
_ANY_N = range(8, 257, 8)
_INTEGER_N = (8, 24, *range(16, 257, 16))
# trailing types and what follows them; K of a dense A; N; how many immediates follow scale-d where
# A is in shared memory, the last of which A in registers does not have
_VARIANTS: tuple[tuple[tuple[str, ...], int, Any, int], ...] = (
    (("f16 f32", "f16", "f16"), 16, _ANY_N, 4),
    (("f32", "bf16", "bf16"), 16, _ANY_N, 4),
    (("f32", "tf32", "tf32"), 8, _ANY_N, 2),
    (("f16 f32", _FP8, _FP8), 32, _ANY_N, 2),
    (("s32", _INT8, _INT8), 32, _INTEGER_N, 0),
    (("s32", _INT8, _INT8, "satfinite"), 32, _INTEGER_N, 0),
    (("s32", "b1", "b1", "and", "popc"), 256, _INTEGER_N, 0),
)
_IMMEDIATES = {"f16": 4, "bf16": 4, "tf32": 2, "e4m3": 2, "e5m2": 2}
_ALIGNED = "sync aligned"
_DENSE, _SPARSE = "wgmma.mma_async", "wgmma.mma_async.sp"


def multiply(c: Lower, i: Instr, f: Match) -> list[Value]:
    """d, a-desc | a, b-desc, {metadata, selector,} scale-d {, imm-scale-a, imm-scale-b
    {, imm-trans-a, imm-trans-b}}."""
    d, a, b, *rest = i.operands
    sparse = f.form.name == _SPARSE
    metadata, selector = (rest.pop(0), rest.pop(0)) if sparse and len(rest) > 2 else (None, None)
    scale, *rest = rest
    form = _form(i, f, isinstance(a, Vec), selector, [int(each.value) for each in rest])
    held = c.each(d)
    of_a = c.each(a) if form.a_in_registers else ()
    if len(held) != form.d_count or len(of_a) not in (0, 4):
        raise UnsupportedPtx(f"{i.opcode} with fragments of {len(held)} and {len(of_a)} registers")
    before = [_passed_on(c, each) for each in held]
    fragment = c.srcs((*of_a, *([metadata] if sparse else ())), "u32")
    others = [
        *([] if of_a else [c.src(a, "u64")]),
        c.src(b, "u64"),
        constant(bool(scale.value), "pred") if isinstance(scale, Imm) else c.src(scale, "pred"),
    ]
    c.settle(*fragment, *others)
    operands = (*before, *fragment, *others)
    names = [f"{{{k}}}" for k in range(len(operands))]
    where = "None, " * bool(of_a) + ", ".join(names[len(before) + len(fragment) :])
    text = (
        f"wgmma_issue(w, {tuple(form)}, {i.line}, ({', '.join(names[: len(before)])}),"
        f" ({''.join(name + ', ' for name in names[len(before) :][: len(fragment)])}), {where})"
    )
    type_ = "u32" if form.d == "f16" else form.d
    results = [(type_, False)] * form.d_count
    values = c.effect(text, *operands, results=results, matrix=True, settles=False)
    if c.late or c.analysis:
        late = Late(values[0])
        for value in values:
            value.late = late
    return values


for _types, _k, _sizes, _ in _VARIANTS:
    for _name, _depth in ((_DENSE, _k), (_SPARSE, 2 * _k)):
        if _types[1] == "b1" and _name == _SPARSE:
            continue
        _shapes = " ".join(f"m{M}n{n}k{_depth}" for n in _sizes)
        op(
            _name,
            types=_types,
            flags=f"{_ALIGNED} {_shapes}{' satfinite' * (_types == _VARIANTS[4][0])}",
        )(multiply)


def _form(
    i: Instr, f: Match, a_in_registers: bool, selector: object, immediates: list[int]
) -> Form:
    """The form, of one shape and with the immediates that its types have."""
    shapes = [flag for flag in f.flags if flag.startswith(f"m{M}n")]
    d, a, b = f.types[:3]
    expected = _IMMEDIATES.get(a, 0)
    if expected == 4 and a_in_registers:
        expected = 3
    scales, transposes = immediates[:2], immediates[2:]
    right = (
        len(shapes) == 1
        and i.opcode.startswith(f"{f.form.name}.sync.aligned.m{M}n")
        and len(immediates) == expected
        and set(scales) <= {-1, 1}
        and set(transposes) <= {0, 1}
    )
    if not right:
        raise UnsupportedPtx(f"unsupported form of wgmma {i.opcode!r} with {immediates}")
    n, k = (int(part) for part in shapes[0].removeprefix(f"m{M}n").split("k"))
    form = Form(
        n=n,
        k=k,
        d=d,
        a=a,
        b=b,
        a_in_registers=a_in_registers,
        a_mn_major=bool(transposes[0]) if len(transposes) == 2 else False,
        b_mn_major=bool(transposes[-1]) if transposes else False,
        negate=len(set(scales)) == 2,
        saturate="satfinite" in i.parts,
    )
    return form if f.form.name == _DENSE else _sparse(i, form, selector)


def _sparse(i: Instr, form: Form, selector: object) -> Form:
    """The form with a selector that its shape has; the manual leaves all others undefined."""
    allowed = selectors(form.row_bits)
    if not isinstance(selector, Imm) or selector.value not in allowed:
        raise UnsupportedPtx(
            f"{i.opcode} with a sparsity selector other than an immediate of {[*allowed]}"
        )
    return form._replace(selector=int(selector.value))


def _passed_on(c: Lower, operand: object) -> Value:
    """A register of D as it is held, which an operation in flight may be about to write."""
    value = c.raw(operand, 32)
    return c.convert(value, "u32") if value.uniform else value


@op("wgmma.fence", flags=_ALIGNED)
def fence(c: Lower, i: Instr, f: Match) -> None:
    """Order registers and later operations; only a checker uses it."""
    c.effect("wgmma_group(w)")


@op("wgmma.commit_group", flags=_ALIGNED)
def commit(c: Lower, i: Instr, f: Match) -> None:
    c.effect("wgmma_group(w).commit(w)")


@op("wgmma.wait_group", flags=_ALIGNED, blocking=True)
def wait(c: Lower, i: Instr, f: Match) -> None:
    c.effect(f"wgmma_wait(w, {int(i.operands[0].value)})", parks=True)


# -- what they do ---------------------------------------------------------------------------


@runtime
def wgmma_group(w: Warp) -> Any:
    """The warpgroup of a warp that executes one of these instructions."""
    target = w.program.entry.target
    if target != _TARGET:
        raise UnsupportedPtx(f"wgmma needs .target {_TARGET}, but this is {target or 'none'}")
    if w.frag.mask != ALL:
        raise HardwareRefusal(f"wgmma by lanes {w.frag.mask:#010x} of {w.name()}; must be all 32")
    return _warpgroup_of(w)


@lru_cache(maxsize=256)
def _form_of(fields: tuple[Any, ...]) -> Form:
    return Form(*fields)


@runtime
def wgmma_issue(
    w: Warp,
    form: tuple[Any, ...],
    line: int,
    d: Registers,
    fragment: Registers,
    a: PerLane | None,
    b: PerLane,
    accumulate: PerLane,
) -> np.ndarray:
    """Issue a wgmma.mma_async, and return [register, lane] of D, written when the operation runs.

    Args:
        w: the warp.
        form: fields of the form.
        line: line of the instruction.
        d: registers of D.
        fragment: A in registers, and metadata.
        a: descriptor of an A in shared memory, else None.
        b: descriptor of B.
        accumulate: scale-d.
    """
    group, known = wgmma_group(w), _form_of(form)
    _sums(w.machine, known)  # refuses what is not known when the instruction is executed
    descriptor = None if a is None else _agreed(w, a, "descriptor of A")
    operands = (
        known,
        line,
        descriptor,
        _agreed(w, b, "descriptor of B"),
        bool(_agreed(w, accumulate, "scale-d")),
    )
    for value in operands[2:4]:
        if value is not None:
            smem_desc(value)  # refuses a bad one when the instruction is executed
    of_a = 4 if known.a_in_registers else 0
    out = np.full((known.d_count, 32), POISON, np.uint32)
    part = Part(w, fragment[:of_a], d, out, fragment[of_a:])
    whole = group.add(part, operands)
    for each in w.listeners:
        each.warpgroup_joined(w, group, group.of(w).issued)
    if whole is not None:
        _issue(w, whole)
    return part.out.view({"f32": np.float32, "s32": np.int32}.get(known.d, np.uint32))


def _agreed(w: Warp, value: PerLane, what: str) -> Any:
    return w.agreed(value, f"the {what} of a wgmma")


def _issue(w: Warp, what: Multiplication) -> None:
    """The last of the four warps has come."""
    form = what.operands[0]

    def run(work: Work) -> None:
        of_a, of_b = _operands(what)
        for each in w.listeners:  # of what lies inside shared memory
            each.warpgroup_multiply(what)
        _run(what, of_a, of_b)

    flops = 2 * M * form.n * form.a_k
    w.machine.counts["mma"] += 1
    w.machine.counts["mma.flops"] += flops
    what.work = Work("tensor core", form.label, run, size=flops)
    w.machine.issue(w, what.work, what.group.queue)
    waiters, what.waiters = what.waiters, []
    for warp, fragment in waiters:
        warp.wake(fragment)


def _sums(launch: Launch, form: Form) -> Rule | None:
    """Return the rule of sums, None if their order is free."""
    if form.selector is not None:
        require_free_order(launch, _SPARSE, form.d)
        return None
    return sums_of(launch, _DENSE, form.d, form.a, form.b)


def _operands(what: Multiplication) -> tuple[np.ndarray, np.ndarray]:
    """A and B, as `read_a` and `read_b` give them."""
    form, _, a, b, _ = what.operands
    cta = what.group.cta
    smem = AsyncView(cta).smem if cta.any_unfenced else cta.smem
    if a is None:
        parts = [part.a for part in what.parts if part is not None]
        of_a = a_of_fragments(_stacked(parts), form.a)
    else:
        of_a = read_a(smem, smem_desc(a), form)
    return of_a, read_b(smem, smem_desc(b), form)


def _run(what: Multiplication, of_a: np.ndarray, of_b: np.ndarray) -> None:
    form, _, _, _, accumulate = what.operands
    parts, stored = [part for part in what.parts if part is not None], None
    if form.selector is not None:
        metadata, kept = _stacked([part.metadata for part in parts])[:, 0], of_a
        of_a = with_zeros(form, kept, metadata)
        if not np.isfinite(of_b).all():
            stored = with_zeros(form, np.ones_like(kept), metadata) != 0
    before = _stacked([part.d for part in parts]) if accumulate else None
    sums = _sums(what.group.cta.machine, form)
    for part, bits in zip(parts, product(form, of_a, of_b, before, sums, stored), strict=True):
        part.out[:] = bits
        part.a = part.d = part.metadata = ()


def _stacked(fragments: list[Registers]) -> np.ndarray:
    """Return uint32 [warp, register, lane]."""
    out = np.empty((WARPS, len(fragments[0]), 32), np.uint32)
    for rows, fragment in zip(out, fragments, strict=True):
        for row, register in zip(rows, fragment, strict=True):
            row[:] = register.view(np.uint32) if isinstance(register, np.ndarray) else register
    return out


@runtime
def wgmma_wait(w: Warp, allowed: int) -> bool | None:
    """All but the newest `allowed` groups are complete; None: parked, as a warp has yet to come."""
    group = wgmma_group(w)
    last = 0
    for each in group.awaited(w, allowed):
        if each.work is None:
            each.waiters.append((w, w.frag))
            w.park(each)
            return None
        last = each.number
        w.machine.units.force(each.work)
    group.complete(w, last)
    for each in w.listeners:
        each.warpgroup_waited(w, group, last)
    return True


def _warpgroup_of(w: Warp) -> Warpgroup:
    """Return the warpgroup of a warp, all of whose lanes must be active.

    Raises HardwareRefusal unless it has four warps of 32 threads.
    """
    first = w.index // WARPS * WARPS
    found = w.cta.warpgroups.get(first)
    if found is None:
        if len(w.cta.warps) < first + WARPS:
            raise HardwareRefusal(f"wgmma by {w.name()}: its warpgroup has fewer than four warps")
        found = w.cta.warpgroups[first] = Warpgroup(w.cta, first)
    return found
