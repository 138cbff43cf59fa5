"""Append, gather, copy and checksum.

Tensors on a CUDA GPU of compute capability 9.0 or 10.x run there (`append_swa`, `append_pages` and
`gather_pages` also on 8.x and 12.x); tensors on the CPU run in the emulator. For `backend` and
`arch` see `kernelkit.call.launch.choose_target`. Each call is one launch (a checksum another, which
writes zeros), can be captured in a graph, and does nothing for no rows.

Every function checks all of its arguments before anything compiles:

- TypeError: a wrong kind of argument.
- ValueError: a shape, dtype, stride, device or number that does not fit.
- NotImplementedError: a record that has no kernel, or a tensor that requires grad.

Numbers in tables are checked on the CPU alone. On a GPU nothing waits for them, and one that is out
of range counts as -1.
"""

from __future__ import annotations

from typing import Any

import torch

from kernelkit.call.front import fronted
from kernelkit.call.tensors import require_types
from kvcache.checks import require
from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows
from kvcache.movement.arguments import Place
from kvcache.movement.launch import (
    APPEND_PAGES,
    APPEND_ROWS,
    APPEND_SWA,
    CHECKSUM,
    COPY_SLOTS,
    GATHER,
    GATHER_PAGES,
    cut_segments,
)

__all__ = [
    "append_pages",
    "append_rows",
    "append_swa",
    "checksum",
    "copy_slots",
    "cut_segments",
    "gather",
    "gather_pages",
]


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
    """Write the latent entries of tokens to a sliding window: rotated and in the format of
    `rows.record`, bit for bit as `kvcache.movement.reference.append_swa` defines them.

    Args:
        rows: the entries of one layer, of BF16_512, FP8_584 or FP8_656; written in place.
        kv: [T, 512], of FP8_656 [T, 576], bfloat16 or float32, normalised; the last 64 elements are
            not rotated yet. The last dimension is contiguous, the other stride a multiple of 16
            bytes.
        positions: int64 [T], the position of each token, a row of `cos` and `sin`; not looked at
            where `slots` has -1.
        slots: int64 [T], the entry of each token, or -1 for none; no entry twice.
        cos, sin: float32 [P, 32], angle i of neighbours 2 i and 2 i + 1; rows may lie apart.

    Raises:
        NotImplementedError: for any other record; for e4m3 on compute capabilities 8.0, 8.6 and
            8.7; and as the module says.
        TypeError, ValueError: as the module says.
    """
    APPEND_SWA({
        "rows": rows, "kv": kv, "positions": positions, "slots": slots, "cos": cos, "sin": sin,
        "backend": backend, "arch": arch,
    })  # fmt: skip


