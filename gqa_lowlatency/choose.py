"""Choose the config of a decode problem: CTAs per KV head, query rows per CTA, dependent fields.

Pure functions of sizes, with measurements as data. `portable/plan.py` and `sm100/plan.py` lay out
a CTA of one architecture. Compute capabilities 8.x and 12.x have no clusters here; a KV head is
split into as many parts as fill their SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from kernelkit.call.tensors import INPUT_NAMES
from kernelkit.compile.arch import ARCHITECTURES, PORTABLE, written_for
from kernelkit.plan import hw
from kernelkit.tune.choices import Choice as Measured
from kernelkit.tune.choices import Tuned, are_open

TILE = 128  # keys that a CTA processes at a time
KEPT = 1024  # cached decisions
# With more clusters than SMs, shorter CTAs end at similar times. H100, 64 entries of 8k keys, 8 KV
# heads: 690 instead of 692.5 us; equal at 4k keys.
MIN_KEYS_OF_PAIRS = 8192
MIN_KEYS_OF_16_WARPS = 512
MIN_KEYS_OF_LONG_SHARES = 8192  # from which 8 warps read faster than 16
MIN_KEYS_OF_DEEP_RINGS = 4096  # from which deep rings gain more than a second CTA in a large grid
MAX_ELEMENTS_OF_16_WARPS = 1024  # of O in the registers of a warp, 128 per thread
MIN_KEYS_OF_LONG_STEPS = 512
MAX_ELEMENTS_OF_LONG_STEPS = 1024  # of O in the registers of one of 8 warps
MIN_KEYS_TO_SPLIT = 8192  # from which the merge of several clusters costs less than it saves
MIN_TILES_OF_SPLIT = 2  # of each CTA
MAX_FILL_TO_SPLIT = 0.25  # largest share of the SMs that one cluster per KV head occupies
# Without clusters: a part writes 4 KB for 8 rows of 128 dims, and 256 keys have 128 KB.
MIN_KEYS_OF_PART = 2 * TILE
# With `batch_invariant` parts depend on the keys alone. Their overhead, useless in a large batch,
# is 2 % of the bytes; 16 parts for each of 8 KV heads fill a GPU of 128 SMs.
MIN_KEYS_OF_FIXED_PART, MAX_FIXED_PARTS = 512, 16
MIN_SMEM_OF_16_COLUMNS = 128 * 1024  # of a CTA, for head dim 512


@dataclass(frozen=True)
class Machine:
    """GPU properties that a launch is sized for.

    sms: SMs to fill.
    widest: largest useful cluster; 1 if CTAs share keys only through parts.
    columns: head_dim -> most query rows of a CTA, by its registers and shared memory.
    fp8_columns: the same with e4m3 keys, for head dims at which it differs.
    """

    sms: int
    widest: int
    columns: dict[int, int]
    fp8_columns: dict[int, int] = field(default_factory=dict)


# For the mma.sync kernel: O of a warp has 4096 elements, and two warps divide 512 columns.
_BY_REGISTERS = {64: 64, 128: 32, 256: 16, 512: 16}
# With 99 KB of shared memory: 16 columns of 512 have 32 KB of O, 16 of Q, and 8 of what two warps
# exchange. The rings of four warps have 64.
_IN_LITTLE_MEMORY = _BY_REGISTERS | {512: 8}


def _columns_on(arch: str) -> dict[int, int]:
    """Return `Machine.columns` of a GPU without clusters."""
    little = hw.smem_bytes_per_cta(arch) < MIN_SMEM_OF_16_COLUMNS
    return _IN_LITTLE_MEMORY if little else _BY_REGISTERS


# Compute capabilities 8.x and 12.x: the SMs of the largest GPU; a launch uses those of its GPU.
_PORTABLE = [arch for arch in ARCHITECTURES if written_for(arch) == PORTABLE]
MACHINES = {
    # Clusters of 16 were slower than of 8 at every length on an H100.
    "sm_90a": Machine(132, 8, _BY_REGISTERS),
    # At 512 a ring has to hold V of a tile: 128 KB in 16 bits, with 48 KB of Q and O of 16 columns.
    "sm_100a": Machine(148, 16, {64: 64, 128: 64, 256: 64, 512: 16}, {512: 32}),
    **{arch: Machine(hw.SMS_OF[arch], 1, _columns_on(arch)) for arch in _PORTABLE},
}


def machine_of(arch: str, sms: int = 0) -> Machine:
    """Return the machine of `arch`, or of the architecture whose kernels serve it.

    sms: SMs of the GPU; 0 if unknown.
    """
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
    """Return the CTAs of a cluster.

    As many as get an SM each, but no more than there are tiles of keys: on an H100 64 clusters of
    two are faster than of four.

    Args:
        arch: architecture of the launch.
        keys: keys of the longest entry.
        clusters: batch x KV heads x tiles of rows.
        batch_invariant: choose as for one cluster, so that the choice depends on `keys` alone.
        co_scheduled: returns how many clusters of so many CTAs run at once. Wider clusters would
            run one after the other, as they do anyway if there are more clusters than SMs.
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
    """Return the clusters that share a KV head, nearly always 1 on GPUs with wide clusters.

    The last cluster to arrive reads the results of all, which costs 1.5 us on an H100. That gives
    8.2 instead of 11.4 us for 8k keys of one KV head, but no gain with eight KV heads. Arguments
    are as in `choose_cluster`; sms: SMs of the GPU, 0 for those of `MACHINES`.
    """
    machine, ctas = machine_of(arch, sms), clusters * cluster
    if machine.widest == 1:
        return parts_that_fill(machine, keys, ctas, batch_invariant=batch_invariant)
    few = ctas <= machine.sms * MAX_FILL_TO_SPLIT and cluster == machine.widest
    if batch_invariant or not few or keys < MIN_KEYS_TO_SPLIT:
        return 1
    return max(1, min(machine.sms // ctas, keys // (TILE * MIN_TILES_OF_SPLIT * cluster)))


def parts_that_fill(machine: Machine, keys: int, ctas: int, *, batch_invariant: bool) -> int:
    """Return the CTAs that share a KV head without clusters: as many as get an SM each.

    A second CTA on an SM would gain no bandwidth. One slot of 8 warps in flight, 32 KB for each
    microsecond of latency, is 3.5 TB/s over 108 SMs, and these GPUs have at most 2 TB/s.
    """
    if batch_invariant:
        return max(1, min(keys // MIN_KEYS_OF_FIXED_PART, MAX_FIXED_PARTS))
    return max(1, min(machine.sms // max(ctas, 1), keys // MIN_KEYS_OF_PART, MAX_PARTS))


def choose_columns(arch: str, head_dim: int, warps: int = 0, *, fp8: bool = False) -> int:
    """Return the most query rows of one CTA; more than 8 warps have fewer registers each.

    fp8 tells whether the keys are e4m3.
    """
    machine = machine_of(arch)
    columns = machine.columns | machine.fp8_columns if fp8 else machine.columns
    return columns[head_dim] * 8 // max(warps, 8)


def choose_warps(arch: str, keys: int, ctas: int, elements: int) -> int:
    """Return the warps of a CTA of the Hopper kernel, 0 for its default.

    Sixteen warps keep more copies in flight if a CTA has an SM alone and enough to read. H100, 8 KV
    heads: 15.3 instead of 15.7 us at 8k keys, but 6.1 instead of 4.9 us at 1k.

    Args:
        arch: architecture of the launch.
        keys: keys of a CTA.
        ctas: CTAs of the grid.
        elements: columns x head_dim of O.
    """
    if arch != "sm_90a" or elements > MAX_ELEMENTS_OF_16_WARPS:
        return 0
    medium = MIN_KEYS_OF_16_WARPS <= keys < MIN_KEYS_OF_LONG_SHARES
    return 16 if medium and ctas <= MACHINES[arch].sms else 0


def choose_step(
    arch: str, keys: int, columns: int, head_dim: int, *, fp8: bool, warps: int = 0
) -> int:
    """Return the keys that a warp of the Hopper kernel processes at a time, 0 for its default.

    32 e4m3 keys have as many bytes in flight as 16 keys of 16 bits, and instructions bound the
    loop: 225 instead of 302 for 16 keys. If a CTA has few keys, its tile would become too large.
    With more columns, or dims, or dims and warps, registers do not hold the scores.

    keys: keys of a CTA. fp8 tells whether they are e4m3.
    """
    elements = columns * head_dim * max(warps, 8) // 8
    small = columns == COLUMNS[0] and elements <= MAX_ELEMENTS_OF_LONG_STEPS
    long = small and fp8 and keys >= MIN_KEYS_OF_LONG_STEPS
    return STEPS[-1] if arch == "sm_90a" and long else 0


def one_to_an_sm(arch: str, keys: int, ctas: int, *, pdl: bool = False, sms: int = 0) -> bool:
    """Return whether deep rings gain more than a second CTA on the SM.

    Two CTAs overlap each other's start and end, which matters for short shares. One CTA with 32 KB
    more of ring: 89.4 instead of 92.1 us (H100, one entry of 64k keys, 8 KV heads), 690 instead of
    699 (64 entries of 8k, more CTAs than SMs).

    pdl: the two CTAs belong to two grids, and the second grid puts two on an SM before it reaches
    SMs that are still busy. If each of its CTAs could have had an SM, that costs a tenth (98.6
    instead of 89.5 us, eight entries of 8k, 128 CTAs). Other arguments are as above.
    """
    if pdl:
        return most_sms(arch, ctas, sms) and ctas <= machine_of(arch, sms).sms
    if arch != "sm_90a":
        return False
    alone = ctas <= MACHINES[arch].sms and keys >= MIN_KEYS_OF_16_WARPS
    return alone or keys >= MIN_KEYS_OF_DEEP_RINGS


def two_to_an_sm(arch: str, ctas: int) -> bool:
    """Return whether two CTAs of a Blackwell grid share an SM, with half of the ring each.

    One reads while the other begins or ends. Modelled for a B200, 8 KV heads, 512 CTAs: 42.6
    instead of 53.5 us (64 entries of 1k keys), 304 instead of 355 (of 8k); 256 CTAs: 26.3 instead
    of 28.1 (32 entries of 1k). No gain if each CTA has an SM alone.
    """
    return arch == "sm_100a" and ctas > MACHINES[arch].sms


def most_sms(arch: str, ctas: int, sms: int = 0) -> bool:
    """Return whether a grid leaves no room for another one; sms as in `choose_num_splits`.

    The next grid, with K and V ready, had then better begin at once: 12.1 instead of 13.2 us (H100,
    eight entries of 1k keys). Otherwise its CTAs wait on SMs where a third grid could fetch: 16.7
    instead of 13.3 us (one entry of 8k keys, 64 CTAs).
    """
    return 2 * ctas > machine_of(arch, sms).sms


@dataclass(frozen=True)
class Decision:
    """Config and kernel of a launch.

    kernel: module of the kernel.
    num_splits: clusters that share a KV head, if the config has parts.
    row_tiles: tiles of query rows of a KV head.
    """

    config: DecodeConfig
    kernel: str
    num_splits: int
    row_tiles: int


def choose_config(arguments: Arguments, target: Target, cluster: int = 0) -> DecodeConfig:
    """Choose the config to compile, without checking it. cluster: see `decide`."""
    return decide(arguments, target, cluster).config


def decide(arguments: Arguments, target: Target, cluster: int = 0) -> Decision:
    """Choose the launch, without checking it.

    Defaults stay defaults, since a config is a key of the compile cache. cluster: size measured to
    be the best, used if the arguments leave it open; dependent fields are chosen as for any other
    size.
    """
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
    """Return the config of the arguments, independent of sizes; cluster 0 leaves the choice to
    `config_for`.
    """
    return _with_columns(_tuned_config(arguments), arch)


def _tuned_config(arguments: Arguments) -> DecodeConfig:
    """Return the config of the arguments, including their tuning fields."""
    chosen = {name: getattr(arguments, name) for name in TUNABLE}
    return replace(_plain_config(arguments), **chosen)


def _with_columns(config: DecodeConfig, arch: str) -> DecodeConfig:
    """Return the config with the limit of rows of a CTA, if the limit matters."""
    if config.max_columns:
        return config
    try:
        fp8 = config.keys_dtype == "e4m3"
        columns = choose_columns(arch, config.head_dim, config.warps, fp8=fp8)
    except KeyError:  # a head_dim that config.check_values() will refuse
        return config
    return replace(config, max_columns=columns) if config.rows > columns else config


@dataclass(frozen=True)
class Load:
    """Sizes that a config depends on.

    keys: most keys that the tokens of an entry see.
    heads: KV heads of all entries.
    num_splits: clusters that share a KV head, 0 chooses.
    sms: SMs of the GPU; 0 for those of `MACHINES`, always used with clusters.
    cluster: CTAs of a cluster, 0 chooses.
    """

    keys: int
    heads: int
    batch_invariant: bool = False
    num_splits: int = 0
    sms: int = 0
    cluster: int = 0


def config_for(
    wished: DecodeConfig, arch: str, load: Load, co_scheduled: CoScheduled | None = None
) -> DecodeConfig:
    """Return the config to compile for `wished` under a load. co_scheduled: see
    `choose_cluster`.
    """
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
    """Choose the fields that suit the CTAs of a grid and the keys of each; fixed fields stay.

    Chosen are CTAs per SM, warps of the Hopper kernel, and when the next grid begins. Return None
    if `wished` fixes the cluster, and with it the other fields.
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
    """Return the load of a call. cluster: see `decide`.

    Without clusters the SMs are read from the GPU: GPUs of one architecture differ by a factor of
    ten.
    """
    heads, device = arguments.q.shape[0] * arguments.k.shape[-2], arguments.q.device
    sms = sms_of(device) if device.type == "cuda" and written_for(arch) == PORTABLE else 0
    fixed, parts = arguments.batch_invariant, arguments.parts
    return Load(arguments.most_seen, heads, fixed, parts, sms, cluster)


def clusters_per_head(arch: str, arguments: Arguments, config: DecodeConfig) -> int:
    """Return the number of clusters that share a KV head."""
    return _splits_of(arch, load_of(arguments, arch), config)


def _splits_of(arch: str, load: Load, config: DecodeConfig) -> int:
    return _num_splits(arch, load, load.heads * config.row_tiles, config.cluster)


def _num_splits(arch: str, load: Load, clusters: int, cluster: int) -> int:
    """Return the configured number of splits, or choose it."""
    return load.num_splits or choose_num_splits(
        arch,
        load.keys,
        max(clusters, 1),
        cluster,
        batch_invariant=load.batch_invariant,
        sms=load.sms,
    )


def _plain_config(arguments: Arguments) -> DecodeConfig:
    """Return the config of the arguments, without tuning."""
    q, k, tokens = arguments.q, arguments.k, arguments.q_tokens
    q_dtype, out_dtype = INPUT_NAMES[q.dtype], INPUT_NAMES[arguments.o_dtype]
    return DecodeConfig(
        head_dim=q.shape[-1],
        group=q.shape[-2] // k.shape[-2],
        q_tokens=tokens,
        dtype=q_dtype,
        kv_dtype="e4m3" if k.dtype == torch.float8_e4m3fn else "",
        k_scale=arguments.k_scale is not None,
        v_scale=arguments.v_scale is not None,
        out_dtype="" if out_dtype == q_dtype else out_dtype,
        out_scale=arguments.out_scale is not None,
        causal=arguments.causal and tokens > 1 and arguments.tree is None,
        left=arguments.window_left is not None,
        tree=arguments.tree is not None,
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
    """Return how many clusters of a width the device runs at once; None for the emulator, without a
    limit.
    """
    if target.backend != "cuda":
        return None
    return lambda width: (
        clusters_at_once(device, width) * _residents(replace(config, cluster=width), target.arch)
    )


def _residents(config: DecodeConfig, arch: str) -> int:
    """Return how many CTAs fit on an SM by shared memory."""
    if arch != "sm_90a":
        return 1
    from gqa_lowlatency.portable.plan import PortablePlan

    needed = PortablePlan(config).smem_bytes + hw.SMEM_RESERVED_BYTES
    return max(1, hw.SMEM_BYTES_PER_SM // needed)


# ---- what may be measured


@dataclass(frozen=True)
class Options:
    """Options chosen by measurement; 0 leaves the choice to the rules."""

    cluster: int = 0
    parts: int = 0
    max_columns: int = 0
    warps: int = 0
    step: int = 0
    stages: int = 0


LEFT_OPEN = Options()
PARTS = (1, 2, 4, 8, 16, 32, 64)
# (warps, step) of the mma.sync kernel: on other GPUs, and on Hopper
CTAS_OF = [*product(WARP_COUNTS[:2], STEPS)], [*product(WARP_COUNTS[1:], STEPS)]
TUNED = Tuned("decode", {arch: (kernel,) for arch, kernel in KERNELS.items()}, [*vars(LEFT_OPEN)])


@dataclass(frozen=True)
class Problem:
    """Problem that a measured choice depends on.

    config: config of the arguments, without tuning.
    keys, heads: as in `Load`.
    """

    config: DecodeConfig
    keys: int
    heads: int


def problem_of(arguments: Arguments) -> Problem | None:
    """Return the measured problem; None if the arguments fix a tunable option or are batch-
    invariant.
    """
    if arguments.batch_invariant or not are_open(arguments, (*TUNABLE, "parts")):
        return None
    heads = arguments.batch * arguments.kv_heads
    return Problem(_plain_config(arguments), arguments.most_seen, heads)


def with_options(arguments: Arguments, options: Options) -> Arguments:
    """Return the arguments with all options but the cluster, which would fix its dependent fields,
    too.
    """
    if options is LEFT_OPEN:
        return arguments
    return replace(arguments, **{n: v for n, v in vars(options).items() if n != "cluster"})


def choices(problem: Problem, arch: str) -> list[Measured]:
    """Return the options that may suit a problem; some of them do not fit.

    Grids have at most two CTAs for each SM, or one cluster per KV head. They are combined with the
    options of a CTA of the architecture.
    """
    machine = machine_of(arch)
    config, fp8 = problem.config, problem.config.keys_dtype == "e4m3"
    row_tiles = -(-config.rows // choose_columns(arch, config.head_dim, fp8=fp8))
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
