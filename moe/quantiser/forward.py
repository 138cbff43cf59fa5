"""`quantise`: check, allocate, find the global scale if it is wished for, launch the kernel."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernelkit.launch import Target, choose_target, launch
from kernelkit.tensors import (
    require_grid,
    require_no_grad,
    require_rank,
    require_scalars,
    require_table,
    require_tensors,
    require_tma,
    with_plain_strides,
)
from moe.compile import compile_amax, compile_quantise
from moe.formats import BlockFormat, format_of, row_blocks, scale_blocks, scale_bytes
from moe.indices import check_offsets, check_range
from moe.quantiser.config import CTAS_OF_AMAX, AmaxConfig, QuantiseConfig, ctas_of_block, is_wide
from moe.quantiser.scatter import scatter
from moe.quantized import Quantized, of_bytes

ARCHS = ("sm_100a", "sm_90a")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def quantise(
    x: torch.Tensor,
    fmt: str,
    *,
    global_scale: str | torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    choices: int = 1,
    offsets: torch.Tensor | None = None,
    row_of_slot: torch.Tensor | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> Quantized:
    """x in the format `fmt`, bit for bit as `moe.reference.quantise` defines it.

    x: [T, K], bfloat16 or float16, K a multiple of the format's block; the last dimension is
        contiguous, the other stride a multiple of 16 bytes.
    fmt: 'nvfp4', 'mxfp4' or 'mxfp8'.
    global_scale: of nvfp4 alone: fp32 [1] or [R], one for each row of the result, or what to
        compute it from, the largest magnitude of the 'tensor' x (the default) or of each 'token'.
    rows: int32 [R], row r of the result is row rows[r] // choices of x, from 0 to T - 1; without
        it R = T. choices: of a token, where rows are slots (`Permutation.slot_of_row`).
    offsets: int32 [E + 1], ascending from 0 to R. Rows offsets[e] .. offsets[e + 1] - 1 belong to
        expert e, whose scale factors begin at a fresh block of 128 rows. There is room for any
        counts; behind the last block of the last expert nothing is written.
    row_of_slot: int32 [T * choices], the inverse of `rows` (`Permutation.row_of_slot`), with both
        of them: x is read once, not once for each of its rows; the same bits.
    backend, arch: see `kernelkit.launch.choose_target`.

    Raises TypeError, ValueError or NotImplementedError before it compiles. One launch, another
    with row_of_slot, another and a fill for a scale that is computed. On a GPU rows, offsets and
    row_of_slot are not looked at: no wait.
    """
    form = format_of(fmt)
    _check(x, form, global_scale, rows, offsets)
    _check_places(x, rows, choices, offsets)
    _check_inverse(x, rows, choices, offsets, row_of_slot)
    target = choose_target(x.device, backend, arch, ARCHS)
    count = len(x) if rows is None else len(rows)
    columns = form.columns(x.shape[1])
    blocks = blocks_for(count, offsets)
    require_grid(**{"blocks of 128 rows": blocks})
    data = x.new_empty((count, columns * form.block // form.per_byte // 4), dtype=torch.int32)
    scales = x.new_empty(scale_bytes(blocks, columns) // 4, dtype=torch.int32)
    scaling, given = _given_scale(x, form, global_scale, target)
    gathered, grouped = rows is not None, offsets is not None
    config = QuantiseConfig(fmt, DTYPES[x.dtype], gathered, grouped, scaling, choices)
    config = replace(config, wide=is_wide(x.shape[1]))
    places, outputs = (rows, offsets, row_of_slot), (data, scales)
    encode, decode = _run(x, config, given, places, outputs, target)
    return of_bytes(data.view(torch.uint8), scales.view(torch.uint8), encode, decode, fmt)


def _run(
    x: torch.Tensor,
    config: QuantiseConfig,
    given: torch.Tensor | None,
    places: tuple[torch.Tensor | None, ...],
    outputs: tuple[torch.Tensor, torch.Tensor],
    target: Target,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Writes outputs, elements and scale factors; returns the global scales and their inverses.

    places: rows, offsets and row_of_slot.
    """
    (rows, offsets, row_of_slot), count = places, len(outputs[0])
    if count and row_of_slot is not None and config.scaling != "given rows":
        once = replace(config, gathered=False, grouped=False, scattered=True)
        return scatter(x, once, given, outputs, (rows, row_of_slot, offsets), target)
    encode = decode = None
    if config.scaling:
        size = count if config.of_rows else 1
        encode, decode = (x.new_empty(size, dtype=torch.float32) for _ in range(2))
    if count:
        blocks = blocks_for(count, offsets)
        grid = (ctas_of_block(config, x.shape[1], blocks), blocks)
        scaling = (given, encode, decode) if config.scaling else None
        arguments = (with_plain_strides(x), rows, offsets), outputs, scaling, grid
        _launch_quantise(config, arguments, target, x.device)
    elif config.scaling and not config.of_rows:
        encode.fill_(1.0).mul_(given if config.scaling == "given" else 1.0)
        torch.reciprocal(encode, out=decode)
    return encode, decode


