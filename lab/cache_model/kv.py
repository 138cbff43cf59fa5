"""`plan.py`: tables of the memory that a KV cache needs and of the requests that fit."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvcache.layouts.layout import GUARD_BYTES, Layout
from kvcache.planner.capacity import (
    CAUSES,
    Mix,
    Plan,
    Usage,
    most_requests,
    plan,
    usage,
    workspace_bytes,
)
from lab.cache_model.vllm import VllmLayout, vllm_layout
from lab.flags.kvcache import label, layouts
from lab.tools.common import refuse, write_json
from lab.tools.style import picture
from lab.tools.tables import Column, Row, Table, show, table

MIB = 2**20
CURVE = tuple(2**k for k in range(7, 21))  # context lengths of the picture
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def mib(count: int) -> str:
    """MiB with as many digits as it takes to see something."""
    return f"{count / MIB:,.{2 if count < 100 * MIB else 0}f}"


def size(count: int) -> str:
    """Bytes as they are while that is readable."""
    return f"{count:,}" if count < 10**7 else f"{mib(count)} MiB"


def length(tokens: int) -> str:
    """1k, 1M, or the number."""
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"


def mix_words(mix: Mix) -> str:
    """The lengths, and how many of each."""
    if len(mix.tokens) == 1:
        return f"{length(mix.tokens[0])} tokens"
    pairs = zip(mix.tokens, mix.weights, strict=True)
    return ", ".join(f"{length(tokens)} ({weight})" for tokens, weight in pairs) + " tokens"


# -- tables, of documents -------------------------------------------------------------------------


def _tokens(row: Row) -> str:
    return length(row["tokens"])


def _gb(part: str, digits: int, row: Row) -> str:
    return f"{row['bytes'][part] / 1e9:,.{digits}f}"


def _slots(part: str) -> tuple[Column, Column]:
    """Return the columns for the number of slots and their size."""
    return (part, f"{{slots[{part}]:,}}"), ("GB", partial(_gb, part, 2))


def _stranded(fit: Row) -> int:
    return sum(fit["stranded_bytes"].values())


LAYOUTS = (
    ("layout", "{layout}"), ("B/token", "{bytes_per_token:,.0f}"),
    ("padded", "{padded_bytes_per_token:,.0f}"), ("block B", "{block_bytes:,}"),
    ("payload", "{block_payload:,}"), ("state B", "{state_bytes:,}"),
    ("payload", "{state_payload:,}"), ("checkpoint B", "{checkpoint_bytes:,}"),
    ("block tokens", "{block_tokens:,}"),
)  # fmt: skip
SPLIT = (
    ("layout", "{layout}"), ("memory GB", lambda plan: f"{plan['memory'] / 1e9:,.1f}"),
    *_slots("blocks"), *_slots("states"), *_slots("checkpoints"),
    ("workspace GB", partial(_gb, "workspace", 3)), ("reserved GB", partial(_gb, "reserved", 3)),
    ("left B", "{bytes[left over]:,}"), ("requests", "{requests:,}"),
    ("limited by", "{limited_by}"),
)  # fmt: skip
FITS = (
    ("tokens", _tokens), ("blocks", "{blocks:,}"), ("MiB", lambda fit: mib(fit["total_bytes"])),
    ("B/token", lambda fit: f"{fit['total_bytes'] / fit['tokens']:,.0f}"),
    ("stranded MiB", lambda fit: mib(_stranded(fit))),
    ("%", lambda fit: f"{_stranded(fit) / fit['total_bytes']:.1%}"),
    ("requests", "{requests:,}"), ("limited by", "{limited_by}"),
    ("idle blocks", "{idle_blocks:,}"), ("idle states", "{idle_states:,}"),
    ("divided for it", "{best:,}"),
)  # fmt: skip


def stranded_table(plan: dict) -> Table:
    """Bytes of a request that hold nothing that it needs, by cause."""
    fits = plan["fits"]
    causes = [cause for cause in CAUSES if any(fit["stranded_bytes"][cause] for fit in fits)]
    columns = [("tokens", _tokens)]
    columns += [(c, lambda fit, c=c: size(fit["stranded_bytes"][c])) for c in causes]
    return table(f"{plan['layout']}: stranded bytes of a request", columns, fits)


def peer_of(layout: Layout) -> VllmLayout | None:
    """vLLM's layout of the same model, where it is known."""
    try:
        return vllm_layout(layout)
    except ValueError:
        return None


