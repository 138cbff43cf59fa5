"""Decode problems, their hostile inputs, and how a result is judged.

The same cases are for the kernels of all architectures: `arch` says whose turn it is.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gqa_lowlatency import DecodeConfig, reference
from gqa_lowlatency.config import TUNABLE
from kernelkit.numerics import tolerance
from lab.measure.accuracy import coarser
from lab.problems import extremes
from lab.problems.attention import DTYPES, NO_PAGES, SPARE_PAGES, grow, nan_view
from lab.problems.trees import words_of_tree


@dataclass(frozen=True)
class Case:
    """Problem of decode. q is [batch, tokens, Hq, D]; heads is (Hq, Hkv).

    lens: a length per entry.
    keys: 'dense': every entry has the first length. 'lens': a longer cache with NaN after
    each length. A number: pages of that many rows, shuffled, in a pool with spare ones. Keys
    that no token sees are NaN, too.
    kv_dtype: '' for dtype.
    scales: for 'e4m3': 'none', 'one', or 'heads' for one per KV head.
    flat: whether q lacks the dimension of tokens.
    pdl: '', 'pdl' or 'ready'.
    parts, cluster: 0 to choose automatically.
    out_scale: divisor of an O in e4m3, 0 for none.
    tuning: other tunable fields of the config.
    tree: kind of words of the tokens, one of `lab.tools.groups.TREES`; '' for none.
    firsts: the first key of each entry.
    sink_value: sink of every other head, from the first on.
    climb, depth, extreme: as in the attention problems.
    """

    lens: tuple[int, ...]
    heads: tuple[int, int] = (8, 1)
    tokens: int = 1
    head_dim: int = 128
    dtype: str = "bf16"
    kv_dtype: str = ""
    scales: str = "one"
    out_dtype: str = ""
    out_scale: float = 0.0
    causal: bool = True
    window: int | None = None
    tree: str = ""
    sink_tokens: int = 0
    firsts: tuple[int, ...] = ()
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    keys: str | int = "lens"
    sink_value: float | None = None
    amplitude: float = 1.0
    climb: float = 0.0
    depth: float = 0.0
    flat: bool = False
    pdl: str = ""
    batch_invariant: bool = False
    parts: int = 0
    cluster: int = 0
    tuning: tuple[tuple[str, int], ...] = ()
    extreme: int = 0

    def __str__(self) -> str:
        kv = f".{self.kv_dtype}.{self.scales}" * bool(self.kv_dtype)
        parts = [f"d{self.head_dim}", self.dtype + kv + f">{self.out_dtype}" * bool(self.out_dtype)]
        parts[-1] += f".{self.out_scale:g}" * bool(self.out_scale)
        parts += [f"h{self.heads[0]}.{self.heads[1]}", f"t{self.tokens}" + "flat" * self.flat]
        parts += ["causal" if self.causal else "full"]
        parts += [f"w{self.window}.{self.sink_tokens}"] * (self.window is not None)
        parts += [self.tree] * bool(self.tree)
        parts += [f"from{'.'.join(map(str, self.firsts))}"] * bool(self.firsts)
        parts += [f"cap{self.softcap:g}"] * bool(self.softcap) + ["sinks"] * self.sinks
        parts += [f"page{self.keys}" if isinstance(self.keys, int) else str(self.keys)]
        parts += [".".join(map(str, self.lens)), f"c{self.cluster}"]
        parts += [f"parts{self.parts}"] * bool(self.parts)
        parts += [f"{name}{value}" for name, value in self.tuning]
        parts += [f"scale{self.scale}"] * (self.scale is not None) + [self.pdl] * bool(self.pdl)
        parts += ["invariant"] * self.batch_invariant
        parts += [] if self.sink_value is None else [f"sink{self.sink_value:g}"]
        parts += [f"climb{self.climb:g}"] * bool(self.climb)
        parts += [f"depth{self.depth:g}"] * bool(self.depth)
        parts += [f"extreme{self.extreme}"] * bool(self.extreme)
        return "-".join(parts + [f"amp{self.amplitude:g}"] * (self.amplitude != 1.0))

    @property
    def group(self) -> str:
        """Cases of one group share a compiled kernel, unless sizes choose another cluster."""
        static = replace(
            self, lens=(), heads=(self.heads[0] // self.heads[1], 1), scales="", amplitude=1.0,
            sink_value=None, climb=0.0, depth=0.0, extreme=0,
            out_scale=float(self.out_scale > 0),
            window=None if self.window is None else 1, sink_tokens=int(self.sink_tokens > 0),
            softcap=float(self.softcap > 0), scale=None, parts=int(self.parts > 1),
            tree="tree" * bool(self.tree),
            firsts=self.firsts[:0] or (0,) * bool(self.firsts),
        )  # fmt: skip
        return f"{zlib.crc32(repr(static).encode()):08x}"

    @property
    def io(self) -> torch.dtype:
        """dtype of q and P."""
        return DTYPES[self.dtype]

    @property
    def kv(self) -> torch.dtype:
        """dtype of k and v."""
        return DTYPES[self.kv_dtype or self.dtype]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each entry that exist."""
        return (self.lens[0],) * len(self.lens) if self.keys == "dense" else self.lens

    def seen(self, entry: int) -> torch.Tensor:
        """bool [keys]: which of an entry any token sees."""
        options = reference.Options(
            causal=self.causal, window=self.window, sink_tokens=self.sink_tokens
        )
        # Keys of a tree's tokens hold numbers, whether a token sees them or not.
        words = torch.full((self.tokens,), -1) if self.tree else None
        seen = reference.visible_keys(self.tokens, self.lengths[entry], options, words).any(dim=0)
        seen[: self.firsts[entry] if self.firsts else 0] = False
        return seen

    def inputs(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views into larger allocations full of NaN, heads before tokens in memory; the same
        numbers on every device but 'meta', where there is no memory."""
        generator = torch.Generator().manual_seed(self.seed)
        batch, (q_heads, _) = len(self.lens), self.heads
        q = nan_view((batch, self.tokens, q_heads, self.head_dim), self.io, device)
        if device != "meta":
            rows = self._numbers(generator, q.shape, is_query=True) * self.amplitude
            if self.depth:
                rows[..., -1] = -self.depth
            q.copy_(rows)
        k, v = (self._cache(generator, device, is_k=is_k) for is_k in (True, False))
        return (q[:, 0] if self.flat else q), k, v

    def _cache(self, generator: torch.Generator, device: str, *, is_k: bool) -> torch.Tensor:
        """K or V; NaN wherever no token looks."""
        heads, dim, size = self.heads[1], self.head_dim, self.keys
        is_there = device != "meta"
        rows = [self._rows(generator, entry, is_k=is_k)
                for entry in range(len(self.lens) if is_there else 0)]  # fmt: skip
        if not isinstance(size, int):
            surplus = 37 if size == "lens" else 0
            shape = len(self.lens), max(self.lengths) + surplus, heads, dim
            cache = nan_view(shape, self.kv, device)
            for entry, entry_rows in enumerate(rows):
                cache[entry, : len(entry_rows)] = entry_rows.to(self.kv)
            return cache
        table = self.page_table()
        count = int((table >= 0).sum()) + SPARE_PAGES
        pool = nan_view((count, size, heads, dim), self.kv, device)
        for entry, entry_rows in enumerate(rows):
            key = torch.arange(len(entry_rows))
            page = table[entry, key // size].long()
            there = (page >= 0) & (page < count)
            place = page[there].to(device), (key % size)[there].to(device)
            pool[place] = entry_rows[there].to(device, self.kv)
        return pool

    def _rows(self, generator: torch.Generator, entry: int, *, is_k: bool) -> torch.Tensor:
        """Rows of an entry, [keys, heads, head_dim] in fp32."""
        shape = (self.lengths[entry], self.heads[1], self.head_dim)
        if is_k:
            rows = self._numbers(generator, shape, is_query=False)
        else:
            rows = torch.randn(shape, generator=generator)
        if self.climb and is_k:
            grow(rows, self.climb)
        if self.depth and is_k:
            rows[..., -1] = self.depth
        rows[~self.seen(entry)] = math.nan
        return rows

    def _numbers(
        self, generator: torch.Generator, shape: Sequence[int], *, is_query: bool
    ) -> torch.Tensor:
        """Numbers of q or k, in fp32."""
        if not self.extreme:
            return torch.randn(tuple(shape), generator=generator)
        pick = random.Random(torch.randint(1 << 31, (1,), generator=generator).item())
        dtype = self.io if is_query else self.kv
        return extremes.elements(pick, shape, dtype, is_query=is_query)

    def page_table(self) -> torch.Tensor:
        """int32 [batch, pages of the longest entry and one more]; no page where no token looks."""
        counts = [-(-length // self.keys) for length in self.lengths]
        pages = list(range(sum(counts) + SPARE_PAGES))
        random.Random(self.seed).shuffle(pages)
        rows = []
        for entry, count in enumerate(counts):
            looked = torch.zeros(max(counts) + 1, self.keys, dtype=torch.bool)
            looked[:count].view(-1)[: self.lengths[entry]] = self.seen(entry)
            rows.append([
                pages.pop() if look else NO_PAGES[index % len(NO_PAGES)]
                for index, look in enumerate(looked.any(1).tolist())
            ])  # fmt: skip
        used = sorted(page for row in rows for page in row if page in range(1 << 20))
        dense = {page: index for index, page in enumerate(used)}
        return torch.tensor([[dense.get(page, page) for page in row] for row in rows]).int()

    def options(self) -> dict[str, Any]:
        """Keyword arguments that `decode` and the reference share."""
        options: dict[str, Any] = {
            "causal": self.causal, "window": self.window, "sink_tokens": self.sink_tokens,
            "softcap": self.softcap, "scale": self.scale, "out_dtype": DTYPES.get(self.out_dtype),
        }  # fmt: skip
        if self.out_scale:
            options["out_scale"] = torch.tensor([self.out_scale])
        if self.keys != "dense":
            options["kv_lens"] = torch.tensor(self.lens, dtype=torch.int32)
        if self.tree:
            pick = random.Random(self.seed)
            words = [words_of_tree(self.tree, self.tokens, pick) for _ in self.lens]
            options["tree"] = torch.stack(words).squeeze(1) if self.flat else torch.stack(words)
        if self.firsts:
            options["first_keys"] = torch.tensor(self.firsts, dtype=torch.int32)
        if isinstance(self.keys, int):
            options["page_table"] = self.page_table()
        if self.sinks:
            options["sinks"] = torch.roll(torch.linspace(-2.0, 4.0, self.heads[0]), 1)
            if self.sink_value is not None:
                options["sinks"][::2] = self.sink_value
            if self.extreme:
                options["sinks"] = extremes.sinks(random.Random(self.extreme), self.heads[0])
        if self.kv_dtype and self.scales != "none":
            count = self.heads[1] if self.scales == "heads" else 1
            options["k_scale"] = torch.linspace(0.5, 1.5, count)
            options["v_scale"] = torch.linspace(3.0, 0.25, count)
            pick = random.Random(self.extreme)
            for name in ("k_scale", "v_scale") if self.extreme else ():
                options[name] = extremes.factors(pick, count)
        return options

    def launch_options(self, arch: str | None) -> dict[str, Any]:
        """Keyword arguments that change no result."""
        tuning = dict(self.tuning)
        if tuning and not self.cluster:
            raise ValueError(f"tuning {tuning} without a cluster: sizes then choose the config")
        assert tuning.keys() <= set(TUNABLE)
        config = DecodeConfig(cluster=self.cluster, **tuning) if self.cluster else None
        return {
            "pdl": self.pdl != "", "kv_ready_before_pdl": self.pdl == "ready", "arch": arch,
            "batch_invariant": self.batch_invariant, "parts": self.parts, "config": config,
        }  # fmt: skip

    @property
    def seed(self) -> int:
        """Return a seed that is equal in every process, unlike hash(), and independent of
        tuning."""
        return zlib.crc32(str(replace(self, parts=0, cluster=0, tuning=(), pdl="")).encode())


def judge(
    case: Case, arch: str, results: Sequence[torch.Tensor], **changes: Any
) -> list[tolerance.Report]:
    """Verdicts on O and LSE, on the host. changes: of the reference's options."""
    options = case.options() | {"arch": arch} | changes
    grain = grain_of(case, results[0])
    return verdicts(case.inputs(), options, results, grain, extreme=case.extreme > 0)


def grain_of(case: Case, o: torch.Tensor) -> torch.dtype:
    """16 bits of O are rounded once more than those of P."""
    return coarser((case.io, o.dtype))


def verdicts(
    inputs: Sequence[torch.Tensor],
    options: dict[str, Any],
    results: Sequence[torch.Tensor],
    grain: torch.dtype,
    *,
    extreme: bool = False,
) -> list[tolerance.Report]:
    """On O, in units of `grain`, and LSE: the fp64 definition beside the kernel's roundings.
    extreme: each head by itself."""
    narrow = results[0].dtype == DTYPES["e4m3"]
    if narrow:  # `tolerance.compare_e4m3` rounds it
        options = options | {"out_dtype": torch.float32}
    exact, rounded = (f(*inputs, **options) for f in (reference.definition, reference.rounded))
    if extreme:
        pairs = (results[0], results[1]), (exact.o, exact.lse), (rounded.o, rounded.lse)
        return extremes.judge(*pairs, grain)
    compare_o = tolerance.compare_e4m3 if narrow else tolerance.compare_output
    return [
        compare_o(results[0], exact.o, rounded.o, grain),
        tolerance.compare_lse(results[1], exact.lse, rounded.lse),
    ]
