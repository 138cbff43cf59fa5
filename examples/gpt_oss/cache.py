"""Keys and values of all layers by `kvcache`, and attention over them by `fmha` and
`gqa_lowlatency`.

A full layer keeps its keys in pages, one for each block of tokens, which requests with the same
beginning share. A sliding layer keeps the last `window` of them in a ring, which is a page of its
own: the state of a request. Attention of one token does not mind the order of keys, so decoding
reads the ring as it is; a prompt that goes on behind kept tokens gathers them in order first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from blackwell_engines.parallel import join, own_positions, ring_attention
from examples.gpt_oss.config import Config
from examples.gpt_oss.ranks import Ranks
from fmha import AttentionOptions, attention
from gqa_lowlatency import decode
from kernelkit.call.tensors import brought
from kvcache import Cache, Ring, Rows, Sizes, Step, append_rows, gather
from kvcache.layouts.records import round_up

PAGED, RINGED = ("k", "v"), ("k_window", "v_window")  # streams and rings of the layout
# Arrays of a step that decoding reads.
DECODED = ("positions", "lengths", "block_tables", "state_slots", "rows_of.k", "rows_of.k_window")
TABLE_ALIGN = 256  # bytes


@dataclass(frozen=True, eq=False)
class Place:
    """Rows and pages of a layer's keys and values; pages are [slots, rows, Hkv, D]."""

    sliding: bool
    rows: tuple[Rows, Rows]
    pages: tuple[torch.Tensor, torch.Tensor]


class Kept:
    """The cache of `requests` requests of up to `tokens` tokens each, and of what they leave.

    share: whether a prompt begins with what is kept of earlier ones: blocks, and of sliding layers
    a checkpoint of their rings.
    """

    def __init__(
        self,
        config: Config,
        requests: int,
        tokens: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        share: bool = True,
    ) -> None:
        layout = config.layout(dtype)
        self.device, self.window, self.blocks = device, config.window, layout.blocks(tokens)
        checkpoints = 2 * requests if share else 0
        sizes = Sizes(requests * self.blocks, requests, checkpoints)
        self.cache = Cache(layout, sizes, device=device)
        self.places = [self._place(config, number, dtype) for number in range(config.layers)]

    def _place(self, config: Config, number: int, dtype: torch.dtype) -> Place:
        sliding, cache = config.sliding[number], self.cache
        names = RINGED if sliding else PAGED
        array = cache.layout.find(names[0])
        copy = array.of_layer[number]
        assert copy is not None
        shape = (config.kv_heads, config.head_dim)
        k, v = (cache.rows(name, copy).alone for name in names)
        pages = [cache.pages(name, copy, dtype, shape) for name in names]
        return Place(sliding, (k, v), (pages[0], pages[1]))

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self.cache.storage.pools.values())


