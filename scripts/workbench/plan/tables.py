"""Tables, JSON and pictures of KV cache plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvcache.layouts.layout import GUARD_BYTES, Layout
from kvcache.planner.capacity import CAUSES, Mix, Plan, most_requests, usage
from workbench.flags.kvcache import label
from workbench.plan.vllm import VllmLayout, vllm_layout
from workbench.tables import Table, picture

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


def layout_table(layouts: Sequence[Layout]) -> Table:
    """What the entries are, payload and with padding."""
    heads = ["layout", "B/token", "padded", "block B", "payload", "state B", "payload"]
    heads += ["checkpoint B", "block tokens"]
    cells = [
        [
            label(layout),
            f"{layout.bytes_per_token:,.0f}",
            f"{layout.block_bytes / layout.block_tokens:,.0f}",
            f"{layout.block_bytes:,}",
            f"{layout.block_payload:,}",
            f"{layout.state_bytes:,}",
            f"{layout.state_payload:,}",
            f"{layout.checkpoint_bytes:,}",
            f"{layout.block_tokens:,}",
        ]
        for layout in layouts
    ]
    return f"Layouts (every slot ends in {GUARD_BYTES} guard bytes)", heads, cells


def split_table(plans: Sequence[Plan]) -> Table:
    """How the pools share the memory, and what fits."""
    heads = ["layout", "memory GB", "blocks", "GB", "states", "GB", "checkpoints", "GB"]
    heads += ["workspace GB", "reserved GB", "left B", "requests", "limited by"]
    cells = []
    for made in plans:
        shares = made.shares
        cells.append(
            [
                label(made.layout),
                f"{made.memory / 1e9:,.1f}",
                *(f"{made.blocks:,}", f"{shares['blocks'] / 1e9:,.2f}"),
                *(f"{made.states:,}", f"{shares['states'] / 1e9:,.2f}"),
                *(f"{made.checkpoints:,}", f"{shares['checkpoints'] / 1e9:,.2f}"),
                *(f"{shares[part] / 1e9:,.3f}" for part in ("workspace", "reserved")),
                f"{shares['left over']:,}",
                *(f"{made.requests:,}", made.limited_by),
            ]
        )
    return f"Memory, divided for requests of {mix_words(plans[0].mix)}", heads, cells


def mix_words(mix: Mix) -> str:
    """The lengths, and how many of each."""
    if len(mix.tokens) == 1:
        return f"{length(mix.tokens[0])} tokens"
    pairs = zip(mix.tokens, mix.weights, strict=True)
    return ", ".join(f"{length(tokens)} ({weight})" for tokens, weight in pairs) + " tokens"


def fit_table(made: Plan, lengths: Iterable[int]) -> Table:
    """What other lengths get from these pools."""
    heads = ["tokens", "blocks", "MiB", "B/token", "stranded MiB", "%", "requests"]
    heads += ["limited by", "idle blocks", "idle states", "divided for it"]
    cells = []
    for tokens in lengths:
        fit = made.fit(tokens)
        held = fit.usage
        cells.append(
            [
                length(tokens),
                f"{held.blocks:,}",
                mib(held.total),
                f"{held.total / tokens:,.0f}",
                mib(held.stranded_bytes),
                f"{held.stranded_share:.1%}",
                *(f"{fit.requests:,}", fit.limited_by),
                *(f"{fit.idle_blocks:,}", f"{fit.idle_states:,}"),
                f"{fit.best:,}",
            ]
        )
    longest = made.longest()
    title = f"{label(made.layout)}: a request, and how many fit; one alone has {longest:,} tokens"
    return title, heads, cells


def stranded_table(made: Plan, lengths: Sequence[int]) -> Table:
    """Bytes of a request that hold nothing that it needs, by cause."""
    found = [usage(made.layout, tokens) for tokens in lengths]
    causes = [cause for cause in CAUSES if any(held.stranded[cause] for held in found)]
    cells = [
        [length(held.tokens), *(size(held.stranded[cause]) for cause in causes)] for held in found
    ]
    return f"{label(made.layout)}: stranded bytes of a request", ["tokens", *causes], cells


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


def vllm_table(made: Plan, lengths: Iterable[int], batched_tokens: int) -> Table:
    """A request there and here; MiB. There any block serves any request, here the memory has been
    divided, so the last two columns differ."""
    heads = ["tokens", "vLLM MiB", "stranded", "%", "reserve", "requests"]
    heads += ["same records MiB", "stranded", "%", "this plan MiB", "stranded", "%", "requests"]
    heads += ["divided for it"]
    cells = []
    for row in vllm_rows(made, lengths, batched_tokens):
        there, same, here = row["vllm"], row["same_records"], row["ours"]
        cells.append(
            [
                length(row["tokens"]),
                *_three(there),
                mib(there["reserve_bytes"]),
                f"{there['requests']:,}",
                *_three(same),
                *_three(here),
                *(f"{here['requests']:,}", f"{here['divided_for_it']:,}"),
            ]
        )
    title = (
        f"A request of {made.layout.name} in vLLM, here with its records (584 + 132 bytes, all "
        "rows of HCA tails), and in this plan"
    )
    return title, heads, cells


def _three(of: dict) -> list[str]:
    share = of["stranded_bytes"] / of["total_bytes"]
    return [mib(of["total_bytes"]), mib(of["stranded_bytes"]), f"{share:.1%}"]


def vllm_rows(made: Plan, lengths: Iterable[int], batched_tokens: int) -> list[dict]:
    """Bytes of a request in vLLM's layout beside ours, and how many fit into the same memory."""
    peer = vllm_layout(made.layout)
    rows = []
    for tokens in lengths:
        there = {
            "total_bytes": peer.total(tokens),
            "stranded_bytes": peer.stranded(tokens),
            "reserve_bytes": peer.reserve(tokens, batched_tokens) * peer.stride,
            "requests": peer.requests(made.memory, tokens, batched_tokens),
        }
        same, here = usage(peer.same_records, tokens), usage(made.layout, tokens)
        rows.append(
            {
                "tokens": tokens,
                "vllm": there,
                "same_records": {
                    "total_bytes": same.total,
                    "stranded_bytes": same.stranded_bytes,
                },
                "ours": {
                    "total_bytes": here.total,
                    "stranded_bytes": here.stranded_bytes,
                    "requests": made.fit(tokens).requests,
                    "divided_for_it": made.fit(tokens).best,
                },
            }
        )
    return rows


