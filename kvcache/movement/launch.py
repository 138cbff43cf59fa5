"""The operators `blackwell_kernels::kv_...`: check, allocate, turn arguments into a table of words,
describe the launch. One each; none where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelkit.call.launch import Target, choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import DTYPE_NAMES
from kernelkit.compile.arch import PORTABLE
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.device.param_table import ParamTable
from kvcache.checks import require, whole
from kvcache.layouts.records import round_up
from kvcache.layouts.rows import DataRows
from kvcache.movement.arguments import (
    MAX_SLOT_BYTES,
    AppendRows,
    AppendSwa,
    Checksum,
    CopySlots,
    Gather,
    Pair,
)
from kvcache.movement.config import (
    LARGEST_PIECE,
    PAGES_VECTORS,
    VECTOR_BYTES,
    WORD_BYTES,
    Angles,
    AppendConfig,
    AppendParams,
    ChecksumConfig,
    ChecksumParams,
    CopyConfig,
    DequantiseConfig,
    DequantiseParams,
    Entries,
    PagePair,
    PagesConfig,
    PagesParams,
    RowPair,
    RowsConfig,
    RowsParams,
    SegmentsParams,
    Slots,
    SlotsParams,
    TokenRows,
    TwoRowsParams,
    WholeSlotsParams,
    ctas_for,
    lanes_of,
    piece_bytes,
    vector_of,
)
from kvcache.movement.pages import AppendPages, GatherPages

Config = AppendConfig | DequantiseConfig | RowsConfig | PagesConfig | CopyConfig | ChecksumConfig

# The module of `kvcache.movement` that has the kernel of a config.
KERNELS = {
    AppendConfig: "append_kernel",
    DequantiseConfig: "dequantise_kernel",
    RowsConfig: "rows_kernel",
    PagesConfig: "pages_kernel",
    CopyConfig: "slots_kernel",
    ChecksumConfig: "checksum_kernel",
}
ARCHS = ("sm_100a", "sm_90a")
PORTABLE_ARCHS = (*ARCHS, PORTABLE)  # beside attention by mma.sync
WITHOUT_E4M3 = ("sm_80", "sm_86", "sm_87")  # PTX ISA, cvt: e4m3x2 needs sm_89
MAX_ITEMS = 1 << 31  # pieces of slots in a launch


def run_append_swa(given: AppendSwa) -> tuple[()]:
    """Write the entries of `given.slots`."""
    given.check()
    rows, kv = given.rows, given.kv
    target = choose_target(kv.device, given.backend, given.arch, PORTABLE_ARCHS)
    if rows.record.scale_bytes and target.arch in WITHOUT_E4M3:
        raise NotImplementedError(
            f"entries of {rows.record.name} on {target.arch}: e4m3 needs sm_89 or later"
        )
    config, params, ctas = plan_append_swa(given)
    if ctas:
        _launch(config, params, ctas, target, kv.device)
    return ()


def plan_append_swa(given: AppendSwa) -> tuple[AppendConfig, AppendParams, int]:
    """Return the config, the parameters and the number of CTAs, 0 if there are no tokens."""
    rows, kv = given.rows, given.kv
    config = AppendConfig(rows.record.name, DTYPE_NAMES[kv.dtype])
    params = AppendParams(
        kv=TokenRows.of(kv),
        positions=given.positions,
        slots=given.slots,
        angles=Angles.of(given.cos, given.sin),
        entries=Entries.of(rows),
    )
    return config, params, ctas_for(len(kv), config.rows)


def run_append_rows(given: AppendRows) -> tuple[()]:
    """Write the entries of `given.slots` in each pool."""
    given.check()
    _copy_rows(given.pairs, given.slots, gathered=False, place=(given.backend, given.arch))
    return ()


def run_gather(given: Gather) -> tuple[()]:
    """Write `given.out`."""
    given.check()
    rows, indices, out = given.rows, given.indices, given.out
    if not given.dequantises:
        _copy_rows(
            [(rows.data_rows, out)], indices, gathered=True, place=(given.backend, given.arch)
        )
        return ()
    target = choose_target(out.device, given.backend, given.arch, ARCHS)
    if len(out):
        config = DequantiseConfig(rows.record.name)
        params = DequantiseParams(entries=Entries.of(rows), indices=indices, out=TokenRows.of(out))
        _launch(config, params, ctas_for(len(out), config.rows), target, out.device)
    return ()


def run_append_pages(given: AppendPages) -> tuple[()]:
    """Write the rows of `given.slots` in pages."""
    given.check()
    _move_pages(given)
    return ()


def run_gather_pages(given: GatherPages) -> tuple[()]:
    """Write `given.k` and `given.v`."""
    given.check()
    _move_pages(given)
    return ()


def run_copy_slots(given: CopySlots) -> tuple[()]:
    """Write the slots of the target."""
    given.check()
    (source, target_pool), pairs = given.pools.values(), given.pairs
    count, size = len(pairs), piece_bytes(len(pairs) * source.shape[1])
    pieces = given.pieces(size)
    target = choose_target(pairs.device, given.backend, given.arch, ARCHS)
    if not count * pieces:
        return ()
    _check_items("pairs", count, pieces)
    params = SlotsParams(
        source=Slots.of(source), target=Slots.of(target_pool), pairs=pairs, count=count
    )
    if given.segments is None:
        params = WholeSlotsParams(**vars(params), piece_bytes=size, pieces=pieces)
    else:
        params = SegmentsParams(**vars(params), segments=given.segments, pieces=pieces)
    config = CopyConfig(given.segments is not None)
    _launch(config, params, ctas_for(count * pieces), target, pairs.device)
    return ()


def run_checksum(given: Checksum) -> tuple[torch.Tensor]:
    """int64 [n]."""
    given.check()
    slots, begin, end = given.slots, given.begin, given.end
    target = choose_target(slots.device, given.backend, given.arch, ARCHS)
    count = len(slots)
    sums = torch.zeros(count, dtype=torch.int64, device=slots.device)  # CTAs add to them
    size = piece_bytes(count * (end - begin))
    pieces = -(-(end - begin) // size)
    if not count * pieces:
        return (sums,)
    _check_items("slots", count, pieces)
    params = ChecksumParams(
        pool=Slots.of(given.pool, begin, end),
        slots=slots,
        count=count,
        sums=sums,
        pieces=pieces,
        piece_bytes=size,
    )
    _launch(ChecksumConfig(), params, ctas_for(count * pieces), target, slots.device)
    return (sums,)


def _copy_rows(
    pairs: Sequence[Pair],
    mapping: torch.Tensor,
    *,
    gathered: bool,
    place: tuple[str, str | None],
) -> None:
    """Copy rows between tensors [T, ...] and pools; gathered: from the pools."""
    (first, x), *_ = pairs
    tokens = len(x)
    target = choose_target(mapping.device, *place, ARCHS)
    if not tokens:
        return
    numbers = [number for pair in pairs for number in _divisible(*pair)]
    vector, widest = vector_of(*numbers), max(rows.row_bytes for rows, _ in pairs)
    config = RowsConfig(vector, lanes_of(widest, vector), len(pairs), gathered)
    copied = [RowPair.of(*pair, vector) for pair in pairs]
    params = RowsParams(
        mapping=mapping, tokens=tokens, entries=len(first.pool) * first.rows, first=copied[0]
    )
    if len(copied) == 2:
        params = TwoRowsParams(**vars(params), second=copied[1])
    _launch(config, params, ctas_for(tokens, config.rows), target, mapping.device)


def pages_config(given: AppendPages | GatherPages) -> PagesConfig:
    """Return the kernel configuration for these arguments.

    It depends on the common divisor of sizes, addresses and strides.
    """
    k, v, pages = given.k, given.v, (given.k_pages, given.v_pages)
    quantised, scaled = "", False
    if isinstance(given, AppendPages):
        quantised, scaled = given.quantised, given.k_scale is not None
    wider = 2 if quantised else 1  # a token's access than that to its page
    steps = [step for x in (k, v) for step in _steps(x)]
    vector = vector_of(*steps, *(wider * step for x in pages for step in _steps(x)))
    if quantised and vector < 2 * WORD_BYTES:
        raise ValueError(
            f"addresses and strides of K, V and their e4m3 pages are multiples of {vector}: at "
            f"least {2 * WORD_BYTES} bytes of tokens"
        )
    row_bytes = k.shape[1] * max(k.shape[-1], v.shape[-1]) * k.itemsize
    lanes = lanes_of(row_bytes, vector, PAGES_VECTORS)
    gathered = isinstance(given, GatherPages)
    return PagesConfig(vector, lanes, quantised, scaled, gathered)


def _move_pages(given: AppendPages | GatherPages) -> None:
    """Between tokens and pages."""
    target = choose_target(given.slots.device, given.backend, given.arch, PORTABLE_ARCHS)
    k, v, pages = given.k, given.v, (given.k_pages, given.v_pages)
    scales: tuple[torch.Tensor | None, ...] = (None, None)
    if isinstance(given, AppendPages):
        scales = (given.k_scale, given.v_scale)
        if given.quantised and target.arch in WITHOUT_E4M3:
            raise NotImplementedError(f"tokens to e4m3 on {target.arch}: needs sm_89 or later")
    if not given.tokens or not k.shape[1] * max(k.shape[-1], v.shape[-1]):
        return
    config = pages_config(given)
    pairs = [
        PagePair.of(x, there, x.shape[-1] * x.itemsize // config.vector, scale)
        for x, there, scale in zip((k, v), pages, scales, strict=True)
    ]
    params = PagesParams(
        slots=given.slots,
        tokens=given.tokens,
        entries=given.entries,
        rows=given.k_pages.shape[1],
        heads=k.shape[1],
        k=pairs[0],
        v=pairs[1],
    )
    _launch(config, params, ctas_for(given.tokens, config.rows), target, k.device)


def _steps(x: torch.Tensor) -> list[int]:
    """Address of a tensor, strides of what has more than one place, and bytes of a row: the width
    of an access has to divide them."""
    sizes = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [stride * x.itemsize for size, stride in sizes if size > 1]
    return [x.data_ptr(), x.shape[-1] * x.itemsize, *strides]


def _divisible(rows: DataRows, x: torch.Tensor) -> list[int]:
    """Addresses, strides and sizes that the width of an access has to divide."""
    numbers = [x.data_ptr(), rows.pool.data_ptr(), rows.data_offset, rows.row_bytes]
    numbers += [x.stride(0) * x.itemsize] * (len(x) > 1)
    return numbers + [rows.pool.stride(0)] * (len(rows.pool) > 1)


def cut_segments(
    segments: Sequence[tuple[int, int, int]], most: int = LARGEST_PIECE
) -> torch.Tensor:
    """Cut segments so that a CTA has as much to copy as any other.

    Args:
        segments: (offset in a slot of the source, of the target, bytes), multiples of 16.
        most: bytes of a piece, at most.

    Returns:
        int64 [s, 3], the same bytes: each segment in equal pieces.
    """
    require("segments", segments, Sequence)
    whole("most", most, VECTOR_BYTES)
    cut = []
    for number, segment in enumerate(segments):
        require(f"segments[{number}]", segment, Sequence)
        if len(segment) != 3:
            raise ValueError(f"segments[{number}] has {len(segment)} numbers: two offsets, bytes")
        begin, place, size = (whole(f"segments[{number}]", n, 0, MAX_SLOT_BYTES) for n in segment)
        pieces = max(1, -(-size // most))
        step = round_up(-(-size // pieces), VECTOR_BYTES)
        for done in range(0, size, step or 1):
            cut.append((begin + done, place + done, min(step, size - done)))
    return torch.tensor(cut, dtype=torch.int64).reshape(-1, 3)


def compile_kernel(config: Config, arch: str) -> CompiledKernel | None:
    """The kernel of a config; None while `kernelkit.compile.compiler.collecting`."""
    return compile_once(config, arch, f"kvcache.movement.{KERNELS[type(config)]}")


def _launch(config: Config, params: Any, ctas: int, target: Target, device: torch.device) -> None:
    """Launch `ctas` CTAs of the kernel of a config with a dataclass of its parameters."""
    launch(compile_kernel(config, target.arch), (ParamTable.of(params), ctas), target, device)


def _check_items(what: str, count: int, pieces: int) -> None:
    """Refuse more pieces of slots than a launch counts."""
    if count * pieces >= MAX_ITEMS:
        raise ValueError(f"{count} {what} of {pieces} pieces: fewer than {MAX_ITEMS} in all")


def _nothing(_: Any) -> tuple[()]:
    """Return the fake result of an operator that returns nothing."""
    return ()


def _fake_checksum(given: Checksum) -> tuple[torch.Tensor]:
    return (given.slots.new_empty(given.slots.shape),)


_WRITES = ("rows_pool",)
APPEND_SWA = Operator(
    "kv_append_swa", AppendSwa, run_append_swa, _nothing, results=0, writes=_WRITES, pools=True
)
APPEND_ROWS = Operator(
    "kv_append_rows", AppendRows, run_append_rows, _nothing, results=0,
    writes=("pool", "other_pool"), pools=True,
)  # fmt: skip
APPEND_PAGES = Operator(
    "kv_append_pages", AppendPages, run_append_pages, _nothing, results=0,
    writes=("k_pages", "v_pages"),
)  # fmt: skip
GATHER_PAGES = Operator(
    "kv_gather_pages", GatherPages, run_gather_pages, _nothing, results=0, writes=("k", "v")
)
GATHER = Operator("kv_gather", Gather, run_gather, _nothing, results=0, writes=("out",), pools=True)
COPY_SLOTS = Operator(
    "kv_copy_slots", CopySlots, run_copy_slots, _nothing, results=0, writes=("target",), pools=True,
    hosted=("source", "target"),
)  # fmt: skip
CHECKSUM = Operator(
    "kv_checksum", Checksum, run_checksum, _fake_checksum, results=1, hosted=("pool",)
)