class Prefill:
    """`Attend` of a step that appends any number of tokens to some requests."""

    def __init__(self, kept: Kept, step: Step) -> None:
        self.kept, self.longest = kept, step.longest
        self.at = step.tensors(kept.device)
        self.before = _Before.of(kept, step)

    @property
    def last(self) -> torch.Tensor:
        """int64 [B]: the last token of each request, among those of the step."""
        return self.at["cu_tokens"][1:].long() - 1

    def __call__(
        self, number: int, sinks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `examples.gpt_oss.model.Attend`; one launch for all requests."""
        place, at = self.kept.places[number], self.at
        starts = at["cu_tokens"]
        options: AttentionOptions = {
            "cu_seqlens_q": starts, "max_seqlen_q": self.longest, "sinks": sinks,
        }  # fmt: skip
        mapping = at["rows_of.k_window" if place.sliding else "rows_of.k"]
        pairs = (place.rows[0], k), (place.rows[1], v)
        if not place.sliding:
            append_rows(*pairs, mapping)
            tables: AttentionOptions = {"page_table": at["block_tables"], "kv_lens": at["lengths"]}
            return attention(q, *place.pages, **(options | tables | {"causal": True}))
        if self.before is not None:  # and only then are the rings written to
            (k, v), starts = self.before.joined(place, k, v), self.before.starts
        append_rows(*pairs, mapping)
        options |= {"window": (self.kept.window - 1, 0), "cu_seqlens_k": starts}
        return attention(q, k, v, **options)


@dataclass(frozen=True, eq=False)
class _Before:
    """Keys of a ring that new tokens see, merged with the new keys of the step.

    Attributes:
        kept: int64 [N], entries of the ring, -1 at the position of a new key.
        new: int64 [T], positions of the new keys.
        starts: int32 [B + 1], start of each request in the merged rows.
    """

    kept: torch.Tensor
    new: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, kept: Kept, step: Step) -> _Before | None:
        """Return the merged keys, or None if every request begins with this step."""
        counts = np.minimum(step.starts, kept.window - 1)
        if not counts.any():
            return None
        ring = kept.cache.layout.find(RINGED[0])
        assert isinstance(ring, Ring)
        rows = ring.rows(kept.cache.layout.draft)
        lengths = counts + step.lengths - step.starts
        starts = np.concatenate(([0], np.cumsum(lengths)))
        owners = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(starts[-1]) - starts[owners]  # within the request
        positions = (step.starts - counts)[owners] + place
        entries = step.state_slots.astype(np.int64)[owners] * rows + positions % rows
        old = place < counts[owners]
        arrays = (np.where(old, entries, -1), np.flatnonzero(~old), starts.astype(np.int32))
        return cls(*(brought(torch.from_numpy(array), kept.device) for array in arrays))

    def joined(
        self, place: Place, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Kept and new keys, and values, of all requests: [N, Hkv, D] each."""
        found = [new.new_empty((len(self.kept), *new.shape[1:])) for new in (k, v)]
        pairs = []
        for rows, both, new in zip(place.rows, found, (k, v), strict=True):
            gather(rows, self.kept, both)
            pool = both.view(torch.uint8).view(1, -1)
            pairs.append((Rows(pool, 0, 0, len(both), rows.record), new))
        append_rows(pairs[0], pairs[1], self.new)
        return found[0], found[1]


class Decoding:
    """`Attend` for steps that append a token to each of `batch` requests.

    The tables have fixed addresses, so that one captured step serves all: `fill` writes what the
    next one needs.

    tables: int32 and int64 on the device, by the names of `kvcache.Step.arrays`, in one piece of
    memory that one copy fills.
    """

    def __init__(self, kept: Kept, batch: int) -> None:
        self.kept = kept
        self.shapes = dict.fromkeys(DECODED, (batch,)) | {"block_tables": (batch, kept.blocks)}
        nbytes = sum(_room(name, shape) for name, shape in self.shapes.items())
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=kept.device)
        self.tables = self._tables(self.memory)

    def _tables(self, memory: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return views of the tables, placed one after another in `memory`."""
        pieces = memory.split([_room(name, shape) for name, shape in self.shapes.items()])
        return {
            name: piece.view(_dtype(name))[: math.prod(shape)].view(shape)
            for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)
        }

    def fill(self, step: Step) -> None:
        """The tables of a step of so many requests, without a wait."""
        on_gpu = self.memory.is_cuda
        filled = torch.empty_like(self.memory, device="cpu", pin_memory=on_gpu)
        step.fill(self._tables(filled))
        self.memory.copy_(filled, non_blocking=on_gpu)

    def prepare(self) -> None:
        """Derive the tables that all sliding layers read; part of the step."""
        self.in_window = self.tables["lengths"].clamp(max=self.kept.window)
        self.rings = self.tables["state_slots"][:, None]

    def __call__(
        self, number: int, sinks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `examples.gpt_oss.model.Attend`; one launch for all requests."""
        place, tables = self.kept.places[number], self.tables
        mapping = tables["rows_of.k_window" if place.sliding else "rows_of.k"]
        append_rows((place.rows[0], k), (place.rows[1], v), mapping)
        lengths, table = tables["lengths"], tables["block_tables"]
        if place.sliding:
            lengths, table = self.in_window, self.rings
        # Launched while `append_rows` ends, for which the kernel itself waits.
        return decode(q, *place.pages, sinks=sinks, kv_lens=lengths, page_table=table, pdl=True)


def _dtype(name: str) -> torch.dtype:
    """Return the dtype of an array of a step."""
    return torch.int64 if name == "positions" or name.startswith("rows_of") else torch.int32


def _room(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a table, up to where the next one may begin."""
    return round_up(math.prod(shape) * _dtype(name).itemsize, TABLE_ALIGN)


# Context parallelism: each rank computes its tokens of a whole prompt, and keeps all keys.
#
# Full layers attend by `ring_attention`. Sliding ones need the keys of the window before a rank's
# two chunks and no ring. The cache of each rank receives the keys of all ranks, so that afterwards
# every rank decodes independently.


class SharedPrefill:
    """`Attend` of a step that appends one prompt, from its beginning to its end.

    places: int64 [T], which tokens of the prompt are this rank's, in its order. Prompts that do not
    come out even have their last token some more times, which nobody sees.
    """

    def __init__(self, kept: Kept, step: Step, ranks: Ranks) -> None:
        if len(step.requests) != 1 or step.starts[0]:
            raise ValueError(f"{len(step.requests)} requests behind {step.starts} tokens: one, new")
        self.kept, self.ranks, self.tokens = kept, ranks, step.longest
        chunks = 2 * ranks.world
        self.chunk = -(-self.tokens // chunks)
        own = own_positions(self.chunk * chunks, ranks.rank, ranks.world)
        self.places = own.clamp(max=self.tokens - 1)
        self.at = step.tensors(kept.device)
        before = kept.window - 1
        self.spans = [(max(0, x - before), x + self.chunk) for x in own[:: self.chunk].tolist()]
        ends = torch.tensor([[0, 0], *[[self.chunk, end - begin] for begin, end in self.spans]])
        starts = brought(ends.cumsum(0).int(), kept.device).unbind(1)
        self.starts = [each.contiguous() for each in starts]  # of queries, and of keys

    @property
    def last(self) -> tuple[int, int]:
        """The rank that has the prompt's last token, and which of its tokens that is."""
        number, place = divmod(self.tokens - 1, self.chunk)
        world = self.ranks.world
        late = number >= world
        return 2 * world - 1 - number if late else number, place + self.chunk * late

    def __call__(
        self, number: int, sinks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `examples.gpt_oss.model.Attend`."""
        place, group = self.kept.places[number], self.ranks.group
        keys, values = self._gathered(k), self._gathered(v)
        mapping = self.at["rows_of.k_window" if place.sliding else "rows_of.k"]
        new = keys[: self.tokens], values[: self.tokens]
        append_rows((place.rows[0], new[0]), (place.rows[1], new[1]), mapping)
        if not place.sliding:
            own = (x[None].contiguous() for x in (q, k, v))
            return ring_attention(*own, causal=True, sinks=sinks, group=group)[0]
        near = [torch.cat([x[slice(*span)] for span in self.spans]) for x in (keys, values)]
        return attention(
            q, *near, window=(self.kept.window - 1, 0), sinks=sinks, cu_seqlens_q=self.starts[0],
            cu_seqlens_k=self.starts[1], max_seqlen_q=self.chunk,
        )  # fmt: skip

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks, [2 world chunk, ..], in the order of the prompt."""
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.ranks.world)]
        dist.all_gather(parts, own, group=self.ranks.group)
        return join(parts, dim=0)
