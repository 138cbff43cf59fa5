"""The operator `blackwell_kernels::moe_mixed_gemm`: check, allocate, describe the launch.

Nothing here waits for the device or reads from it, so that a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kernelkit.call.launch import Target, choose_target, launch, sms_of
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import (
    DTYPES,
    require_table,
    require_tensors,
    require_tma,
    with_plain_strides,
)
from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import compile_once
from kernelkit.plan import hw
from kernelkit.tune.choices import are_open
from moe.arguments import Activation, SwiGLU, check_form, check_offsets, check_range
from moe.choose import row_tiles
from moe.kernel_arguments import MixedKernelArguments, MixedTensors, Sizes
from moe.launch import numbers_of, plain
from moe.mixed.choose import (
    OPTIONS,
    TUNED,
    Problem,
    choose_split,
    choose_teams,
    choose_tile_rows,
    tiles_of,
)
from moe.mixed.config import (
    ARCHS,
    BITS,
    KERNELS,
    OUTPUTS,
    ROWS,
    ROWS_OF,
    MixedConfig,
    RowsConfig,
)
from moe.mixed.fragments import DEPTH, Fragments, units_of

ROWS_ARCHS = {"bf16": ARCHS, "e4m3": ("sm_90a",)}  # architectures with rows of this dtype
FP32 = torch.float32
X_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, eq=False)
class MixedArguments:
    """Arguments of `moe.mixed_gemm`."""

    x: torch.Tensor
    w: Fragments
    offsets: torch.Tensor
    bias: torch.Tensor | None = None
    activation: Activation | None = None  # with alternating rows; None: no activation
    rows: torch.Tensor | None = None  # rows of x to gather
    x_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    slots: int = 1  # slots of a token of gathered rows
    out: str = "bf16"  # name of a dtype
    tile_rows: int | None = None
    teams: int | None = None
    parts: int | None = None
    split: int | None = None
    most_rows: int | None = None
    pdl: bool = False
    backend: str = "auto"
    arch: str | None = None

    @property
    def count(self) -> int:
        """Rows that there is room for."""
        return len(self.x if self.rows is None else self.rows)

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return self.w.rows // (1 if self.activation is None else 2)

    @cached_property
    def target(self) -> Target:
        """Device and backend that run the product."""
        return choose_target(self.x.device, self.backend, self.arch, ARCHS)

    @property
    def kernel_arch(self) -> str:
        """Architecture that the target's kernel and its tiles are written for."""
        return written_for(self.target.arch)

    @property
    def chosen_rows(self) -> tuple[int, ...]:
        """Given rows of a tile, or those chosen by sizes."""
        if self.tile_rows is not None:
            return (self.tile_rows,)
        return choose_tile_rows(self.count, self.w.experts, self.kernel_arch, self.w.x)

    @cached_property
    def configs(self) -> tuple[MixedConfig, ...]:
        """Configs to compile: one launch for all experts, or two.

        The first of two has experts whose rows fit into a tile, the second one the others. There is
        one launch if CTAs share tiles, if warpgroups are given, or if no expert has more rows.
        Tiles that were measured for these sizes have priority.
        """
        tuned = TUNED.applied(self, self.x.device, MixedArguments.problem, check_tiles)
        if tuned is not self:
            return tuned.configs
        least, *greater = self.chosen_rows
        first = self.with_tile(least)
        holds_all = self.most_rows is not None and self.most_rows <= least
        if not greater or first.split > 1 or self.teams is not None or holds_all:
            return (first,)
        second = self.with_tile(*greater)
        return replace(first, most=least), replace(second, split=1, pdl=True, least=least + 1)

    def problem(self) -> Problem | None:
        """Problem that tiles are chosen for; None if they are given."""
        if not are_open(self, OPTIONS):
            return None
        sizes = self.count, self.w.experts, self.w.rows, self.w.k
        return Problem(self.plain, *sizes, self.most_rows or 0)

    @property
    def config(self) -> MixedConfig:
        """Config of the only launch, or of the first one."""
        return self.configs[0]

    @property
    def gathers(self) -> bool:
        """Whether gathering rows is faster than a launch that sorts them: if so few that one launch
        does all, in the smallest tiles."""
        tiles = [each.tile_rows for each in self.configs]
        return self.w.x != "e4m3" and tiles == [*ROWS_OF[self.kernel_arch][:1]]

    def with_tile(self, tile_rows: int) -> MixedConfig:
        """Return the config of a launch for all experts, with tiles of `tile_rows` rows."""
        arch = self.kernel_arch
        sizes = self.count, self.w.experts, self.w.rows, tile_rows
        teams, parts, split = self.teams, self.parts, self.split
        if teams is None:
            teams, parts = choose_teams(*sizes, arch, self.w.x)
            if split is None:
                tiles = tiles_of(*sizes, teams * parts)
                split = choose_split(tiles, tile_rows, units_of(self.w.k, DEPTH), arch)
        split = 1 if split is None else split
        tile = {"tile_rows": tile_rows, "teams": teams, "parts": parts or 1, "split": split}
        return replace(self.plain, **tile)

    @property
    def plain(self) -> MixedConfig:
        """Config that follows from the arguments, with default tiles."""
        return MixedConfig(
            fmt=self.w.fmt,
            x=self.w.x,
            row_scale=self.x_scale is not None and len(self.x_scale) > 1,
            pair_factor=self.w.has_pairs,
            swiglu=self.activation is not None,
            limit=self.activation is not None and self.activation.limit is not None,
            bias=self.bias is not None,
            out=self.out,
            gather=self.rows is not None,
            pdl=self.pdl,
        )

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        x, w = self.x, self.w
        check_form(self.activation)
        require_tensors(x=x, w=w.data, factor=w.factor, offsets=self.offsets)
        w.check()
        tiles = sorted({rows for each in ROWS_OF.values() for rows in each})
        if self.tile_rows is not None and self.tile_rows not in tiles:
            raise NotImplementedError(f"tile_rows {self.tile_rows}: one of {tiles}")
        dtype = X_DTYPES[w.x]
        if x.dtype != dtype:
            raise NotImplementedError(f"x is {x.dtype}, expected {dtype}, for which w is arranged")
        if self.out not in OUTPUTS:
            raise NotImplementedError(f"out {self.out}: one of {OUTPUTS}")
        require_table("x", x, dtype, (None, w.k))
        if not x.is_contiguous():
            raise ValueError(f"x has strides {x.stride()}: not contiguous")
        require_tma("x", x)
        if w.swiglu != (self.activation is not None):
            rows = "alternate gate and up" if w.swiglu else "have no gate"
            raise ValueError(f"activation {self.activation}, but the rows of w {rows}")
        self._check_scales()
        require_table("offsets", self.offsets, torch.int32, (w.experts + 1,))
        check_offsets(self.offsets, self.count)
        if self.bias is not None:
            require_tensors(x=x, bias=self.bias)
            require_table("bias", self.bias, torch.float32, (w.experts, w.rows))
        if self.slots < 1 or (self.slots > 1 and self.rows is None):
            limit = "1 without rows" if self.rows is None else "at least 1"
            raise ValueError(f"slots {self.slots}: {limit}")
        if self.rows is not None:
            require_tensors(x=x, rows=self.rows)
            require_table("rows", self.rows, torch.int32, (None,))
            self._check_slots(self.rows)
        self._check_hints()
        unit = hw.TMA_ALIGN_BYTES * 8 // BITS[self.out]
        if self.columns % unit:
            raise NotImplementedError(f"{self.columns} columns of output: a multiple of {unit}")
        check_tiles(self)

    def _check_scales(self) -> None:
        """Check the scales of x and of the output: required for e4m3, refused for other dtypes."""
        wanted = {"x_scale": self.w.x == "e4m3", "out_scale": self.out == "e4m3"}
        for name, want in wanted.items():
            scale = getattr(self, name)
            if (scale is not None) != want:
                kind = "a tensor" if want else "None"
                raise ValueError(f"{name} is {scale}, expected {kind} for these dtypes")
            if scale is not None:
                require_tensors(x=self.x, **{name: scale})
                require_table(name, scale, torch.float32, (None,))
                sizes = (1, len(self.x)) if name == "x_scale" else (1,)
                if len(scale) not in sizes:
                    raise ValueError(f"{name} has {len(scale)} scales: one of {sizes}")

    def _check_hints(self) -> None:
        """Check the arguments that tiles are chosen by."""
        if self.parts is not None and self.teams is None:
            raise ValueError(f"parts {self.parts} without teams: give both or neither")
        if self.most_rows is None or not self.count:
            return
        least = 1
        if self.offsets.device.type == "cpu":
            least = max(int(self.offsets.diff().max()), least)
        if self.most_rows < least:
            raise ValueError(f"most_rows {self.most_rows}: at least {least} of an expert")

    def _check_slots(self, rows: torch.Tensor) -> None:
        """Check the values of existing rows, on the CPU only."""
        if rows.device.type == "cpu":
            every = len(self.x) * self.slots
            check_range("rows", rows[: int(self.offsets[-1])], every, f"x has {every} slots")


