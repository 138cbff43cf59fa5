"""`attention`: validate, choose a config, decide empty problems, compile once, launch."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fmha.config import AttentionConfig
from kernelkit import hw
from kernelkit.launch import Target, choose_target, launch
from kernelkit.tensors import require_rank, require_tensors, require_tma, with_plain_strides

ARCHS = ("sm_100a",)
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LAYOUT = "[B, S, H, D]"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    normalize: bool = True,
    return_lse: bool = False,
    kv_lens: torch.Tensor | None = None,
    backend: str = "auto",
    arch: str | None = None,
    config: AttentionConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """softmax(scale Q K^T + mask) V for q [B, Sq, Hq, D] and k, v [B, Skv, Hkv, D].

    bfloat16 or float16; query head h reads key head h // (Hq // Hkv). The last dimension is
    contiguous, other strides are multiples of 16 bytes: views are read in place.

    causal: bottom-right aligned, query r sees keys [0, kv_len - Sq + r].
    scale: multiplies q.k, > 0; 1 / sqrt(D) by default.
    kv_lens: int32 [B] on the same device, keys that exist; what lies past them is never used. On a
        GPU the kernel clamps values to [0, Skv], on the CPU others are refused.
    backend, arch: see `kernelkit.launch.choose_target`.
    config: its tunable fields (stages, tiles, rescale_log2); the arguments decide the rest.

    Returns O [B, Sq, Hq, D] in q.dtype; with return_lse (O, LSE), LSE [B, Hq, Sq] fp32 in natural
    log; with normalize=False (O_raw, LSE, row_max): O_raw = sum exp(s - row_max) V in fp32 and
    O = O_raw / exp(LSE - row_max). row_max is the reference maximum that was used, which may lag
    the true one. A row that sees no key has O = 0 and LSE = row_max = -inf.

    Raises TypeError, ValueError or NotImplementedError, naming the value and the limit, before
    anything is compiled. Forward only.
    """
    lengths = {} if kv_lens is None else {"kv_lens": kv_lens}
    require_tensors(q=q, k=k, v=v, **lengths)
    _check_shapes(q, k, v)
    _check_lengths(kv_lens, batch=q.shape[0], skv=k.shape[1])
    scale = _check_scale(scale, q.shape[-1])
    config = replace(
        config or AttentionConfig(),
        head_dim=q.shape[-1],
        dtype=_dtype_name(q, k, v),
        mask="causal" if causal else "full",
        normalize=normalize,
        kv_lens=kv_lens is not None,
    )
    config.check()
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tma(name, tensor)
    target = choose_target(q.device, backend, arch, ARCHS)
    results = _run(config, target, (q, k, v), kv_lens, scale)
    if not normalize:
        return results
    return results[:2] if return_lse else results[0]


def _run(
    config: AttentionConfig,
    target: Target,
    inputs: tuple[torch.Tensor, ...],
    kv_lens: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(O, LSE, row_max or None), computed by one launch, or none where there is nothing to sum."""
    q, k, v = inputs
    batch, sq, heads, head_dim = q.shape
    out_dtype = q.dtype if config.normalize else torch.float32
    o = torch.empty((batch, sq, heads, head_dim), dtype=out_dtype, device=q.device)
    lse = torch.empty((batch, heads, sq), dtype=torch.float32, device=q.device)
    row_max = None if config.normalize else torch.empty_like(lse)
    if o.numel() == 0 or k.numel() == 0:
        lse.fill_(-math.inf)
        return o.zero_(), lse, None if row_max is None else row_max.fill_(-math.inf)
    from fmha.sm100.compile import compile_attention

    compiled = compile_attention(config, target.arch)
    tensors = tuple(with_plain_strides(tensor) for tensor in (q, k, v, o))
    lengths = None if kv_lens is None else kv_lens.contiguous()
    launch(compiled, (tensors, (lse, row_max), lengths, scale), target, q.device)
    return o, lse, row_max


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_rank(name, tensor, LAYOUT)
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise NotImplementedError(f"{name} requires grad: there is no backward; use no_grad()")
    if k.shape != v.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in shape")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, k and v have {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[3]}, k and v have {k.shape[3]}")
    q_heads, kv_heads = q.shape[2], k.shape[2]
    if q_heads == 0 or kv_heads == 0:
        raise ValueError(f"{q_heads} query and {kv_heads} key heads: at least 1 of each")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} key heads")
    for name, size in (("batch", q.shape[0]), ("heads", q_heads)):
        if size > hw.MAX_GRID_YZ:
            raise ValueError(f"{name} {size}, limit {hw.MAX_GRID_YZ} (grid dimension)")


def _check_lengths(kv_lens: torch.Tensor | None, batch: int, skv: int) -> None:
    if kv_lens is None:
        return
    if kv_lens.dtype != torch.int32 or tuple(kv_lens.shape) != (batch,):
        raise ValueError(
            f"kv_lens is {kv_lens.dtype} {tuple(kv_lens.shape)}, expected int32 ({batch},)"
        )
    if kv_lens.device.type == "cpu" and ((kv_lens < 0) | (kv_lens > skv)).any():
        raise ValueError(f"kv_lens {kv_lens.tolist()}: from 0 to Skv = {skv}")


def _check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale {scale}: finite and > 0, the row maximum is taken before scaling")
    return float(scale)


def _dtype_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1:
        raise TypeError(f"q {q.dtype}, k {k.dtype} and v {v.dtype} differ in dtype")
    if q.dtype not in DTYPE_NAMES:
        raise NotImplementedError(f"dtype {q.dtype}: supported are {tuple(DTYPE_NAMES)}")
    return DTYPE_NAMES[q.dtype]