def document(made: Plan, lengths: Sequence[int], batched_tokens: int) -> dict:
    """Everything of a plan, exact, for --json."""
    layout = made.layout
    fits = [made.fit(tokens) for tokens in lengths]
    names = ("tokens", "requests", "best", "limited_by", "why", "idle_blocks", "idle_states")
    written = {
        "layout": label(layout),
        "bytes_per_token": layout.bytes_per_token,
        "padded_bytes_per_token": layout.block_bytes / layout.block_tokens,
        "block_tokens": layout.block_tokens,
        "draft": layout.draft,
        **{
            name: getattr(layout, name)
            for name in ("block_bytes", "block_payload", "state_bytes", "state_payload")
        },
        "checkpoint_bytes": layout.checkpoint_bytes,
        "memory": made.memory,
        "context": dict(zip(made.mix.tokens, made.mix.weights, strict=True)),
        "slots": {n: getattr(made, n) for n in ("blocks", "states", "checkpoints")},
        "bytes": dict(made.shares),
        **{name: getattr(made, name) for name in ("requests", "limited_by", "why")},
        "longest": made.longest(),
        "fits": [
            {name: getattr(fit, name) for name in names}
            | {
                "blocks": fit.usage.blocks,
                "total_bytes": fit.usage.total,
                "live_bytes": fit.usage.live,
                "stranded_bytes": dict(fit.usage.stranded),
            }
            for fit in fits
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