def vllm_groups(layout: Layout, batched_tokens: int) -> Table:
    """vLLM's groups of layers."""
    peer = vllm_layout(layout)
    heads = ["group", "tokens", "bytes", "stranded by the stride", "held", "reserved"]
    rows = [
        [
            group.name,
            f"{group.tokens}",
            f"{group.bytes:,}",
            f"{peer.stranded_share(group):.1%}",
            f"{group.steady()}" if group.window else "all",
            f"{group.reserved(1 << 40, batched_tokens):,}" if group.window else "",
        ]
        for group in peer.groups
    ]
    reserve = peer.reserve(1 << 40, batched_tokens)
    gib = reserve * peer.stride / 2**30
    title = (
        f"vLLM's blocks of {peer.stride:,} bytes for {layout.name}; a long request reserves "
        f"{reserve:,} of them ({gib:.2f} GiB) with {batched_tokens:,} tokens in flight, and "
        f"holds {peer.steady} ({mib(peer.steady * peer.stride)} MiB)"
    )
    return title, heads, rows


def _held(whose: str, words: str) -> tuple[Column, ...]:
    """Bytes of a request: all, what of that is stranded, and its share."""
    return (
        (words, lambda row: mib(row[whose]["total_bytes"])),
        ("stranded", lambda row: mib(row[whose]["stranded_bytes"])),
        ("%", lambda row: f"{row[whose]['stranded_bytes'] / row[whose]['total_bytes']:.1%}"),
    )


BESIDE_VLLM = (
    ("tokens", _tokens),
    *_held("vllm", "vLLM MiB"),
    ("reserve", lambda row: mib(row["vllm"]["reserve_bytes"])),
    ("requests", "{vllm[requests]:,}"),
    *_held("same_records", "same records MiB"),
    *_held("ours", "this plan MiB"),
    ("requests", "{ours[requests]:,}"),
    ("divided for it", "{ours[divided_for_it]:,}"),
)


def vllm_table(plan: dict, name: str) -> Table:
    """A request there and here; MiB. There any block serves any request, here the memory has been
    divided, so the last two columns differ. name: of the layout."""
    title = (
        f"A request of {name} in vLLM, here with its records (584 + 132 bytes, all rows of HCA "
        "tails), and in this plan"
    )
    return table(title, BESIDE_VLLM, plan["vllm"])


def vllm_rows(made: Plan, lengths: Iterable[int], batched_tokens: int) -> list[dict]:
    """Bytes of a request in vLLM's layout beside ours, and how many fit into the same memory."""
    peer = vllm_layout(made.layout)
    return [
        {
            "tokens": tokens,
            "vllm": {
                "total_bytes": peer.total(tokens),
                "stranded_bytes": peer.stranded(tokens),
                "reserve_bytes": peer.reserve(tokens, batched_tokens) * peer.stride,
                "requests": peer.requests(made.memory, tokens, batched_tokens),
            },
            "same_records": _bytes_of(usage(peer.same_records, tokens)),
            "ours": _bytes_of(usage(made.layout, tokens))
            | {
                "requests": made.fit(tokens).requests,
                "divided_for_it": made.fit(tokens).best,
            },
        }
        for tokens in lengths
    ]


def _bytes_of(held: Usage) -> dict[str, int]:
    return {"total_bytes": held.total, "stranded_bytes": held.stranded_bytes}


def document(made: Plan, lengths: Sequence[int], batched_tokens: int) -> dict:
    """Everything of a plan, exact, for --json."""
    layout = made.layout
    names = ("tokens", "requests", "best", "limited_by", "why", "idle_blocks", "idle_states")
    of_layout = ("block_tokens", "draft", "bytes_per_token", "block_bytes", "block_payload",
                 "state_bytes", "state_payload", "checkpoint_bytes")  # fmt: skip
    written = {
        "layout": label(layout),
        **{name: getattr(layout, name) for name in of_layout},
        "padded_bytes_per_token": layout.block_bytes / layout.block_tokens,
        **{name: getattr(made, name) for name in ("memory", "requests", "limited_by", "why")},
        "context": dict(zip(made.mix.tokens, made.mix.weights, strict=True)),
        "slots": {n: getattr(made, n) for n in ("blocks", "states", "checkpoints")},
        "bytes": dict(made.shares),
        "longest": made.longest(),
        "fits": [
            {name: getattr(fit, name) for name in names}
            | {
                "blocks": fit.usage.blocks,
                "total_bytes": fit.usage.total,
                "live_bytes": fit.usage.live,
                "stranded_bytes": dict(fit.usage.stranded),
            }
            for fit in map(made.fit, lengths)
        ],
    }
    if peer_of(layout):
        written["vllm"] = vllm_rows(made, lengths, batched_tokens)
    return written


