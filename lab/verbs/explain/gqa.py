"""What `explain.py gqa` says: who works on which keys, and what a CTA holds where."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.choose import TILE, choose_config, clusters_per_head, machine_of
from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.launch import has_keys, make_workspace
from gqa_lowlatency.portable.plan import Plan90
from gqa_lowlatency.sm100.plan import ROLES, Plan100
from gqa_lowlatency.split import Reach, reach, share
from kernelkit.call.launch import Target
from kernelkit.plan import hw
from kernelkit.plan.dtypes import ITEM_BYTES
from lab.cases.decode import Case, Cta, case_of, cta_of, settled
from lab.tools.common import describe
from lab.verbs.explain.plans import (
    Rows,
    Section,
    byte_range,
    lines_of,
    named_barriers,
    parts_of,
    plural,
    print_plan,
    smem_title,
)

LENGTHS_SHOWN = 8  # of the different ones of a batch


@dataclass(frozen=True)
class Launch:
    """A checked case, and what is launched for it."""

    case: Case
    arguments: Arguments
    config: DecodeConfig

    @property
    def cta(self) -> Cta:
        """What a CTA has."""
        return cta_of(self.config, self.case.arch)

    @property
    def parts(self) -> int:
        """Clusters of a KV head."""
        if not self.config.parts:
            return 1
        return clusters_per_head(self.case.arch, self.arguments, self.config)

    @property
    def ctas(self) -> int:
        """That share the keys of a KV head."""
        return self.config.cluster * self.parts

    def reach(self, n_keys: int, tile: int) -> Reach:
        """Tiles of an entry that hold a key which some row sees."""
        window, sink_tokens = self.arguments.window_left, self.arguments.sink_tokens
        return reach(n_keys, self.config.q_tokens, tile, window, sink_tokens)


def explain(launch: Launch) -> Iterator[str]:
    """The whole plan, line by line."""
    yield f"gqa_lowlatency for {launch.case.arch}: {describe(launch.config)}"
    yield f"for {launch.case}"
    if not has_keys(launch.arguments):
        yield "\nNo keys: no launch."
        return
    plan = launch.cta.plan
    of_a_cta = of_hopper(plan) if isinstance(plan, Plan90) else parts_of(plan, ROLES)
    yield from lines_of((sharing(launch), *of_a_cta))


def sharing(launch: Launch) -> Section:
    """How the CTAs share the work, and what of it limits what."""
    config, arguments, sms = launch.config, launch.arguments, machine_of(launch.case.arch).sms
    sizes = launch.ctas, arguments.kv_heads * config.row_tiles, arguments.batch
    ctas = f"{' x '.join(map(str, sizes))} = {math.prod(sizes)} CTAs for {sms} SMs"
    invariance = "off: cluster, and so the bits, depend on the batch"
    if arguments.batch_invariant:
        most = arguments.most_seen
        invariance = f"on: the cluster follows from the {most} keys seen at most alone"
    rows = [
        ("grid", f"{ctas}: CTAs of a KV head, KV heads x row tiles, entries"),
        ("cluster", cluster(launch)),
        ("not wider", limits(launch)),
        ("query rows", query_rows(config)),
        ("owners", owners(config)),
        ("tile", f"{launch.cta.tile} keys"),
        *entries(launch),
        ("must read", reads(launch)),
        ("CTAs of an SM", residents(launch.cta, launch.case.arch)),
        ("batch_invariant", invariance),
    ]
    return "How the CTAs share the work", rows


def cluster(launch: Launch) -> str:
    """Its CTAs, and the clusters of a KV head."""
    words = f"{plural(launch.config.cluster, 'CTA')} for a KV head of an entry"
    if launch.parts == 1:
        return words
    workspace = make_workspace(launch.arguments, launch.config, launch.parts)
    room = sum(tensor.nbytes for tensor in workspace)
    return (
        f"{words}, with {plural(launch.parts - 1, 'cluster')} more; the last to arrive merges "
        f"what all left in {room:,} bytes of workspace"
    )


def limits(launch: Launch) -> str:
    """Why not a cluster of twice as many CTAs."""
    config, arguments, arch = launch.config, launch.arguments, launch.case.arch
    if arguments.cluster:
        return "as asked"
    machine, wider = machine_of(arch), 2 * config.cluster
    if machine.widest == 1:
        return "CTAs share keys through parts alone on this GPU"
    clusters = arguments.batch * arguments.kv_heads * config.row_tiles
    clusters = 1 if arguments.batch_invariant else clusters
    tiles = -(-arguments.most_seen // TILE)
    apart = choose_config(arguments, Target("emulate", arch)).cluster
    reasons = {
        f"{machine.widest} CTAs are the most worth taking": wider > machine.widest,
        f"{plural(tiles, 'tile')} of {TILE} keys": wider > tiles,
        f"{clusters} x {wider} CTAs for {machine.sms} SMs": clusters * wider > machine.sms,
        "clusters that this GPU runs at once": config.cluster < apart,
    }
    return "; ".join(words for words, holds in reasons.items() if holds) or "as measured"


def query_rows(config: DecodeConfig) -> str:
    """Of a KV head, and where they stand."""
    heads, tokens = plural(config.group, "head"), plural(config.q_tokens, "token")
    words = f"{config.rows} of a KV head ({heads} x {tokens}) in "
    if config.row_tiles == 1:
        return f"{words}{config.columns} columns"
    return f"{words}{config.row_tiles} row tiles of {config.columns} columns, beside each other"


def owners(config: DecodeConfig) -> str:
    """Who finishes what of O."""
    if config.cluster == 1:
        return "the only CTA finishes O"
    each = f"{config.owned_columns} of its {config.columns} columns each"
    return f"{config.owner_ctas} of {config.cluster} CTAs finish O, {each}"


def entries(launch: Launch) -> Rows:
    """A row per length, the longest first."""
    lengths = sorted(Counter(launch.case.lengths).items(), reverse=True)
    rows = [
        (f"{count} x {n_keys:,} keys", shares(launch, n_keys))
        for n_keys, count in lengths[:LENGTHS_SHOWN]
    ]
    hidden = len(lengths) - len(rows)
    return rows + [("shorter", plural(hidden, "more length"))] * bool(hidden)


def shares(launch: Launch, n_keys: int) -> str:
    """Tiles of the first and the last CTA of an entry."""
    seen, ctas = launch.reach(n_keys, launch.cta.tile), launch.ctas
    ranks = (0, ctas - 1) if ctas > 1 else (0,)
    dealt = (f"CTA {rank}: {tiles_of(seen, *share(seen.tiles, ctas, rank))}" for rank in ranks)
    return f"{plural(seen.tiles, 'tile')}; {'; '.join(dealt)}"


def tiles_of(seen: Reach, begin: int, count: int) -> str:
    """How many, and their numbers: two ranges where sink tokens and a window stand apart."""
    if count == 0:
        return "none"
    first, last = seen.tile(begin), seen.tile(begin + count - 1)
    if count == 1:
        return f"1 ({first})"
    if last - first < count:
        return f"{count} ({first}..{last})"
    return f"{count} ({first}..{seen.sink_tiles - 1}, {seen.first}..{last})"


def reads(launch: Launch) -> str:
    """Bytes of Q and of all keys and values that some row sees, and what row tiles read again."""
    config, arguments, times = launch.config, launch.arguments, launch.config.row_tiles
    keys = sum(launch.reach(n_keys, tile=1).tiles for n_keys in launch.case.lengths)
    kv = 2 * keys * arguments.kv_heads * config.head_dim * ITEM_BYTES[config.keys_dtype]
    q = arguments.q.numel() * config.io_bytes
    words = f"{kv + q:,} bytes: K and V {kv:,}, Q {q:,}"
    if times == 1:
        return words
    return f"{words}; each row tile reads K and V again, {times} times: {times * kv:,} bytes"


def residents(cta: Cta, arch: str) -> str:
    """CTAs that stand on an SM at the same time, and what their threads may then need."""
    room = hw.smem_bytes_per_sm(arch)
    fit = {"shared memory": room // (cta.smem_bytes + hw.SMEM_RESERVED_BYTES)}
    if isinstance(cta.plan, Plan100):
        fit["tensor memory"] = hw.TMEM_COLUMNS // cta.plan.tmem.allocated
    fewest = min(fit.values())
    registers = hw.REGISTERS_PER_SM // (fewest * cta.threads) // 8 * 8
    by = ", ".join(f"{count} by {what}" for what, count in fit.items())
    most = min(registers, hw.REGISTERS_PER_THREAD)
    return f"{by}; {fewest} by registers, if a thread takes at most {most}"


def of_hopper(plan: Plan90) -> tuple[Section, ...]:
    """What a CTA has: its warps do all the same, each for its keys."""
    queries = "shared memory, read again for every step" if plan.queries_in_smem else "registers"
    warps = [
        ("a step", f"{plan.keys} keys of the tile, a warp alone"),
        ("ring", f"{plan.slots} slots of {plan.slot_bytes:,} bytes: K and V of a step in turn"),
        ("after it", f"{4 * plan.partial_words:,} bytes over the ring: what the warp found"),
        ("Q", f"in {queries}"),
        ("products", f"mma.sync m16n8k16: Q K^T of {plan.q_dtype}, V^T P of {plan.p_dtype}"),
    ]
    all_warps = f"Warps: {plan.warps}, {plan.threads} threads", warps
    return all_warps, named_barriers(plan.barriers), hopper_smem(plan)


def hopper_smem(plan: Plan90) -> Section:
    """A row per range."""
    config = plan.config
    words = {
        "rings": f"{plan.warps} x {plan.ring_bytes:,} bytes",
        "queries": f"fragments of Q, {config.columns} columns",
        "statistics": f"of {config.cluster} CTAs: maxima and sums",
        "mail": f"of {config.cluster} CTAs: {config.owned_columns} columns of O",
        "arrived": "mbarrier of the mailbox",
    }
    begins = [begin for begin, _ in plan.smem.offsets().values()]
    rows = [
        (byte_range(begin, end), *named)
        for named, begin, end in zip(
            words.items(), begins, (*begins[1:], plan.smem_bytes), strict=True
        )
        if begin < end
    ]
    return smem_title(plan.smem_bytes, plan.smem_limit), rows


def perform(options: argparse.Namespace) -> int:
    def lines() -> Iterator[str]:
        case = case_of(options)
        return explain(Launch(case, *settled(case)))

    return print_plan(lines)
