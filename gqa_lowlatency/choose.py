"""What a decode problem is compiled for: how many CTAs share the keys of a KV head, which of its
query rows stand in one of them, and what else follows from sizes.

Pure functions of sizes, with what was measured as data. What a CTA of one architecture holds where
is in `portable/plan.py`, `sm100/plan.py`. Compute capabilities 8.x and 12.x have no clusters here,
and as many parts of a KV head as fill their SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from gqa_lowlatency.arguments import MAX_PARTS, Arguments
from gqa_lowlatency.config import (
    CLUSTERS,
    COLUMNS,
    KERNELS,
    STEPS,
    TUNABLE,
    WARP_COUNTS,
    DecodeConfig,
)
from kernelkit.call.launch import Target, clusters_at_once, sms_of
from kernelkit.call.tensors import DTYPE_NAMES
from kernelkit.compile.arch import ARCHITECTURES, PORTABLE, written_for
from kernelkit.plan import hw
from kernelkit.tune.choices import Choice as Measured
from kernelkit.tune.choices import Tuned, are_open

TILE = 128  # keys that a CTA takes at a time
KEPT = 1024  # decisions
# More clusters than SMs, of shorter CTAs: the last of them end closer together. H100, 64 entries of
# 8k keys, 8 KV heads: 690 instead of 692.5 us; as fast at 4k keys.
MIN_KEYS_OF_PAIRS = 8192
MIN_KEYS_OF_16_WARPS = 512
MIN_KEYS_OF_LONG_SHARES = 8192  # of which 8 warps read faster than 16
MIN_KEYS_OF_DEEP_RINGS = 4096  # that are worth more than a second CTA where there are many
MAX_ELEMENTS_OF_16_WARPS = 1024  # of O in the registers of a warp, of 128 a thread
MIN_KEYS_OF_LONG_STEPS = 512
MAX_ELEMENTS_OF_LONG_STEPS = 1024  # of O in the registers of one of 8 warps
MIN_KEYS_TO_SPLIT = 8192  # from which the merge of several clusters costs less than it saves,
MIN_TILES_OF_SPLIT = 2  # for each CTA,
MAX_FILL_TO_SPLIT = 0.25  # where one cluster per KV head leaves the other SMs without work
# Where there are no clusters: a part leaves 4 KB for 8 rows of 128 dims, and 256 keys have 128.
MIN_KEYS_OF_PART = 2 * TILE
# With `batch_invariant` they depend on the keys alone: the overhead, which a large batch has for
# nothing, is 2 % of the bytes, and 16 for each of 8 KV heads fill a GPU of 128 SMs.
MIN_KEYS_OF_FIXED_PART, MAX_FIXED_PARTS = 512, 16


@dataclass(frozen=True)
class Machine:
    """What a launch is laid out for.

    sms: to be filled. widest: the largest cluster worth taking; 1: CTAs share keys through parts
    alone. columns: head_dim -> most query rows of a CTA, by its registers and shared memory.
    """

    sms: int
    widest: int
    columns: dict[int, int]


_BY_REGISTERS = {64: 64, 128: 32, 256: 16}  # of the kernel on mma.sync
# Compute capabilities 8.x and 12.x: the SMs of the largest GPU, but a launch takes its own.
_PORTABLE = [arch for arch in ARCHITECTURES if written_for(arch) == PORTABLE]
MACHINES = {
    # Clusters of 16 were slower than of 8 at every length on an H100.
    "sm_90a": Machine(132, 8, _BY_REGISTERS),
    "sm_100a": Machine(148, 16, {64: 64, 128: 64, 256: 64}),
    **{arch: Machine(hw.SMS_OF[arch], 1, _BY_REGISTERS) for arch in _PORTABLE},
}


def machine_of(arch: str, sms: int = 0) -> Machine:
    """Of the architecture, or of that whose kernels serve it; sms: of the GPU, 0: unknown."""
    machine = MACHINES.get(arch) or MACHINES[written_for(arch)]
    return replace(machine, sms=sms) if sms else machine


CoScheduled = Callable[[int], int]


def choose_cluster(
    arch: str,
    keys: int,
    clusters: int,
    *,
    batch_invariant: bool = False,
    co_scheduled: CoScheduled | None = None,
) -> int:
    """CTAs of a cluster; keys: of the longest entry; clusters: batch x KV heads x tiles of rows.

    As many as find an SM each, but no more than there are tiles of keys: on an H100 64 clusters of
    two are faster than of four. batch_invariant: as if there was one cluster, so that the choice
    depends on `keys` alone. co_scheduled: clusters of so many CTAs that run at once; wider ones
    than that would run one after the other, as they do anyway where there are more than SMs.
    """
    machine = machine_of(arch)
    clusters = 1 if batch_invariant else max(clusters, 1)
    possible = [width for width in CLUSTERS if width <= min(machine.widest, -(-keys // TILE))]
    if not possible:
        return 1
    wanted = machine.sms // clusters
    if arch == "sm_90a" and clusters > machine.sms and keys >= MIN_KEYS_OF_PAIRS:
        wanted = 2
    width = max((width for width in possible if width <= wanted), default=1)
    if co_scheduled is not None and not batch_invariant:
        at_once = clusters if clusters <= machine.sms else 1
        while width > 1 and at_once > co_scheduled(width):
            width //= 2
    return width


def choose_num_splits(
    arch: str,
    keys: int,
    clusters: int,
    cluster: int,
    *,
    batch_invariant: bool = False,
    sms: int = 0,
) -> int:
    """Clusters that share a KV head, 1 nearly always where there are wide ones; arguments as in
    `choose_cluster`, sms: of the GPU, 0: those of `MACHINES`.

    The last to arrive reads what all have left, 1.5 us of an H100: 8.2 instead of 11.4 us for 8k
    keys of one KV head, but no gain with eight of them.
    """
    machine, ctas = machine_of(arch, sms), clusters * cluster
    if machine.widest == 1:
        return parts_that_fill(machine, keys, ctas, batch_invariant=batch_invariant)
    few = ctas <= machine.sms * MAX_FILL_TO_SPLIT and cluster == machine.widest
    if batch_invariant or not few or keys < MIN_KEYS_TO_SPLIT:
        return 1
    return max(1, min(machine.sms // ctas, keys // (TILE * MIN_TILES_OF_SPLIT * cluster)))


def parts_that_fill(machine: Machine, keys: int, ctas: int, *, batch_invariant: bool) -> int:
    """CTAs that share a KV head where there are no clusters: as many as find an SM each.

    A second CTA on an SM would find no more bandwidth: one slot of 8 warps on its way, 32 KB for
    each microsecond of latency, is 3.5 TB/s of 108 SMs, and these GPUs have at most 2 TB/s.
    """
    if batch_invariant:
        return max(1, min(keys // MIN_KEYS_OF_FIXED_PART, MAX_FIXED_PARTS))
    return max(1, min(machine.sms // max(ctas, 1), keys // MIN_KEYS_OF_PART, MAX_PARTS))


def choose_columns(arch: str, head_dim: int, warps: int = 0) -> int:
    """Most query rows of one CTA; more than 8 warps leave each of them fewer registers."""
    return machine_of(arch).columns[head_dim] * 8 // max(warps, 8)


def choose_warps(arch: str, keys: int, ctas: int, elements: int) -> int:
    """Warps of a CTA of the Hopper kernel, 0 for its default; keys: of a CTA; ctas: of the grid;
    elements: columns x head_dim of O.

    Sixteen keep more copies in flight where a CTA has an SM for itself and enough to read (H100, 8
    KV heads: 15.3 instead of 15.7 us at 8k keys, but 6.1 instead of 4.9 at 1k).
    """
    if arch != "sm_90a" or elements > MAX_ELEMENTS_OF_16_WARPS:
        return 0
    medium = MIN_KEYS_OF_16_WARPS <= keys < MIN_KEYS_OF_LONG_SHARES
    return 16 if medium and ctas <= MACHINES[arch].sms else 0


def choose_step(
    arch: str, keys: int, columns: int, head_dim: int, *, fp8: bool, warps: int = 0
) -> int:
    """Keys that a warp of the Hopper kernel takes at a time, 0 for its default; keys: of a CTA;
    fp8: whether they are e4m3.

    Of those as many bytes as of 16 others are in flight, and instructions bound the loop: 225
    instead of 302 for 16 keys. For short shares a CTA would take too many at a time; with more
    columns, or dims, or dims and warps, registers do not hold the scores.
    """
    elements = columns * head_dim * max(warps, 8) // 8
    small = columns == COLUMNS[0] and elements <= MAX_ELEMENTS_OF_LONG_STEPS
    long = small and fp8 and keys >= MIN_KEYS_OF_LONG_STEPS
    return STEPS[-1] if arch == "sm_90a" and long else 0


def one_to_an_sm(arch: str, keys: int, ctas: int, *, pdl: bool = False, sms: int = 0) -> bool:
    """Whether deep rings are worth more than a second CTA on the SM; arguments as above.

    Two start and end in each other's shadow, which counts where shares are short. One with 32 KB
    more of ring: 89.4 instead of 92.1 us (H100, one entry of 64k keys, 8 KV heads), 690 instead of
    699 (64 entries of 8k, more CTAs than SMs). pdl: two are of two grids, and the second grid
    doubles up before it reaches SMs that are still busy; where each of its CTAs could have had one
    that costs a tenth (98.6 instead of 89.5 us, eight entries of 8k, 128 CTAs).
    """
    if pdl:
        return most_sms(arch, ctas, sms) and ctas <= machine_of(arch, sms).sms
    if arch != "sm_90a":
        return False
    alone = ctas <= MACHINES[arch].sms and keys >= MIN_KEYS_OF_16_WARPS
    return alone or keys >= MIN_KEYS_OF_DEEP_RINGS


def two_to_an_sm(arch: str, ctas: int) -> bool:
    """Whether the CTAs of a Blackwell grid stand in pairs on an SM, with half of the ring each.

    One reads while the other begins or ends. Modelled for a B200, 8 KV heads, 512 CTAs: 42.6
    instead of 53.5 us (64 entries of 1k keys), 304 instead of 355 (of 8k); 256 CTAs: 26.3 instead
    of 28.1 (32 entries of 1k). No gain where each has an SM for itself.
    """
    return arch == "sm_100a" and ctas > MACHINES[arch].sms


def most_sms(arch: str, ctas: int, sms: int = 0) -> bool:
    """Whether a grid leaves no room for another one beside it, sms as in `choose_num_splits`.

    Then the grid behind it, with K and V ready, had better begin at once: 12.1 instead of 13.2 us
    (H100, eight entries of 1k keys). Else its CTAs wait where those of a third could fetch: 16.7
    instead of 13.3 us (one entry of 8k keys, 64 CTAs).
    """
    return 2 * ctas > machine_of(arch, sms).sms


@dataclass(frozen=True)
class Decision:
    """What is launched. kernel: the module. num_splits: clusters that share a KV head, where the
    config has parts. row_tiles: of a KV head."""

    config: DecodeConfig
    kernel: str
    num_splits: int
    row_tiles: int


def choose_config(arguments: Arguments, target: Target, cluster: int = 0) -> DecodeConfig:
    """What to compile; not checked yet. cluster: see `decide`."""
    return decide(arguments, target, cluster).config


def decide(arguments: Arguments, target: Target, cluster: int = 0) -> Decision:
    """What to launch; not checked yet. Defaults stay defaults: a config is a key of the cache.

    cluster: that was measured to be the best, where the arguments leave it open; what follows from
    it is chosen as for any other."""
    load = load_of(arguments, target.arch, cluster)
    return _decision(_tuned_config(arguments), load, target, arguments.q.device)


@lru_cache(KEPT)
def _decision(plain: DecodeConfig, load: Load, target: Target, device: torch.device) -> Decision:
    wished, arch = _with_columns(plain, target.arch), target.arch
    limits = co_scheduled_on(target, replace(wished, cluster=1), device)
    config = config_for(wished, arch, load, limits)
    num_splits = _splits_of(arch, load, config)
    return Decision(config, KERNELS[written_for(arch)], num_splits, config.row_tiles)


def wished_config(arguments: Arguments, arch: str) -> DecodeConfig:
    """What the arguments say, sizes aside; cluster 0 leaves the choice to `config_for`."""
    return _with_columns(_tuned_config(arguments), arch)


def _tuned_config(arguments: Arguments) -> DecodeConfig:
    """What the arguments say, with what they choose."""
    chosen = {name: getattr(arguments, name) for name in TUNABLE}
    return replace(_plain_config(arguments), **chosen)


def _with_columns(config: DecodeConfig, arch: str) -> DecodeConfig:
    """With the limit of rows of a CTA, where it changes something."""
    if config.max_columns:
        return config
    try:
        columns = choose_columns(written_for(arch), config.head_dim, config.warps)
    except KeyError:  # a head_dim that config.check_values() will refuse
        return config
    return replace(config, max_columns=columns) if config.rows > columns else config


@dataclass(frozen=True)
class Load:
    """Sizes that a config depends on. keys: that the tokens of an entry see at most. heads: KV
    heads of all entries. num_splits: clusters that share a KV head, 0 chooses. sms: of the GPU,
    0: those of `MACHINES`, as always where there are clusters. cluster: CTAs of one, 0 chooses."""

    keys: int
    heads: int
    batch_invariant: bool = False
    num_splits: int = 0
    sms: int = 0
    cluster: int = 0


def config_for(
    wished: DecodeConfig, arch: str, load: Load, co_scheduled: CoScheduled | None = None
) -> DecodeConfig:
    """What to compile for `wished` under a load; co_scheduled: see `plan.choose_cluster`."""
    chosen = choose(wished, arch, load, co_scheduled)
    return replace(wished, **vars(chosen)) if chosen else replace(wished, parts=load.num_splits > 1)


@dataclass(frozen=True)
class Choice:
    """Fields of a config that follow from the load."""

    cluster: int
    parts: bool
    warps: int
    step: int
    alone: bool
    early: bool
    beside: bool


def choose(
    wished: DecodeConfig, arch: str, load: Load, co_scheduled: CoScheduled | None = None
) -> Choice | None:
    """None where a cluster is wished for, and with it the rest.

    What suits the CTAs of a grid and the keys of each: how many stand on an SM, the warps of the
    Hopper kernel, when the next grid begins. What is wished for stays.
    """
    if wished.cluster:
        return None
    arch = arch if arch in MACHINES else written_for(arch)
    fixed, row_tiles, sms = load.batch_invariant, wished.row_tiles, load.sms
    clusters = load.heads * row_tiles
    cluster = load.cluster or choose_cluster(
        arch, load.keys, clusters, batch_invariant=fixed, co_scheduled=co_scheduled
    )
    num_splits = _num_splits(arch, load, clusters, cluster)
    sharing = cluster * num_splits
    ctas = (1 if fixed else load.heads) * row_tiles * sharing
    keys = load.keys // sharing
    warps, columns, head_dim = wished.warps, wished.columns, wished.head_dim
    fp8 = wished.keys_dtype == "e4m3"
    step = wished.step or choose_step(arch, keys, columns, head_dim, fp8=fp8, warps=warps)
    if not warps and step != STEPS[-1] and not wished.pdl:
        warps = choose_warps(arch, keys, ctas, columns * head_dim)
    early = wished.kv_ready and arch == "sm_90a" and most_sms(arch, ctas)
    alone = one_to_an_sm(arch, keys, ctas, pdl=wished.pdl, sms=sms)
    beside = two_to_an_sm(arch, ctas) and not wished.pdl
    return Choice(cluster, num_splits > 1, warps, step, alone, early, beside)


def load_of(arguments: Arguments, arch: str, cluster: int = 0) -> Load:
    """The load of a call. Where there are no clusters GPUs of one architecture differ by ten
    times. cluster: see `decide`."""
    heads, device = arguments.q.shape[0] * arguments.k.shape[-2], arguments.q.device
    sms = sms_of(device) if device.type == "cuda" and written_for(arch) == PORTABLE else 0
    fixed, parts = arguments.batch_invariant, arguments.parts
    return Load(arguments.most_seen, heads, fixed, parts, sms, cluster)


def clusters_per_head(arch: str, arguments: Arguments, config: DecodeConfig) -> int:
    """Clusters that share a KV head."""
    return _splits_of(arch, load_of(arguments, arch), config)


def _splits_of(arch: str, load: Load, config: DecodeConfig) -> int:
    return _num_splits(arch, load, load.heads * config.row_tiles, config.cluster)


def _num_splits(arch: str, load: Load, clusters: int, cluster: int) -> int:
    """As wished, or chosen."""
    return load.num_splits or choose_num_splits(
        arch,
        load.keys,
        max(clusters, 1),
        cluster,
        batch_invariant=load.batch_invariant,
        sms=load.sms,
    )


def _plain_config(arguments: Arguments) -> DecodeConfig:
    """What the arguments say."""
    q, k, tokens = arguments.q, arguments.k, arguments.q_tokens
    q_dtype, out_dtype = DTYPE_NAMES[q.dtype], DTYPE_NAMES[arguments.o_dtype]
    return DecodeConfig(
        head_dim=q.shape[-1],
        group=q.shape[-2] // k.shape[-2],
        q_tokens=tokens,
        dtype=q_dtype,
        kv_dtype="e4m3" if k.dtype == torch.float8_e4m3fn else "",
        k_scale=arguments.k_scale is not None,
        v_scale=arguments.v_scale is not None,
        out_dtype="" if out_dtype == q_dtype else out_dtype,
        causal=arguments.causal and tokens > 1,
        left=arguments.window_left is not None,
        sink_tokens=arguments.sink_tokens > 0,
        softcap=arguments.softcap > 0,
        sinks=arguments.sinks is not None,
        lens=arguments.kv_lens is not None,
        first=arguments.first_keys is not None,
        page_size=0 if arguments.page_table is None else k.shape[1],
        pdl=arguments.pdl,
        kv_ready=arguments.kv_ready_before_pdl,
    )


def co_scheduled_on(
    target: Target, config: DecodeConfig, device: torch.device
) -> CoScheduled | None:
    """What the device says; the emulator has no limit."""
    if target.backend != "cuda":
        return None
    return lambda width: (
        clusters_at_once(device, width) * _residents(replace(config, cluster=width), target.arch)
    )


def _residents(config: DecodeConfig, arch: str) -> int:
    """CTAs that shared memory lets stand on an SM."""
    if arch != "sm_90a":
        return 1
    from gqa_lowlatency.portable.plan import Plan90

    needed = Plan90(config).smem_bytes + hw.SMEM_RESERVED_BYTES
    return max(1, hw.SMEM_BYTES_PER_SM // needed)


# ---- what may be measured


@dataclass(frozen=True)
class Options:
    """What a measurement chooses; 0 leaves it to the rules."""

    cluster: int = 0
    parts: int = 0
    max_columns: int = 0
    warps: int = 0
    step: int = 0
    stages: int = 0


LEFT_OPEN = Options()
PARTS = (1, 2, 4, 8, 16, 32, 64)
# (warps, step) of the kernel of Hopper on others, and on Hopper itself
CTAS_OF = [*product(WARP_COUNTS[:2], STEPS)], [*product(WARP_COUNTS[1:], STEPS)]
TUNED = Tuned("decode", {arch: (kernel,) for arch, kernel in KERNELS.items()}, [*vars(LEFT_OPEN)])


@dataclass(frozen=True)
class Problem:
    """What the choice depends on. config: what the arguments say; keys, heads: as of `Load`."""

    config: DecodeConfig
    keys: int
    heads: int


def problem_of(arguments: Arguments) -> Problem | None:
    """None where the arguments choose, or promise the same bits whatever else is in the batch."""
    if arguments.batch_invariant or not are_open(arguments, (*TUNABLE, "parts")):
        return None
    heads = arguments.batch * arguments.kv_heads
    return Problem(_plain_config(arguments), arguments.most_seen, heads)


def with_options(arguments: Arguments, options: Options) -> Arguments:
    """All of them but the cluster, which would be a wish for what follows from it, too."""
    if options is LEFT_OPEN:
        return arguments
    return replace(arguments, **{n: v for n, v in vars(options).items() if n != "cluster"})


def choices(problem: Problem, arch: str) -> list[Measured]:
    """What may suit a problem: grids of at most two CTAs for each SM, or of one cluster per KV
    head, and what a CTA of the architecture leaves open. Not all of them fit."""
    machine = machine_of(arch)
    row_tiles = -(-problem.config.rows // choose_columns(arch, problem.config.head_dim))
    tiles = -(-problem.keys // TILE)
    ctas_of = [(0, 0)] if written_for(arch) == "sm_100a" else CTAS_OF[arch == "sm_90a"]
    found: list[Measured] = []
    for cluster in (width for width in CLUSTERS if width <= min(machine.widest, max(tiles, 1))):
        ctas = cluster * row_tiles * max(problem.heads, 1)
        for parts in PARTS:
            if parts > 1 and (parts * ctas > 2 * machine.sms or parts * cluster > tiles):
                break
            grid = {"cluster": cluster, "parts": parts}
            found += [grid | {"warps": warps, "step": step} for warps, step in ctas_of]
    return found
