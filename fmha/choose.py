"""What an attention problem is compiled for: what its arguments say, and what suits its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product

from fmha.arguments import Arguments, entry_lengths
from fmha.config import TUNABLE, AttentionConfig
from fmha.plan import kernel_of, make_plan, tiles_of
from fmha.tiles import Tiles
from kernelkit.attention import bounded
from kernelkit.call.tensors import DTYPE_NAMES, INPUT_NAMES, same_elements
from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.plan import hw
from kernelkit.tune.choices import Choice, Tuned, are_open

KEYS_OF_A_STEP = 32  # what a step costs beside its keys, in keys
LEAST_GAIN = 0.1  # for which another kernel is worth compiling
KEPT = 1024  # choices for a config and a window


@dataclass(frozen=True)
class Sizes:
    """What a config depends on besides what the arguments say. queries: of the longest entry."""

    batch: int
    queries: int


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

    def blocks(self, config: AttentionConfig, sizes: Sizes) -> int:
        """Of one entry."""
        return self.sharers * tiles_of(config, self.arch).blocks(sizes.queries)

    def work(self, sizes: Sizes) -> int:
        """Of one entry; where nothing but the order of rows differs, alike."""
        return self.blocks(self.base, sizes) * self.tile_work


def choose_config(arguments: Arguments, arch: str = "sm_100a") -> AttentionConfig:
    """What to compile for `arch`; not checked yet."""
    sizes = Sizes(arguments.batch, longest_queries(arguments))
    return best_of(candidates(arguments, arch), sizes)


def best_of(found: tuple[Candidate, ...], sizes: Sizes) -> AttentionConfig:
    """The candidate with the least work for these sizes, with its larger blocks, half as many, if
    they fill the GPU."""
    best = min(found, key=lambda candidate: candidate.work(sizes))
    layout = tiles_of(best.base, best.arch)
    if best.larger is None or layout.blocks(sizes.queries) < layout.larger_from:
        return best.base
    ctas = sizes.batch * best.blocks(best.larger, sizes) * tiles_of(best.larger, best.arch).ctas
    return best.larger if ctas >= hw.SMS_OF[best.arch] else best.base


def candidates(arguments: Arguments, arch: str = "sm_100a") -> tuple[Candidate, ...]:
    """What may be compiled for these arguments, whatever their sizes."""
    plain = plain_config(arguments)
    if tiles_of(plain, arch).loads_once and same_elements(arguments.k, arguments.v):
        plain = replace(plain, k_is_v=True)
    q_heads, window = arguments.q_heads, _window(arguments)
    groups = _groups(arguments)
    return tuple(_candidate(replace(plain, group=n), arch, q_heads, window) for n in groups)


def _groups(arguments: Arguments) -> tuple[int, ...]:
    """How many heads may share tiles, all of a group or none."""
    group = arguments.q_heads // arguments.kv_heads
    if arguments.pack_heads is None:
        return tuple(dict.fromkeys((1, group)))
    return (group if arguments.pack_heads else 1,)


def _window(arguments: Arguments) -> int:
    """Keys that a query sees, as far as the window says."""
    right = 0 if arguments.causal else bounded(arguments.window_right)
    return bounded(arguments.window_left) + 1 + right


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
    config = AttentionConfig(
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
        **{name: getattr(arguments, name) for name in TUNABLE},
    )
    out_dtype = DTYPE_NAMES[arguments.o_dtype]
    return config if config.o_dtype == out_dtype else replace(config, out_dtype=out_dtype)


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


@dataclass(frozen=True)
class Problem:
    """What the choice depends on. config: what the arguments say. queries: of the longest entry;
    tokens: of all entries, where they are packed; keys: that an entry has at most; left, right: how
    far a query sees, -1 for all."""

    config: AttentionConfig
    batch: int
    queries: int
    keys: int
    q_heads: int
    kv_heads: int
    tokens: int = 0
    left: int = -1
    right: int = -1


def problem_of(arguments: Arguments) -> Problem | None:
    """None where the arguments choose."""
    if not are_open(arguments, ("pack_heads", *TUNABLE)):
        return None
    sides = arguments.window_left, 0 if arguments.causal else arguments.window_right
    return Problem(
        plain_config(arguments),
        arguments.batch,
        longest_queries(arguments),
        arguments.capacity,
        arguments.q_heads,
        arguments.kv_heads,
        0 if arguments.cu_seqlens_q is None else arguments.queries,
        *(-1 if side is None else side for side in sides),
    )


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
