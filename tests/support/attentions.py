"""Helpers for tests of both attentions: problems, calls that both refuse, a watch on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BF16, INT = torch.bfloat16, torch.int32
E4M3 = torch.float8_e4m3fn
COPY_TO = torch.ops.aten._to_copy.default

Call = tuple[tuple, dict[str, Any]]
Refusal = tuple[tuple, dict[str, Any], type[Exception], str]


def problem(
    kind: str,
    device: str = "cpu",
    *,
    head_dims: tuple[int, int] = (64, 64),
    kv_dtype: torch.dtype = BF16,
) -> Call:
    """Return (q, k, v), tables: 4 query heads on 2 KV heads, 2 entries, 40 keys at most.

    kind: 'dense'; 'lens' with lengths; 'flat' with lengths and without a dimension of tokens;
    'pages'; 'packed' queries and keys.
    """
    generator, (dim, v_dim) = torch.Generator().manual_seed(0), head_dims

    def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        if device == "cpu":
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def table(values: list) -> torch.Tensor:
        given = torch.tensor(values, dtype=INT)
        return given if device == "cpu" else torch.empty(given.shape, dtype=INT, device=device)

    queries, keys, tables = (2, 3), (2, 40), {}
    if kind == "packed":
        queries, keys = (8,), (40,)
        tables = {"cu_seqlens_q": table([0, 3, 8]), "cu_seqlens_k": table([0, 30, 40])}
    elif kind != "dense":
        tables = {"kv_lens": table([40, 17])}
        queries = (2,) if kind == "flat" else queries
    if kind == "pages":
        keys = (5, 16)
        tables["page_table"] = table([[3, 1, 0], [2, 4, 0]])
    k, v = (tensor(*keys, 2, columns, dtype=kv_dtype) for columns in (dim, v_dim))
    return (tensor(*queries, 4, dim), k, v), tables


def same(results: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    return all(map(torch.equal, results, expected))


# ---- calls that both refuse


def tensors(q_shape=(1, 1, 4, 64), kv_shape=(1, 8, 2, 64), dtype=BF16, kv_dtype=None) -> tuple:
    kv = torch.zeros(kv_shape).to(kv_dtype or dtype)
    return torch.zeros(q_shape, dtype=dtype), kv, kv


def lens(*values: int, dtype: torch.dtype = INT) -> dict[str, torch.Tensor]:
    return {"kv_lens": torch.tensor(values, dtype=dtype)}


def pages(*rows: list[int], lengths: tuple = (8,), page_size: int = 16) -> Call:
    """A pool of 4 pages for the entries whose page numbers are `rows`."""
    inputs = tensors(kv_shape=(4, page_size, 2, 64))
    return inputs, {"page_table": torch.tensor(rows, dtype=INT), **lens(*lengths)}


Q, K, V = tensors()
SINKS = torch.zeros(4)

REFUSED: dict[str, Refusal] = {
    "no tensor": (([], K, V), {}, TypeError, "q is list"),
    "no tensor for lengths": ((Q, K, V), {"kv_lens": [8]}, TypeError, "kv_lens is list"),
    "dtype": (tensors(dtype=torch.float32), {}, NotImplementedError, "torch.float32"),
    "device mix": ((Q.to("meta"), K, V), {}, ValueError, "meta"),
    "device of lengths": (
        (Q, K, V), {"kv_lens": lens(8)["kv_lens"].to("meta")}, ValueError, "'kv_lens': 'meta'",
    ),
    "head_dim": (tensors((1, 1, 4, 72), (1, 8, 2, 72)), {}, NotImplementedError, "72"),
    "head_dim mix": (tensors((1, 1, 4, 64), (1, 8, 2, 128)), {}, ValueError, "128"),
    "batch mix": (tensors((3, 1, 4, 64)), {}, ValueError, "batch 3"),
    "k and v in shape": ((Q, K, V[:, :4]), {}, ValueError, "(1, 4, 2, 64)"),
    "group": (tensors((1, 1, 3, 64)), {}, ValueError, "3 query heads"),
    "zero heads": (tensors((1, 1, 0, 64)), {}, ValueError, "0 query"),
    "zero key heads": (tensors(kv_shape=(1, 8, 0, 64)), {}, ValueError, "0 KV"),
    "last stride": ((Q.mT.contiguous().mT, K, V), {}, ValueError, "stride 4"),
    "row stride": (
        (torch.zeros(1, 1, 4, 68, dtype=BF16)[..., :64], K, V), {}, ValueError, "136 bytes",
    ),
    "misaligned": (
        (torch.zeros(257, dtype=BF16)[1:].view(1, 1, 4, 64), K, V),
        {}, ValueError, "not a multiple of 16",
    ),
    "broadcast": (
        (Q, *(K[:, :1].expand(1, 8, 2, 64),) * 2), {}, ValueError, "of 0 bytes",
    ),
    "scale": ((Q, K, V), {"scale": -1.0}, ValueError, "-1.0"),
    "scale nan": ((Q, K, V), {"scale": float("nan")}, ValueError, "nan"),
    "scale below fp32": ((Q, K, V), {"scale": 1e-50}, ValueError, "1e-12"),
    "scale text": ((Q, K, V), {"scale": "a"}, TypeError, "scale is 'a', expected float | None"),
    "softcap": ((Q, K, V), {"softcap": -30.0}, ValueError, "softcap -30.0"),
    "softcap inf": ((Q, K, V), {"softcap": float("inf")}, ValueError, "softcap inf"),
    "softcap large": ((Q, K, V), {"softcap": 1e5}, ValueError, "4096"),
    "causal number": ((Q, K, V), {"causal": 1}, TypeError, "causal is 1"),
    "window of three": ((Q, K, V), {"window": (1, 2, 3)}, TypeError, "window (1, 2, 3): expected"),
    "window of text": ((Q, K, V), {"window": "4"}, TypeError, "window '4': expected"),
    "window of truth": ((Q, K, V), {"window": True}, TypeError, "window True: expected"),
    "window of floats": ((Q, K, V), {"window": (1.5, 0)}, TypeError, "window_left is 1.5"),
    "window negative": ((Q, K, V), {"window": -2}, ValueError, "window left -2"),
    "window negative behind": ((Q, K, V), {"window": (3, -2)}, ValueError, "window right -2"),
    "sink tokens alone": ((Q, K, V), {"sink_tokens": 4}, ValueError, "without a left window"),
    "sink tokens": ((Q, K, V), {"sink_tokens": -4, "window": 3}, ValueError, "sink_tokens -4"),
    "sinks shape": ((Q, K, V), {"sinks": SINKS[:1]}, ValueError, "(1,), expected"),
    "sinks dtype": ((Q, K, V), {"sinks": SINKS.int()}, ValueError, "int32, expected a floating"),
    "out dtype": ((Q, K, V), {"out_dtype": torch.float64}, NotImplementedError, "float64"),
    "out scale of bfloat16": (
        (Q, K, V), {"out_scale": 2.0}, ValueError, "out_scale with out_dtype torch.bfloat16: only",
    ),
    "out scale 0": (
        (Q, K, V), {"out_scale": 0.0, "out_dtype": E4M3}, ValueError, "out_scale 0.0: from 1.175e",
    ),
    "out scale inf": (
        (Q, K, V), {"out_scale": math.inf, "out_dtype": E4M3}, ValueError, "out_scale inf: a fin",
    ),
    "out scale of text": (
        (Q, K, V), {"out_scale": "1", "out_dtype": E4M3}, TypeError, "out_scale is '1', expected a",
    ),
    "out scale in a tensor": (
        (Q, K, V), {"out_scale": torch.tensor([-2.0]), "out_dtype": E4M3}, ValueError,
        "out_scale -2.0: from 1.175e",
    ),
    "out scale of each head": (
        (Q, K, V), {"out_scale": torch.ones(4), "out_dtype": E4M3}, ValueError,
        "out_scale is torch.float32 (4,), expected torch.float32, one number",
    ),
    "out scale of float64": (
        (Q, K, V), {"out_scale": torch.ones(1).double(), "out_dtype": E4M3}, ValueError, "float64",
    ),
    "out in e4m3 on sm_86": (
        (Q, K, V), {"out_dtype": E4M3, "arch": "sm_86"}, NotImplementedError,
        "e4m3 on sm_86: its conversion needs compute capability 8.9",
    ),
    "out of float64": ((Q, K, V), {"out": Q.double()}, NotImplementedError, "float64"),
    "out of another dtype": (
        (Q, K, V), {"out": Q.half(), "out_dtype": BF16}, ValueError, "out is torch.float16",
    ),
    "out shape": (
        (Q, K, V), {"out": Q[0].clone()}, ValueError, "out has shape (1, 4, 64), expected (1, "
    ),
    "out misaligned": (
        (Q, K, V), {"out": torch.zeros(257, dtype=BF16)[1:].view(Q.shape)}, ValueError, "out",
    ),
    "out elsewhere": ((Q, K, V), {"out": Q.to("meta")}, ValueError, "'out': 'meta'"),
    "out of no tensor": ((Q, K, V), {"out": 3}, TypeError, "out is int"),
    "backend": ((Q, K, V), {"backend": "torch"}, ValueError, "torch"),
    "no GPU here": ((Q, K, V), {"backend": "cuda"}, ValueError, "CUDA tensors"),
    "arch": ((Q, K, V), {"arch": "sm_75"}, NotImplementedError, "sm_75"),
    "config no config": ((Q, K, V), {"config": {}}, TypeError, "config is dict, expected"),
    "lengths dtype": ((Q, K, V), lens(8, dtype=torch.int64), ValueError, "int64"),
    "lengths shape": ((Q, K, V), lens(8, 8), ValueError, "(2,)"),
    "lengths range": ((Q, K, V), lens(9), ValueError, "= 8"),
    "lengths negative": ((Q, K, V), lens(-1), ValueError, "kv_lens -1 of entry 0"),
    "page": (*pages([4]), ValueError, "pages 0 to 3"),
    "page negative": (*pages([0, -1], lengths=(17,)), ValueError, "[0, -1]"),
    "page size": (*pages([0], page_size=0), ValueError, "pages of 0 rows: at least 1"),
    "pages too few": (*pages([0], lengths=(17,)), ValueError, "= 16"),
    "pages of another batch": (*pages([0], [1]), ValueError, "(2, 1)"),
    "pages of int64": (
        pages([0])[0], {"page_table": torch.tensor([[0]]), **lens(8)}, ValueError, "int64",
    ),
    "pages without lengths": (
        pages([0])[0], {"page_table": pages([0])[1]["page_table"]}, ValueError, "without kv_lens",
    ),
}  # fmt: skip


def check_refused(refusal: Refusal, attend: Callable, plan: Callable) -> None:
    arguments, options, error, words = refusal
    for call in (attend, plan)[: 1 if "out" in options else 2]:  # calls of a plan are given it
        with pytest.raises(error) as raised:
            call(*arguments, **options)
        assert words in str(raised.value)


NO_PAGES = {"page_table": torch.zeros(1, 0, dtype=INT), **lens(0)}
EMPTY: dict[str, Call] = {
    "no key": (tensors(kv_shape=(1, 0, 2, 64)), {"causal": True}),
    "no entry": (tensors((0, 2, 4, 64), (0, 8, 2, 64)), {}),
    "no page of an entry": (pages([0])[0], NO_PAGES),
    "no page at all": (tensors(kv_shape=(0, 16, 2, 64)), NO_PAGES),
}  # fmt: skip


# ---- views of tracers, and operations for which the host would wait on a GPU


def metadata(results: tuple) -> list[tuple]:
    return [(t.shape, t.dtype, t.stride(), t.device.type) for t in results]


class Watched(TorchDispatchMode):
    """Records operators that read from a GPU, or that copy host memory to it, and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.made: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        on_gpu = any(t.device.type == "cuda" for t in args if isinstance(t, torch.Tensor))
        moved = torch.device(kwargs.get("device") or "cuda").type != "cuda"
        reads = function is torch.ops.aten._local_scalar_dense.default
        if reads or (on_gpu and moved) or (not on_gpu and function is COPY_TO):
            self.waits.append(str(function))
        if function.namespace == "aten" and not function.is_view:
            self.made.append(str(function))
        return function(*args, **kwargs)
