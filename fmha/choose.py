"""What an attention problem is compiled for: what its arguments say, and what suits its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product

from fmha.arguments import Arguments, entry_lengths
from fmha.config import TUNABLE, AttentionConfig
from fmha.plan import kernel_of, make_plan, tiles_of
from fmha.tiles import Tiles
from kernelkit.call.tensors import DTYPE_NAMES, INPUT_NAMES, same_elements
from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.plan import hw
from kernelkit.plan.limits import UNBOUNDED
from kernelkit.tune.choices import Choice, Tuned, are_open

KEYS_OF_A_STEP = 32  # what a step costs beside its keys, in keys
LEAST_GAIN = 0.1  # for which another kernel is worth compiling
KEPT = 1024  # choices for a problem, or for a config and a window


@dataclass(frozen=True)
class Problem:
    """All that the choice of a kernel depends on.

    config: what the arguments say. queries: of the longest entry; keys: that an entry has at most;
    tokens: of all entries, where they are packed; left, right: how far a query sees, -1 for all;
    pack_heads: None chooses; same: K and V are the same tensor, and a kernel may load it once.
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
        """Keys that a query sees, as far as the window says."""
        return sum(UNBOUNDED if n < 0 else min(n, UNBOUNDED) for n in (self.left, self.right)) + 1


@dataclass(frozen=True)
class Decision:
    """What is launched for a problem, and what of its tiles the host asks for.

    kernel: the module. blocks: of query tiles, of all heads and entries. residents: CTAs that stand
    on an SM; ctas: of a cluster.
    """

    config: AttentionConfig
    kernel: str
    blocks: int
    residents: int
    ctas: int


@dataclass(frozen=True)
class Candidate:
    """Heads that share tiles, or do not, with the key tiles that suit the window.

    arch: of the kernel; larger: the same with larger blocks, where it may be chosen; sharers:
    groups of heads that share tiles, of one entry; tile_work: see `_tile_work`.
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
        """Work of one entry; where nothing but the order of rows differs, alike."""
        return self.blocks(self.base, queries) * self.tile_work


@lru_cache(KEPT)
def decide(problem: Problem, arch: str = "sm_100a") -> Decision:
    """What to launch on `arch`, checked.

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
    """What to compile for `arch`; not checked yet."""
    problem = problem_of(arguments)
    return best_of(candidates(problem, arch), problem.batch, problem.queries)


def best_of(found: tuple[Candidate, ...], batch: int, queries: int) -> AttentionConfig:
    """The candidate with the least work for these sizes, with its larger blocks, half as many, if
    they fill the GPU. queries: of the longest entry."""
    best = min(found, key=lambda candidate: candidate.work(queries))
    layout = tiles_of(best.base, best.arch)
    if best.larger is None or layout.blocks(queries) < layout.larger_from:
        return best.base
    ctas = batch * best.blocks(best.larger, queries) * tiles_of(best.larger, best.arch).ctas
    return best.larger if ctas >= hw.SMS_OF[best.arch] else best.base


def candidates(problem: Problem, arch: str = "sm_100a") -> tuple[Candidate, ...]:
    """What may be compiled for a problem, whatever its sizes."""
    plain = problem.config
    if problem.same and tiles_of(plain, arch).loads_once:
        plain = replace(plain, k_is_v=True)
    return tuple(
        _candidate(replace(plain, group=n), arch, problem.q_heads, problem.window)
        for n in _groups(problem)
    )


def _groups(problem: Problem) -> tuple[int, ...]:
    """How many heads may share tiles, all of a group or none."""
    group = problem.q_heads // problem.kv_heads
    if problem.pack_heads is None:
        return tuple(dict.fromkeys((1, group)))
    return (group if problem.pack_heads else 1,)


def _candidate(plain: AttentionConfig, arch: str, q_heads: int, window: int) -> Candidate:
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


@lru_cache(KEPT)  # takes a millisecond, of calls of every number of tokens
def _narrowed(config: AttentionConfig, arch: str, window: int) -> AttentionConfig:
    """With as many keys in a tile as suit the window, if that saves enough."""
    if config.tile_n or not (config.left and config.right):
        return config
    narrow = min(
        (config, *tiles_of(config, arch).variants()),
        key=lambda narrower: _token_work(narrower, arch, window),
    )
    gain = 1 - _token_work(narrow, arch, window) / _token_work(config, arch, window)
    return narrow if gain > LEAST_GAIN else config


def _token_work(config: AttentionConfig, arch: str, window: int) -> float:
    """Of the key tiles that a query block sees, for each token of it."""
    return _tile_work(config, arch, window) / _tokens(tiles_of(config, arch))


