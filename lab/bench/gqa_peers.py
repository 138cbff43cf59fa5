"""Decode problems, their reference, and who solves them: gqa_lowlatency, torch, FlashInfer.

A peer makes, for a problem and the buffer sets of a rotation, one launch per set; a launch returns
O [B, Hq, D], or [B, Hq, 1, D]. It raises where it cannot: not installed, a dtype that it does not
take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gqa_lowlatency import DecodeConfig, decode, decode_plan
from lab.measure.timing import rotation

# name -> dtypes of Q, and of K and V
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "e4m3": (torch.bfloat16, torch.float8_e4m3fn),
}
INPUTS = "q, k, v standard normal, rounded to their dtypes"
# of the worst row, norm over norm: P and O are rounded; with e4m3, Q may be, too
MAX_ERROR = {"bf16": 0.02, "fp16": 0.005, "e4m3": 0.08}
PAGE = 64  # of the peers that read pages: a view of the same memory
WORKSPACE_BYTES = 128 << 20
TINY = torch.finfo(torch.float32).tiny  # a row of zeros has no relative error
CHUNK = 8192  # keys that the reference takes at a time

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Launch = Callable[[], torch.Tensor]
Peer = Callable[["Problem", Sequence[Inputs]], list[Launch]]


@dataclass(frozen=True)
class Problem:
    """Decode problem with one new token per entry: q [batch, q_heads, head_dim], k and v [batch,
    kv_len, kv_heads, head_dim], every key valid."""

    batch: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    def check(self) -> None:
        """Raise ValueError for sizes that are no problem."""
        if min(self.batch, self.kv_len, self.q_heads, self.kv_heads, self.head_dim) < 1:
            raise ValueError(f"{self}: sizes are at least 1")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads: a multiple of {self.kv_heads} KV heads")

    @property
    def nbytes(self) -> int:
        """Bytes that a launch must move: K and V, and the small Q and O."""
        q_dtype, kv_dtype = DTYPES[self.dtype]
        keys = 2 * self.batch * self.kv_len * self.kv_heads * self.head_dim * kv_dtype.itemsize
        return keys + 2 * self.batch * self.q_heads * self.head_dim * q_dtype.itemsize

    def sets(self, cache_bytes: int) -> int:
        """Buffer sets of a rotation after which nothing of the first is left in the cache."""
        return rotation(self.nbytes, cache_bytes)

    def inputs(self, device: str, seed: int = 0) -> Inputs:
        q_dtype, kv_dtype = DTYPES[self.dtype]
        q_shape = (self.batch, self.q_heads, self.head_dim)
        kv_shape = (self.batch, self.kv_len, self.kv_heads, self.head_dim)
        if device == "meta":
            shapes = ((q_shape, q_dtype), (kv_shape, kv_dtype), (kv_shape, kv_dtype))
            return tuple(torch.empty(s, dtype=d, device="meta") for s, d in shapes)
        generator = torch.Generator(device).manual_seed(seed)
        options = {"generator": generator, "device": device, "dtype": q_dtype}
        q = torch.randn(q_shape, **options)
        return q, *(torch.randn(kv_shape, **options).to(kv_dtype) for _ in range(2))


def reference(inputs: Inputs) -> torch.Tensor:
    """O [B, Hq, D] in fp32, a chunk of the keys of one entry at a time."""
    q, k, v = inputs
    batch, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    out = q.new_empty(q.shape, dtype=torch.float32)
    for entry in range(batch):
        rows = q[entry].float().view(kv_heads, -1, head_dim) * head_dim**-0.5
        o, top = torch.zeros_like(rows), rows.new_full((*rows.shape[:2], 1), -torch.inf)
        total = torch.zeros_like(top)
        for begin in range(0, k.shape[1], CHUNK):
            keys, values = (x[entry, begin : begin + CHUNK].float().transpose(0, 1) for x in (k, v))
            scores = rows @ keys.transpose(1, 2)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            p, keep = torch.exp(scores - new_top), torch.exp(top - new_top)
            o, total, top = o * keep + p @ values, total * keep + p.sum(-1, keepdim=True), new_top
        out[entry] = (o / total).view(q_heads, head_dim)
    return out


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Error of the worst row, norm over norm; infinite where anything is not finite."""
    difference = actual.reshape(expected.shape).float() - expected
    rows = difference.norm(dim=-1) / expected.norm(dim=-1).clamp_min(TINY)
    worst = rows.max().item()
    return worst if worst == worst else float("inf")


# -- ours -----------------------------------------------------------------------------------------


def planned(*, allocates: bool = False, **options: Any) -> Peer:
    """A `decode_plan` with these options; its outputs exist before it is called, or not."""

    def make(problem: Problem, sets: Sequence[Inputs]) -> list[Launch]:
        plan = decode_plan(*sets[0], **options)

        def launch_of(inputs: Inputs) -> Launch:
            if allocates:
                return lambda: plan(*inputs)[0]
            q = inputs[0]
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
            return lambda: plan(*inputs, out=out, lse=lse)[0]

        return [launch_of(inputs) for inputs in sets]

    return make


