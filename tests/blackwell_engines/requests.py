"""Helpers that tests of engines share: a plugin imported without its engine, requests, and a judge
that computes each request by itself in float64.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch

from fmha.reference import definition, rounded
from kernelkit.numerics.tolerance import compare_output

NOWHERE = 1 << 30  # no page: tables hold it where no one may read


@dataclass(frozen=True)
class LayerShape:
    """Attention parameters of a layer. window: number of keys before the query's position."""

    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scales: tuple[Any, Any] = (1.0, 1.0)  # of K and V, numbers or tuples with one for each KV head

    @property
    def sink_logits(self) -> torch.Tensor | None:
        return torch.linspace(-1.0, 2.0, self.q_heads).bfloat16() if self.sinks else None


SHAPES = {
    "plain": LayerShape(),
    "gpt-oss": LayerShape(q_heads=8, kv_heads=1, window=17, sinks=True),
    "gemma": LayerShape(window=9, softcap=20.0, head_dim=128),
    "fp8": LayerShape(kv_dtype=torch.float8_e4m3fn, scales=(0.5, 0.25)),
    "fp16": LayerShape(dtype=torch.float16, kv_heads=4),
}


def served(shapes: dict[str, LayerShape]) -> list[tuple[str, str]]:
    """List (architecture, shape); sm_89 refuses caches in e4m3 (see test_plugin.py)."""
    return [
        (arch, name)
        for arch in ("sm_100a", "sm_90a", "sm_89")
        for name in shapes
        if shapes[name].kv_dtype is None or arch != "sm_89"
    ]


def stand_ins(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Map the names of modules to modules with these contents, and to those around them."""
    found: dict[str, ModuleType] = {}
    for path, names in contents.items():
        for name in accumulate(path.split("."), "{}.{}".format):
            found.setdefault(name, ModuleType(name))
        vars(found[path]).update(names)
    return found


@contextmanager
def imported(engine: ModuleType) -> Iterator[ModuleType]:
    """The backend for `engine`, a module of these tests, whose stand-ins replace the engine's."""
    name = f"{engine.__package__.removeprefix('tests.')}.backend"
    with pytest.MonkeyPatch.context() as patch:
        for path, module in engine.modules().items():
            patch.setitem(sys.modules, path, module)
        sys.modules.pop(name, None)
        yield importlib.import_module(name)
        sys.modules.pop(name, None)


@dataclass
class Request:
    """A request with all tokens that it will ever have; the first `done` of them are in the
    cache.
    """

    name: int
    shape: LayerShape
    length: int
    done: int = 0
    pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.name)
        shape, heads = self.shape, self.shape.q_heads + 2 * self.shape.kv_heads
        rows = torch.randn(self.length, heads, shape.head_dim, generator=generator)
        # As in a model, q, k and v are columns of one tensor.
        sizes = [shape.q_heads, shape.kv_heads, shape.kv_heads]
        self.q, self.k, self.v = rows.to(shape.dtype).split(sizes, 1)

    def judge(
        self, out: torch.Tensor, first: int, windowed: bool = True, causal: bool = True
    ) -> None:
        """Compare O of the tokens from `first` on with the definition, within the kernel's
        rounding. A window that is not causal has two equal sides.
        """
        shape, end = self.shape, first + len(out)
        k, v = self.k[:end], self.v[:end]
        window = shape.window if windowed else None
        options = {
            "causal": causal, "softcap": shape.softcap or 0.0,
            "window": (window, None if causal else window),
            "sinks": None if shape.sink_logits is None else shape.sink_logits.float(),
        }  # fmt: skip
        if shape.kv_dtype is not None:
            scales = [torch.tensor(scale).view(-1) for scale in shape.scales]
            options |= {"k_scale": scales[0], "v_scale": scales[1]}
            k, v = (
                (x.float() / s[:, None]).to(shape.kv_dtype)
                for x, s in zip((k, v), scales, strict=True)
            )
        given = self.q[None, first:end], k[None], v[None]
        exact, near = (f(*given, **options).o[0] for f in (definition, rounded))
        report = compare_output(out, exact, near, shape.dtype)
        assert report.ok, f"request {self.name} from {first}: {report}"


def packed(parts: list[torch.Tensor], padded: int) -> torch.Tensor:
    """Concatenate the tokens of all requests, followed by rows of NaN up to `padded`."""
    rows = torch.cat(parts)
    out = rows.new_full((padded, *rows.shape[1:]), float("nan"))
    out[: len(rows)] = rows
    return out


def next_tokens(order: Sequence[Request], rows: int) -> list[torch.Tensor]:
    """Return q, k and v of each request's next token on the GPU, followed by rows of padding."""
    return [
        packed([getattr(r, name)[r.done : r.done + 1] for r in order], rows).cuda()
        for name in "qkv"
    ]


def replay_captured(
    run: Callable[[], torch.Tensor],
    order: Sequence[Request],
    static: Sequence[torch.Tensor],
    batch: Any,
    fresh: Callable[[], Any],
    fields: Sequence[str],
) -> None:
    """Capture `run`, which reads `static` and returns O; judge 20 replays, which cross the end of a
    page. `fields` of `batch` and the tokens change in place, to those of `fresh`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        graph.replay()
        for row, request in enumerate(order):
            heads = out[row].view(1, request.shape.q_heads, -1)
            request.judge(heads.cpu(), request.done)
            request.done += 1
        new = fresh()
        for name in fields:
            getattr(batch, name).copy_(getattr(new, name))
        for old, tokens in zip(static, next_tokens(order, len(static[0])), strict=True):
            old.copy_(tokens)
