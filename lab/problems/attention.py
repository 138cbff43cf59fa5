"""Attention problems for tests and commands, their hostile inputs, and how a result is judged."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from fmha import AttentionConfig, attention, reference
from fmha.config import FP8, MAX_RESCALE_LOG2, TUNABLE
from fmha.reference import Attention
from kernelkit.call.launch import emulation
from kernelkit.numerics import tolerance
from lab.flags.attention import OPTIONS
from lab.problems import extremes
from lab.problems.masks import Recipe, lists_of, recipe_of, shifted
from lab.problems.trees import words_of_tree
from ptxemu import Options
from ptxemu.check.text import render

POLICIES = ("round-robin", "random", "adversarial")
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
}
PAST_ROWS, PAST_COLUMNS = 5, 64  # NaN around every input, inside the same allocation
PATIENCE = 1800.0  # seconds of a launch; a busy machine is no reason to fail
SPARE_PAGES = 3  # pages of the pool that no table names
NO_PAGES = (-1, 1 << 30, -(1 << 31))  # what a page table holds behind the pages of an entry
ENOUGH_ROWS, PHASES = 1000, (0.2, 0.4, 0.6, 0.8)
LOG2_LAG = AttentionConfig().rescale_log2
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


Tuning = make_dataclass(
    "Tuning",
    [(option.name, type(option.default), option.default) for option in OPTIONS],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True)
class Case(Tuning):  # type: ignore[misc, valid-type]
    """q [batch, sq, Hq, D]; k [batch, skv, Hkv, D], v [.., Dv]; dims (D, Dv).

    q_lens, k_lens: lengths of packed entries; sq or skv is then ignored.
    kv_lens: valid keys per entry; everything past them is NaN.
    page_size: size of K and V pages, shuffled, in a pool with spare ones. The table holds no valid
    page after an entry's last one.
    amplitude: amplitude of q; large values move the row maximum from tile to tile.
    normalize: if False, the raw output is normalised here.
    out_dtype: '' for the default of the API.
    out_scale: divisor of an O in e4m3, 0 for none.
    climb: keys, and scores with them, grow by that factor plus 1 up to the last, or down from the
    first if it is negative.
    depth: its square lowers all scores, before they are scaled.
    sink_value: sink of every other head, from the first on.
    tree: kind of words of the queries, one of `lab.tools.groups.TREES`; '' for none.
    mask: recipe of functions of positions, one of `lab.tools.groups.RECIPES`; '' for none. It is
        causal only if `causal` says so.
    blocks: size of the blocks of a block mask, which has the causal mask and the recipe, or without
        both whole blocks at random; 0 for none.
    tokens_first: whether tokens, not heads, come first in memory.
    scales: whether each head of an e4m3 tensor has a scale.
    k_is_v: whether V is the same tensor as K.
    extreme: seed for q, k, scales and sinks from `extremes`; 0 for none.
    """

    sq: int
    skv: int
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    dtype: str = "bf16"
    causal: bool = False
    kv_lens: tuple[int, ...] | None = None
    amplitude: float = 1.0
    normalize: bool = True
    dims: tuple[int, int] = (64, 64)
    window: tuple[int | None, int | None] = (None, None)
    tree: str = ""
    mask: str = ""
    blocks: int = 0
    sink_tokens: int = 0
    softcap: float = 0.0
    sinks: bool = False
    q_offset: int | tuple[int, ...] | None = None
    q_lens: tuple[int, ...] | None = None
    k_lens: tuple[int, ...] | None = None
    page_size: int = 0
    rope_dim: int = 0
    out_dtype: str = ""
    out_scale: float = 0.0
    pack_heads: bool | None = None
    scale: float | None = None
    pdl: bool = False
    climb: float = 0.0
    depth: float = 0.0
    sink_value: float | None = None
    tokens_first: bool = False
    kv_dtype: str = ""
    scales: bool = False
    k_is_v: bool = False
    extreme: int = 0

    def __str__(self) -> str:
        return "-".join(self.words())

    def words(self) -> list[str]:
        """List what differs from the defaults."""
        parts = [f"d{self.dims[0]}" + f".{self.dims[1]}" * (self.dims[0] != self.dims[1])]
        parts += self._tuned(in_front=True)
        parts += [self.dtype + f".{self.kv_dtype}" * bool(self.kv_dtype)]
        parts[-1] += f">{self.out_dtype}" * bool(self.out_dtype)
        parts[-1] += f".{self.out_scale:g}" * bool(self.out_scale)
        parts += ["scales"] * self.scales + ["kisv"] * self.k_is_v
        parts += ["raw"] * (not self.normalize) + ["causal"] * self.causal
        if self.window != (None, None):
            parts += ["w{}.{}".format(*("-" if side is None else side for side in self.window))]
        parts += [self.tree] * bool(self.tree) + [self.mask] * bool(self.mask)
        parts += [f"blocks{self.blocks}"] * bool(self.blocks)
        for name, value in (
            ("first", self.sink_tokens),
            ("cap", self.softcap),
            ("page", self.page_size),
            ("rope", self.rope_dim),
            ("scale", self.scale or 0),
        ):
            parts += [f"{name}{value:g}"] * bool(value)
        parts += self._tuned(in_front=False)
        parts += ["sinks"] * self.sinks + ["pdl"] * self.pdl
        parts += [f"h{self.heads[0]}.{self.heads[1]}"]
        parts += [] if self.pack_heads is None else ["packed" if self.pack_heads else "apart"]
        queries, keys = _listed(self.q_lens) or self.sq, _listed(self.k_lens) or self.skv
        parts += [f"{queries}x{keys}"] + [f"b{self.batch}"] * (self.batch > 1)
        parts += [] if self.kv_lens is None else [f"lens{_listed(self.kv_lens)}"]
        parts += [] if self.q_offset is None else [f"at{_listed(self.q_offset)}"]
        parts += [f"amp{self.amplitude:g}"] * (self.amplitude != 1.0)
        parts += [f"climb{self.climb:g}"] * bool(self.climb)
        parts += [f"depth{self.depth:g}"] * bool(self.depth) + ["tokens"] * self.tokens_first
        parts += [f"extreme{self.extreme}"] * bool(self.extreme)
        return parts + ([] if self.sink_value is None else [f"sink{self.sink_value:g}"])

    def _tuned(self, *, in_front: bool) -> list[str]:
        """Words of options that are not by default, in front of the dtype or behind it."""
        options = sorted(OPTIONS, key=lambda option: option.place)
        return [
            option.word.format(value)
            for option in options
            if (option.place < 0) == in_front
            and (value := getattr(self, option.name)) != option.default
        ]

    @property
    def lag_log2(self) -> float:
        """Largest lag of the row maximum, as log2."""
        if self.is_fp8:
            return math.log2(torch.finfo(torch.float8_e4m3fn).max)
        return MAX_RESCALE_LOG2 if self.rescale_log2 == LOG2_LAG else self.rescale_log2

    @property
    def group(self) -> str:
        """Cases of one group share a compiled kernel (or two, where packing is automatic)."""
        static = (
            self.dims, self.dtype, self.out_dtype, self.out_scale > 0, self.normalize,
            self.causal or self.window[1] is not None, self.window[0] is not None,
            self.tree != "", self._mask_key(), self.sink_tokens > 0, self.softcap > 0, self.sinks,
            self.blocks, self.q_offset is not None,
            self.q_lens is not None, self.k_lens is not None, self.kv_lens is not None,
            self.page_size, self.rope_dim, self.pack_heads,
            *(getattr(self, option.name) for option in OPTIONS),
            self.kv_dtype, self.scales, self.k_is_v,
        )  # fmt: skip
        return f"{zlib.crc32(repr(static).encode()):08x}"

    def _mask_key(self) -> tuple[str, ...]:
        """What decides the programs of a recipe: some have sizes as constants."""
        sizes = (max(self.keys, default=0),) if self.mask in ("sliding-global", "chunks") else ()
        return (self.mask, *map(str, sizes))

    @property
    def queries(self) -> tuple[int, ...]:
        """Queries of each entry."""
        return self.q_lens or (self.sq,) * self.batch

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each entry that exist."""
        stored = self.k_lens or (self.skv,) * self.batch
        return stored if self.kv_lens is None else tuple(map(min, stored, self.kv_lens))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Position of the first query of each entry."""
        if self.q_offset is None:
            return tuple(n_k - n_q for n_q, n_k in zip(self.queries, self.keys, strict=True))
        return (self.q_offset,) * self.batch if isinstance(self.q_offset, int) else self.q_offset

    @property
    def is_fp8(self) -> bool:
        """Whether K and V are e4m3."""
        return FP8 in (self.dtype, self.kv_dtype)

    @property
    def io(self) -> torch.dtype:
        """dtype of q."""
        return DTYPES[self.dtype]

    @property
    def o_dtype(self) -> str:
        """Dtype of O."""
        if self.out_dtype or not self.normalize:
            return self.out_dtype or "fp32"
        return "bf16" if self.dtype == FP8 else self.dtype

    @property
    def coarsest(self) -> torch.dtype:
        """Coarsest of the dtypes of q and O the one with the fewest bits: 16 bits of O are rounded
        once more than those of P. e4m3 is left out, `reference.rounded` knows what it costs."""
        found = {DTYPES[name] for name in (self.dtype, self.o_dtype) if name != FP8}
        return max(found, key=lambda dtype: torch.finfo(dtype).eps)

    def inputs(self, device: str = "cpu") -> Inputs:
        """Views into larger allocations full of NaN, heads before tokens in memory; the same
        numbers on every device but 'meta', where there is no memory."""
        memory = _Memory(device, torch.Generator().manual_seed(self._seed()))
        q = self._filled(memory, 0, self.q_lens, self.sq)
        k, v = self._keys_and_values(memory)
        return q, k, k if self.k_is_v else v

    def _keys_and_values(self, memory: _Memory) -> tuple[torch.Tensor, torch.Tensor]:
        if self.page_size:
            return self._pool(memory, 1), self._pool(memory, 2)
        k, v = (self._filled(memory, side, self.k_lens, self.skv) for side in (1, 2))
        starts = [0, *accumulate(self.k_lens or ())]
        for tensor in (k, v) if self.kv_lens is not None else ():
            for entry, length in enumerate(self.keys):
                packed = self.k_lens is not None
                rows = tensor[starts[entry] : starts[entry + 1]] if packed else tensor[entry]
                rows[length:] = math.nan
        return k, v

    def _filled(
        self, memory: _Memory, side: int, lens: tuple[int, ...] | None, tokens: int
    ) -> torch.Tensor:
        """q, k or v (side 0, 1, 2) with normal numbers; lens: of packed entries."""
        shape = (self.batch, tokens) if lens is None else (1, sum(lens))
        heads, columns = self.heads[min(side, 1)], self.dims[max(side - 1, 0)]
        tensor = memory.nan_view(self, side, (*shape, heads, columns))
        if memory.exists:
            rows = self._rows(memory, tensor.shape, side)
            if tensor.dtype == DTYPES[FP8]:  # torch makes NaN of what is too large
                most = torch.finfo(tensor.dtype).max
                rows = rows.clamp(-most, most)
            tensor.copy_(rows)
        return tensor if lens is None else tensor[0]

    def _rows(self, memory: _Memory, shape: Sequence[int], side: int) -> torch.Tensor:
        """[.., tokens, heads, columns] in fp32."""
        if self.extreme and side < 2:
            pick = random.Random(torch.randint(1 << 31, (1,), generator=memory.generator).item())
            dtype = DTYPES[self.kv_dtype or self.dtype] if side else self.io
            rows = extremes.elements(pick, shape, dtype, is_query=side == 0)
            return rows.to(memory.device)
        rows = torch.randn(shape, generator=memory.generator).to(memory.device)
        if self.climb and side == 1:
            grow(rows, self.climb)
        rows *= 1 if side else self.amplitude
        if self.depth and side < 2:
            rows[..., -1] = self.depth if side else -self.depth
        return rows

    def _pool(self, memory: _Memory, side: int) -> torch.Tensor:
        """The pages of k or v (side 1, 2)."""
        table = self.page_table()
        used = sum(-(-length // self.page_size) for length in self.keys)
        heads, columns = self.heads[1], self.dims[side - 1]
        pool = memory.nan_view(self, side, (used + SPARE_PAGES, self.page_size, heads, columns))
        for entry, length in enumerate(self.keys if memory.exists else ()):
            count = -(-length // self.page_size)
            pages = pool.new_full((count, self.page_size, heads, columns), math.nan)
            pages.flatten(0, 1)[:length] = self._rows(memory, (length, heads, columns), side)
            pool[table[entry, :count].long()] = pages
        return pool

    def page_table(self) -> torch.Tensor:
        """int32 [batch, pages of the longest entry], with one column more unless the last entry is
        as long: then nothing lies behind the table."""
        counts = [-(-length // self.page_size) for length in self.keys]
        pages = list(range(sum(counts) + SPARE_PAGES))
        random.Random(self._seed()).shuffle(pages)
        width = max(counts) + (counts[-1] < max(counts))
        rows = [
            [pages.pop() for _ in range(count)]
            + [NO_PAGES[index % len(NO_PAGES)] for index in range(width - count)]
            for count in counts
        ]
        return torch.tensor(rows, dtype=torch.int32)

    def options(self) -> dict[str, Any]:
        """Keyword arguments that `attention` and the reference share."""
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "sink_tokens": self.sink_tokens,
            "softcap": self.softcap,
            "scale": self.scale,
        }
        if self.q_offset is not None:
            options["q_offset"] = self.q_offset
            if not isinstance(self.q_offset, int):
                options["q_offset"] = _int32(self.q_offset)
        if self.kv_lens is not None:
            options["kv_lens"] = _int32(self.kv_lens)
        for name, lengths in (("cu_seqlens_q", self.q_lens), ("cu_seqlens_k", self.k_lens)):
            if lengths is not None:
                options[name] = _int32([0, *accumulate(lengths)])
        if self.page_size:
            options["page_table"] = self.page_table()
        if self.tree:
            options["tree"] = self._words_of_tree()
        options |= self.functions()
        if self.sinks:
            spread = torch.linspace(-2.0, 4.0, self.heads[0])
            options["sinks"] = torch.roll(spread, 1)  # the first head has the strongest sink
            if self.sink_value is not None:
                options["sinks"][::2] = self.sink_value
            if self.extreme:
                options["sinks"] = extremes.sinks(random.Random(self.extreme), self.heads[0])
        if self.out_scale:
            options["out_scale"] = torch.tensor([self.out_scale])
        if self.rope_dim:
            options["rope"] = self._rope()
        if self.scales:
            options |= self._scales_of_heads()
        return options

    def functions(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Functions of positions and lists of blocks, whose tensors are on a device."""
        ends = [start + n for start, n in zip(self.offsets, self.queries, strict=True)]
        found = Recipe()
        if self.mask:
            positions = max(*ends, *self.keys, 1)
            found = recipe_of(self.mask, self.batch, self.heads[0], positions, device)
        mask, named = found.mask_mod, {"score_mod": found.score_mod}
        if self.blocks:
            mask = shifted(replace(found, causal=self.causal).whole_mask, self.skv - self.sq)
            shape = (self.batch, self.heads[0], self.sq, self.skv)
            named["block_mask"] = lists_of(mask, shape, self.blocks, device)
            named["causal"] = False
        named["mask_mod"] = mask
        return {name: function for name, function in named.items() if function is not None}

    def _words_of_tree(self) -> torch.Tensor:
        """Return the words of the queries, another tree for each entry."""
        pick = random.Random(self._seed())
        words = [words_of_tree(self.tree, tokens, pick) for tokens in self.queries]
        return torch.stack(words) if self.q_lens is None else torch.cat(words)

    def _scales_of_heads(self) -> dict[str, torch.Tensor]:
        """Return a scale per head for each e4m3 tensor."""
        if self.extreme:
            heads = {"k_scale": self.heads[1], "v_scale": self.heads[1]}
            heads |= {"q_scale": self.heads[0]} if self.dtype == FP8 else {}
            pick = random.Random(self.extreme)
            return {name: extremes.factors(pick, count) for name, count in heads.items()}
        scales = {name: torch.linspace(0.5, 2.0, self.heads[1]) for name in ("k_scale", "v_scale")}
        if self.dtype == FP8:
            scales["q_scale"] = torch.linspace(1.5, 0.75, self.heads[0])
        return scales

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention`."""
        return {
            **self.options(),
            "normalize": self.normalize,
            "return_lse": True,
            "out_dtype": DTYPES.get(self.out_dtype),
            "pack_heads": self.pack_heads,
            "pdl": self.pdl,
            "config": AttentionConfig(**{name: getattr(self, name) for name in TUNABLE}),
        }

    def _rope(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables that end with the last position."""
        ends = [start + rows for start, rows in zip(self.offsets, self.queries, strict=True)]
        step = 10000.0 ** (-torch.arange(self.rope_dim // 2) * 2 / self.rope_dim)
        angles = torch.arange(max(*ends, 1))[:, None] * step
        return torch.cos(angles), torch.sin(angles)

    def _seed(self) -> int:
        """Return a seed that is equal in every process, unlike hash()."""
        return zlib.crc32(str(self).encode())


def _listed(values: int | Sequence[int] | None) -> str:
    if values is None or isinstance(values, int):
        return "" if values is None else str(values)
    return ".".join(map(str, values))


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class _Memory:
    """Memory of a device. generator: of the numbers, on the CPU."""

    device: str
    generator: torch.Generator

    @property
    def exists(self) -> bool:
        return self.device != "meta"

    def nan_view(self, case: Case, side: int, sizes: tuple[int, int, int, int]) -> torch.Tensor:
        """Return a view for q, k or v (side 0, 1, 2)."""
        dtype = DTYPES[case.kv_dtype or case.dtype] if side else case.io
        return nan_view(sizes, dtype, self.device, tokens_first=case.tokens_first)


def nan_view(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    tokens_first: bool = False,
) -> torch.Tensor:
    """[batch, tokens, heads, columns] of NaN, and NaN around it. tokens_first: heads lie behind
    tokens in memory, not before them."""
    batch, tokens, heads, columns = sizes
    shape = [batch, heads, tokens + PAST_ROWS, columns + PAST_COLUMNS]
    if tokens_first:
        shape[1:3] = shape[2:0:-1]
    whole = torch.full(shape, math.nan, dtype=dtype, device=device)
    whole = whole if tokens_first else whole.transpose(1, 2)
    return whole[:, :tokens, :, PAST_COLUMNS:]


def grow(rows: torch.Tensor, climb: float) -> None:
    """[.., tokens, heads, columns] times 1 to 1 + |climb| from the first token to the last one, or
    from the last one to the first where it is negative."""
    growth = torch.linspace(0, abs(climb), rows.shape[-3], device=rows.device)
    rows *= 1 + (growth if climb > 0 else growth.flip(0))[:, None, None]


def run(
    case: Case, policy: str | Options, seed: int = 0, arch: str = "sm_100a"
) -> tuple[torch.Tensor, ...]:
    """(O, LSE), or (O_raw, LSE, row_max), of the kernel in the emulator, where nothing is found."""
    results, reports = run_reported(case, policy, seed, arch)
    for report in reports:
        assert not report.findings, render(report)
    return results


def run_reported(
    case: Case, policy: str | Options, seed: int = 0, arch: str = "sm_100a", **changes: Any
) -> tuple[tuple, list]:
    """Return the results and the reports of the emulated launches.

    policy: a policy or all options.
    arch: architecture of the kernel.
    changes: changed arguments of attention."""
    if isinstance(policy, str):
        policy = Options(policy=policy, seed=seed, limit=PATIENCE)
    with emulation(policy, arch=arch) as active:
        results = attention(*case.inputs(), **(case.arguments() | changes))
    return results, active.reports


def references(
    case: Case, inputs: Inputs | None = None, *, aligned_sums: bool = False
) -> tuple[Attention, Attention]:
    """(fp64 definition, the same with the kernel's rounding points), both normalised. inputs: those
    of the case, where they are at hand; the references are computed where they are. aligned_sums:
    as a GPU makes them.

    8 bits of P make errors of a few rows a matter of luck: there each element is the worst of
    several references, whose maxima lag by other shares.

    An O in e4m3 is left in fp32: `tolerance.compare_e4m3` rounds it."""
    inputs = inputs or case.inputs()
    options = case.options() | case.functions(inputs[0].device)
    exact = reference.definition(*inputs, **options)
    o_dtype = "fp32" if case.o_dtype == FP8 else case.o_dtype
    options |= {"out_dtype": DTYPES[o_dtype], "aligned_sums": aligned_sums}
    rounded = reference.rounded(*inputs, **options)
    if case.is_fp8 and sum(case.queries) * case.heads[0] < ENOUGH_ROWS:
        for phase in PHASES:
            other = reference.rounded(*inputs, **options, phase=phase)
            worse = (other.o.double() - exact.o).abs() > (rounded.o.double() - exact.o).abs()
            rounded = replace(rounded, o=torch.where(worse, other.o, rounded.o))
    return exact, rounded


def judge(
    case: Case,
    results: Sequence[torch.Tensor],
    inputs: Inputs | None = None,
    *,
    aligned_sums: bool = False,
) -> list[tolerance.Report]:
    """Verdicts on O and LSE, and on the identity that connects a raw output with them. inputs,
    aligned_sums: see `references`; the results are on the same device."""
    exact, rounded = references(case, inputs, aligned_sums=aligned_sums)
    o, lse = results[:2]
    reports = []
    if not case.normalize:
        o = normalised(*results)
        reports.append(compare_row_max(results[2], exact.row_max, rounded.row_max, case.lag_log2))
    if case.extreme:
        pairs = ((o, lse), *((each.o, each.lse) for each in (exact, rounded)))
        packed = case.q_lens is not None
        return extremes.judge(*pairs, case.coarsest, packed=packed)
    compare_o = tolerance.compare_e4m3 if case.o_dtype == FP8 else tolerance.compare_output
    return [
        compare_o(o, exact.o, rounded.o, case.coarsest),
        tolerance.compare_lse(lse, exact.lse, rounded.lse),
        *reports,
    ]


def compare_row_max(
    row_max: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor, rescale_log2: float
) -> tolerance.Report:
    """The maximum that a raw O refers to may lag the true one, by as much as P may grow; either is
    a score, as exact as the reference's."""
    # (-inf) - (-inf) where no key was seen
    lag, error = ((exact - other).nan_to_num(nan=0.0) for other in (row_max, rounded))
    of_scores = error.abs().max().item() if error.numel() else 0.0
    floor = tolerance.LSE_FLOOR + tolerance.REFERENCE_FACTOR * of_scores
    limit = rescale_log2 * math.log(2.0) + floor
    right = (lag >= -floor) & (lag <= limit)
    where = tuple((~right).nonzero()[0].tolist()) if not right.all() else ()
    worst = lag[where].item() if where else 0.0
    return tolerance.Report("row_max", not where, where, worst, limit, of_scores)


def normalised(raw: torch.Tensor, lse: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    """O = O_raw / exp(LSE - row_max); rows without keys stay as they are."""
    total = torch.exp(lse - row_max).nan_to_num(nan=1.0)  # (-inf) - (-inf) where no key was seen
    return raw / total.transpose(-2, -1)[..., None]


def same_bits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Bit equality, NaNs and signed zeros included."""
    return all(torch.equal(_bytes_of(a), _bytes_of(b)) for a, b in zip(first, second, strict=True))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes; a clone, since a dimension of size 1 may have any stride."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
