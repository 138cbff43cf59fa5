"""Requests of an engine, and what attention has to say of them: each by itself, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fmha.reference import definition, rounded
from kernelkit.numerics.tolerance import compare_output

NOWHERE = 1 << 30  # no page: what tables hold where nobody has to look


@dataclass(frozen=True)
class Shape:
    """Of a layer. window: keys before the own position."""

    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def sink_logits(self) -> torch.Tensor | None:
        return torch.linspace(-1.0, 2.0, self.q_heads).bfloat16() if self.sinks else None


@dataclass
class Request:
    """All tokens that it will ever have; the first `done` of them are in the cache."""

    name: int
    shape: Shape
    length: int
    done: int = 0
    pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.name)
        shape, heads = self.shape, self.shape.q_heads + 2 * self.shape.kv_heads
        rows = torch.randn(self.length, heads, shape.head_dim, generator=generator)
        # As a model's product has them: q, k and v are columns of one tensor.
        sizes = [shape.q_heads, shape.kv_heads, shape.kv_heads]
        self.q, self.k, self.v = rows.to(shape.dtype).split(sizes, 1)

    def judge(self, out: torch.Tensor, first: int, windowed: bool = True) -> None:
        """O of the tokens from `first` on, within what roundings of the kernel make of it."""
        shape, end = self.shape, first + len(out)
        k, v = self.k[:end], self.v[:end]
        options = {
            "causal": True, "softcap": shape.softcap or 0.0,
            "window": (shape.window if windowed else None, None),
            "sinks": None if shape.sink_logits is None else shape.sink_logits.float(),
        }  # fmt: skip
        if shape.kv_dtype is not None:
            scales = [torch.tensor([scale]) for scale in shape.scales]
            options |= {"k_scale": scales[0], "v_scale": scales[1]}
            k, v = ((x.float() / s).to(shape.kv_dtype) for x, s in zip((k, v), scales, strict=True))
        given = self.q[None, first:end], k[None], v[None]
        exact, near = (f(*given, **options).o[0] for f in (definition, rounded))
        report = compare_output(out, exact, near, shape.dtype)
        assert report.ok, f"request {self.name} from {first}: {report}"


def packed(parts: list[torch.Tensor], padded: int) -> torch.Tensor:
    """Tokens of all requests behind each other, and rows of NaN up to `padded`."""
    rows = torch.cat(parts)
    out = rows.new_full((padded, *rows.shape[1:]), float("nan"))
    out[: len(rows)] = rows
    return out
