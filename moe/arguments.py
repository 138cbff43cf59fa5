"""Arguments of `grouped_gemm` and parts of those of `fused_moe`: checks by value and limit, and the
config of the grouped GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kernelkit.call.tensors import (
    DTYPE_NAMES,
    as_number,
    require_table,
    require_tensors,
    require_tma,
    require_type,
)
from kernelkit.plan import hw
from kernelkit.plan.dtypes import ITEM_BYTES
from kernelkit.plan.limits import FLT_MAX, FLT_MIN
from kernelkit.tune.choices import are_open
from moe.choose import (
    OPTIONS,
    TUNED,
    Problem,
    check_tile_rows,
    decide,
)
from moe.config import (
    GRANULARITIES,
    MIXED,
    WINDOW,
    WINDOW_ALIGN_BYTES,
    WINDOW_STEP,
    GroupedConfig,
)
from moe.formats import FORMATS, scale_blocks, scale_bytes
from moe.quantized import Quantized


@dataclass(frozen=True)
class Activation:
    """h = (up + beta) gate sigmoid(alpha gate); gate is clamped above by limit, up on both sides.

    Plain SwiGLU is (1, 0, None), DeepSeek-V4's (1, 0, 10), that of gpt-oss (1.702, 1, 7).
    granularity: rows of gate, then of up, that alternate in the packed weights.
    """

    granularity: int
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None


@dataclass(frozen=True)
class Router:
    """Options of expert selection, as of `moe.route`. `moe.models` has those of known models."""

    top_k: int
    scoring: str = "softmax"
    bias: torch.Tensor | None = None
    n_group: int = 1
    topk_group: int = 1
    renormalize: bool = True
    scale: float = 1.0
    logit_bias: torch.Tensor | None = None
    shared: int = 0
    shared_weight: float = 1.0

    @property
    def slots(self) -> int:
        """Experts of a token, chosen and shared."""
        return self.top_k + self.shared

    def check_slots(self) -> None:
        """Raise NotImplementedError or ValueError for a negative number of experts, or for none.
        Routing checks the upper limits."""
        if self.top_k < 1:
            raise NotImplementedError(f"top_k {self.top_k}: at least 1")
        if self.shared < 0:
            raise ValueError(f"shared {self.shared}: at least 0")


@dataclass(frozen=True, eq=False)
class RouterLinear:
    """The linear layer that computes logits: weight [E, H] and bias [E], in the dtype of x.

    ready: weight, bias and the tensors of `Router` are older than the previous kernel on the
    stream, as a model's weights are. They are loaded while that kernel ends. Tensors written by
    that kernel, or by one that it did not wait for, are not ready.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    ready: bool = False


@dataclass(frozen=True, eq=False)
class Chosen:
    """Choices that are made already, as engines have them: topk_ids and topk_weights.

    ids: int32 or int64 [T, k], the experts of each token; -1 is no expert, and adds nothing.
    weights: any floating dtype [T, k]; they multiply the experts' outputs as they are.
    experts: number of experts of the whole layer, needed with `expert_range` alone.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    experts: int | None = None


@dataclass(frozen=True)
class SwiGLU:
    """(up + beta) gate sigmoid(alpha gate) of clamped gate and up; see `Activation`."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def of_rows(self, granularity: int) -> Activation:
        """Return this activation for gate and up that alternate by so many rows. Each field is
        named, since torch.compile of torch 2.11 does not follow vars()."""
        return Activation(granularity, self.alpha, self.beta, self.limit)


