"""The kernels' arguments: checked by value and limit, turned into addresses, launched.

Nothing here waits for a GPU: values of tables that live there are taken as they are, and kernels
pass over what is out of range. One launch each; none where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelkit.launch import Target, choose_target, launch
from kernelkit.param_table import table_of
from kernelkit.tensors import (
    DTYPE_NAMES,
    is_broadcast,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
    require_types,
)
from kvcache.layouts.latent import LATENTS, Latent
from kvcache.layouts.records import round_up
from kvcache.layouts.rows import Rows, check_mapping, check_pool
from kvcache.movement.compile import (
    compile_append,
    compile_checksum,
    compile_copy,
    compile_dequantise,
    compile_rows,
)
from kvcache.movement.config import (
    LARGEST_PIECE,
    VECTOR_BYTES,
    AppendConfig,
    ChecksumConfig,
    CopyConfig,
    DequantiseConfig,
    RowsConfig,
    ctas_for,
    lanes_of,
    piece_bytes,
    vector_of,
)
from kvcache.movement.rope import check_positions, check_rope

ARCHS = ("sm_100a", "sm_90a")
LATENT_DTYPES = (torch.bfloat16, torch.float32)
MAX_SLOT_BYTES = 1 << 31
MAX_ITEMS = 1 << 31  # pieces of slots in a launch

Pair = tuple[Rows, torch.Tensor]


def run_append_swa(
    rows: Rows,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """See `kvcache.movement.api.append_swa`."""
    cos, sin = rope
    tensors = {"kv": kv, "positions": positions, "slots": slots, "cos": cos, "sin": sin}
    require_tensors(pool=rows.pool, **tensors)
    latent = LATENTS.get(rows.record.name)
    if latent is None:
        raise NotImplementedError(f"record {rows.record.name}: supported are {[*LATENTS]}")
    _check_latent("kv", kv, LATENT_DTYPES, latent)
    tokens, (first, *angles) = len(kv), check_rope(positions, cos, sin, len(kv))
    _check_entries("slots", slots, tokens, rows)
    target = choose_target(kv.device, backend, arch, ARCHS)
    if not tokens:
        return
    if slots.device.type == "cpu":
        check_positions(positions[slots >= 0], angles[-1])
    config = AppendConfig(rows.record.name, DTYPE_NAMES[kv.dtype])
    source = kv.data_ptr(), kv.stride(0) * kv.itemsize, tokens
    numbers = (*source, first, slots.data_ptr(), *angles, *_entries_of(rows))
    launch_items(
        compile_append(config, target.arch), numbers, (tokens, config.rows), target, kv.device
    )


def run_append_rows(
    pairs: Sequence[Pair], slots: torch.Tensor, *, backend: str = "auto", arch: str | None = None
) -> None:
    """See `kvcache.movement.api.append_rows`."""
    if len(pairs) not in (1, 2):
        raise ValueError(f"{len(pairs)} pairs of rows and a tensor: 1 or 2")
    if len({rows.entries for rows, _ in pairs}) > 1:
        entries = [rows.entries for rows, _ in pairs]
        raise ValueError(f"pools of {entries} entries: one mapping is of as many in each")
    _run_rows(pairs, slots, gathered=False, backend=backend, arch=arch)


def run_gather(
    rows: Rows,
    indices: torch.Tensor,
    out: torch.Tensor,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """See `kvcache.movement.api.gather`."""
    latent = LATENTS.get(rows.record.name)
    if latent is None or not latent.group:
        if rows.record.scale_bytes:
            names = [name for name, latent in LATENTS.items() if latent.group]
            raise NotImplementedError(
                f"record {rows.record.name} has scales apart from its data: supported are {names} "
                "and records without"
            )
        _run_rows([(rows, out)], indices, gathered=True, backend=backend, arch=arch)
        return
    require_tensors(pool=rows.pool, indices=indices, out=out)
    _check_latent("out", out, (torch.bfloat16,), latent)
    _check_entries("indices", indices, len(out), rows)
    target = choose_target(out.device, backend, arch, ARCHS)
    if not len(out):
        return
    config = DequantiseConfig(rows.record.name)
    result = out.data_ptr(), out.stride(0) * out.itemsize, len(out)
    numbers = (*_entries_of(rows), indices.data_ptr(), *result)
    compiled, items = compile_dequantise(config, target.arch), (len(out), config.rows)
    launch_items(compiled, numbers, items, target, out.device)


def run_copy_slots(
    pools: tuple[torch.Tensor, torch.Tensor],
    pairs: torch.Tensor,
    segments: torch.Tensor | None,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> None:
    """See `kvcache.movement.api.copy_slots`; pools: source, target."""
    source, target_pool = pools
    for name, pool in (("source", source), ("target", target_pool)):
        _check_copied(name, pool, pairs.device)
    require_table("pairs", pairs, torch.int64, (None, 2))
    if pairs.numel() and not pairs.is_contiguous():
        raise ValueError(f"pairs has strides {pairs.stride()}: contiguous")
    for column, (name, pool) in enumerate((("source", source), ("target", target_pool))):
        limit = f"the {name} has slots 0 to {len(pool) - 1}"
        check_mapping(f"pairs of the {name}", pairs[:, column], len(pool), limit)
    count, piece = len(pairs), piece_bytes(len(pairs) * source.shape[1])
    size = _pieces(pools, segments, pairs.device, piece)
    target = choose_target(pairs.device, backend, arch, ARCHS)
    if not count * size:
        return
    if count * size >= MAX_ITEMS:
        raise ValueError(f"{count} pairs of {size} pieces: fewer than {MAX_ITEMS} in all")
    numbers: list[int] = []
    for pool in pools:
        numbers += [pool.data_ptr(), pool.stride(0), len(pool), pool.shape[1]]
    numbers += [pairs.data_ptr(), count, piece if segments is None else segments.data_ptr(), size]
    compiled = compile_copy(CopyConfig(segments is not None), target.arch)
    launch_items(compiled, numbers, (count * size, 1), target, pairs.device)


def run_checksum(
    pool: torch.Tensor,
    slots: torch.Tensor,
    begin: int,
    end: int,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """See `kvcache.movement.api.checksum`."""
    require_types(pool=pool, slots=slots)
    check_pool("pool", pool)
    _check_reached("pool", pool, "slots", slots.device)
    count, slot_bytes = len(slots), pool.shape[1]
    limit = min(slot_bytes, MAX_SLOT_BYTES)
    if begin % VECTOR_BYTES or end % VECTOR_BYTES or not 0 <= begin <= end <= limit:
        raise ValueError(
            f"bytes {begin} to {end}: multiples of {VECTOR_BYTES} from 0 to {limit}, in order"
        )
    require_table("slots", slots, torch.int64, (None,))
    check_mapping("slots", slots, len(pool), f"the pool has slots 0 to {len(pool) - 1}")
    target = choose_target(slots.device, backend, arch, ARCHS)
    sums = torch.zeros(count, dtype=torch.int64, device=slots.device)  # CTAs add to them
    piece = piece_bytes(count * (end - begin))
    pieces = -(-(end - begin) // piece)
    if not count * pieces:
        return sums
    if count * pieces >= MAX_ITEMS:
        raise ValueError(f"{count} slots of {pieces} pieces: fewer than {MAX_ITEMS} in all")
    range_ = pool.data_ptr() + begin, pool.stride(0), len(pool), end - begin
    numbers = (*range_, slots.data_ptr(), count, sums.data_ptr(), pieces, piece)
    compiled = compile_checksum(ChecksumConfig(), target.arch)
    launch_items(compiled, numbers, (count * pieces, 1), target, slots.device)
    return sums


def _run_rows(
    pairs: Sequence[Pair], mapping: torch.Tensor, *, gathered: bool, backend: str, arch: str | None
) -> None:
    """Between the tokens of tensors [T, ...] and rows of pools."""
    name = "indices" if gathered else "slots"
    tokens = len(pairs[0][1]) if pairs[0][1].ndim else 0
    numbers: list[int] = []
    for index, (rows, x) in enumerate(pairs):
        require_tensors(pool=rows.pool, x=x, **{name: mapping})
        rows.check(align=1)
        _check_tokens(f"tensor {index}" if not gathered else "out", x, tokens, rows)
        numbers += _numbers_of(rows, x)
    first = pairs[0][0]
    _check_entries(name, mapping, tokens, first, align=1)
    target = choose_target(mapping.device, backend, arch, ARCHS)
    if not tokens:
        return
    vector = vector_of(*numbers)
    widest = max(rows.record.data_bytes for rows, _ in pairs)
    config = RowsConfig(vector, lanes_of(widest, vector), len(pairs), gathered)
    table = [mapping.data_ptr(), tokens, first.entries]
    for rows, x in pairs:
        data, _, stride, count, _ = _entries_of(rows)
        table += [x.data_ptr(), x.stride(0) * x.itemsize, data, stride, count]
        table.append(rows.record.data_bytes // vector)
    items = tokens, config.rows
    launch_items(compile_rows(config, target.arch), table, items, target, mapping.device)


def launch_items(
    compiled: Any,
    numbers: Sequence[int],
    items: tuple[int, int],
    target: Target,
    device: torch.device,
) -> None:
    """items: how many there are, and how many a CTA has at a time."""
    launch(compiled, (table_of(numbers), ctas_for(*items)), target, device)


def _numbers_of(rows: Rows, x: torch.Tensor) -> list[int]:
    """Addresses, strides and sizes that an access has to divide."""
    numbers = [x.data_ptr(), rows.pool.data_ptr(), rows.data_offset, rows.record.data_bytes]
    numbers += [x.stride(0) * x.itemsize] * (len(x) > 1)
    return numbers + [rows.pool.stride(0)] * (len(rows.pool) > 1)


def _entries_of(rows: Rows) -> tuple[Any, ...]:
    """Addresses of the first data and scales, bytes between slots, rows, entries."""
    pool = rows.pool.data_ptr()
    scales = pool + rows.scale_offset
    return pool + rows.data_offset, scales, rows.pool.stride(0), rows.rows, rows.entries


def _check_latent(
    name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], latent: Latent
) -> None:
    layout = f"[T, {latent.elements}]"
    require_rank(name, x, layout)
    if x.dtype not in dtypes or x.shape[1] != latent.elements:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: {dtypes} {layout}")
    require_tma(name, x)


def _check_entries(
    name: str, mapping: torch.Tensor, tokens: int, rows: Rows, align: int = VECTOR_BYTES
) -> None:
    """Rows, and a mapping of so many tokens to them."""
    rows.check(align)
    require_table(name, mapping, torch.int64, (tokens,))
    limit = f"{len(rows.pool)} slots of {rows.rows} rows have 0 to {rows.entries - 1}"
    check_mapping(name, mapping, rows.entries, limit)


def _check_tokens(name: str, x: torch.Tensor, tokens: int, rows: Rows) -> None:
    """[T, ...] with the bytes of a row in one piece for every token."""
    if not x.ndim or len(x) != tokens:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [{tokens}, ...]")
    row_bytes = x[:1].numel() * x.itemsize if tokens else rows.record.data_bytes
    if row_bytes != rows.record.data_bytes:
        raise ValueError(
            f"{name} has {row_bytes} bytes for a token, {rows.record.name} has "
            f"{rows.record.data_bytes}"
        )
    if tokens and (not x[0].is_contiguous() or is_broadcast(x)):
        raise ValueError(f"{name} has strides {x.stride()}: a token's elements in one piece")


def _check_copied(name: str, pool: torch.Tensor, device: torch.device) -> None:
    check_pool(name, pool)
    slot_bytes = pool.shape[1]
    if slot_bytes % VECTOR_BYTES or slot_bytes >= MAX_SLOT_BYTES:
        raise ValueError(
            f"{name} has slots of {slot_bytes} bytes: a multiple of {VECTOR_BYTES} below "
            f"{MAX_SLOT_BYTES}"
        )
    _check_reached(name, pool, "pairs", device)


def _check_reached(name: str, pool: torch.Tensor, table: str, device: torch.device) -> None:
    """A pool on the device of a table, or in the host's pinned memory, which a GPU reads."""
    pinned = device.type == "cuda" and pool.device.type == "cpu" and pool.is_pinned()
    if pool.device != device and not pinned:
        raise ValueError(f"{name} is on {pool.device}: on {device} as {table}, or pinned memory")


