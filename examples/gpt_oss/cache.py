"""Keys and values of all layers by `kvcache`, and attention over them by `fmha` and
`gqa_lowlatency`.

A full layer keeps its keys in pages, one for each block of tokens, which requests with the same
beginning share. A sliding layer keeps the last `window` of them in a ring, which is a page of its
own: the state of a request. Attention of one token does not mind the order of keys, so decoding
reads the ring as it is; a prompt that goes on behind kept tokens gathers them in order first.
A prompt leaves a checkpoint of the rings at its last boundary of a block, written from the tokens
of the step itself, so that no step has to end there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
# And that a prefill in tables of fixed size reads, those that mappings of tokens are.
MAPPINGS = ("rows_of.k", "rows_of.k_window", "marks_of.k_window")
TABLE_ALIGN = 256  # bytes


@dataclass(frozen=True, eq=False)
class Place:
    """Rows and pages of a layer's keys and values; pages are [slots, rows, Hkv, D].

    marks: rows of a sliding layer in checkpoints, if there are any.
    """

    sliding: bool
    rows: tuple[Rows, Rows]
    pages: tuple[torch.Tensor, torch.Tensor]
    marks: tuple[Rows, Rows] | None


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
        self.share = share
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
        marks = [cache.marks(name, copy).alone for name in names if sliding and self.share]
        return Place(sliding, (k, v), (pages[0], pages[1]), (marks[0], marks[1]) if marks else None)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self.cache.storage.pools.values())


class Prefill:
    """`Attend` of a step that appends any number of tokens to some requests.

    at: tensors on the device, by the names of `kvcache.Step.arrays`.
    longest: most tokens that a request may have in the step.
    before: keys of rings that new tokens see, or None if every request begins with this step.
    marks: whether checkpoints are to be written.
    """

    def __init__(
        self,
        kept: Kept,
        at: Mapping[str, torch.Tensor],
        longest: int,
        before: Before | None,
        *,
        marks: bool,
    ) -> None:
        self.kept, self.at, self.longest = kept, at, longest
        self.before, self.marks = before, marks

    @classmethod
    def of(cls, kept: Kept, step: Step) -> Prefill:
        """Return the `Attend` of one step, with tables of its own."""
        before = None
        if step.starts.any():
            tables = [torch.from_numpy(table) for table in merged_rows(kept, step)]
            before = Before(*(brought(table, kept.device) for table in tables))
        at = step.tensors(kept.device)
        return cls(kept, at, step.longest, before, marks=bool(step.marks))

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
        if not place.sliding:
            append_rows((place.rows[0], k), (place.rows[1], v), at["rows_of.k"])
            tables: AttentionOptions = {"page_table": at["block_tables"], "kv_lens": at["lengths"]}
            return attention(q, *place.pages, **(options | tables | {"causal": True}))
        keys, values = k, v
        if self.before is not None:  # and only then are the rings written to
            (keys, values), starts = self.before.joined(place, k, v), self.before.starts
        append_rows((place.rows[0], k), (place.rows[1], v), at["rows_of.k_window"])
        if self.marks and place.marks is not None:
            append_rows((place.marks[0], k), (place.marks[1], v), at["marks_of.k_window"])
        options |= {"window": (self.kept.window - 1, 0), "cu_seqlens_k": starts}
        return attention(q, keys, values, **options)


def merged_rows(kept: Kept, step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tables of a `Before` for the requests of a step."""
    counts = np.minimum(step.starts, kept.window - 1)
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
    return np.where(old, entries, -1), np.flatnonzero(~old), starts.astype(np.int32)


@dataclass(frozen=True, eq=False)
class Before:
    """Keys of a ring that new tokens see, merged with the new keys of the step.

    Attributes:
        kept: int64 [N], entries of the ring, -1 at the position of a new key.
        new: int64 [T], positions of the new keys.
        starts: int32 [B + 1], start of each request in the merged rows.
    """

    kept: torch.Tensor
    new: torch.Tensor
    starts: torch.Tensor

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