@fronted()
def append_rows(
    first: tuple[Rows, torch.Tensor],
    second: tuple[Rows, torch.Tensor] | None,
    slots: torch.Tensor,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Write the bytes of tokens as they are to entries, of one tensor or of two, K and V say.

    Args:
        first: (rows, x): the entries of one layer, written in place, and x [T, ...] of any dtype
            and any stride between tokens; the elements of a token lie in one piece and have the
            data bytes of the record.
        second: another such pair with as many tokens and entries, or None.
        slots: int64 [T], the entry of each token in both, or -1 for none; no entry twice. Neither
            x nor slots lie in the entries that are written.

    Raises:
        NotImplementedError: for a record with scales apart from its data, and as the module says.
        TypeError, ValueError: as the module says.
    """
    rows, x = _pair("first", first)
    given = {"pool": rows.pool, "x": x, "slots": slots, "place": _place(rows)}
    if second is not None:
        other_rows, other = _pair("second", second)
        given |= {"other": other, "other_place": _place(other_rows)}
        if other_rows.pool is not rows.pool:
            given["other_pool"] = other_rows.pool
    APPEND_ROWS(given | {"backend": backend, "arch": arch})


def append_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Write K and V of tokens to pages as engines have them, by strides: heads may lie outside of
    rows, K and V may be columns of one tensor, pages may lie apart.

    Args:
        k_pages: [pages, page_size, heads, D], written in place, with any strides but for the last,
            which is 1. Elements lie apart, from those of v_pages as well.
        v_pages: [pages, page_size, heads, Dv] of its dtype.
        k: [T or more, heads, D], of the pages' dtype, whose bytes are copied; bfloat16 or float16
            where pages are float8_e4m3fn become x * (1 / scale), both rounded in fp32, rounded to
            nearest even and saturated. Any strides but for the last.
        v: [T or more, heads, Dv] of k's dtype.
        slots: int64 [T], page * page_size + row of each token, or -1 for none; none twice.
        k_scale, v_scale: both or none, fp32 with one element, of pages in e4m3, read in place. A
            scale is a normal number of fp32 of either sign; on the CPU others raise ValueError. On
            a GPU, where the host does not wait, a scale of NaN stores NaN, and one of 0 stores
            +-448, or NaN for elements of 0.

    Raises:
        NotImplementedError: for e4m3 on compute capabilities 8.0, 8.6 and 8.7, and as the module
            says.
        TypeError, ValueError: as the module says.
    """
    APPEND_PAGES({
        "k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, "slots": slots,
        "k_scale": k_scale, "v_scale": v_scale, "backend": backend, "arch": arch,
    })  # fmt: skip


def gather_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Read rows of pages to where kernels want them side by side; zeros for -1.

    Args:
        k_pages, v_pages: as for `append_pages`.
        slots: int64 [T], page * page_size + row, in any order and as often as wished, or -1.
        k, v: [T or more, heads, D] and [.., Dv] of the pages' dtype, written in place.

    Raises:
        TypeError, ValueError: as the module says.
    """
    given = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, "slots": slots}
    GATHER_PAGES(given | {"backend": backend, "arch": arch})


def _pair(name: str, pair: Any) -> tuple[Rows, torch.Tensor]:
    """(rows, x), or TypeError."""
    kinds = [type(item).__name__ for item in pair] if isinstance(pair, tuple | list) else []
    if len(kinds) != 2 or not isinstance(pair[0], Rows) or not isinstance(pair[1], torch.Tensor):
        found = f"({', '.join(kinds)})" if kinds else type(pair).__name__
        raise TypeError(f"{name} is {found}, expected (Rows, torch.Tensor)")
    return pair[0], pair[1]


def _place(rows: Rows) -> Place:
    """Return the place of unquantised rows."""
    if not isinstance(rows.record, Record):
        require("record", rows.record, Record)
    if rows.record.scale_bytes:
        raise NotImplementedError(
            f"record {rows.record.name} has {rows.record.scale_bytes} bytes of scales apart from "
            "its data: append_rows supports only records without"
        )
    record = rows.record
    return Place(rows.data_offset, rows.rows, record.data_bytes, record.name, rows.scale_offset)


@fronted()
def gather(
    rows: Rows,
    indices: torch.Tensor,
    out: torch.Tensor,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Gather entries to the rows of `out`, zeros for -1.

    Args:
        rows: the entries of one layer: of FP8_584 or FP8_656, which are dequantised, or of a record
            without scales, whose bytes are copied.
        indices: int64 [N], entries, in any order and as often as wished, or -1.
        out: bfloat16 [N, 512] or [N, 576] of what is dequantised, else [N, ...] of any dtype with
            the data bytes of the record in a row; written in place.

    Raises:
        NotImplementedError: for another record with scales, and as the module says.
        TypeError, ValueError: as the module says.
    """
    GATHER({"rows": rows, "indices": indices, "out": out, "backend": backend, "arch": arch})


def copy_slots(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    segments: torch.Tensor | None = None,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """Copy slot a of `source` to slot b of `target` for every pair (a, b).

    Args:
        source: uint8 [slots, slot_bytes], a pool on the device of `pairs` or, where that is a GPU,
            in the host's pinned memory, which the kernel reads over the bus.
        target: a pool like `source`, perhaps the same one; written in place.
        pairs: int64 [n, 2], contiguous; nothing is done where either is -1. What is written by one
            pair is neither read nor written by another.
        segments: int64 [s, 3], contiguous, (offset in a slot of source, of target, bytes),
            multiples of 16, or None for whole slots of equal size; what one of them writes no other
            writes, nor reads in a slot that is copied to and from. A CTA has a segment:
            `cut_segments` makes them equally long.

    Raises:
        TypeError, ValueError: as the module says; a segment that reaches out of a slot is refused
            on the CPU and passed over on a GPU.
    """
    require_types(target=target, source=source)
    COPY_SLOTS({
        "source": None if source is target else source, "target": target, "pairs": pairs,
        "segments": segments, "backend": backend, "arch": arch,
    })  # fmt: skip


def checksum(
    pool: torch.Tensor,
    slots: torch.Tensor,
    begin: int,
    end: int,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """Compute a checksum of the same range of bytes in some slots of a pool.

    Equal bytes have equal checksums, in whatever slot. A change of a single word is always seen,
    any other change but for one in 2^64.

    Args:
        pool: uint8 [slots, slot_bytes], on the device of `slots` or in pinned memory of the host.
        slots: int64 [n], the slots to take, or -1.
        begin, end: the range within a slot, multiples of 16.

    Returns:
        int64 [n], 0 for slot -1.

    Raises:
        TypeError, ValueError: as the module says.
    """
    given = {"pool": pool, "slots": slots, "begin": begin, "end": end}
    return CHECKSUM(given | {"backend": backend, "arch": arch})
