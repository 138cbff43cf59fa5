"""The operator `blackwell_kernels::moe_quantise`: check, allocate, find the global scale if
requested, describe the launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernelkit.call.launch import Target, choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    require_grid,
    require_no_grad,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
    with_plain_strides,
)
from kernelkit.compile.compiler import compile_once
from kernelkit.plan import hw
from moe.arguments import check_offsets, check_range, check_scale
from moe.formats import (
    FORMATS,
    SCALINGS,
    BlockFormat,
    format_of,
    row_blocks,
    scale_atoms,
    scale_blocks,
    scale_bytes,
)
from moe.quantiser.config import (
    AMAX_CTAS_OF_SM,
    CODE_WORDS,
    AmaxConfig,
    QuantiseConfig,
    SpreadConfig,
    ctas_of_block,
    ctas_that_spread,
    sized,
)
from moe.quantized import Quantized, made_of, of_bytes

ARCHS = ("sm_100a", "sm_90a")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_SLOTS = (1 << 31) - 1  # `rows` are int32

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Tokens:
    """The arguments of `moe.quantise`, and two more.

    row_of_slot: int32 [T * choices], the inverse of `rows` (`Permutation.row_of_slot`), with rows
    and offsets. x is then read once, not once for each of its rows; the same bits. partial: slots
    may have no row, -1, and there are at most as many rows as slots; otherwise exactly as many.
    """

    x: torch.Tensor
    fmt: str
    global_scale: torch.Tensor | str | None = None
    rows: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    row_of_slot: torch.Tensor | None = None
    choices: int = 1
    partial: bool = False
    backend: str = "auto"
    arch: str | None = None

    @property
    def scale(self) -> torch.Tensor | str | None:
        """The global scale, or its source; None in a format without."""
        if self.global_scale is None and FORMATS[self.fmt].has_global:
            return "token"
        return self.global_scale

    @property
    def count(self) -> int:
        """Rows of the result."""
        return self.x.shape[0] if self.rows is None else self.rows.shape[0]

    @property
    def blocks(self) -> int:
        """Upper bound of blocks of scale factors, by expert if there are offsets."""
        if self.offsets is None:
            return row_blocks(self.count)
        return scale_blocks(self.count, self.offsets.shape[0] - 1)


def quantise(given: Tokens) -> Quantized:
    """Quantise `given` with `forward`, and wrap the results."""
    data, scales, *factors = forward(given)
    return made_of(data, scales, given.fmt, *(factors if FORMATS[given.fmt].has_global else ()))


def forward(given: Tokens) -> Results:
    """Quantise x to the format `fmt`, as `empty_results` allocates it. It is one launch, another
    one with row_of_slot, and another one before it for the scale of the tensor.

    Raises TypeError, ValueError or NotImplementedError before it compiles. On a GPU, values of
    rows, offsets and row_of_slot are not checked: no wait.
    """
    x, form = given.x, format_of(given.fmt)
    _check(given, form)
    _check_places(given)
    _check_inverse(given)
    target = choose_target(x.device, given.backend, given.arch, ARCHS)
    require_grid(**{"blocks of 128 rows": given.blocks})
    results = empty_results(given)
    scaling, known = _given_scale(given, form, target)
    gathered, grouped = given.rows is not None, given.offsets is not None
    config = QuantiseConfig(given.fmt, DTYPES[x.dtype], gathered, grouped, scaling, given.choices)
    config = sized(config, given.count, x.shape[1])
    if given.count and given.row_of_slot is not None and scaling != "given rows":
        _scatter(given, config, known, results, target)
    else:
        _run(given, config, known, results, target)
    return results


def empty_results(given: Tokens) -> Results:
    """Allocate bytes of elements and of scale factors, and the global scales and their inverses, if
    any."""
    x, form, scale = given.x, FORMATS[given.fmt], given.scale
    data = x.new_empty((given.count, x.shape[1] // form.per_byte), dtype=torch.uint8)
    room = scale_bytes(given.blocks, form.columns(x.shape[1]))
    of_rows = scale.shape[0] != 1 if isinstance(scale, torch.Tensor) else scale == "token"
    size = (given.count if of_rows else 1) if form.has_global else 0
    encode, decode = (x.new_empty(size, dtype=torch.float32) for _ in range(2))
    return data, x.new_empty(room, dtype=torch.uint8), encode, decode


def quantised(fmt: str, results: Results) -> Quantized:
    """Wrap the results of the operator."""
    data, scales, *factors = results
    return of_bytes(data, scales, fmt, *(factors if FORMATS[fmt].has_global else ()))


def _run(
    given: Tokens,
    config: QuantiseConfig,
    known: torch.Tensor | None,
    results: Results,
    target: Target,
) -> None:
    """Write the results. known: source of the scale."""
    x, (data, scales, encode, decode) = given.x, results
    if given.count:
        outputs = data.view(torch.int32), scales.view(torch.int32)
        grid = (ctas_of_block(config, x.shape[1], given.blocks), given.blocks)
        scaling = (known, encode, decode) if config.scaling else None
        inputs = with_plain_strides(x), given.rows, given.offsets
        compiled = compile_once(config, target.arch, "moe.quantiser.kernel")
        launch(compiled, (inputs, outputs, scaling, grid), target, x.device)
    elif config.scaling and not config.of_rows:
        encode.fill_(1.0).mul_(1.0 if known is None or config.scaling != "given" else known)
        torch.reciprocal(encode, out=decode)


def _scatter(
    given: Tokens,
    config: QuantiseConfig,
    known: torch.Tensor | None,
    results: Results,
    target: Target,
) -> None:
    """Run as `_run` does, but quantise every token once and write it for each of its choices. Two
    launches."""
    x, (data, scales, *factors), (tokens, k) = given.x, results, given.x.shape
    config = replace(config, gathered=False, grouped=False, scattered=True, partial=given.partial)
    atoms = scale_atoms(config.format.columns(k))
    once = x.new_empty((tokens, -(-atoms // CODE_WORDS) * CODE_WORDS), dtype=torch.int32)
    of_tokens = factors
    if config.of_rows:
        of_tokens = [x.new_empty(tokens, dtype=torch.float32) for _ in factors]
    scaling = (known, *of_tokens) if config.scaling else None
    inputs, outputs = (with_plain_strides(x), given.row_of_slot, None), data.view(torch.int32)
    grid = (ctas_of_block(config, k, row_blocks(tokens)), row_blocks(tokens))
    compiled = compile_once(config, target.arch, "moe.quantiser.kernel")
    launch(compiled, (inputs, (outputs, once.view(-1)), scaling, grid), target, x.device)

    spread = SpreadConfig(config.choices, config.of_rows)
    copied = (of_tokens, factors) if config.of_rows else ([None, None], [None, None])
    source, copies = (once, *copied[0]), (scales.view(torch.int32), *copied[1])
    tables, ctas = (given.rows, given.offsets), ctas_that_spread(spread, atoms, given.blocks)
    compiled = compile_once(spread, target.arch, "moe.quantiser.spread_kernel")
    launch(compiled, (source, copies, tables, (ctas, given.blocks, atoms)), target, x.device)


def _given_scale(
    given: Tokens, form: BlockFormat, target: Target
) -> tuple[str, torch.Tensor | None]:
    """Return (`scaling` of the config, its tensor: global scales, or bits of amaxes)."""
    global_scale = given.scale
    if not form.has_global:
        return "", None
    if isinstance(global_scale, torch.Tensor):
        return ("given" if len(global_scale) == 1 else "given rows"), global_scale
    if global_scale == "token":  # each CTA finds the scales of its rows
        return "token", None
    offsets = (
        given.offsets if given.rows is None else None
    )  # offsets of the rows of x, not of gathered rows
    return "tensor", _amaxes(given.x, offsets, target)


def _amaxes(x: torch.Tensor, offsets: torch.Tensor | None, target: Target) -> torch.Tensor:
    """Return int32, the bits of the fp32 amaxes of parts of x."""
    ctas = min(len(x), AMAX_CTAS_OF_SM * hw.SMS_OF[target.arch])
    bits = x.new_empty(ctas, dtype=torch.int32)
    if ctas:
        config = AmaxConfig(DTYPES[x.dtype], offsets is not None)
        compiled = compile_once(config, target.arch, "moe.quantiser.amax_kernel")
        launch(compiled, (with_plain_strides(x), offsets, bits, ctas), target, x.device)
    return bits


def _check(given: Tokens, form: BlockFormat) -> None:
    x, names = given.x, ("x", "global_scale", "rows", "offsets")
    tensors = {name: getattr(given, name) for name in names}
    tensors = {n: t for n, t in tensors.items() if n == "x" or not isinstance(t, str | None)}
    require_tensors(**tensors)
    require_no_grad(**tensors)
    require_rank("x", x, "[T, K]")
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"x is {x.dtype}: supported are {tuple(DTYPES)}")
    form.columns(x.shape[1])
    require_tma("x", x)
    for name in tensors.keys() & {"rows", "offsets"}:
        require_table(name, tensors[name], torch.int32, (None,))
    if given.count and not len(x):
        raise ValueError(f"{given.count} rows of x [0, {x.shape[1]}], which has no tokens")
    offsets = given.offsets
    if offsets is not None and len(offsets) < 2:
        raise ValueError(f"offsets has {len(offsets)} elements, expected experts + 1, at least 2")
    _check_global_scale(form, given.global_scale, given.count)


def _check_places(given: Tokens) -> None:
    choices, slots = given.choices, len(given.x) * given.choices
    if choices < 1 or (given.rows is None and choices > 1):
        raise ValueError(f"choices {choices}: at least 1, and 1 without rows")
    if max(slots, choices) > MAX_SLOTS:
        raise ValueError(f"choices {choices} of {len(given.x)} tokens: at most {MAX_SLOTS} slots")
    rows, offsets = given.rows, given.offsets
    if offsets is not None:
        check_offsets(offsets, given.count)
    if rows is not None:
        what = "rows" if choices == 1 else "slots"
        if offsets is not None and offsets.device.type == "cpu":
            rows = rows[: int(offsets[-1])]  # later rows are not used
        check_range("rows", rows, slots, f"x has {what} 0 to {slots - 1}")


def _check_inverse(given: Tokens) -> None:
    row_of_slot, slots = given.row_of_slot, len(given.x) * given.choices
    if row_of_slot is None:
        return
    require_tensors(x=given.x, row_of_slot=row_of_slot)
    rows = 0 if given.rows is None else len(given.rows)
    enough = rows <= slots if given.partial else rows == slots
    if given.rows is None or given.offsets is None or not enough:
        raise ValueError(f"row_of_slot needs offsets, and rows of all {slots} slots")
    require_table("row_of_slot", row_of_slot, torch.int32, (slots,))
    begin = -1 if given.partial else 0
    check_range("row_of_slot", row_of_slot, rows, f"rows are 0 to {rows - 1}", begin=begin)


def _check_global_scale(
    form: BlockFormat, global_scale: str | torch.Tensor | None, count: int
) -> None:
    if global_scale is None:
        return
    if not form.has_global:
        raise ValueError(f"global_scale with {form.name}, which has none")
    if isinstance(global_scale, str):
        if global_scale not in SCALINGS:
            raise ValueError(f"global_scale {global_scale!r}: 'token', 'tensor' or a tensor")
        return
    require_table("global_scale", global_scale, torch.float32, (None,))
    if len(global_scale) not in (1, count):
        raise ValueError(f"global_scale has {len(global_scale)} elements, expected 1 or {count}")
    check_scale("global_scale", global_scale)


QUANTISE = Operator("moe_quantise", Tokens, forward, empty_results, results=4)