class Tables:
    """Tables of fixed addresses, so that one captured step serves all, in one piece of memory that
    one copy fills.

    on_device: by name, int32 or int64; see `_dtype`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self.shapes = dict(shapes)
        nbytes = sum(_room(name, shape) for name, shape in self.shapes.items())
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.on_device = self._views(self.memory)

    def _views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the tables, placed one after another in `memory`."""
        pieces = memory.split([_room(name, shape) for name, shape in self.shapes.items()])
        return {
            name: piece.view(_dtype(name))[: math.prod(shape)].view(shape)
            for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)
        }

    def on_host(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return new memory of the host, for `bring`, and the tables in it."""
        memory = torch.empty_like(self.memory, device="cpu", pin_memory=self.memory.is_cuda)
        return memory, self._views(memory)

    def bring(self, memory: torch.Tensor) -> None:
        """Copy memory of `on_host` to the device, without a wait."""
        self.memory.copy_(memory, non_blocking=self.memory.is_cuda)


class Decoding:
    """`Attend` for steps that append a token to each of `batch` requests.

    tables: tensors on the device, by the names of `kvcache.Step.arrays`; `fill` writes what the
    next step needs.
    """

    def __init__(self, kept: Kept, batch: int) -> None:
        self.kept = kept
        shapes = dict.fromkeys(DECODED, (batch,)) | {"block_tables": (batch, kept.blocks)}
        self._tables = Tables(shapes, kept.device)
        self.tables = self._tables.on_device

    def fill(self, step: Step) -> None:
        """The tables of a step of so many requests, without a wait."""
        memory, tables = self._tables.on_host()
        step.fill(tables)
        self._tables.bring(memory)

    def prepare(self) -> None:
        """Derive the tables that all sliding layers read; part of the step."""
        self.in_window = self.tables["lengths"].clamp(max=self.kept.window)
        self.rings = self.tables["state_slots"][:, None]

    def __call__(
        self, number: int, sinks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `examples.gpt_oss.model.Attend`; one launch for all requests."""
        rows, mapping = self.entries(number)
        append_rows((rows[0], k), (rows[1], v), mapping)
        return self.attend(number, sinks, q)

    def entries(self, number: int) -> tuple[tuple[Rows, Rows], torch.Tensor]:
        """See `examples.gpt_oss.few.forward.Kept`."""
        place = self.kept.places[number]
        return place.rows, self.tables["rows_of.k_window" if place.sliding else "rows_of.k"]

    def attend(self, number: int, sinks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """See `examples.gpt_oss.few.forward.Kept`; one launch for all requests."""
        place, tables = self.kept.places[number], self.tables
        lengths, table = tables["lengths"], tables["block_tables"]
        if place.sliding:
            lengths, table = self.in_window, self.rings
        # Launched while the one before ends, for which the kernel itself waits.
        return decode(q, *place.pages, sinks=sinks, kv_lens=lengths, page_table=table, pdl=True)


@dataclass(frozen=True)
class PromptShape:
    """Sizes of a prefill in tables of fixed size.

    tokens: of all requests together, padded.
    requests: exactly so many.
    continued: whether one of them follows tokens that are in the cache.
    """

    tokens: int
    requests: int
    continued: bool


class PaddedPrefill:
    """A prefill in tables of fixed addresses and size, so that a captured one serves others.

    Padding is a request of its own, behind the others: its tokens read the null block and
    themselves, and write nothing. So every row of every kernel is computed from numbers.

    tables: `ids` and `last` (int64 [T], [B]), those of `Prefill`, and those of a `Before`.
    """

    def __init__(self, kept: Kept, shape: PromptShape) -> None:
        self.kept, self.shape = kept, shape
        tokens, owners = shape.tokens, shape.requests + 1
        width = max(kept.blocks, kept.cache.layout.blocks(tokens))
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("ids", "positions", "new"), (tokens,))
        shapes |= dict.fromkeys(MAPPINGS, (tokens,)) | {"last": (shape.requests,)}
        shapes |= {"cu_tokens": (owners + 1,), "starts": (owners + 1,), "lengths": (owners,)}
        shapes |= {"block_tables": (owners, width)}
        shapes |= {"kept": (tokens + shape.requests * (kept.window - 1),)}
        self._tables = Tables(shapes, kept.device)
        self.tables = self._tables.on_device
        before = Before(*(self.tables[name] for name in ("kept", "new", "starts")))
        self.attend = Prefill(
            kept, self.tables, tokens, before if shape.continued else None, marks=kept.share
        )

    def fill(self, step: Step | None, ids: Iterable[np.ndarray] = ()) -> None:
        """Write the tables of a step, whose tokens are `ids`; None: of one that is all padding."""
        memory, tables = self._tables.on_host()
        found = {name: table.numpy() for name, table in tables.items()}
        for name, table in found.items():
            table.fill(-1 if name in MAPPINGS or name == "kept" else 0)
        tokens = 0
        if step is not None:
            self._fill_step(step, found)
            tokens = int(step.cu_tokens[-1])
            np.concatenate([*ids], out=found["ids"][:tokens])
        rest, merged = self.shape.tokens - tokens, len(found["kept"])
        # The padding has all merged rows that are left, zeros and then its new keys.
        found["new"][tokens:] = np.arange(merged - rest, merged)
        found["lengths"][-1] = rest
        found["cu_tokens"][-1], found["starts"][-1] = self.shape.tokens, merged
        self._tables.bring(memory)

    def _fill_step(self, step: Step, tables: Mapping[str, np.ndarray]) -> None:
        """Write what is not padding."""
        arrays, requests = step.arrays(), self.shape.requests
        tokens = int(step.cu_tokens[-1])
        for name in ("positions", *MAPPINGS):
            if name in arrays:
                tables[name][:tokens] = arrays[name]
        tables["cu_tokens"][: requests + 1] = step.cu_tokens
        tables["last"][:] = step.cu_tokens[1:] - 1
        tables["lengths"][:requests] = step.lengths
        table = arrays["block_tables"]
        tables["block_tables"][:requests, : table.shape[1]] = table
        kept, new, starts = merged_rows(self.kept, step)
        tables["kept"][: len(kept)], tables["new"][:tokens] = kept, new
        tables["starts"][: requests + 1] = starts


_WIDE = ("positions", "ids", "new", "last", "kept")  # and all mappings


def _dtype(name: str) -> torch.dtype:
    """Return the dtype of a table."""
    return torch.int64 if name in _WIDE or name.startswith(MAPPINGS) else torch.int32


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
