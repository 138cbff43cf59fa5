"""Problems and peers of `bench.py fmha`: sets of problems by the names of --rows, peers by name."""

from __future__ import annotations

import importlib.util
import itertools
import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from fmha import attention
from fmha.blocks import block_lists
from fmha.config import FP8, AttentionConfig
from fmha.mods import trace_mask_mod, trace_score_mod
from lab.bench.gqa_peers import MAX_ERROR, WORKSPACE_BYTES, error_of
from lab.bench.peers import cudnn_graph, flash3, flash4_masks
from lab.bench.peers.run import versions
from lab.problems.attention import DTYPES
from lab.problems.masks import Recipe, recipe_of, shifted
from lab.problems.trees import words_of_tree
from lab.tools.groups import RECIPES, spelt

TOKENS, COLUMNS = 16384, 2048  # of every row of the first set: batch x S, heads x head dim


@dataclass(frozen=True)
class Problem:
    """q [batch, sq, q_heads, head_dim], k and v [batch, skv, kv_heads, head_dim or v_dim].

    kv_dtype: dtype of k and v, '' for that of q.
    causal: aligned bottom-right.
    window: number of keys visible before the query's position, None for all.
    sinks: whether a learned logit per query head joins the denominator.
    k_is_v: whether v is the same tensor as k.
    recipe: mask or scores by a function of positions, of `lab.tools.groups.RECIPES`; 'tree' for
        queries that are a tree of draft tokens; 'sparse:25' for lists of 25 % of all blocks, drawn
        at random; '' for none. `causal` is that of the recipe.
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
    recipe: str = ""

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
        """Describe the keys that a row sees; the window includes the query's position."""
        words = {"full": "full", "causal": "causal", "window": f"window {(self.window or 0) + 1}"}
        return words.get(self.mask, self.mask) + ", sinks" * self.sinks

    @property
    def mask(self) -> str:
        """Name of the mask, as --mask."""
        if self.recipe:
            return f"tree:{self.sq}" if self.recipe == "tree" else self.recipe
        if self.window is not None:
            return "window"
        return "causal" if self.causal else "full"

    @property
    def share(self) -> float:
        """Share of all blocks that a random list has; 0 for other masks."""
        name, _, percent = self.recipe.partition(":")
        return int(percent) / 100 if name == "sparse" else 0.0

    @property
    def flop(self) -> int:
        """Operations of both products: a square causal problem counts as half, as benchmarks have
        it, all others by the pairs that are seen. A recipe counts as the mask without it, but for
        lists of blocks."""
        if self.share:
            pairs = self.sq * self.skv * self.share
        elif self.recipe and self.causal:
            pairs = self.sq * self.skv / 2
        elif self.recipe or self.mask == "full":
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


def _all_fp8() -> tuple[Problem, ...]:
    """Q, K and V in e4m3, 4k to 16k."""
    return tuple(replace(problem, dtype=FP8) for problem in _anchor() if problem.sq >= 4096)


def _fp8() -> tuple[Problem, ...]:
    """K and V in e4m3, with queries in bf16 and in e4m3, beside bf16."""
    problems = (problem for problem in _anchor() if problem.sq == 8192)
    return tuple(
        replace(problem, dtype=dtype, kv_dtype=kv_dtype)
        for problem in problems
        for dtype, kv_dtype in (("bf16", ""), ("bf16", "e4m3"), ("e4m3", ""))
    )


def of_recipe(problem: Problem, recipe: str) -> Problem:
    """Return a problem with a recipe, as causal as the recipe is."""
    return replace(problem, recipe=recipe, causal=recipe in CAUSAL_RECIPES)


def _masks() -> tuple[Problem, ...]:
    """8k and 32k, head dims 64 and 128, of each recipe and causal beside it."""
    sizes = itertools.product((8192, 32768), (64, 128), ("", *RECIPES))
    return tuple(
        of_recipe(Problem(1, s, s, 16, 16, dim, dim), recipe)
        if recipe
        else Problem(1, s, s, 16, 16, dim, dim, causal=True)
        for s, dim, recipe in sizes
    )