def tuned(*, parts: int = 0, **fields: int) -> Peer:
    """A `decode_plan` with these tunable fields of its config; what is not named is chosen."""

    config = DecodeConfig(**({"cluster": 0} | fields))
    return planned(parts=parts, config=config)


def called(problem: Problem, sets: Sequence[Inputs]) -> list[Launch]:
    """`decode` as it is."""
    return [partial(decode, *inputs) for inputs in sets]


# -- torch ----------------------------------------------------------------------------------------


def _heads_first(inputs: Inputs) -> Inputs:
    """Views [B, H, S, D]."""
    q, k, v = inputs
    return q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)


def sdpa(backend: SDPBackend) -> Peer:
    def make(problem: Problem, sets: Sequence[Inputs]) -> list[Launch]:
        grouped = problem.q_heads != problem.kv_heads

        def launch(inputs: Inputs) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*inputs, enable_gqa=grouped)

        return [partial(launch, _heads_first(inputs)) for inputs in sets]

    return make


def flex(problem: Problem, sets: Sequence[Inputs]) -> list[Launch]:
    """flex_attention, compiled for this shape."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # else the shapes of a run end at the limit of recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = problem.q_heads != problem.kv_heads
    return [partial(compiled, *_heads_first(inputs), enable_gqa=grouped) for inputs in sets]


# -- FlashInfer -----------------------------------------------------------------------------------


def _page_numbers(problem: Problem, device: torch.device) -> torch.Tensor:
    """int32 [batch, pages of an entry]: in the order of memory."""
    if problem.kv_len % PAGE:
        raise NotImplementedError(f"kv_len {problem.kv_len}: pages of {PAGE} do not divide it")
    pages = problem.batch * problem.kv_len // PAGE
    return torch.arange(pages, dtype=torch.int32, device=device).view(problem.batch, -1)


def _pages(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as pages [pages, PAGE, heads, D]."""
    _, k, v = inputs
    return k.view(-1, PAGE, *k.shape[2:]), v.view(-1, PAGE, *v.shape[2:])


def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def flashinfer_tables(backend: str) -> Peer:
    """The kernels that read page tables: 'xqa', or 'trtllm-gen' on compute capability 10.x."""

    def make(problem: Problem, sets: Sequence[Inputs]) -> list[Launch]:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        if backend == "trtllm-gen" and torch.cuda.get_device_capability()[0] != 10:
            raise NotImplementedError("trtllm-gen is for compute capability 10.x")
        table = _page_numbers(problem, sets[0][0].device)
        lens = torch.full_like(table[:, 0], problem.kv_len)
        same = (_workspace(table.device), table, lens, problem.kv_len)
        options = {"bmm1_scale": problem.head_dim**-0.5, "bmm2_scale": 1.0}
        options |= {"kv_layout": "NHD", "backend": backend}
        return [
            partial(
                trtllm_batch_decode_with_kv_cache,
                *(inputs[0], _pages(inputs), *same),
                out=torch.empty_like(inputs[0]),
                **options,
            )
            for inputs in sets
        ]

    return make


def flashinfer_fa2(problem: Problem, sets: Sequence[Inputs]) -> list[Launch]:
    """The wrapper with plan and run, as it is used under CUDA graphs."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    table = _page_numbers(problem, sets[0][0].device)
    numbers, last = table.flatten(), torch.full_like(table[:, 0], PAGE)
    starts = torch.arange(problem.batch + 1, dtype=torch.int32, device=table.device)
    starts *= table.shape[1]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(table.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=starts.clone(),
        paged_kv_indices_buffer=numbers.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
        backend="fa2",
    )
    heads = (problem.q_heads, problem.kv_heads, problem.head_dim)
    q_dtype, kv_dtype = DTYPES[problem.dtype]
    wrapper.plan(starts, numbers, last, *heads, PAGE, q_data_type=q_dtype, kv_data_type=kv_dtype)
    return [partial(wrapper.run, inputs[0], _pages(inputs)) for inputs in sets]


OURS = {
    "decode": planned(),
    "decode pdl": planned(pdl=True),
    "decode pdl kv-ready": planned(pdl=True, kv_ready_before_pdl=True),
}
PEERS: dict[str, Peer] = {
    **OURS,
    "torch cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "torch flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "flex": flex,
    "flashinfer xqa": flashinfer_tables("xqa"),
    "flashinfer trtllm-gen": flashinfer_tables("trtllm-gen"),
    "flashinfer fa2": flashinfer_fa2,
}
# of an eager call on the host
CALLS: dict[str, Peer] = {
    "decode()": called,
    "decode_plan": planned(allocates=True),
    "decode_plan, out=": planned(),
    "torch cudnn": PEERS["torch cudnn"],
    "torch flash": PEERS["torch flash"],
}