def draw(path: Path, plans: Sequence[Plan], batched_tokens: int) -> None:
    """Requests over context length (vLLM's V4 dashed), and the pools' shares of the memory."""
    with picture(path, 1, 2, figsize=(14, 5.5)) as (_, (axes,)):
        _draw_curves(axes[0], plans, batched_tokens)
        _draw_bars(axes[1], plans)


def _draw_curves(curves: Any, plans: Sequence[Plan], batched_tokens: int) -> None:
    for k, made in enumerate(plans):
        colour, peer = COLOURS[k % len(COLOURS)], peer_of(made.layout)
        fits = [most_requests(made.layout, made.divided, Mix((tokens,))) for tokens in CURVE]
        curves.plot(*_positive(CURVE, fits), "-o", ms=3, color=colour, label=label(made.layout))
        if peer and made.layout.name not in [p.layout.name for p in plans[:k]]:
            there = [peer.requests(made.memory, tokens, batched_tokens) for tokens in CURVE]
            name = f"{made.layout.name} in vLLM"
            curves.plot(*_positive(CURVE, there), "--", color=colour, label=name)
    curves.set(xscale="log", yscale="log", xlabel="tokens of a request", ylabel="requests that fit")
    curves.set_xticks(CURVE, [length(tokens) for tokens in CURVE], fontsize=7)
    curves.minorticks_off()
    curves.grid(alpha=0.3)
    curves.set_title("memory divided for each length", fontsize=10)
    curves.legend(fontsize=7)


def _draw_bars(bars: Any, plans: Sequence[Plan]) -> None:
    below = [0.0] * len(plans)
    for k, part in enumerate(plans[0].shares):
        heights = [made.shares[part] / 1e9 for made in plans]
        bars.bar(range(len(plans)), heights, bottom=below, color=COLOURS[k], label=part)
        below = [low + high for low, high in zip(below, heights, strict=True)]
    bars.set_xticks(
        range(len(plans)), [label(made.layout).replace(" ", "\n") for made in plans], fontsize=6
    )
    bars.set_xlim(-0.8, len(plans) - 0.2)
    bars.set_ylabel("GB")
    bars.set_title(f"divided for {mix_words(plans[0].mix)}", fontsize=10)
    bars.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _positive(x: Sequence[int], y: Sequence[int]) -> tuple[list[int], list[int]]:
    """Points that a logarithmic axis has."""
    kept = [(a, b) for a, b in zip(x, y, strict=True) if b]
    return [a for a, _ in kept], [b for _, b in kept]


def perform(options: argparse.Namespace) -> int:
    try:
        names = ("block_tokens", "draft", "mtp", "online_hca")
        models = options.model or ["deepseek-v4-pro"]
        asked = {name: getattr(options, name) for name in names}
        plans = [plan_of(layout, options) for layout in layouts(models, options.record, **asked)]
    except ValueError as error:
        return refuse(error)
    documents = [document(p, options.lengths, options.batched_tokens) for p in plans]
    title = f"Layouts (every slot ends in {GUARD_BYTES} guard bytes)"
    show(*table(title, LAYOUTS, documents))
    title = f"Memory, divided for requests of {mix_words(plans[0].mix)}"
    show(*table(title, SPLIT, documents))
    for made in plans:
        all_alike = f"all {made.requests:,} requests can have {made.longest(made.requests):,}"
        print(f"{label(made.layout)}: {made.why}; {all_alike} tokens each")
    print()
    known: set[str] = set()  # of models, whatever their records
    for made, told in zip(plans, documents, strict=True):
        title = f"{told['layout']}: a request, and how many fit; one alone has "
        show(*table(f"{title}{told['longest']:,} tokens", FITS, told["fits"]))
        show(*stranded_table(told))
        if "vllm" not in told:
            continue
        if made.layout.name not in known:
            show(*vllm_groups(made.layout, options.batched_tokens))
        known.add(made.layout.name)
        show(*vllm_table(told, made.layout.name))
    if options.json:
        write_json(options.json, documents)
    if options.plot:
        draw(options.plot, plans, options.batched_tokens)
    return 0


def plan_of(layout: Layout, options: argparse.Namespace) -> Plan:
    if options.weights >= options.memory:
        raise ValueError(
            f"--weights {options.weights:,} bytes leave nothing of --memory {options.memory:,}"
        )
    checkpoints, share = options.checkpoints if layout.has_state else (0, 0.0)
    return plan(
        layout,
        options.memory - options.weights,
        options.context,
        batch=options.batch,
        states=options.states if layout.has_state else 0,
        checkpoints=checkpoints,
        checkpoint_share=share,
        workspace=workspace_bytes(layout, options.workspace),
    )