def _trees() -> tuple[Problem, ...]:
    """Trees of draft tokens over 8k keys, and causal blocks of as many tokens."""
    return tuple(
        Problem(8, tokens, 8192, 32, 8, 128, 128, causal=causal, recipe="" if causal else "tree")
        for tokens in (8, 16, 32, 64)
        for causal in (True, False)
    )


def _sparse() -> tuple[Problem, ...]:
    """Random lists of blocks, and all blocks beside them."""
    sizes = itertools.product((8192, 32768), ("", "sparse:50", "sparse:25", "sparse:10"))
    return tuple(of_recipe(Problem(1, s, s, 16, 16, 128, 128), recipe) for s, recipe in sizes)


CAUSAL_RECIPES = ("document", "alibi", "chunks")
ROWS = {
    "anchor": _anchor(),
    "gpt-oss": (_gpt_oss(8192, 127), _gpt_oss(2048, 127), _gpt_oss(8192, None)),
    "gqa": (Problem(1, 8192, 8192, 64, 8, 128, 128, causal=True),),
    "mla": tuple(Problem(2, 8192, 8192, 16, 16, 192, 128, causal=c) for c in (False, True)),
    "fp8": _fp8(),
    "e4m3": _all_fp8(),
    "masks": _masks(),
    "trees": _trees(),
    "sparse": _sparse(),
    "hd512": tuple(
        Problem(1, 8192, 8192, 64, 1, 512, 512, causal=True, k_is_v=same) for same in (False, True)
    ),
}


BLOCKS = (128, 128)  # queries and keys of a block of a block mask
SAMPLED = 128  # query rows of a head that are computed exactly
INPUTS = "q, k, v and sinks standard normal, rounded to their dtype"
OURS = "fmha"
PACKAGES = {"fa4": "flash_attn", "flashinfer": "flashinfer"}  # that installing torch leaves out
# Peers with a module of their own, which says why the library cannot run here.
ADAPTERS: dict[str, ModuleType] = {
    "fa3": flash3,
    "cudnn-graph": cudnn_graph,
    "cudnn-graph-e4m3": cudnn_graph,
}
# Distributions of the other peers, for a file's versions.
DISTRIBUTIONS = {
    "fmha": ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12"),
    "fa4": ("flash-attn-4",),
    "flashinfer": ("flashinfer-python",),
}

Launch = Callable[[], torch.Tensor]
Peer = Callable[[Problem, "Inputs"], Launch]


@dataclass(frozen=True)
class Inputs:
    """sinks: [q_heads] in bf16, what FlashAttention-4 takes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None


def inputs_of(problem: Problem, device: str = "cuda", seed: int = 0) -> Inputs:
    """Standard normal."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(dtype: str, *size: int) -> torch.Tensor:
        drawn = torch.bfloat16 if dtype == FP8 else DTYPES[dtype]
        numbers = torch.randn(size, generator=generator, device=device, dtype=drawn)
        return numbers.to(DTYPES[dtype])

    keys = (problem.batch, problem.skv, problem.kv_heads)
    kv_dtype = problem.kv_dtype or problem.dtype
    q = normal(problem.dtype, problem.batch, problem.sq, problem.q_heads, problem.head_dim)
    k = normal(kv_dtype, *keys, problem.head_dim)
    return Inputs(
        q,
        k,
        k if problem.k_is_v else normal(kv_dtype, *keys, problem.v_dim),
        normal("bf16", problem.q_heads) if problem.sinks else None,
    )


def compared(
    actual: torch.Tensor, expected: torch.Tensor, dtype: str, of: str, sample: Sample | None = None
) -> dict[str, Any]:
    """Return how far O differs from that of the peer `of`; raise ValueError beyond the limit.

    With a sample O is also judged by exact rows, and may be off the other by twice the limit.

    The limit applies to the worst row's error norm relative to its norm: rows with many keys
    have small values, so an absolute limit would not detect errors in them.
    """
    actual = actual.reshape(expected.shape)
    error, limit = error_of(actual, expected.float()), MAX_ERROR[dtype]
    found = sample.errors(actual) if sample else {}
    if sample and not found["exact_error"] <= limit:
        off = found["exact_error"]
        raise ValueError(f"wrong: a row is {off:.1%} off the exact one, limit {limit:.1%}")
    limit *= 2 if sample else 1
    if not error <= limit:
        raise ValueError(f"wrong: a row is {error:.1%} off {of}'s, limit {limit:.1%}")
    difference = (actual.float() - expected.float()).abs().max().item()
    return {"compared_with": of, "error": error, "max_difference": difference, **found}


