"""Append, gather, copy and checksum, and the torch operators `blackwell_kernels::kv_...` behind
them: tracers see each whole, and its schema says what it writes to.

A tensor on a CUDA GPU of compute capability 9.0 or 10.x runs there, one on the CPU in the emulator;
`backend` and `arch`: see `kernelkit.launch.choose_target`. Everything is checked before it
compiles, and refused by TypeError, ValueError or NotImplementedError. On a GPU nobody looks at
values of tables: no wait, and a number that is out of range counts as -1. Each call is one launch
(a checksum another, which writes zeros), can be captured in a graph, and does nothing for no rows.
"""

from __future__ import annotations

from typing import Any

import torch

from kernelkit.schema import register_mutating_operator
from kernelkit.tensors import require_no_grad
from kvcache.layouts.latent import LATENTS
from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows
from kvcache.movement import forward
from kvcache.movement.forward import cut_segments

PLACE = "str backend='auto', str? arch=None"
APPEND_SWA = (
    "(Tensor(a!) pool, Tensor kv, Tensor positions, Tensor slots, Tensor cos, Tensor sin, *, "
    f"int data_offset, int scale_offset, int rows, str record, {PLACE}) -> ()"
)
APPEND_ROWS = (
    "(Tensor(a!) pool, Tensor x, Tensor slots, Tensor(b!)? other_pool, Tensor? other, *, "
    "int data_offset, int rows, int data_bytes, int other_offset=0, int other_rows=1, "
    f"int other_bytes=0, {PLACE}) -> ()"
)
GATHER = (
    "(Tensor pool, Tensor indices, Tensor(a!) out, *, "
    "int data_offset, int scale_offset, int rows, str record, int data_bytes, int scale_bytes=0, "
    f"{PLACE}) -> ()"
)
COPY_SLOTS = (
    f"(Tensor? source, Tensor(a!) target, Tensor pairs, Tensor? segments, *, {PLACE}) -> ()"
)
CHECKSUM = f"(Tensor pool, Tensor slots, *, int begin, int end, {PLACE}) -> Tensor"
OTHER = {"other_offset": 0, "other_rows": 1, "other_bytes": 0}  # with their defaults

__all__ = ["append_rows", "append_swa", "checksum", "copy_slots", "cut_segments", "gather"]