@dataclass(frozen=True)
class Scales:
    """Global scales of the activations in nvfp4. Formats without a global scale accept None only.

    x is the scale of the tokens, h that of the output of SwiGLU. Each is one of these:

    - 'token', or None, the default: one scale for each row, from its largest magnitude. A row's
      result does not depend on other rows.
    - 'tensor': one scale for all rows, from their largest magnitude. One row with a NaN or an
      infinity makes every other row NaN, and one that is 1,000 times as large as the others
      rounds them to 0. It costs one launch more than 'token'.
    - a tensor, fp32 [1]: a known scale, such as a calibrated one
      (`moe.huggingface.activation_scales`). A row's result does not depend on other rows; numbers
      beyond 2688 / scale saturate. With a known h the first product quantises its output, which
      saves a launch.

    h_amax: fp32 [1], becomes max(h_amax, the largest magnitude of h). A later scale is 2688 /
    h_amax. No product of the same call reads it. It becomes NaN once a row of h has a NaN:
    calibrate without padding.
    """

    x: torch.Tensor | str | None = None
    h: torch.Tensor | str | None = None
    h_amax: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Arguments:
    """Arguments of `moe.grouped_gemm`. out: a name of a dtype or of a format."""

    x: Quantized
    w: Quantized
    offsets: torch.Tensor
    encode_scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    activation: Activation | None = None
    out: str = "bf16"
    bias: torch.Tensor | None = None
    tile_rows: int | None = None
    most_rows: int | None = None
    tile_n: int | None = None
    carry: bool = False
    pdl: bool = False
    w_ready: bool = False
    backend: str = "auto"
    arch: str | None = None

    @property
    def experts(self) -> int:
        """E."""
        return self.w.data.shape[0]

    @property
    def most(self) -> int:
        """Rows that an expert may have."""
        rows = self.x.data.shape[0]
        return rows if self.most_rows is None else min(self.most_rows, rows)

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return self.w.data.shape[-2] // (1 if self.activation is None else 2)

    @property
    def blocks(self) -> int:
        """Blocks of 128 rows that the scale factors of x and of the output have room for."""
        return scale_blocks(self.x.data.shape[0], self.w.data.shape[0])

    @property
    def mixed(self) -> bool:
        """Whether x and w differ in format."""
        return self.x.fmt != self.w.fmt

    @cached_property
    def config(self) -> GroupedConfig:
        """Config to compile. Tiles that were measured for these sizes have priority."""
        tuned = TUNED.applied(self, self.offsets.device, Arguments.measured_problem, check_tiles)
        if tuned is not self:
            return tuned.config
        return decide(self.problem, self.tile_rows, self.tile_n)

    @cached_property
    def problem(self) -> Problem:
        """Problem that tiles are chosen for."""
        x, w = self.x.data, self.w.data
        k = x.shape[1] * FORMATS[self.x.fmt].per_byte
        return Problem(self.plain, x.shape[0], w.shape[0], w.shape[1], k, self.most)

    def measured_problem(self) -> Problem | None:
        """Problem for the lookup of measured tiles; None if tiles are given."""
        return self.problem if are_open(self, OPTIONS) else None

    @property
    def plain(self) -> GroupedConfig:
        """Config that follows from the arguments, with default tiles."""
        activation, decode = self.activation, self.x.decode_scale
        return GroupedConfig(
            fmt=self.w.fmt,
            x_fmt=self.x.fmt if self.mixed else "",
            row_scale=decode is not None and len(decode) > 1,
            pair_scale=self.w.decode_scale is not None and self.w.decode_scale.ndim == 2,
            granularity=0 if activation is None else activation.granularity,
            limit=activation is not None and activation.limit is not None,
            out=self.out,
            amax=self.amax is not None,
            bias=self.bias is not None,
            carry=self.carry,
            pdl=self.pdl,
            w_ready=self.w_ready,
        )

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        check_form(self.activation)
        self._check_operands()  # first, since the config depends on x
        self._check_scale_factors()
        config = self.config
        self._check_columns(config)
        self._check_rows(config)
        self._check_others(config)

    def _check_operands(self) -> None:
        """The elements of x and w, and offsets."""
        x, w = self.x.data, self.w.data
        require_tensors(x=x, w=w, offsets=self.offsets)
        if w.ndim != 3 or x.ndim != 2:
            raise ValueError(
                f"x {tuple(x.shape)}, w {tuple(w.shape)}: expected [R, K] and [E, N, K]"
            )
        require_table("offsets", self.offsets, torch.int32, (w.shape[0] + 1,))
        if x.shape[1] % hw.TMA_ALIGN_BYTES:
            per_byte, fmt = FORMATS[self.x.fmt].per_byte, self.x.fmt
            unit = hw.TMA_ALIGN_BYTES * per_byte
            raise NotImplementedError(
                f"K = {x.shape[1] * per_byte} in {fmt}: a multiple of {unit}, for TMA"
            )
        for name, data in (("x", x), ("w", w)):
            if not data.is_contiguous():
                raise ValueError(f"{name}.data has strides {data.stride()}: not contiguous")
            require_tma(f"{name}.data", data)
        for name, operand in (("x", self.x), ("w", self.w)):
            require_tma(f"{name}.scales", operand.scales)
            decode = operand.decode_scale
            if decode is not None:
                shape = (None, 2) if decode.ndim == 2 else (None,)
                require_table(f"{name}.decode_scale", decode, torch.float32, shape)

    def _check_scale_factors(self) -> None:
        """Formats, K, and that there are as many scale factors as rows and experts need."""
        x, w, form, experts = self.x, self.w, FORMATS[self.x.fmt], self.w.data.shape[0]
        k, k_of_w = x.data.shape[-1] * form.per_byte, w.data.shape[-1] * FORMATS[w.fmt].per_byte
        if k != k_of_w or (self.mixed and (x.fmt, w.fmt) != MIXED):
            raise ValueError(
                f"x is {x.fmt} with K = {k}, w is {w.fmt} with K = {k_of_w}: one format and one K "
                f"for both, or {MIXED}"
            )
        if self.mixed:
            self._check_windows()
        rows, decode = x.data.shape[0], w.decode_scale
        wanted = scale_bytes(self.blocks, form.columns(k))
        if rows and x.scales.numel() != wanted:
            raise ValueError(
                f"x has {x.scales.numel()} bytes of scale factors, {wanted} for {rows} rows of "
                f"{experts} experts: quantise it with offsets"
            )
        if decode is not None and len(decode) != experts:
            raise ValueError(f"w has {len(decode)} global scales for {experts} experts")
        if decode is not None and decode.ndim == 2 and self.activation is None:
            raise ValueError("w has global scales for gate and for up, but there is no activation")

    def _check_windows(self) -> None:
        """Check the requirements of TMA on elements that it pads."""
        k, start = self.x.k, self.w.data.data_ptr()
        if k % WINDOW_STEP or k < WINDOW:
            raise NotImplementedError(
                f"K = {k} of w in {self.w.fmt} with x in {self.x.fmt}: a multiple of "
                f"{WINDOW_STEP}, at least {WINDOW}"
            )
        if start % WINDOW_ALIGN_BYTES:
            raise ValueError(
                f"w.data starts at address {start:#x}, not a multiple of {WINDOW_ALIGN_BYTES} "
                f"bytes, with x in {self.x.fmt}"
            )

    def _check_columns(self, config: GroupedConfig) -> None:
        n, form = self.w.data.shape[1], FORMATS.get(config.out)
        pair = 2 * config.granularity or 1
        if n % pair:
            raise ValueError(f"N = {n}: a multiple of {pair}, as gate and up alternate")
        if form is not None:
            unit = hw.TMA_ALIGN_BYTES * form.per_byte
        else:
            unit = hw.TMA_ALIGN_BYTES // ITEM_BYTES[config.out]
        columns = n if self.activation is None else n // 2
        if columns % unit:
            raise NotImplementedError(
                f"{columns} columns of output in {config.out}: a multiple of {unit} (16 bytes)"
            )

    def _check_rows(self, config: GroupedConfig) -> None:
        """Check rows and offsets. Values of offsets are read on the CPU only: a GPU uses them
        unchecked."""
        problem = self.problem
        rows, most = problem.rows, problem.most_rows
        if most * problem.experts < rows:
            raise ValueError(
                f"most_rows {self.most_rows}: {problem.experts} experts have {rows} rows together"
            )
        check_tile_rows(config.tile_rows, most)
        check_offsets(self.offsets, rows)
        if self.offsets.device.type == "cpu":
            largest = int(self.offsets.diff().max())
            if largest > most:
                raise ValueError(f"most_rows {self.most_rows}: an expert has {largest} rows")

    def _check_others(self, config: GroupedConfig) -> None:
        """Global scales of the output, its largest magnitude, and the bias."""
        form = FORMATS.get(config.out)
        wanted = form is not None and form.has_global
        if (self.encode_scale is not None) != wanted:
            raise ValueError(f"out {self.out} {'needs an' if wanted else 'has no'} encode_scale")
        named = {"encode_scale": self.encode_scale, "amax": self.amax, "bias": self.bias}
        given = {name: tensor for name, tensor in named.items() if tensor is not None}
        if not given:
            return
        require_tensors(x=self.x.data, **given)
        for name, tensor in given.items():
            shape = tuple(self.w.data.shape[:2]) if name == "bias" else (1,)
            require_table(name, tensor, torch.float32, shape)
        if self.bias is not None:
            require_tma("bias", self.bias)  # loads of threads need the same alignment as TMA
        if self.encode_scale is not None:
            check_scale("encode_scale", self.encode_scale)


