"""vLLM's KV cache of a DeepSeek-V4 model, rebuilt from its specs: what a request holds there.

One pool of blocks, one space of block numbers. Layers form groups; a block belongs to one group at
a time, and every block is as wide as the widest group. Groups of a window give blocks back that the
window has left behind, but at admission each request reserves what a whole step in flight needs.

Sources: vLLM 0.33.0 (`v1/kv_cache_interface.py`: MLA and sliding-window MLA specs, 256-token blocks
of 584-byte entries and 132-byte indexer keys, compressor states as windows of 8 and 128 in blocks
of 4 and 8 rows, pages rounded up to 576 bytes; `v1/core/kv_cache_utils.py`: groups of as many
layers as pad least). The bytes of V4-Flash's groups are those that vLLM's issue #54703 prints. What
follows for requests is derived from these, not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernelkit.plan.dtypes import FP32_BYTES
from kvcache.layouts.layout import Layout
from kvcache.layouts.models import CSA, HCA, Options, deepseek_v4
from kvcache.layouts.records import FP8_584, INDEXER_FP8, round_up
from kvcache.planner.capacity import usage
from lab.flags.kvcache import BATCHED_TOKENS

BLOCK_TOKENS = 256
SWA_ROWS, CSA_STATE_ROWS, HCA_STATE_ROWS = 64, 4, 8  # of a block, in tokens
PAGE_ALIGN = FP8_584.page_align


@dataclass(frozen=True)
class Page:
    """A layer's part of a block: `rows` entries of `row_bytes`."""

    rows: int
    row_bytes: int
    align: int = PAGE_ALIGN

    @property
    def payload(self) -> int:
        return self.rows * self.row_bytes

    @property
    def bytes(self) -> int:
        return round_up(self.payload, self.align)


@dataclass(frozen=True)
class Group:
    """Layers that share a block table: (layers, page) pairs.

    tokens: tokens in a block.
    window: tokens that a query sees, itself included; 0 for all.
    """

    name: str
    tokens: int
    pages: tuple[tuple[int, Page], ...]
    window: int = 0

    @property
    def bytes(self) -> int:
        return sum(layers * page.bytes for layers, page in self.pages)

    @property
    def payload(self) -> int:
        return sum(layers * page.payload for layers, page in self.pages)

    def blocks(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens holds between two steps of one token."""
        behind = max(0, tokens - self.window + 1) // self.tokens if self.window else 0
        return math.ceil(tokens / self.tokens) - behind

    def steady(self) -> int:
        """The most that a long request holds of a window group then."""
        return math.ceil(self.window / self.tokens) + 1

    def reserved(self, tokens: int, in_flight: int) -> int:
        """Blocks that admission wants to see free for a request of `tokens` tokens."""
        blocks = math.ceil(tokens / self.tokens)
        if not self.window:
            return blocks
        return min(blocks, math.ceil((self.window - 1 + in_flight) / self.tokens) + 1)


@dataclass(frozen=True)
class VllmLayout:
    """The groups of a model. same_records: ours of the same entries, for a fair comparison."""

    groups: tuple[Group, ...]
    same_records: Layout

    @property
    def stride(self) -> int:
        """Bytes of every block: the widest group's."""
        return max(group.bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of a long request, padding included."""
        (paged,) = (group for group in self.groups if not group.window)
        return self.stride / paged.tokens

    def stranded_share(self, group: Group) -> float:
        """Share of a block that the group has, what another group's width adds to it."""
        return 1 - group.bytes / self.stride

    def blocks(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens holds."""
        return sum(group.blocks(tokens) for group in self.groups)

    def total(self, tokens: int) -> int:
        """Bytes of them."""
        return self.blocks(tokens) * self.stride

    def live(self, tokens: int) -> int:
        """Bytes that the request still needs: the same as ours of the same entries."""
        return usage(self.same_records, tokens).live

    def stranded(self, tokens: int) -> int:
        """The others of its blocks."""
        return self.total(tokens) - self.live(tokens)

    @property
    def steady(self) -> int:
        """Blocks that a long request holds of the window groups, at most."""
        return sum(group.steady() for group in self.groups if group.window)

    def reserve(self, tokens: int, batched_tokens: int = BATCHED_TOKENS, batches: int = 1) -> int:
        """Blocks of window groups that have to be free before a request is admitted."""
        in_flight = batched_tokens * batches
        return sum(g.reserved(tokens, in_flight) for g in self.groups if g.window)

    def requests(self, memory: int, tokens: int, batched_tokens: int = BATCHED_TOKENS) -> int:
        """Return how many requests of `tokens` tokens fit: the last one is admitted while the
        others decode."""
        (paged,) = (group for group in self.groups if not group.window)
        blocks = memory // self.stride
        last = paged.blocks(tokens) + self.reserve(tokens, batched_tokens)
        return 1 + (blocks - last) // self.blocks(tokens) if blocks >= last else 0


def vllm_layout(layout: Layout) -> VllmLayout:
    """vLLM's groups for a DeepSeek-V4 model; ValueError for any other.

    Draft layers count as layers of the window.
    """
    copies = {array.name: array.copies for array in (*layout.streams, *layout.rings)}
    if not {"csa", "hca", "swa"} <= copies.keys():
        raise ValueError(f"{layout.name} has {sorted(copies)}; DeepSeek-V4 has csa, hca and swa")
    csa, hca, swa = copies["csa"], copies["hca"], copies["swa"]
    window, entry = layout.find("swa").window, FP8_584.bytes
    paged = Group(
        "CSA, indexer, HCA",
        BLOCK_TOKENS,
        (
            (csa, Page(BLOCK_TOKENS // CSA, entry)),
            (csa, Page(BLOCK_TOKENS // CSA, INDEXER_FP8.bytes)),
            (hca, Page(BLOCK_TOKENS // HCA, entry)),
        ),
    )
    width = group_width([max(csa, hca), swa, csa, hca])
    groups = [paged]
    for first in range(0, swa, width):
        layers = min(width, swa - first)
        pages = ((layers, Page(SWA_ROWS, entry)),)
        groups.append(Group(f"SWA of {layers} layers", SWA_ROWS, pages, window))
    groups.append(
        Group(
            "CSA states",
            CSA_STATE_ROWS,
            (
                (csa, Page(CSA_STATE_ROWS, _state_row(2, 512))),
                (csa, Page(CSA_STATE_ROWS, _state_row(2, 128))),
            ),
            2 * CSA,
        )
    )
    pages = ((hca, Page(HCA_STATE_ROWS, _state_row(1, 512))),)
    groups.append(Group("HCA states", HCA_STATE_ROWS, pages, HCA))
    own = [layout.find(name).of_layer for name in ("csa", "hca")]
    ratios = [
        CSA if a is not None else HCA if b is not None else 0 for a, b in zip(*own, strict=True)
    ]
    same = deepseek_v4(layout.name, ratios, window, Options(record="fp8-index8"))
    return VllmLayout(tuple(groups), same)


def _state_row(overlap: int, width: int) -> int:
    """Values and scores of a token."""
    return 2 * overlap * width * FP32_BYTES


def group_width(layers: list[int]) -> int:
    """Layers of a group: at least as many as the first family has, and so that families cut into
    groups of this many leave the fewest places empty."""
    widths = range(layers[0], max(layers) + 1)
    return min(widths, key=lambda width: sum(-count % width for count in layers))