def append_swa(
    rows: Rows,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Entries of a sliding window, rotated and in the format of `rows.record`, bit for bit as
    `kvcache.movement.reference.append_swa` defines them.

    rows: of BF16_512, FP8_584 or FP8_656.
    kv: [T, 512], of FP8_656 [T, 576], bfloat16 or float32, normalised; the last 64 elements are not
        rotated yet. The last dimension is contiguous, the other stride a multiple of 16 bytes.
    positions: int64 [T], of each token, in the tables; not looked at where slots has -1.
    slots: int64 [T], the entry of each token, or -1; no entry twice.
    cos, sin: float32 [P, 32], angle i of neighbours 2 i and 2 i + 1; rows may lie apart.
    """
    require_no_grad(kv=kv)
    numbers = {"data_offset": rows.data_offset, "scale_offset": rows.scale_offset}
    append_swa_op(
        rows.pool, kv, positions, slots, cos, sin,
        **numbers, rows=rows.rows, record=rows.record.name, backend=backend, arch=arch,
    )  # fmt: skip


def append_rows(
    first: tuple[Rows, torch.Tensor],
    second: tuple[Rows, torch.Tensor] | None,
    slots: torch.Tensor,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """The bytes of x [T, ...] of (rows, x), of K and V say, to the entries in slots.

    x: any dtype and any stride between tokens; the elements of a token lie in one piece and have
        the data bytes of the record.
    slots: int64 [T], the entry of each token in both, or -1; no entry twice.
    """
    (rows, x), (other_rows, other) = first, second or (None, None)
    require_no_grad(x=x, **({} if other is None else {"other": other}))
    options = _numbers_of(rows, "data_offset", "rows", "data_bytes")
    other_pool = None
    if other_rows is not None:
        options |= _numbers_of(other_rows, "other_offset", "other_rows", "other_bytes")
        other_pool = None if other_rows.pool is rows.pool else other_rows.pool
    append_rows_op(rows.pool, x, slots, other_pool, other, **options, backend=backend, arch=arch)


def _numbers_of(rows: Rows, *names: str) -> dict[str, int]:
    """What rows of bytes as they are need, by these names."""
    if rows.record.scale_bytes:
        raise NotImplementedError(
            f"record {rows.record.name} has {rows.record.scale_bytes} bytes of scales apart from "
            "its data, which plain rows have not: append_rows takes records without"
        )
    return dict(zip(names, (rows.data_offset, rows.rows, rows.record.data_bytes), strict=True))


def gather(
    rows: Rows,
    indices: torch.Tensor,
    out: torch.Tensor,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Entries to rows of out, zeros for -1.

    rows: of FP8_584 or FP8_656, dequantised to out [N, 512] or [N, 576] in bfloat16, or of a record
        without scales, whose bytes are copied to out [N, ...], as many of any dtype.
    indices: int64 [N], entries, in any order and as often as wished, or -1.
    """
    numbers = {"data_offset": rows.data_offset, "scale_offset": rows.scale_offset}
    record = {"record": rows.record.name, "data_bytes": rows.record.data_bytes}
    record["scale_bytes"] = rows.record.scale_bytes
    gather_op(
        rows.pool, indices, out,
        **numbers, rows=rows.rows, **record, backend=backend, arch=arch,
    )  # fmt: skip


def copy_slots(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    segments: torch.Tensor | None = None,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Slot a of source to slot b of target for every pair (a, b).

    source, target: pools, perhaps the same one; on the device of pairs or, where that is a GPU, in
        the host's pinned memory, which the kernel reads or writes over the bus.
    pairs: int64 [n, 2]; nothing is done where either is -1. What is written by one pair is neither
        read nor written by another.
    segments: int64 [s, 3], contiguous, (offset in a slot of source, of target, bytes), multiples of
        16, or None for whole slots of equal size. A CTA has a segment: `cut_segments` makes them
        equally long. Those that reach out of a slot are refused on the CPU, passed over on a GPU.
    """
    given = None if source is target else source
    copy_slots_op(given, target, pairs, segments, backend=backend, arch=arch)


def checksum(
    pool: torch.Tensor,
    slots: torch.Tensor,
    begin: int,
    end: int,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """int64 [n]: of bytes begin to end, multiples of 16, of every slot; 0 for slot -1.

    Equal bytes have equal checksums, in whatever slot; a word that changes alone is always seen,
    anything else but for one in 2^64.
    """
    return checksum_op(pool, slots, begin=begin, end=end, backend=backend, arch=arch)


# -- operators ------------------------------------------------------------------------------------


def _append_swa(
    pool: torch.Tensor,
    *tensors: torch.Tensor,
    data_offset: int,
    scale_offset: int,
    rows: int,
    record: str,
    **place: Any,
) -> None:
    found = LATENTS[record].record if record in LATENTS else Record(record, 1)
    kv, positions, slots, *rope = tensors
    where = Rows(pool, data_offset, scale_offset, rows, found)
    forward.run_append_swa(where, kv, positions, slots, tuple(rope), **place)


def _append_rows(
    pool: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    other_pool: torch.Tensor | None,
    other: torch.Tensor | None,
    **options: Any,
) -> None:
    first, second = (
        [options.pop(name, default) for name, default in names.items()]
        for names in ({"data_offset": 0, "rows": 1, "data_bytes": 0}, OTHER)
    )
    pairs = [(_plain_rows(pool, *first), x)]
    if other is not None:
        pairs.append((_plain_rows(pool if other_pool is None else other_pool, *second), other))
    forward.run_append_rows(pairs, slots, **options)


def _plain_rows(pool: torch.Tensor, offset: int, rows: int, data_bytes: int) -> Rows:
    return Rows(pool, offset, 0, rows, Record("row", data_bytes))


def _gather(pool: torch.Tensor, indices: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
    name, *sizes = (options.pop(key, 0) for key in ("record", "data_bytes", "scale_bytes"))
    place = (options.pop(key) for key in ("data_offset", "scale_offset", "rows"))
    found = LATENTS[name].record if name in LATENTS else Record(name, *sizes)
    forward.run_gather(Rows(pool, *place, found), indices, out, **options)


def _copy_slots(
    source: torch.Tensor | None,
    target: torch.Tensor,
    pairs: torch.Tensor,
    segments: torch.Tensor | None,
    **place: Any,
) -> None:
    source = target if source is None else source
    forward.run_copy_slots((source, target), pairs, segments, **place)


def _checksum(
    pool: torch.Tensor, slots: torch.Tensor, *, begin: int, end: int, **place: Any
) -> torch.Tensor:
    return forward.run_checksum(pool, slots, begin, end, **place)


def _fake_checksum(pool: torch.Tensor, slots: torch.Tensor, **options: Any) -> torch.Tensor:
    return slots.new_empty(slots.shape)


append_swa_op = register_mutating_operator("kv_append_swa", APPEND_SWA, _append_swa)
append_rows_op = register_mutating_operator("kv_append_rows", APPEND_ROWS, _append_rows)
gather_op = register_mutating_operator("kv_gather", GATHER, _gather)
copy_slots_op = register_mutating_operator("kv_copy_slots", COPY_SLOTS, _copy_slots)
checksum_op = register_mutating_operator("kv_checksum", CHECKSUM, _checksum, _fake_checksum)
