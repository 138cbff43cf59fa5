"""The problems that `bench.py fmha` times, and their sets by the names of --rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from lab.tools.groups import spelt

TOKENS, COLUMNS = 16384, 2048  # of every row of the first set: batch x S, heads x head dim


@dataclass(frozen=True)
class Problem:
    """q [batch, sq, q_heads, head_dim], k and v [batch, skv, kv_heads, head_dim or v_dim].

    kv_dtype: of k and v, '' for that of q. causal is aligned bottom-right. window: keys seen before
    the own position, None for all. sinks: a learned logit per query head joins the denominator.
    k_is_v: v is k, the same tensor.
    """

    batch: int
    sq: int
    skv: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str = "bf16"
    causal: bool = False
    window: int | None = None
    sinks: bool = False
    kv_dtype: str = ""
    k_is_v: bool = False

    def __str__(self) -> str:
        lengths = spelt(self.sq) if self.sq == self.skv else f"{spelt(self.sq)}x{spelt(self.skv)}"
        sizes = f"{self.batch} x {lengths}, heads {self.q_heads}/{self.kv_heads} of {self.dims}"
        dtype = self.dtype + f".{self.kv_dtype}" * bool(self.kv_dtype)
        return f"{sizes}, {dtype}, {self.sight}" + ", K is V" * self.k_is_v

    @property
    def dims(self) -> str:
        """'128', or '192,128' where V has other columns."""
        return f"{self.head_dim}" + f",{self.v_dim}" * (self.v_dim != self.head_dim)

    @property
    def sight(self) -> str:
        """What a row sees, in words: the window counts the own key."""
        words = {"full": "full", "causal": "causal", "window": f"window {(self.window or 0) + 1}"}
        return words[self.mask] + ", sinks" * self.sinks

    @property
    def mask(self) -> str:
        """Of --mask."""
        if self.window is not None:
            return "window"
        return "causal" if self.causal else "full"

    @property
    def flop(self) -> int:
        """Of both products: a square causal problem counts as half, as benchmarks have it, all
        others by the pairs that are seen."""
        if self.mask == "full":
            pairs = float(self.sq * self.skv)
        elif self.mask == "causal" and self.sq == self.skv:
            pairs = self.sq * self.skv / 2
        else:
            pairs = sum(map(self._seen, range(self.sq)))
        return int(2 * pairs * (self.head_dim + self.v_dim)) * self.q_heads * self.batch

    def _seen(self, row: int) -> int:
        """Keys that a row sees."""
        own = self.skv - self.sq + row
        begin = 0 if self.window is None else max(0, own - self.window)
        return max(0, (min(self.skv, own + 1) if self.causal else self.skv) - begin)


def _anchor() -> tuple[Problem, ...]:
    grid = itertools.product((64, 128, 256), (False, True), (1024, 4096, 8192, 16384))
    return tuple(
        Problem(TOKENS // s, s, s, heads, heads, dim, dim, causal=causal)
        for dim, causal, s in grid
        for heads in (COLUMNS // dim,)
    )


def _gpt_oss(s: int, window: int | None) -> Problem:
    return Problem(1, s, s, 64, 8, 64, 64, causal=True, window=window, sinks=True)


def _fp8() -> tuple[Problem, ...]:
    """K and V in e4m3, with queries in bf16 and in e4m3, beside bf16."""
    problems = (problem for problem in _anchor() if problem.sq == 8192)
    return tuple(
        replace(problem, dtype=dtype, kv_dtype=kv_dtype)
        for problem in problems
        for dtype, kv_dtype in (("bf16", ""), ("bf16", "e4m3"), ("e4m3", ""))
    )


ROWS = {
    "anchor": _anchor(),
    "gpt-oss": (_gpt_oss(8192, 127), _gpt_oss(2048, 127), _gpt_oss(8192, None)),
    "gqa": (Problem(1, 8192, 8192, 64, 8, 128, 128, causal=True),),
    "mla": tuple(Problem(2, 8192, 8192, 16, 16, 192, 128, causal=c) for c in (False, True)),
    "fp8": _fp8(),
    "hd512": tuple(
        Problem(1, 8192, 8192, 64, 1, 512, 512, causal=True, k_is_v=same) for same in (False, True)
    ),
}