def _tokens(layout: Tiles) -> int:
    """Of a block."""
    return max(layout.box_tokens * layout.block_tiles // layout.head_parts, 1)


def _tile_work(config: AttentionConfig, arch: str, window: int) -> int:
    """Of the key tiles that a query block sees, in keys; without a window 1, as all see as many."""
    if not (config.left and config.right):
        return 1
    layout = tiles_of(config, arch)
    tokens = _tokens(layout)
    return -(-(window + tokens - 1) // layout.tile_n) * (layout.tile_n + KEYS_OF_A_STEP)


def plain_config(arguments: Arguments) -> AttentionConfig:
    """What the arguments say, sizes aside. Defaults stay defaults: a config is a key of the
    cache."""
    head_dim, v_dim = arguments.q.shape[-1], arguments.v.shape[-1]
    dtype, kv_dtype = INPUT_NAMES[arguments.q.dtype], INPUT_NAMES[arguments.k.dtype]
    o_dtype = arguments.o_dtype
    return AttentionConfig(
        head_dim=head_dim,
        v_head_dim=0 if v_dim == head_dim else v_dim,
        dtype=dtype,
        kv_dtype="" if kv_dtype == dtype else kv_dtype,
        q_scale=arguments.q_scale is not None,
        k_scale=arguments.k_scale is not None,
        v_scale=arguments.v_scale is not None,
        right=arguments.causal or arguments.window_right is not None,
        left=arguments.window_left is not None,
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
        out_dtype="" if o_dtype == arguments.own_o_dtype else DTYPE_NAMES[o_dtype],
        **{name: getattr(arguments, name) for name in TUNABLE},
    )


@cache
def _fits(config: AttentionConfig, arch: str) -> bool:
    try:
        make_plan(config, arch)
    except (ValueError, NotImplementedError):
        return False
    return True


def longest_queries(arguments: Arguments) -> int:
    """Queries of the longest entry, or an upper bound of it where only the GPU knows."""
    if arguments.cu_seqlens_q is None:
        return arguments.queries
    if arguments.max_seqlen_q is not None:
        return min(arguments.max_seqlen_q, arguments.queries)
    if not arguments.on_host:
        return arguments.queries
    lengths = entry_lengths("cu_seqlens_q", arguments.cu_seqlens_q, arguments.queries)
    return max(lengths, default=0)


# ---- what may be measured

# Not what changes more than the order of sums.
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
    left, right = arguments.window_left, 0 if arguments.causal else arguments.window_right
    return Problem(
        plain_config(arguments),
        arguments.batch,
        longest_queries(arguments),
        arguments.capacity,
        q.shape[-2],
        k.shape[-2],
        tokens=0 if arguments.cu_seqlens_q is None else q.shape[0],
        left=-1 if left is None else left,
        right=-1 if right is None else right,
        pack_heads=arguments.pack_heads,
        same=same_elements(k, arguments.v),
    )


def measured_problem(arguments: Arguments) -> Problem | None:
    """The problem as measurements know it; None where the arguments choose."""
    if not are_open(arguments, ("pack_heads", *TUNABLE)):
        return None
    return replace(problem_of(arguments), same=False)


def choices(problem: Problem, arch: str) -> list[Choice]:
    """What may suit a problem: every tile that the kernel of `arch` takes for its config."""
    group = problem.q_heads // problem.kv_heads
    found: list[Choice] = []
    for packed in (False, True) if group > 1 else (False,):
        plain = replace(problem.config, group=group if packed else 1)
        for option in _tiles(plain, arch):
            if _fits(replace(plain, **option), arch):
                found.append({"pack_heads": packed, **option})
    return found


def _tiles(plain: AttentionConfig, arch: str) -> list[Choice]:
    """Options of a kernel, of which not all fit together."""
    kernel = kernel_of(plain, arch)
    names: tuple[str, ...] = ("tile_n", "schedule")
    values: list[tuple] = [tuple(range(64, 129, 16)), ("base", "pingpong")]
    if "sm90" in kernel:
        names = ("tile_m", "tile_n", "ctas", "schedule")
        heights = (128, 192) if plain.head_dim <= 256 else (64,)  # as two warpgroups share 64 rows
        values = [heights, WIDTHS_OF_HOPPER, (1, 2), ("base", "pingpong")]
    elif "portable" in kernel:
        names, values = ("tile_n", "slices"), [tuple(range(16, 129, 16)), (0, 1, 2, 4)]
    return [dict(zip(names, each, strict=True)) for each in product(*values)]
