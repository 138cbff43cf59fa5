"""`decode` and `decode_plan`: the arguments of a user in, the operator or a plan behind them."""

from __future__ import annotations

from typing import Any

import torch

from gqa_lowlatency import ops
from gqa_lowlatency.arguments import SCALAR_KINDS, TABLES, Arguments
from gqa_lowlatency.config import TUNABLE, DecodeConfig
from gqa_lowlatency.direct import DecodePlan
from kernelkit.tensors import require_no_grad, require_scalars, require_types

Scale = float | torch.Tensor
SCALES = ("k_scale", "v_scale")


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_lens: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    causal: bool = True,
    window: int | None = None,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
    kv_ready_before_pdl: bool = False,
    batch_invariant: bool = False,
    parts: int = 0,
    backend: str = "auto",
    arch: str | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale Q K^T + mask) V of the newest tokens over a cache of keys and values.

    Shapes. q [B, T, Hq, D], T from 1 to 8 tokens, or [B, Hq, D] for one; bfloat16 or float16, D
    one of `gqa_lowlatency.config.HEAD_DIMS`. k, v [B, S, Hkv, D] of q's dtype or float8_e4m3fn;
    query head h reads KV head h // (Hq // Hkv). Pages: k, v [pages, page_size, Hkv, D], page_size
    a divisor of 128, with page_table, int32 [B, pages of an entry], and seq_lens. The last
    dimension is contiguous, other strides are multiples of 16 bytes: views are read in place.
    seq_lens: int32 [B], keys of each entry, the T query tokens included: token t stands at
        seq_lens - T + t. The cache may be longer, what lies behind is never used; None is all of
        S. An entry may have no keys, or fewer than T.
    max_seq_len: a bound on seq_lens that decides how many CTAs share the keys of a KV head; None
        is what the cache can hold. A captured launch is right for all lengths up to S.

    What a token sees. causal: no key behind its own position; False: all keys of the entry.
    window: keys seen before the own position, None for all. sink_tokens: that many first keys are
    visible beside a window. Keys and pages that no token sees are not read and may hold NaN.

    Scores. scale: multiplies q.k, > 0; 1 / sqrt(D) by default. softcap: c > 0 makes a score s
    c tanh(s / c). sinks: fp32 [Hq], for each head a logit whose value is zero. k_scale, v_scale:
    what e4m3 keys and values are multiplied by, a number or fp32 [1] or [Hkv], 1 by default; only
    [Hkv] is read in place: a number takes a small fill before the kernel, [1] a copy.

    Results. O like q in out_dtype (bfloat16, float16, float32; q.dtype by default); with
    return_lse (O, LSE), LSE [B, Hq, T], or [B, Hq] where q has no T, fp32 in natural log, sinks
    included. A token that sees no key has O = 0 and LSE = -inf, or LSE = its sink.

    How it runs. pdl: programmatic dependent launch: the kernel may begin before the one in front
    of it on the stream has ended. kv_ready_before_pdl: that kernel writes none of k, v, seq_lens
    and page_table, so that they are read at once; all the others wait. batch_invariant: the
    bits of an entry depend on its own tensors, length and max_seq_len only, whatever else is in
    the batch. parts: clusters that share a KV head and merge through a workspace in global memory;
    0 chooses, 1 unless there are few KV heads and many keys. backend, arch: see
    `kernelkit.launch.choose_target`. config: its tunable fields (`gqa_lowlatency.config.TUNABLE`)
    instead of those that sizes choose.

    Raises TypeError, ValueError or NotImplementedError, naming the value and the limit, before
    anything is compiled. The contents of integer tensors are checked on the CPU; on a GPU, where
    the host does not wait, they are taken as they are. There, a call whose layouts and options are
    those of one of the last 64 of its thread costs the host a tenth of the first. Forward only.
    torch.compile sees one operator, `blackwell_kernels::decode`; CUDA graphs capture it.
    """
    options = {
        "seq_lens": seq_lens, "page_table": page_table, "max_seq_len": max_seq_len,
        "causal": causal, "window": window, "sink_tokens": sink_tokens, "softcap": softcap,
        "sinks": sinks, "scale": scale, "k_scale": k_scale, "v_scale": v_scale,
        "out_dtype": out_dtype, "pdl": pdl, "kv_ready_before_pdl": kv_ready_before_pdl,
        "batch_invariant": batch_invariant, "parts": parts, "backend": backend, "arch": arch,
        "config": config,
    }  # fmt: skip
    # An operator parses every argument that it is given: those of a plain call are three.
    given = {name: value for name, value in options.items() if value is not _DEFAULTS[name]}
    o, lse = ops.decode(q, k, v, **_arguments(q, k, v, given))
    return (o, lse) if return_lse else o


_DEFAULTS = dict(decode.__kwdefaults__)


def decode_plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> DecodePlan:
    """A plan for steps like this one: plan(q, k, v, seq_lens=, page_table=, out=, lse=).

    The tensors and options are those of `decode`, and everything that it checks is checked here,
    the kernel is compiled here. A call then costs the host some microseconds: it compares shapes,
    strides, dtypes and devices with those planned, puts the new addresses into arguments that were
    made here, and launches. Sinks and scales belong to the plan; their contents may change in
    place, but those of a number. return_lse has no meaning: a call returns (O, LSE).
    """
    if "return_lse" in options:
        raise TypeError("decode_plan takes no return_lse: a call of the plan returns (O, LSE)")
    return DecodePlan(Arguments(q, k, v, **_arguments(q, k, v, options)))


def _arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> dict[str, Any]:
    """The fields of Arguments behind q, k and v by name, types checked; only those given."""
    require_types(q=q, k=k, v=v)
    tensors, scalars = {}, {}
    for name, value in options.items():
        if name in TABLES:
            if value is not None:
                tensors[name] = _scale(value, k) if name in SCALES else value
        elif name == "config":
            scalars |= _tunable(value)
        elif name in SCALAR_KINDS and name not in TUNABLE:
            scalars[name] = value
        else:
            raise TypeError(f"unknown option {name}")
    require_types(**tensors)
    require_no_grad(q=q, k=k, v=v, **tensors)
    require_scalars({name: SCALAR_KINDS[name] for name in scalars}, scalars)
    return tensors | scalars


def _scale(scale: Scale, k: torch.Tensor) -> Scale:
    """A number becomes a tensor with an element for each head, which the kernel reads in place."""
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        return scale
    return torch.full(k.shape[-2:-1], float(scale), device=k.device)


def _tunable(config: DecodeConfig | None) -> dict[str, int]:
    """The tunable fields of `config` that do not leave the choice to us."""
    if config is None:
        return {}
    if not isinstance(config, DecodeConfig):
        raise TypeError(f"config is {type(config).__name__}, expected DecodeConfig")
    fields = {name: getattr(config, name) for name in TUNABLE}
    return {name: value for name, value in fields.items() if value}
