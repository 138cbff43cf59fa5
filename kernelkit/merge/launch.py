"""Operator of `merge`: check the parts, allocate, launch the kernel once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.attention import check_sinks, fill_without_keys
from kernelkit.call.launch import Target, choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    require_grid,
    require_table,
    require_tensors,
    require_tma,
)
from kernelkit.compile.arch import PORTABLE
from kernelkit.compile.compiler import compile_once
from kernelkit.device.param_table import ParamTable, Word
from kernelkit.merge import plan as merge_plan
from kernelkit.merge.plan import MergeConfig

ARCHS = ("sm_90a", "sm_100a", PORTABLE)
KERNEL = "kernelkit.merge.kernel"
MAX_STRIDE = 1 << 31  # the kernel multiplies 32-bit indices by 32-bit strides
NAMES = ("O", "LSE", "row_max")

Part = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Parts:
    """The arguments of `kernelkit.merge.api.merge`: O, LSE and row_max (None for a normalised part)
    of each part, or of the one that is a stack."""

    o: tuple[torch.Tensor, ...]
    lse: tuple[torch.Tensor, ...]
    row_max: tuple[torch.Tensor | None, ...]
    out_dtype: torch.dtype
    sinks: torch.Tensor | None = None
    stacked: bool = False
    backend: str = "auto"
    arch: str | None = None

    @property
    def parts(self) -> list[Part]:
        """(O, LSE) or (O, LSE, row_max) of each."""
        each = zip(self.o, self.lse, self.row_max, strict=True)
        return [(o, lse) if row_max is None else (o, lse, row_max) for o, lse, row_max in each]


def merge_parts(given: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, LSE) over all parts."""
    parts, sinks, out_dtype = given.parts, given.sinks, given.out_dtype
    problem = _check_parts(parts, given.stacked)
    device = parts[0][0].device
    if sinks is not None:
        sinks = sinks.contiguous()
        require_table("sinks", sinks, torch.float32, (problem.sizes["h"],))
        require_tensors(sinks=sinks, O=parts[0][0])
        if sinks.device.type == "cpu":
            check_sinks(sinks)
    if out_dtype not in DTYPE_NAMES:
        raise NotImplementedError(f"out_dtype {out_dtype}: supported are {tuple(DTYPE_NAMES)}")
    target = choose_target(device, given.backend, given.arch, ARCHS)
    o = torch.empty([problem.sizes[dim] for dim in "bshd"], dtype=out_dtype, device=device)
    lse = torch.empty([problem.sizes[dim] for dim in "bhs"], dtype=torch.float32, device=device)
    if problem.parts == 0 or o.numel() == 0:
        fill_without_keys(o, lse, sinks)
    else:
        _run(problem, parts, sinks, (o, lse), target)
    if "b" not in problem.o_dims:
        o, lse = o.squeeze(0), lse.squeeze(0)
    return o, lse