def blocks_for(count: int, offsets: torch.Tensor | None) -> int:
    """Blocks of scale factors that there is room for, by expert where there are offsets."""
    return row_blocks(count) if offsets is None else scale_blocks(count, offsets.shape[0] - 1)


def _launch_quantise(
    config: QuantiseConfig, arguments: tuple, target: Target, device: torch.device
) -> None:
    launch(compile_quantise(config, target.arch), arguments, target, device)


def _given_scale(
    x: torch.Tensor,
    form: BlockFormat,
    global_scale: str | torch.Tensor | None,
    target: Target,
) -> tuple[str, torch.Tensor | None]:
    """(`scaling` of the config, fp32 that it speaks of: amax or global scales)."""
    if not form.has_global:
        return "", None
    if isinstance(global_scale, torch.Tensor):
        return ("given" if len(global_scale) == 1 else "given rows"), global_scale
    per_token = global_scale == "token"
    return global_scale or "tensor", _amax(x, per_token=per_token, target=target)


def _amax(x: torch.Tensor, *, per_token: bool, target: Target) -> torch.Tensor:
    """fp32 [1], or [T] of each row."""
    tokens = len(x)
    bits = (
        x.new_empty(tokens, dtype=torch.int32) if per_token else x.new_zeros(1, dtype=torch.int32)
    )
    if tokens:
        compiled = compile_amax(AmaxConfig(DTYPES[x.dtype], per_token), target.arch)
        ctas = tokens if per_token else min(tokens, CTAS_OF_AMAX)
        launch(compiled, (with_plain_strides(x), bits, ctas), target, x.device)
    return bits.view(torch.float32)


def _check(
    x: torch.Tensor,
    form: BlockFormat,
    global_scale: str | torch.Tensor | None,
    rows: torch.Tensor | None,
    offsets: torch.Tensor | None,
) -> None:
    tensors = {"x": x, "global_scale": global_scale, "rows": rows, "offsets": offsets}
    optional = {"global_scale": (type(None), str), "rows": type(None), "offsets": type(None)}
    tensors = {n: t for n, t in tensors.items() if not isinstance(t, optional.get(n, ()))}
    require_tensors(**tensors)
    require_no_grad(**tensors)
    require_rank("x", x, "[T, K]")
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"x is {x.dtype}: supported are {tuple(DTYPES)}")
    form.columns(x.shape[1])
    require_tma("x", x)
    for name in tensors.keys() & {"rows", "offsets"}:
        require_table(name, tensors[name], torch.int32, (None,))
    count = len(x) if rows is None else len(rows)
    if count and not len(x):
        raise ValueError(f"{count} rows of x [0, {x.shape[1]}]")
    if offsets is not None and len(offsets) < 2:
        raise ValueError(f"offsets has {len(offsets)} elements, expected experts + 1, at least 2")
    _check_global_scale(form, global_scale, count)


def _check_places(
    x: torch.Tensor, rows: torch.Tensor | None, choices: int, offsets: torch.Tensor | None
) -> None:
    require_scalars({"choices": "int"}, {"choices": choices})
    if choices < 1 or (rows is None and choices > 1):
        raise ValueError(f"choices {choices}: at least 1, and 1 without rows")
    count = len(x) if rows is None else len(rows)
    if rows is not None:
        end, what = len(x) * choices, "rows" if choices == 1 else "slots"
        check_range("rows", rows, end, f"x has {what} 0 to {end - 1}")
    if offsets is not None:
        check_offsets(offsets, count)


def _check_inverse(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    choices: int,
    offsets: torch.Tensor | None,
    row_of_slot: torch.Tensor | None,
) -> None:
    if row_of_slot is None:
        return
    require_tensors(x=x, row_of_slot=row_of_slot)
    slots = len(x) * choices
    if rows is None or offsets is None or len(rows) != slots:
        raise ValueError(f"row_of_slot: with offsets and rows of all {slots} slots")
    require_table("row_of_slot", row_of_slot, torch.int32, (slots,))
    check_range("row_of_slot", row_of_slot, slots, f"rows are 0 to {slots - 1}")


def _check_global_scale(
    form: BlockFormat, global_scale: str | torch.Tensor | None, count: int
) -> None:
    if global_scale is None:
        return
    if not form.has_global:
        raise ValueError(f"global_scale with {form.name}, which has none")
    if isinstance(global_scale, str):
        if global_scale not in ("tensor", "token"):
            raise ValueError(f"global_scale {global_scale!r}: 'tensor', 'token' or a tensor")
        return
    require_table("global_scale", global_scale, torch.float32, (None,))
    if len(global_scale) not in (1, count):
        raise ValueError(f"global_scale has {len(global_scale)} elements, expected 1 or {count}")