def check_tiles(arguments: Arguments) -> None:
    """Raise NotImplementedError or ValueError for tiles that do not fit."""
    check_tile_rows(arguments.config.tile_rows, arguments.most)


def check_form(form: Activation | SwiGLU | None) -> None:
    """Raise TypeError or ValueError unless `form` is an activation."""
    if form is None:
        return
    require_type("limit", form.limit, float, optional=True)
    for name in ("alpha", "beta"):
        require_type(name, getattr(form, name), float)
        if not abs(getattr(form, name)) <= FLT_MAX:
            raise ValueError(
                f"{name} {getattr(form, name)}: a finite number of fp32, at most {FLT_MAX:.4g}"
            )
    if form.limit is not None and not 0 < form.limit <= FLT_MAX:
        raise ValueError(
            f"limit {form.limit}: a positive number of fp32, at most {FLT_MAX:.4g}; None for no "
            "limit"
        )
    if not isinstance(form, Activation):
        return
    require_type("granularity", form.granularity, int)
    if form.granularity not in GRANULARITIES:
        raise NotImplementedError(
            f"granularity {form.granularity!r}: supported are {GRANULARITIES}"
        )


def out_name(out: torch.dtype | str) -> str:
    """The name of a dtype; of a format it is itself."""
    if isinstance(out, torch.dtype):
        if out not in DTYPE_NAMES:
            raise NotImplementedError(f"out {out}: supported are {tuple(DTYPE_NAMES)}")
        return DTYPE_NAMES[out]
    if not isinstance(out, str) or out not in FORMATS:
        raise NotImplementedError(f"out {out!r}: a dtype or one of {tuple(FORMATS)}")
    return out


