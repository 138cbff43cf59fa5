"""A plan as text: sections of aligned rows for roles, edges, shared memory and tensor memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kernelkit.plan import hw
from kernelkit.plan.barriers import BarrierPlan
from kernelkit.plan.edges import Edge, EdgePlan, Signal
from kernelkit.plan.smem import SmemPlan
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import RolePlan

RULER_CELLS = 32  # characters that stand for the TMEM columns

Rows = list[tuple[str, ...]]
Section = tuple[str, Rows]  # title, rows of cells


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def parts_of(plan: Any, roles_: RolePlan | None = None) -> tuple[Section, ...]:
    """Roles, edges, and the memories that there are; roles_: where the plan does not hold them."""
    of_warps = [roles(roles_ or plan.roles), edges(plan.edges)]
    named = getattr(plan, "barriers", None)
    if named and named.barriers:
        of_warps.append(named_barriers(named))
    tmem = getattr(plan, "tmem", None)
    return *of_warps, shared_memory(plan.smem), *([tensor_memory(tmem)] if tmem else [])


def lines_of(sections: Iterable[Section]) -> Iterator[str]:
    """Every section with its title, an empty line in front of it."""
    for title, rows in sections:
        yield f"\n{title}"
        yield from _aligned(rows)


def roles(plan: RolePlan) -> Section:
    """A row per role: its warps, its registers, its duty."""
    rows = []
    for role in plan.roles:
        last = f"-{role.last_warp}" if role.warps > 1 else ""
        registers = f"{role.registers} registers" if role.registers else "registers as compiled"
        rows.append((role.name, f"warp {role.first_warp}{last}", registers, role.duty))
    return f"Roles: {plan.warps} warps, {plan.threads} threads", rows


def edges(plan: EdgePlan) -> Section:
    """A row per edge: payload, stages, what fills a stage, what frees it."""
    rows = [
        (
            edge.name,
            f"{edge.producer} -> {edge.consumer}",
            f"{edge.stages} x {edge.payload}",
            f"full: {_full(plan, edge)}",
            f"free: {_freed(plan, edge)}",
        )
        for edge in plan.edges
    ]
    return f"Edges: {sum(edge.barriers for edge in plan.edges)} mbarriers", rows


def named_barriers(plan: BarrierPlan) -> Section:
    """A row per named barrier: its ids, who meets there, and what is so then."""
    rows = []
    for barrier in plan.barriers:
        ids = plan.ids(barrier.name)
        last = f"-{ids[-1]}" if len(ids) > 1 else ""
        threads = f"{barrier.threads} threads of {', '.join(barrier.roles)}"
        rows.append((f"{ids[0]}{last}", barrier.name, threads, barrier.meaning))
    return f"Named barriers: {sum(barrier.count for barrier in plan.barriers)}", rows


def shared_memory(plan: SmemPlan) -> Section:
    """A row per buffer with its byte range."""
    offsets = plan.offsets()
    rows = [
        (
            byte_range(*offsets[buffer.name]),
            buffer.name,
            f"{buffer.stages} x {buffer.stage_bytes:,} bytes",
            f"over {buffer.over}" if buffer.over else f"aligned to {buffer.align}",
        )
        for buffer in plan.buffers
        if buffer.bytes
    ]
    return smem_title(plan.bytes, plan.limit), rows


def smem_title(used: int, limit: int = hw.SMEM_BYTES_PER_CTA) -> str:
    """Title of the section about shared memory."""
    return f"Shared memory: {used:,} of {limit:,} bytes"


def byte_range(begin: int, end: int) -> str:
    return f"[{begin:>7,}, {end:>7,})"


def tensor_memory(plan: TmemPlan) -> Section:
    """A row per column range, drawn over the allocated columns."""
    rows = [
        (
            f"[{item.begin:>3}, {item.end:>3})",
            item.name,
            _bar(item, plan.allocated),
            item.payload + (f", over {item.over}" if item.over else ""),
        )
        for item in plan.ranges
    ]
    return f"Tensor memory: {plan.allocated} of {hw.TMEM_COLUMNS} columns, 128 lanes", rows


def _full(plan: EdgePlan, edge: Edge) -> str:
    arrivals = _arrivals(plan.full(edge.name).arrivals, edge.signal)
    return arrivals + (f", {edge.tx_bytes:,} bytes" if edge.tx_bytes else "")


def _freed(plan: EdgePlan, edge: Edge) -> str:
    if edge.release:
        by = f", of {edge.released_by}" if edge.released_by else ""
        return _arrivals(plan.empty(edge.name).arrivals, edge.release) + by
    return "never, filled once" if edge.freed_by == "exit" else f"by edge {edge.freed_by}"


def _arrivals(count: int, signal: Signal) -> str:
    return f"{plural(count, 'arrival')} by {signal.value}"


def _bar(item: TmemRange, allocated: int) -> str:
    cell = allocated / RULER_CELLS
    begin, end = round(item.begin / cell), round(item.end / cell)
    return ("." * begin + "#" * (end - begin)).ljust(RULER_CELLS, ".")


def _aligned(rows: Rows) -> Iterator[str]:
    """Rows with every column padded to its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()