@dataclass(frozen=True)
class Sample:
    """Exact rows of some query heads, to judge results of few bits by.

    places: (batch, head) of each pair.
    rows: query rows of each pair.
    o: fp64 [pairs, rows, v_dim].
    """

    places: tuple[tuple[int, int], ...]
    rows: torch.Tensor
    o: torch.Tensor

    def errors(self, found: torch.Tensor) -> dict[str, float]:
        """Return how far O [batch, sq, heads, v_dim] is off.

        - exact_error: the worst row, norm over norm;
        - mean_error: all rows together;
        - shrink: the part of the exact values that is missing, as truncated sums lose it.
        """
        mine = torch.stack([found[b][self.rows, h] for b, h in self.places]).double()
        worst = error_of(mine, self.o.float())
        mean = ((mine - self.o).norm() / self.o.norm()).item()
        kept = ((mine * self.o).sum() / (self.o * self.o).sum()).item()
        return {"exact_error": worst, "mean_error": mean, "shrink": 1 - kept}


def sample_of(problem: Problem, inputs: Inputs) -> Sample:
    """Compute SAMPLED rows of a head at either end exactly, of problems without sinks or window."""
    ends = (0, problem.batch - 1), (0, problem.q_heads - 1)
    places = tuple(dict.fromkeys(zip(*ends, strict=True)))
    device, last = inputs.q.device, problem.sq - 1
    rows = torch.linspace(0, last, min(SAMPLED, problem.sq), device=device).round().long()
    group, found = problem.q_heads // problem.kv_heads, []
    for b, h in places:
        q, k, v = inputs.q[b, rows, h], inputs.k[b, :, h // group], inputs.v[b, :, h // group]
        scores = q.double() @ k.double().mT * problem.head_dim**-0.5
        if problem.causal:
            key = torch.arange(problem.skv, device=device)
            hidden = key > (rows + problem.skv - problem.sq)[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        found.append(scores.softmax(-1) @ v.double())
    return Sample(places, rows, torch.stack(found))


def missing(names: Iterable[str]) -> list[str]:
    """Peers that are not installed, or that cannot run here."""
    found = []
    for name in names:
        absent = name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None
        if absent or (name in ADAPTERS and ADAPTERS[name].available()):
            found.append(name)
    return found


def versions_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Map each peer to the versions of its distributions that are installed."""
    wanted = {name: DISTRIBUTIONS.get(name, ()) for name in names}
    wanted |= {name: ADAPTERS[name].DISTRIBUTIONS for name in wanted if name in ADAPTERS}
    return {name: found for name, each in wanted.items() if (found := versions(each))}


def adapted(module: ModuleType, **options: Any) -> Peer:
    """Peer of an adapter module; RuntimeError with its reason where it cannot run."""

    def make(problem: Problem, inputs: Inputs) -> Launch:
        if reason := module.available():
            raise RuntimeError(reason)
        _without(problem, "recipe")
        return module.prepare(problem, inputs, **options)

    return make


def _without(problem: Problem, *options: str) -> None:
    """NotImplementedError for a problem that has one of these."""
    for option in options:
        if getattr(problem, option) not in (None, False, ""):
            raise NotImplementedError(f"it takes no {option}")


def _recipe(problem: Problem, device: torch.device) -> Recipe:
    """Return the recipe of a problem; that of a tree as a table of bits."""
    if problem.recipe == "tree":
        base, bits = problem.skv - problem.sq, _tree_bits(problem, device)
        return Recipe(
            lambda b, h, q, k: (k < base) | bits[q - base, (k - base).clamp(min=0)], tables=(bits,)
        )
    return recipe_of(problem.recipe, problem.batch, problem.q_heads, problem.skv, device)


def _tree_words(problem: Problem, device: torch.device) -> torch.Tensor:
    """Return words [sq] of a tree, the same for all entries."""
    return words_of_tree("branches", problem.sq, random.Random(problem.sq)).to(device)


def _tree_bits(problem: Problem, device: torch.device) -> torch.Tensor:
    """Return bool [sq, sq]: whether a token of the tree sees another."""
    words = _tree_words(problem, device)
    return (words[:, None] >> torch.arange(problem.sq, device=device) & 1).bool()


def _options_of_recipe(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Return our arguments for a problem with a recipe."""
    if problem.recipe == "tree":
        return {"tree": _tree_words(problem, device).expand(problem.batch, -1).contiguous()}
    if problem.share:
        lists, _ = block_lists(_random_blocks(problem, device))
        return {"block_mask": lists}
    recipe, given = _recipe(problem, device), {}
    if recipe.mask_mod is not None:
        given["mask_mod"] = trace_mask_mod(_mask_of_rows(problem, recipe))
        given["block_mask"], _ = block_lists(_block_mask(problem, recipe, BLOCKS, device))
        given["causal"] = False  # part of the mask and its blocks
    if recipe.score_mod is not None:
        given["score_mod"] = trace_score_mod(recipe.score_mod)
    return given


def ours(problem: Problem, inputs: Inputs, instructions: str = "") -> Launch:
    """`fmha.attention`; a GPU that it is not written for is refused."""
    config = AttentionConfig(instructions=instructions)
    given: dict[str, Any] = {"causal": problem.causal, "backend": "cuda", "config": config}
    if problem.window is not None:
        given["window"] = (problem.window, None)
    if inputs.sinks is not None:
        given["sinks"] = inputs.sinks.float()
    if problem.recipe:
        given |= _options_of_recipe(problem, inputs.q.device)
    return partial(attention, inputs.q, inputs.k, inputs.v, **given)


def fa4(problem: Problem, inputs: Inputs) -> Launch:
    """FlashAttention-4 in CuTe DSL."""
    from flash_attn.cute import flash_attn_func

    given: dict[str, Any] = {"causal": problem.causal}
    if problem.window is not None:
        sides = (problem.window, 0 if problem.causal else None)
        given = {"causal": False, "window_size": sides}
    if inputs.sinks is not None:
        given["learnable_sink"] = inputs.sinks
    if problem.recipe:
        return partial(flash4_masks.forward, inputs, _fa4_recipe(problem, inputs))

    def launch() -> torch.Tensor:
        found = flash_attn_func(inputs.q, inputs.k, inputs.v, **given)
        return found[0] if isinstance(found, tuple) else found

    return launch


def _fa4_recipe(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    """Return FlashAttention-4's functions, tables and lists of blocks for a recipe."""
    if problem.share:
        blocks = _random_blocks(problem, inputs.q.device)
        return {"block_sparse_tensors": flash4_masks.block_lists(blocks, BLOCKS[0])}
    recipe = _recipe(problem, inputs.q.device)
    sizes = {"offset": problem.skv - problem.sq, "causal": problem.causal, **recipe.numbers}
    given: dict[str, Any] = flash4_masks.functions(problem.recipe, sizes)
    if recipe.tables:
        given["aux_tensors"] = list(recipe.tables)
    if recipe.mask_mod is None:  # its causal mask goes together with a score_mod
        return given | {"causal": problem.causal}
    rows = flash4_masks.BLOCK * (2 if torch.cuda.get_device_capability()[0] == 10 else 1)
    mask = _block_mask(problem, recipe, (rows, flash4_masks.BLOCK), inputs.q.device)
    return given | {"block_sparse_tensors": flash4_masks.block_lists(mask, rows)}


def _random_blocks(problem: Problem, device: torch.device) -> Any:
    """Return a BlockMask of whole blocks, drawn at random for each head."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, keys = (-(-n // size) for n, size in zip((problem.sq, problem.skv), BLOCKS, strict=True))
    generator = torch.Generator(device).manual_seed(0)
    shape, count = (1, problem.q_heads, rows), max(round(keys * problem.share), 1)
    order = torch.rand(*shape, keys, generator=generator, device=device).argsort(-1)
    first = order[..., :count].sort(-1).values
    indices = torch.cat((first, order[..., count:]), -1).int()
    none = torch.zeros(shape, dtype=torch.int32, device=device)
    full = torch.full_like(none, count)
    sizes = (problem.sq, problem.skv)
    return BlockMask.from_kv_blocks(none, indices, full, indices, BLOCKS, seq_lengths=sizes)


def _block_mask(
    problem: Problem, recipe: Recipe, block: tuple[int, int], device: torch.device
) -> Any:
    """Return FlexAttention's BlockMask of a recipe, the same for all heads."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask, sizes = _mask_of_rows(problem, recipe), (problem.batch, None, problem.sq, problem.skv)
    return create_block_mask(mask, *sizes, device=device, BLOCK_SIZE=block, _compile=True)


def _mask_of_rows(problem: Problem, recipe: Recipe) -> Callable[..., Any]:
    """Return the whole mask as a function of queries that count from 0."""
    mask = shifted(recipe.whole_mask, problem.skv - problem.sq)
    assert mask is not None
    return mask


def flex(problem: Problem, inputs: Inputs) -> Launch:
    """FlexAttention, compiled for this shape, with the BlockMask of the mask."""
    from torch.nn.attention.flex_attention import flex_attention

    _without(problem, "window", "sinks")
    torch.compiler.reset()  # else the shapes of a run end at the limit of recompilations
    offset = problem.skv - problem.sq
    recipe, named = Recipe(causal=problem.causal), problem.recipe and not problem.share
    if named:
        recipe = _recipe(problem, inputs.q.device)
    given: dict[str, Any] = {"enable_gqa": problem.q_heads != problem.kv_heads}
    if problem.share:
        given["block_mask"] = _random_blocks(problem, inputs.q.device)
    elif recipe.whole_mask is not None:
        given["block_mask"] = _block_mask(problem, recipe, BLOCKS, inputs.q.device)
    score = recipe.score_mod
    if score is not None:
        given["score_mod"] = lambda s, b, h, q, k: score(s, b, h, q + offset, k)
    heads = tuple(tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*heads, **given).transpose(1, 2)


def sdpa(backend: SDPBackend) -> Peer:
    """A backend of torch's scaled_dot_product_attention."""

    def make(problem: Problem, inputs: Inputs) -> Launch:
        _without(problem, "window", "sinks", "recipe")
        square = problem.sq == problem.skv
        bias = (
            causal_lower_right(problem.sq, problem.skv) if problem.causal and not square else None
        )
        heads = tuple(tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
        given = {"attn_mask": bias, "is_causal": problem.causal and square,
                 "enable_gqa": problem.q_heads != problem.kv_heads}  # fmt: skip

        def launch() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*heads, **given).transpose(1, 2)

        _asked(launch)
        return launch

    return make


def _asked(launch: Launch) -> None:
    """Call it once; torch warns of why a backend does not take a problem, and then raises without
    that."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            launch()
        except RuntimeError as error:
            reasons = [str(warning.message).partition(" (Triggered")[0] for warning in said]
            raise RuntimeError("; ".join([*reasons, str(error)])) from error


def flashinfer(problem: Problem, inputs: Inputs) -> Launch:
    """FlashInfer's prefill over ragged keys, in the backend that it chooses."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    _without(problem, "sinks", "recipe")
    q, k, v = (tensor.flatten(0, 1) for tensor in (inputs.q, inputs.k, inputs.v))
    entries = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        *(entries * problem.sq, entries * problem.skv),
        *(problem.q_heads, problem.kv_heads, problem.head_dim),
        head_dim_vo=problem.v_dim,
        causal=problem.causal,
        window_left=-1 if problem.window is None else problem.window,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    return partial(wrapper.run, q, k, v)


PEERS: dict[str, Peer] = {
    OURS: ours,
    "mma.sync": partial(ours, instructions="mma.sync"),
    "fa4": fa4,
    "flex": flex,
    "fa3": adapted(flash3),
    "cudnn-graph": adapted(cudnn_graph),
    "cudnn-graph-e4m3": adapted(cudnn_graph, out="e4m3"),
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    "flashinfer": flashinfer,
}