# ---- Checks of values of tables and scales in host memory. On a GPU they are not read back, and
# not checked.


def check_range(name: str, tensor: torch.Tensor, end: int, limit: str, *, begin: int = 0) -> None:
    """Raise ValueError for a value outside begin .. end - 1. `limit` describes the bound."""
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return
    low, high = (int(value) for value in tensor.aminmax())
    if low < begin or high >= end:
        raise ValueError(f"{name} has values from {low} to {high}, but {limit}")


def check_offsets(offsets: torch.Tensor, rows: int) -> None:
    """Raise ValueError unless offsets ascend from 0 to at most the number of rows."""
    if offsets.device.type != "cpu":
        return
    values = offsets.tolist()
    if values[0] != 0 or values[-1] > rows or values != sorted(values):
        raise ValueError(f"offsets {values}: not ascending from 0 to at most {rows}, the rows of x")


def range_fields(expert_range: tuple[int, int] | None) -> dict[str, int]:
    """Return the fields `first_expert` and `end_expert` of a range of experts; none of them for
    None. Raise TypeError unless it is a pair of ints."""
    if expert_range is None:
        return {}
    if not isinstance(expert_range, tuple | list) or len(expert_range) != 2:
        raise TypeError(f"expert_range is {expert_range!r}, expected (first, end) or None")
    first, end = expert_range
    return {
        "first_expert": as_number("expert_range[0]", first, int),
        "end_expert": as_number("expert_range[1]", end, int),
    }


def check_expert_range(first: int, end: int, experts: int) -> None:
    """Raise ValueError for a range without experts, or beyond the existing ones."""
    if not 0 <= first < end <= experts:
        raise ValueError(
            f"expert_range ({first}, {end}): at least one of the experts 0 to {experts - 1}"
        )


def check_scale(name: str, scale: torch.Tensor) -> None:
    """Raise ValueError unless all global scales are positive and finite."""
    if scale.device.type != "cpu":
        return
    wrong = (~((scale > 0) & scale.isfinite())).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        raise ValueError(f"{name}[{row}] is {scale[row].item()}, expected positive and finite")


def check_bias(name: str, bias: torch.Tensor) -> None:
    """Raise ValueError for a bias of experts that is NaN or +inf. An expert with -inf is chosen
    last."""
    if bias.device.type != "cpu":
        return
    wrong = (~(bias < torch.inf)).nonzero()
    if len(wrong):
        expert = int(wrong[0, 0])
        raise ValueError(
            f"{name}[{expert}] is {bias[expert].item()}: expected a number below +inf; -inf makes "
            "an expert the last choice"
        )


def check_factor(name: str, factor: float) -> None:
    """Raise TypeError unless it is a number, ValueError unless positive and normal in fp32."""
    require_type(name, factor, float)
    if not FLT_MIN <= factor <= FLT_MAX:
        raise ValueError(
            f"{name} {factor}: above 0, from {FLT_MIN:.4g} to {FLT_MAX:.4g} (normal in fp32)"
        )