def check_tiles(arguments: MixedArguments) -> None:
    """Raise NotImplementedError or ValueError for tiles that do not fit."""
    for config in arguments.configs:
        config.check_values(arguments.kernel_arch)


def forward(arguments: MixedArguments) -> tuple[torch.Tensor]:
    """[rows, columns]; a launch for each of the configs."""
    arguments.check()
    target = arguments.target
    (out,) = empty_result(arguments)
    for config in arguments.configs if out.numel() else ():
        compiled = compile_once(config, target.arch, KERNELS[arguments.kernel_arch])
        given = kernel_arguments(arguments, config, out)
        launch(compiled, (given,), target, arguments.x.device)
    return (out,)


def empty_result(arguments: MixedArguments) -> tuple[torch.Tensor]:
    """Allocate the output."""
    shape = arguments.count, arguments.columns
    return (arguments.x.new_empty(shape, dtype=DTYPES[arguments.out]),)


def kernel_arguments(
    arguments: MixedArguments, config: MixedConfig, out: torch.Tensor
) -> MixedKernelArguments:
    """Return the launch arguments of `MixedGemm` of either architecture."""
    x, w = arguments.x, arguments.w
    if arguments.rows is None:  # contiguous
        x = x.as_strided((1, len(x), 1, w.k), (w.k, w.k, w.k, 1))
    n_tiles = units_of(w.rows, config.tile_n)
    most = arguments.count if arguments.most_rows is None else arguments.most_rows
    tiles = row_tiles(arguments.count, w.experts, config.tile_rows, most) * n_tiles
    clusters = min(tiles, max(sms_of(x.device) // config.split, 1))
    return MixedKernelArguments(
        x=with_plain_strides(x),
        tensors=MixedTensors(
            weights=w.data,
            factor=w.factor,
            offsets=with_plain_strides(arguments.offsets),
            out=with_plain_strides(out),
            bias=plain(arguments.bias),
            rows=plain(arguments.rows),
            x_scale=plain(arguments.x_scale),
            out_scale=plain(arguments.out_scale),
        ),
        numbers=numbers_of(arguments.activation or SwiGLU()),
        sizes=Sizes(
            units=units_of(w.k, DEPTH),
            tall=units_of(w.rows, ROWS),
            experts=w.experts,
            n_tiles=n_tiles,
            slots=arguments.slots,
        ),
        ctas=clusters * config.split,
    )


def write_rows(
    x: torch.Tensor,
    out: str,
    *,
    row_of_slot: torch.Tensor | None = None,
    rows: int | None = None,
    backend: str,
    arch: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write rows of x [T, K], bf16, as `out`, in one launch.

    In e4m3, each row's largest magnitude becomes 448. Returns rows [R, K] and their decode scales,
    fp32 [R], or None for bf16.

    Args:
        row_of_slot: int32 [T, slots], the row of each slot of a token, or -1; None: a row is a
            token.
        rows: R; rows without a slot are not written.
    """
    config = RowsConfig(out, row_of_slot is not None)
    if x.shape[1] % config.vector:
        raise NotImplementedError(f"{x.shape[1]} columns in {out}: a multiple of {config.vector}")
    target = choose_target(x.device, backend, arch, ROWS_ARCHS[out])
    shape = (len(x) if rows is None else rows, x.shape[1])
    written, scale = x.new_empty(shape, dtype=X_DTYPES[out]), None
    if out == "e4m3":
        scale = x.new_empty(shape[0], dtype=FP32)
    if len(x):
        compiled = compile_once(config, target.arch, "moe.mixed.rows_kernel")
        tensors = x, written, scale, row_of_slot
        launch(compiled, [*map(plain, tensors)], target, x.device)
    return written, scale


MIXED_GEMM = Operator("moe_mixed_gemm", MixedArguments, forward, empty_result, results=1)