def _pieces(
    pools: tuple[torch.Tensor, torch.Tensor],
    segments: torch.Tensor | None,
    device: torch.device,
    piece: int,
) -> int:
    """Pieces of a pair: the segments, checked where they are at hand, or parts of a slot of `piece`
    bytes."""
    sizes = [pool.shape[1] for pool in pools]
    if segments is None:
        if sizes[0] != sizes[1]:
            raise ValueError(f"slots of {sizes[0]} and {sizes[1]} bytes: equal, without segments")
        return -(-sizes[0] // piece)
    require_table("segments", segments, torch.int64, (None, 3))
    if segments.device != device or (segments.numel() and not segments.is_contiguous()):
        raise ValueError(
            f"segments on {segments.device} with strides {segments.stride()}: contiguous, on "
            f"{device} as pairs"
        )
    if segments.device.type == "cpu":
        for segment in segments.tolist():
            _check_segment(segment, sizes)
    return len(segments)


def _check_segment(segment: Sequence[int], sizes: Sequence[int]) -> None:
    *offsets, size = segment
    inside = size >= 0 and all(
        0 <= begin <= limit - size for begin, limit in zip(offsets, sizes, strict=True)
    )
    if not inside or any(number % VECTOR_BYTES for number in segment):
        raise ValueError(
            f"segment {tuple(segment)} (offset in the source, in the target, bytes): multiples of "
            f"{VECTOR_BYTES} within slots of {sizes[0]} and {sizes[1]} bytes"
        )


def cut_segments(
    segments: Sequence[tuple[int, int, int]], most: int = LARGEST_PIECE
) -> torch.Tensor:
    """int64 [s, 3] of the same bytes; each segment in equal pieces of up to `most` bytes."""
    cut = []
    for begin, place, size in segments:
        pieces = max(1, -(-size // most))
        step = round_up(-(-size // pieces), VECTOR_BYTES)
        for done in range(0, size, step or 1):
            cut.append((begin + done, place + done, min(step, size - done)))
    return torch.tensor(cut, dtype=torch.int64).reshape(-1, 3)