def empty_results(given: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE, not yet written; sizes may be symbols."""
    front, o, lse = int(given.stacked), given.o[0], given.lse[0]
    return (
        o.new_empty(o.shape[front:], dtype=given.out_dtype),
        lse.new_empty(lse.shape[front:], dtype=torch.float32),
    )


@dataclass(frozen=True)
class _Problem:
    """A letter per dimension of O and LSE: n parts of a stack, b, s, h, d; and their sizes.

    parts: how many are merged; a list has no dimension n, packed sequences have none b.
    """

    o_dims: str
    lse_dims: str
    sizes: dict[str, int]
    parts: int


def _run(
    problem: _Problem,
    parts: list[Part],
    sinks: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor],
    target: Target,
) -> None:
    """Launch once for all parts; parts of one dtype are adjacent in the table."""
    sizes, stacked = problem.sizes, "n" in problem.o_dims
    by_dtype: dict[str, list[Part]] = {}
    for part in parts:
        by_dtype.setdefault(DTYPE_NAMES[part[0].dtype], []).append(part)
    rows = sizes["b"] * sizes["s"] * sizes["h"]
    config = MergeConfig(
        head_dim=sizes["d"],
        dtypes=tuple(by_dtype),
        out_dtype=DTYPE_NAMES[outputs[0].dtype],
        raw=any(len(part) == 3 for part in parts),
        sinks=sinks is not None,
        stacked=stacked,
        capacity=1 if stacked else merge_plan.capacity_for(len(parts)),
        lanes=merge_plan.lanes_for(problem.parts, rows, sizes["d"]),
    )
    compiled = compile_once(config, target.arch, KERNEL)
    entries = [
        _entry(part, problem, config.vector) for alike in by_dtype.values() for part in alike
    ]
    table = ParamTable(entries, config.capacity)
    counts = (problem.parts,) if stacked else tuple(map(len, by_dtype.values()))
    tile = merge_plan.tile_positions(config.rows, sizes["s"], sizes["h"])
    arguments = (table, counts, outputs, sinks, tile.bit_length() - 1)
    launch(compiled, arguments, target, outputs[0].device)


def _entry(part: Part, problem: _Problem, vector: int) -> list[Word]:
    """A row of the kernel's table, see `kernelkit.merge.kernel.Merge.read_part`."""
    o, lse, reference = (*part, part[1])[:3]  # the weight of a normalised part is that of its LSE
    axes = "shbn" if "n" in problem.o_dims else "shb"
    lse_dims = problem.lse_dims
    layouts = ((o, problem.o_dims, vector), (lse, lse_dims, 1), (reference, lse_dims, 1))
    numbers: list[Word] = [o, lse, reference]
    for tensor, dims, unit in layouts:
        strides = dict(zip(dims, tensor.stride(), strict=True))
        numbers += [strides.get(axis, 0) // unit for axis in axes]
    return numbers


def _check_parts(parts: list[Part], stacked: bool) -> _Problem:
    """Return what the parts have in common; errors name the part that differs."""
    named = {
        f"parts[{index}] {name}": tensor
        for index, part in enumerate(parts)
        for name, tensor in zip(NAMES, part, strict=False)
    }
    require_tensors(**named)
    first = parts[0][0]
    front = "n" * stacked + "b" * (first.ndim - stacked > 3)
    o_dims, lse_dims = front + "shd", front + "hs"
    if first.ndim != len(o_dims):
        raise ValueError(
            f"parts[0] O has shape {tuple(first.shape)}, rank {first.ndim}; expected [B, S, H, D] "
            f"or [T, H, D]{', after the dimension of the stack' * stacked}"
        )
    sizes = {"b": 1, **dict(zip(o_dims, first.shape, strict=True))}
    _check_sizes(sizes)
    for name, tensor in named.items():
        is_o = name.endswith(NAMES[0])
        _check_tensor(name, tensor, [sizes[dim] for dim in (o_dims if is_o else lse_dims)], is_o)
    return _Problem(o_dims, lse_dims, sizes, sizes["n"] if stacked else len(parts))


def _check_sizes(sizes: dict[str, int]) -> None:
    head_dim, step, limit = sizes["d"], merge_plan.HEAD_DIM_STEP, merge_plan.MAX_HEAD_DIM
    if head_dim % step or not 0 < head_dim <= limit:
        raise NotImplementedError(f"head_dim {head_dim}: a multiple of {step} up to {limit}")
    require_grid(batch=sizes["b"])


def _check_tensor(name: str, tensor: torch.Tensor, shape: list[int], is_o: bool) -> None:
    dtypes = tuple(DTYPE_NAMES) if is_o else (torch.float32,)
    if tensor.dtype not in dtypes:
        raise NotImplementedError(f"{name} is {tensor.dtype}: supported are {dtypes}")
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if is_o:
        require_tma(name, tensor)
    limit = MAX_STRIDE * (merge_plan.VECTOR_BYTES // 4 if is_o else 1)
    for dim, (size, stride) in enumerate(zip(shape, tensor.stride(), strict=True)):
        if size > 1 and not 0 <= stride < limit:
            raise ValueError(
                f"{name} has stride {stride} in dimension {dim}, limit {limit} elements"
            )


MERGE = Operator("merge", Parts, merge_parts, empty_results, results=2)
