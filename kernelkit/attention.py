"""Arguments that attention over many and over few query tokens share: names, shapes, checks, and
their form for a kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, TypedDict

import torch

from kernelkit.call.tensors import (
    INPUT_NAMES,
    as_number,
    in_sequence,
    plain_table,
    require_int64,
    require_table,
    require_tensors,
    require_tma,
    require_type,
)
from kernelkit.plan.limits import FLT_MAX, FLT_MIN, MAX_TREE_TOKENS, UNBOUNDED
from kernelkit.plan.log2 import LOG2_E

Sides = tuple[int | None, int | None]
Window = int | Sides | None
Scale = float | torch.Tensor
WithLse = tuple[torch.Tensor, torch.Tensor]  # (O, LSE)

MIN_SCALE = 1e-12
E4M3 = torch.float8_e4m3fn
MIN_SOFTCAP, MAX_SOFTCAP = 1e-6, 4096.0  # the logits of a larger cap would be off by 2 ** -11

_MASKS = (
    "masks are causal=, window=, tree=, sink_tokens= and kv_lens=; fmha.attention also has "
    "mask_mod= and block_mask="
)
_SCORES = "scores are scaled and soft-capped; fmha.attention has score_mod="
_ROTARY = "turn q and k before the call"

# Arguments of other libraries (FlashAttention, FlashInfer, vLLM, torch) -> the name here, or what
# to do instead.
SHARED_NAMES = {
    "seq_lens": "kv_lens",
    "cache_seqlens": "kv_lens",
    "seqused_k": "kv_lens",
    "seqused_q": "drop it: q_offset=kv_lens - seqused_q of fmha.attention places the rows",
    "block_table": "page_table",
    "block_tables": "page_table",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window",
    "window_left": "window",
    "logits_soft_cap": "softcap",
    "soft_cap": "softcap",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "is_causal": "causal",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
    "q_descale": "q_scale",
    "output_scale": "out_scale",
    "o_scale": "out_scale",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "enable_pdl": "pdl",
    "alibi_slopes": _SCORES,
    "attn_mask": _MASKS,
    "attn_bias": _SCORES,
    "custom_mask": _MASKS,
    "mask_mod": _MASKS,
    "block_mask": _MASKS,
    "block_sparse_tensors": _MASKS,
    "aux_tensors": _MASKS,
    "score_mod": _SCORES,
    "attention_chunk": "fmha.attention has mask_mod=, see docs/masks.md",
    "qv": "a second part of the queries is not supported",
    "dropout_p": "there is no dropout; drop it if it is 0",
    "deterministic": "drop it: the bits of a call never change",
    "enable_gqa": "drop it: query heads may be a multiple of KV heads",
    "kv_layout": "drop it: k and v are [.., rows, heads, D]; a view of HND is x.transpose(-3, -2)",
    "cache_batch_idx": "page_table=cache_batch_idx[:, None]: a dense cache is pages of S rows",
    "qo_indptr": "fmha.attention has cu_seqlens_q=",
    "kv_indptr": "kvcache.page_table makes page_table= and kv_lens= of it",
    "paged_kv_indptr": "kvcache.page_table makes page_table= and kv_lens= of it",
    "q_len_per_req": "drop it: q of gqa_lowlatency.decode is [B, T, Hq, D]",
    "pos_encoding_mode": "turn q and k before the call; for ALiBi fmha.attention has score_mod=",
    "page_size": "drop it: k and v have it in their shape",
    "scheduler_metadata": "drop it: attention_plan and decode_plan prepare calls",
    "sm_margin": "drop it: kernels use all SMs",
    "rotary_interleaved": _ROTARY,
    "rotary_cos": _ROTARY,
    "rotary_sin": _ROTARY,
}


class SharedOptions(TypedDict, total=False):
    """Options of both, but for `out`; `causal` has two defaults."""

    window: Annotated[Window, None]
    tree: Annotated[torch.Tensor | None, None]
    sink_tokens: Annotated[int, 0]
    softcap: Annotated[float | None, None]
    sinks: Annotated[torch.Tensor | None, None]
    scale: Annotated[float | None, None]
    k_scale: Annotated[Scale | None, None]
    v_scale: Annotated[Scale | None, None]
    kv_lens: Annotated[torch.Tensor | None, None]
    page_table: Annotated[torch.Tensor | None, None]
    out_dtype: Annotated[torch.dtype | None, None]
    out_scale: Annotated[Scale | None, None]
    pdl: Annotated[bool, False]
    backend: Annotated[str, "auto"]
    arch: Annotated[str | None, None]


@dataclass(frozen=True)
class AttentionArguments:
    """Fields of both; q, k and v are [..., heads, columns]. window_left, window_right: None for
    unbounded."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_lens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    out: torch.Tensor | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    tree: torch.Tensor | None = None
    sink_tokens: int = 0
    softcap: float = 0.0
    scale: float | None = None
    out_dtype: torch.dtype | None = None
    pdl: bool = False
    backend: str = "auto"
    arch: str | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def capacity(self) -> int:
        """Keys that an entry can have at most."""
        if self.page_table is None:
            return self.k.shape[-3]
        return self.page_table.shape[1] * self.k.shape[1] if self.k.numel() else 0

    @property
    def q_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        """KV heads, each read by the same number of query heads."""
        return self.k.shape[-2]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def o_dtype(self) -> torch.dtype:
        if self.out is not None:
            return self.out.dtype
        return self.out_dtype or self.q.dtype

    @property
    def is_fp8(self) -> bool:
        """Whether K and V are e4m3."""
        return self.k.dtype == E4M3

    @property
    def softmax_scale(self) -> float:
        """Factor of q.k."""
        if self.scale is not None:
            return float(self.scale)
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.q.shape[-1] else 1.0

    @property
    def on_host(self) -> bool:
        """Whether reading a tensor is free of waiting."""
        return self.q.device.type == "cpu"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, of those that are there."""
        fields = vars(self).items()
        return {name: value for name, value in fields if isinstance(value, torch.Tensor)}

    def check_devices(self) -> None:
        """Raise ValueError for tensors on different devices."""
        require_tensors(**self.tensors())

    def check_shared(
        self,
        batch: int,
        o_shape: tuple[int, ...],
        o_dtype: torch.dtype,
        scaled: Mapping[str, tuple[torch.Tensor, int]],
    ) -> None:
        """Raise for tables, heads, sinks, windows, factors and an `out` that no kernel supports.

        Args:
            batch: number of entries
            o_shape: shape of O
            o_dtype: dtype of O
            scaled: name of a scale -> the tensor that it multiplies, and the number of heads that
                may have separate scales
        """
        self._check_heads()
        self._check_lengths(batch)
        self._check_window()
        check_factors(self.softmax_scale, self.softcap)
        if self.sinks is not None:
            if not self.sinks.dtype.is_floating_point:
                raise ValueError(f"sinks is {self.sinks.dtype}, expected a floating-point dtype")
            require_table("sinks", self.sinks, self.sinks.dtype, (self.q_heads,))
        if o_dtype not in INPUT_NAMES:
            raise NotImplementedError(f"out_dtype {o_dtype}: one of {tuple(INPUT_NAMES)}")
        if self.out_scale is not None:
            self._check_out_scale(self.out_scale, o_dtype)
        if self.out is not None:
            self._check_out(self.out, o_shape)
        self._check_scales(scaled)
        if self.sinks is not None and self.on_host:
            check_sinks(self.sinks)

    def _check_lengths(self, batch: int) -> None:
        """Raise ValueError for lengths and pages that are no tables, or pages without lengths."""
        if self.page_table is not None:
            require_table("page_table", self.page_table, torch.int32, (batch, None))
            if self.kv_lens is None:
                raise ValueError("page_table without kv_lens: the number of keys is not known")
        if self.kv_lens is not None:
            require_table("kv_lens", self.kv_lens, torch.int32, (batch,))

    def _check_scales(self, scaled: Mapping[str, tuple[torch.Tensor, int]]) -> None:
        """Raise ValueError for a scale that is no number, nor one for each head; on the CPU also
        for one that is not finite."""
        for name, (tensor, heads) in scaled.items():
            scale = getattr(self, name)
            if scale is None:
                continue
            if tensor.dtype != E4M3:
                raise ValueError(f"{name} with {tensor.dtype}: only e4m3 is scaled")
            if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,), (heads,)):
                raise ValueError(
                    f"{name} is {scale.dtype} {tuple(scale.shape)}, expected torch.float32, one "
                    f"number or ({heads},)"
                )
            if self.on_host and not all(map(math.isfinite, scale.flatten().tolist())):
                raise ValueError(f"{name} {scale.tolist()}, expected finite numbers")

    def _check_out_scale(self, scale: torch.Tensor, o_dtype: torch.dtype) -> None:
        """Raise ValueError for a divisor of O that is not one positive number, or that belongs to
        no O in e4m3; the number is read on the CPU only."""
        if o_dtype != E4M3:
            raise ValueError(f"out_scale with out_dtype {o_dtype}: only {E4M3} is scaled")
        if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,)):
            raise ValueError(
                f"out_scale is {scale.dtype} {tuple(scale.shape)}, expected torch.float32, one "
                "number"
            )
        if self.on_host:
            check_out_scale(scale.item())

    def _check_heads(self) -> None:
        q_heads, kv_heads = self.q_heads, self.kv_heads
        if q_heads == 0 or kv_heads == 0:
            raise ValueError(f"{q_heads} query and {kv_heads} KV heads: at least 1 of each")
        if q_heads % kv_heads:
            raise ValueError(
                f"{q_heads} query heads are not a multiple of {kv_heads} KV heads. If k and v are "
                "[.., heads, rows, D] (HND), give k.transpose(-3, -2), a view"
            )

    def _check_window(self) -> None:
        for side in ("left", "right"):
            size = getattr(self, f"window_{side}")
            if size is not None and size < 0:
                raise ValueError(f"window {side} {size}: at least 0 keys, None for unbounded")
        if self.causal and self.window_right not in (None, 0):
            window = self.window_left, self.window_right
            raise ValueError(
                f"causal=True conflicts with window={window}: a causal mask has right = 0. Drop "
                "causal, or pass right = 0 or None"
            )
        if self.tree is not None and self.window_right is not None:
            raise ValueError(
                f"tree conflicts with window right {self.window_right}: its words say which of the "
                "newest keys a token sees. Pass right = None"
            )
        if self.sink_tokens < 0:
            raise ValueError(f"sink_tokens {self.sink_tokens}: at least 0")
        if self.sink_tokens and self.window_left is None:
            raise ValueError(
                f"sink_tokens {self.sink_tokens} without a left window: all rows see the first keys"
            )

    def check_tree(self, shape: tuple[int, ...], most_tokens: int, remedy: str = "") -> None:
        """Raise for words of another shape or dtype, and for entries with too many tokens."""
        assert self.tree is not None
        require_table("tree", self.tree, torch.int64, shape)
        if most_tokens > MAX_TREE_TOKENS:
            raise ValueError(
                f"tree with {most_tokens} tokens of an entry: at most {MAX_TREE_TOKENS}{remedy}"
            )

    def _check_out(self, out: torch.Tensor, shape: tuple[int, ...]) -> None:
        if self.out_dtype not in (None, out.dtype):
            raise ValueError(f"out is {out.dtype}, but out_dtype is {self.out_dtype}")
        if tuple(out.shape) != shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, expected {shape}")
        require_tma("out", out)

    def kernel_sinks(self) -> torch.Tensor | None:
        """fp32, as kernels read them; a copy where they are of another dtype."""
        return None if self.sinks is None else plain_table(self.sinks.float())

    def kernel_tree(self) -> torch.Tensor | None:
        """Words of all entries in sequence, as kernels read them; a copy where they lie apart."""
        return None if self.tree is None else in_sequence(self.tree)

    def kernel_out_scale(self) -> torch.Tensor | None:
        """Return [1], the divisor of O in place."""
        return None if self.out_scale is None else self.out_scale.reshape(1)

    def factors(self) -> tuple[float, float]:
        """scale_log2 and softcap_log2, see `exponent_factors`."""
        return exponent_factors(self.softmax_scale, self.softcap)


def exponent_factors(scale: float, softcap: float) -> tuple[float, float]:
    """(scale_log2, softcap_log2): exp2 takes the place of exp, so scales carry log2(e).

    With softcap c the kernel computes c tanh(x) as 2 c (1/2 - 1 / (1 + exp(2 x))), where x is
    scale q.k / c; without it softcap_log2 is 0.
    """
    scale_log2 = scale * LOG2_E
    if softcap <= 0:
        return scale_log2, 0.0
    return 2.0 * softcap * LOG2_E, 2.0 * scale_log2 / softcap


def check_factors(scale: float, softcap: float) -> None:
    """ValueError for what the kernels do not compute, naming the value and the limit."""
    if not MIN_SCALE <= scale <= 1 / MIN_SCALE:
        raise ValueError(
            f"scale {scale}: from {MIN_SCALE} to {1 / MIN_SCALE}; above 0, since the row maximum "
            "is taken before scaling, and well inside fp32"
        )
    if softcap and not MIN_SOFTCAP <= softcap <= MAX_SOFTCAP:
        raise ValueError(
            f"softcap {softcap}: from {MIN_SOFTCAP} to {MAX_SOFTCAP}, or 0 for none; scores are "
            "accurate to 2 ** -23 of it"
        )


def check_out_scale(scale: float) -> None:
    """ValueError for a divisor of O whose inverse is no positive finite fp32 number."""
    if not FLT_MIN <= scale <= FLT_MAX:
        raise ValueError(f"out_scale {scale}: from {FLT_MIN:.4g} to {FLT_MAX:.4g}")


def check_sinks(sinks: torch.Tensor) -> None:
    """ValueError for a sink that is NaN or +inf: exp(+inf) / exp(+inf) is no number."""
    for head, sink in enumerate(sinks.tolist()):
        if not sink < math.inf:
            raise ValueError(f"sinks {sink} of head {head}: below +inf; -inf for no sink")


def per_head(scale: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """Return one scale per head, contiguous; copy only if needed."""
    if scale is None:
        return None
    return scale.contiguous() if scale.shape == (heads,) else scale.reshape(1).repeat(heads)


def spread_scales(fields: dict[str, Any], names: Mapping[str, str]) -> None:
    """Replace the scales of a call that are numbers by fp32 tensors.

    A scale in `names` becomes one for each head of the tensor that `names` gives, out_scale [1].
    """
    for name, scaled in (*names.items(), ("out_scale", "")):
        scale, tensor = fields.get(name), fields[scaled or "q"]
        if scale is not None and not isinstance(scale, torch.Tensor):
            if isinstance(scale, bool) or not isinstance(scale, Real):
                raise TypeError(f"{name} is {scale!r}, expected a number or torch.Tensor")
            scale = as_number(name, scale, float)
            require_type(scaled or "q", tensor, torch.Tensor)
            if not abs(scale) <= FLT_MAX:
                raise ValueError(f"{name} {scale}: a finite fp32 number, at most {FLT_MAX:.4g}")
            if not scaled:
                check_out_scale(scale)
            sizes, device = tensor.shape[-2:-1] if scaled else (1,), tensor.device
            fields[name] = torch.full(sizes, float(scale), dtype=torch.float32, device=device)


def bounded(size: int | None) -> int:
    """Keys of one side of a window, or of the first ones, as a kernel takes them."""
    return UNBOUNDED if size is None else min(size, UNBOUNDED)


def fill_without_keys(
    o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, *, heads_last: bool = False
) -> None:
    """O = 0, LSE = -inf; a sink, which needs no key, is then all of the LSE.

    lse: [..., H, S], or [..., H] with heads_last.
    """
    lse.fill_(-math.inf)
    if sinks is not None:
        lse.copy_(sinks if heads_last else sinks[:, None])
    o.zero_()


def window_sides(window: Window) -> Sides:
    """Return (left, right) of a window: a number is left. -1 is None, as in FlashAttention."""
    sides = (window, None) if isinstance(window, Integral | None) else window
    if isinstance(window, bool) or not isinstance(sides, tuple | list) or len(sides) != 2:
        raise TypeError(f"window {window!r}: expected (left, right) or left, None for unbounded")
    left, right = (None if type(side) is int and side == -1 else side for side in sides)
    return left, right


def shared_fields(
    given: Mapping[str, Any], config_kind: type, tunable: tuple[str, ...]
) -> dict[str, Any]:
    """Arguments of a call -> fields of the dataclass: a window by its sides, no softcap that is
    None, and of a config the fields `tunable`, which a user may choose."""
    fields = dict(given)
    window = fields.pop("window", None)
    if window is not None:
        fields["window_left"], fields["window_right"] = window_sides(window)
    if fields.get("softcap", 0.0) is None:
        del fields["softcap"]
    if "config" in fields:
        fields |= _tunable_fields(fields.pop("config"), config_kind, tunable)
    return fields


def _tunable_fields(config: object, kind: type, names: tuple[str, ...]) -> dict[str, object]:
    """The fields of a config that a user may choose, where they are not at their default; the types
    of all fields are checked."""
    if config is None:
        return {}
    if not isinstance(config, kind):
        raise TypeError(f"config is {type(config).__name__}, expected {kind.__name__}")
    chosen = {}
    for name, default in vars(kind()).items():
        where = f"config.{name}"
        value = as_number(where, getattr(config, name), type(default))
        require_int64(**{where: value})
        if name in names and value != default:
            chosen[name] = value
    return chosen
