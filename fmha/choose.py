"""Choose the config of an attention problem: from its arguments, then from its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product

from fmha.arguments import Arguments, entry_lengths
from fmha.config import TUNABLE, AttentionConfig
from fmha.plan import kernel_of, make_plan, tiles_of
from kernelkit.call.tensors import INPUT_NAMES, same_elements
from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.plan import hw
from kernelkit.plan.limits import UNBOUNDED
from kernelkit.tune.choices import Choice, Tuned, are_open

KEYS_OF_A_STEP = 32  # fixed cost of a step, in keys
LEAST_GAIN = 0.1  # least gain for which another kernel is worth compiling
KEPT = 1024  # cached choices for a problem, or for a config and a window


@dataclass(frozen=True)
class Problem:
    """All that the choice of a kernel depends on.

    config: config of the arguments, without tuning by sizes.
    queries: queries of the longest entry.
    keys: most keys of an entry.
    tokens: tokens of all entries if they are packed, else 0.
    left, right: how far a query sees to each side, -1 for unbounded.
    pack_heads: whether heads share tiles; None chooses.
    same: whether K and V are the same tensor, which a kernel may load once.
    """

    config: AttentionConfig
    batch: int
    queries: int
    keys: int
    q_heads: int
    kv_heads: int
    tokens: int = 0
    left: int = -1
    right: int = -1
    pack_heads: bool | None = None
    same: bool = False

    @property
    def window(self) -> int:
        """Number of keys that a query sees according to the window."""
        return sum(UNBOUNDED if n < 0 else min(n, UNBOUNDED) for n in (self.left, self.right)) + 1


@dataclass(frozen=True)
class Decision:
    """Kernel launched for a problem, and the tile facts that the host needs.

    kernel: module of the kernel.
    blocks: query blocks of all heads and entries.
    residents: CTAs resident on an SM.
    ctas: CTAs of a cluster.
    """

    config: AttentionConfig
    kernel: str
    blocks: int
    residents: int
    ctas: int


@dataclass(frozen=True)
class Candidate:
    """Config with heads that share tiles or do not, and key tiles that suit the window.

    arch: architecture of the kernel.
    larger: the config with larger blocks; None if it may not be chosen.
    sharers: groups of heads of one entry that share tiles.
    tile_work: see `_tile_work`.
    """

    arch: str
    base: AttentionConfig
    larger: AttentionConfig | None
    sharers: int
    tile_work: int

    def blocks(self, config: AttentionConfig, queries: int) -> int:
        """Query blocks of one entry. queries: of the longest entry."""
        return self.sharers * tiles_of(config, self.arch).blocks(queries)

    def work(self, queries: int) -> int:
        """Work of one entry; equal for candidates that differ only in the order of rows."""
        return self.blocks(self.base, queries) * self.tile_work


@lru_cache(KEPT)
def decide(problem: Problem, arch: str = "sm_100a") -> Decision:
    """Choose the config and kernel for `arch`, and check them.

    Raises:
        ValueError, NotImplementedError: naming the value and what is possible.
    """
    problem.config.check_values()
    config = best_of(candidates(problem, arch), problem.batch, problem.queries)
    tiles = tiles_of(config, arch)
    check_config(config, arch)
    heads = problem.q_heads // config.group
    blocks = problem.batch * heads * tiles.blocks(problem.queries)
    return Decision(config, kernel_of(config, arch), blocks, tiles.residents, tiles.ctas)


@cache
def check_config(config: AttentionConfig, arch: str) -> None:
    """Raise ValueError or NotImplementedError, naming the value and what is possible."""
    make_plan(config, arch)


def choose_config(arguments: Arguments, arch: str = "sm_100a") -> AttentionConfig:
    """Choose the config to compile for `arch`, without checking it."""
    problem = problem_of(arguments)
    return best_of(candidates(problem, arch), problem.batch, problem.queries)


def best_of(found: tuple[Candidate, ...], batch: int, queries: int) -> AttentionConfig:
    """Return the candidate with the least work for these sizes.

    Its larger blocks, half as many, are chosen if they fill the GPU. queries: of the longest entry.
    """
    best = min(found, key=lambda candidate: candidate.work(queries))
    layout = tiles_of(best.base, best.arch)
    if best.larger is None or layout.blocks(queries) < layout.larger_from:
        return best.base
    ctas = batch * best.blocks(best.larger, queries) * tiles_of(best.larger, best.arch).ctas
    return best.larger if ctas >= hw.SMS_OF[best.arch] else best.base


def candidates(problem: Problem, arch: str = "sm_100a") -> tuple[Candidate, ...]:
    """Return the configs that may be compiled for a problem, whatever its sizes."""
    plain = problem.config
    if problem.same and tiles_of(plain, arch).loads_once:
        plain = replace(plain, k_is_v=True)
    return tuple(
        _candidate(replace(plain, group=n), arch, problem.q_heads, problem.window)
        for n in _groups(problem)
    )


def _groups(problem: Problem) -> tuple[int, ...]:
    """Return the possible numbers of heads that share tiles: one, or the whole group."""
    group = problem.q_heads // problem.kv_heads
    if problem.pack_heads is None:
        return tuple(dict.fromkeys((1, group)))
    return (group if problem.pack_heads else 1,)


def _candidate(plain: AttentionConfig, arch: str, q_heads: int, window: int) -> Candidate:
    plain = _with_tiles_of_blocks(plain, arch)
    base, larger = _narrowed(plain, arch, window), tiles_of(plain, arch).larger()
    if larger is not None:
        larger = _narrowed(larger, arch, window)
    return Candidate(
        arch,
        base,
        larger if larger is not None and _fits(larger, arch) else None,
        q_heads // plain.group,
        _tile_work(base, arch, window),
    )


@lru_cache(KEPT)
def _with_tiles_of_blocks(config: AttentionConfig, arch: str) -> AttentionConfig:
    """Return the config with the largest tiles that divide the blocks of a block mask; unchanged
    without one, or if no tiles do."""
    if not config.block_keys or _fits(config, arch):
        return config
    found = [other for other in tiles_of(config, arch).variants() if _fits(other, arch)]

    def size(other: AttentionConfig) -> tuple[int, int]:
        tiles = tiles_of(other, arch)
        return tiles.block_tokens, tiles.tile_n

    return max(found, key=size, default=config)


@lru_cache(KEPT)  # costs a millisecond, and is called for every number of tokens
def _narrowed(config: AttentionConfig, arch: str, window: int) -> AttentionConfig:
    """Return `config` with the best tile_n for the window, or unchanged if little is gained."""
    if config.tile_n or not (config.left and config.right):
        return config
    narrow = min(
        (config, *tiles_of(config, arch).variants()),
        key=lambda narrower: _token_work(narrower, arch, window),
    )
    gain = 1 - _token_work(narrow, arch, window) / _token_work(config, arch, window)
    return narrow if gain > LEAST_GAIN else config


def _token_work(config: AttentionConfig, arch: str, window: int) -> float:
    """Work on the key tiles of a query block, per token of the block."""
    return _tile_work(config, arch, window) / tiles_of(config, arch).block_tokens


def _tile_work(config: AttentionConfig, arch: str, window: int) -> int:
    """Work on the key tiles of a query block, in keys.

    Return 1 without a window: all configs then see equally many keys.
    """
    if not (config.left and config.right):
        return 1
    layout = tiles_of(config, arch)
    tokens = layout.block_tokens
    return -(-(window + tokens - 1) // layout.tile_n) * (layout.tile_n + KEYS_OF_A_STEP)


def plain_config(arguments: Arguments) -> AttentionConfig:
    """Return the config of the arguments, independent of sizes.

    Defaults stay defaults, since a config is a key of the compile cache.
    """
    head_dim, v_dim = arguments.q.shape[-1], arguments.v.shape[-1]
    dtype, kv_dtype = INPUT_NAMES[arguments.q.dtype], INPUT_NAMES[arguments.k.dtype]
    has_right_edge = _right_edge(arguments) is not None
    o_dtype = arguments.o_dtype
    return AttentionConfig(
        head_dim=head_dim,
        v_head_dim=0 if v_dim == head_dim else v_dim,
        dtype=dtype,
        kv_dtype="" if kv_dtype == dtype else kv_dtype,
        q_scale=arguments.q_scale is not None,
        k_scale=arguments.k_scale is not None,
        v_scale=arguments.v_scale is not None,
        right=has_right_edge,
        left=arguments.window_left is not None,
        tree=arguments.tree is not None,
        sink_tokens=arguments.sink_tokens > 0,
        softcap=arguments.softcap > 0,
        sinks=arguments.sinks is not None,
        normalize=arguments.normalize,
        kv_lens=arguments.kv_lens is not None,
        q_offset=arguments.q_offset is not None,
        varlen_q=arguments.cu_seqlens_q is not None,
        varlen_k=arguments.cu_seqlens_k is not None,
        page_size=0 if arguments.page_table is None else arguments.k.shape[1],
        rope_dim=0 if arguments.cos is None else 2 * arguments.cos.shape[1],
        pdl=arguments.pdl,
        out_dtype="" if o_dtype == arguments.own_o_dtype else INPUT_NAMES[o_dtype],
        out_scale=arguments.out_scale is not None,
        mask_mod=arguments.mask_mod,
        score_mod=arguments.score_mod,
        block_rows=arguments.block_rows,
        block_keys=arguments.block_keys,
        **{name: getattr(arguments, name) for name in TUNABLE},
    )


def _right_edge(arguments: Arguments) -> int | None:
    """Return how far a row sees to the right of its position; None where that does not depend on
    the row. The words of a tree say it of the newest keys instead."""
    if arguments.tree is not None:
        return None
    return 0 if arguments.causal else arguments.window_right


@cache
def _fits(config: AttentionConfig, arch: str) -> bool:
    try:
        make_plan(config, arch)
    except (ValueError, NotImplementedError):
        return False
    return True


def longest_queries(arguments: Arguments) -> int:
    """Return the queries of the longest entry, or an upper bound if only the GPU has
    the lengths.
    """
    if arguments.cu_seqlens_q is None:
        return arguments.queries
    if arguments.max_seqlen_q is not None:
        return min(arguments.max_seqlen_q, arguments.queries)
    if not arguments.on_host:
        return arguments.queries
    lengths = entry_lengths("cu_seqlens_q", arguments.cu_seqlens_q, arguments.queries)
    return max(lengths, default=0)


# ---- what may be measured

# Only options that change nothing but the order of sums.
OPTIONS = ("pack_heads", "tile_m", "tile_n", "ctas", "schedule", "slices")
KERNELS = {
    arch: tuple(dict.fromkeys(kernel_of(AttentionConfig(head_dim=d), arch) for d in (64, 80)))
    for arch in ARCHITECTURES
}
WIDTHS_OF_HOPPER = (48, 64, 80, 96, 112, 128, 160, 192)
TUNED = Tuned("attention", KERNELS, OPTIONS)


def problem_of(arguments: Arguments) -> Problem:
    """The problem that checked arguments pose."""
    q, k = arguments.q, arguments.k
    left, right = arguments.window_left, _right_edge(arguments)
    plain, batch = plain_config(arguments), arguments.batch
    pack_heads = False if arguments.heads_of_blocks > 1 else arguments.pack_heads
    return Problem(
        plain,
        batch,
        longest_queries(arguments),
        arguments.capacity,
        q.shape[-2],
        k.shape[-2],
        tokens=0 if arguments.cu_seqlens_q is None else q.shape[0],
        left=-1 if left is None else left,
        right=-1 if right is None else right,
        pack_heads=pack_heads,
        same=same_elements(k, arguments.v),
    )


def measured_problem(arguments: Arguments) -> Problem | None:
    """Return the problem as measurements store it; None if the arguments fix a tunable option."""
    if not are_open(arguments, ("pack_heads", *TUNABLE)):
        return None
    return replace(problem_of(arguments), same=False)


def choices(problem: Problem, arch: str) -> list[Choice]:
    """Return every option that suits a problem: all tiles that the kernel of `arch` supports."""
    group = problem.q_heads // problem.kv_heads
    found: list[Choice] = []
    for packed in (False, True) if group > 1 else (False,):
        plain = replace(problem.config, group=group if packed else 1)
        for option in _tiles(plain, arch):
            if _fits(replace(plain, **option), arch):
                found.append({"pack_heads": packed, **option})
    return found


def _tiles(plain: AttentionConfig, arch: str) -> list[Choice]:
    """Return all option values of a kernel; some combinations do not fit."""
    kernel = kernel_of(plain, arch)
    names: tuple[str, ...] = ("tile_n", "schedule")
    values: list[tuple] = [tuple(range(64, 129, 16)), ("base", "pingpong")]
    if "sm90" in kernel:
        names = ("tile_m", "tile_n", "ctas", "schedule")
        heights = (128, 192) if plain.head_dim <= 256 else (64,)  # two warpgroups share 64 rows
        values = [heights, WIDTHS_OF_HOPPER, (1, 2), ("base", "pingpong")]
    elif "portable" in kernel:
        names, values = ("tile_n", "slices"), [tuple(range(16, 129, 16)), (0, 1, 2, 4)]
    return [dict(zip(names, each, strict=True)) for each in product(*values)]
