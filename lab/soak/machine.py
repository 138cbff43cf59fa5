"""A device in numpy that does what a manager plans, and reads back what is in its pools.

Pools begin poisoned, and nothing is ever cleaned: a slot that is handed out again still has what
its last holder left there. Works are executed at once, but a work is only over when its event says
so, and until then every slot that it touches is remembered: `Machine.hands_out` fails when one of
them serves somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvcache.books.slot_pool import Sizes
from kvcache.books.step import Step
from kvcache.books.work import Copy, Pool, Work
from kvcache.layouts.layout import Layout, Ring, Stream, Tail
from lab.soak.small_caches import Past, ends, half_columns, half_rows, true_bytes, whole_rows

CLEAN = 0xC1  # of slot 0 of STATES
NONSENSE = 0xEE


class Mismatch(AssertionError):
    """The cache does not hold what it should, or a slot serves two."""


@dataclass(eq=False)
class Event:
    """Over when the test says so."""

    over: bool = False

    def query(self) -> bool:
        return self.over


@dataclass(frozen=True)
class Holder:
    """A request as the device sees it: what it should hold, and where."""

    name: str
    history: Past
    blocks: Sequence[int]
    state: int


@dataclass(eq=False)
class InFlight:
    """A work that was issued, or will be: its slots are in use until `event` is over."""

    work: Work
    touched: set[tuple[Pool, int]]
    event: Event = field(default_factory=Event)
    reported: bool = False


class Machine:
    """The pools of a layout, and the works that are under way."""

    def __init__(self, layout: Layout, sizes: Sizes, seed: int = 0) -> None:
        self.layout = layout
        slots = {
            Pool.BLOCKS: (sizes.blocks, layout.block_bytes),
            Pool.STATES: (sizes.states + 1, layout.state_bytes),  # a spare one for the tests
            Pool.CHECKPOINTS: (sizes.checkpoints, layout.checkpoint_bytes),
            Pool.HOST_BLOCKS: (sizes.host_blocks, layout.block_bytes),
            Pool.HOST_STATES: (sizes.host_states, layout.state_bytes),
        }
        poison = np.random.default_rng(seed)
        self.pools = {
            pool: poison.integers(0, 256, (count + 1, size), np.uint8)
            for pool, (count, size) in slots.items()
        }
        self.pools[Pool.STATES][0] = CLEAN
        self.null = self.pools[Pool.BLOCKS][0].copy()
        self.in_flight: list[InFlight] = []
        arrays = (*layout.streams, *layout.rings, *layout.tails)
        self._bytes_of = {array.name: self._addresses(array) for array in arrays}

    def _addresses(self, array: Stream | Ring | Tail) -> np.ndarray:
        """int64 [rows, copies, bytes]: where the bytes of a row lie in a slot."""
        layout, found = self.layout, []
        for copy in range(array.copies):
            if isinstance(array, Tail):
                regions = {(r.name, r.copy): r.offset for r in layout.state_regions}
                rows, size = array.rows(layout.draft), array.row_bytes
                values = regions[array.name, copy]
                parts = [(values, size), (values + rows * size, 0 if array.online else size)]
            else:
                place = layout.place(array.name, copy)
                rows = place.rows
                parts = [(place.data_offset, place.record.data_bytes)]
                parts.append((place.scale_offset, place.record.scale_bytes))
            row = np.arange(rows)[:, None]
            found.append(
                np.concatenate([start + row * size + np.arange(size) for start, size in parts], 1)
            )
        return np.stack(found, 1)

    # -- executing -----------------------------------------------------------------------------

    def copy(self, copies: Iterable[Copy]) -> None:
        """Execute the copies of a work, in order."""
        layout = self.layout
        for source, target, from_slot, to_slot, position in copies:
            read, written = self.pools[source][from_slot], self.pools[target][to_slot]
            if target in (Pool.BLOCKS, Pool.STATES) and to_slot < 1:
                raise Mismatch(f"a copy into slot {to_slot} of {target.value}")
            if position is None:
                written[:] = read
                continue
            if Pool.CHECKPOINTS in (source, target):
                spans = layout.segments(position)
            else:
                spans = [(begin, begin, size) for begin, size in layout.live(position)]
            for in_state, packed, size in spans:
                to = packed if target is Pool.CHECKPOINTS else in_state
                begin = packed if source is Pool.CHECKPOINTS else in_state
                written[to : to + size] = read[begin : begin + size]

    def write(self, step: Step, holders: Sequence[Holder]) -> None:
        """Every token of the step writes its true bytes where the slot mappings say."""
        chain = np.concatenate(
            [
                h.history.chain(range(int(start) + 1, int(end) + 1))
                for h, start, end in zip(holders, step.starts, step.lengths, strict=True)
            ]
        )
        for pool, array, mapping in self._written(step):
            chosen = np.flatnonzero(mapping >= 0)
            rows = mapping[chosen]
            if len(np.unique(rows)) < len(rows):
                raise Mismatch(f"{array.name}: a step writes a row twice: {sorted(rows)}")
            if isinstance(array, Stream) and ((step.positions[chosen] + 1) % array.ratio).any():
                raise Mismatch(f"{array.name}: an entry in the middle of its tokens")
            self._put(pool, array, rows, true_bytes(array, chain[chosen]))

    def spoil(self, step: Step) -> None:
        """Write nonsense wherever the step writes, as a step that fails midway may do."""
        for pool, array, mapping in self._written(step):
            self._put(pool, array, mapping[mapping >= 0], NONSENSE)

    def _written(self, step: Step) -> Iterator[tuple[Pool, Stream | Ring | Tail, np.ndarray]]:
        """(pool, array, slot mapping) of all that a step writes."""
        for array in self.layout.streams:
            yield Pool.BLOCKS, array, step.rows_of(array.name)
        for array in (*self.layout.rings, *self.layout.tails):
            yield Pool.STATES, array, step.rows_of(array.name)

    def _put(
        self, pool: Pool, array: Stream | Ring | Tail, rows: np.ndarray, data: np.ndarray
    ) -> None:
        slots, where = self._where(pool, array, rows)
        if (slots < 1).any() or (slots >= len(self.pools[pool])).any():
            raise Mismatch(f"{array.name}: rows in slots {slots} of {pool.value}")
        self.pools[pool].reshape(-1)[where] = data

    # -- works under way -----------------------------------------------------------------------

    def issue(self, work: Work, holders: Sequence[Holder] = ()) -> InFlight:
        """Execute `work`; of a step `holders` has its requests. It is over when its event is."""
        after = work.after if isinstance(work, Step) else ()
        for copy in (*work.copies, *after):
            self.hands_out(copy.target, copy.target_slot)
        self.copy(work.copies)
        touched = {
            slot
            for copy in (*work.copies, *after)
            for slot in ((copy.source, copy.source_slot), (copy.target, copy.target_slot))
        }
        if isinstance(work, Step):
            self.write(work, holders)
            self.copy(after)
            touched |= {(Pool.BLOCKS, block) for holder in holders for block in holder.blocks}
            touched |= {(Pool.STATES, holder.state) for holder in holders}
        issued = InFlight(work, touched)
        self.in_flight.append(issued)
        return issued

    def hands_out(self, pool: Pool, slot: int) -> None:
        """`slot` begins to serve somebody: a failure while work of its last holder may use it."""
        for other in self.in_flight:
            if (pool, slot) in other.touched:
                raise Mismatch(
                    f"slot {slot} of {pool.value} is handed out, but ticket {other.work.ticket}, "
                    "which is not over, may touch it"
                )

    def writes_in_place(self, block: int) -> None:
        """A step writes `block`, which its request had before: a failure while a copy to the host,
        which need not wait for steps, may still read it. Steps are executed in order."""
        for other in self.in_flight:
            for copy in other.work.copies:
                if copy[:3] == (Pool.BLOCKS, Pool.HOST_BLOCKS, block):
                    raise Mismatch(
                        f"block {block} is written, but ticket {other.work.ticket}, which is not "
                        "over, may still copy it to the host"
                    )

    def over(self, index: int) -> None:
        """Work `index` of those in flight comes to its end."""
        self.in_flight[index].event.over = True
        del self.in_flight[index]

    # -- reading -------------------------------------------------------------------------------

    def verify(self, holders: Sequence[Holder]) -> None:
        """Every entry and every row that a request still needs is its true bytes."""
        for pool, array, rows, columns in self._needed(holders):
            self._compare(pool, array, rows, columns)
        if (self.pools[Pool.BLOCKS][0] != self.null).any():
            raise Mismatch("somebody wrote into the null block")
        if self.layout.has_state and (self.pools[Pool.STATES][0] != CLEAN).any():
            raise Mismatch("somebody wrote into the clean state")

    def image(self, holder: Holder) -> dict[str, bytes]:
        """All that a request still needs, as it is in the pools."""
        found: dict[str, bytes] = {}
        for pool, array, rows, columns in self._needed([holder]):
            where = self._where(pool, array, _numbers(rows))[1]
            data = self.pools[pool].reshape(-1)[where if columns is None else where[..., columns]]
            found[array.name] = found.get(array.name, b"") + data.tobytes()
        return found

    def _needed(self, holders: Sequence[Holder], states_alone: bool = False) -> Iterator[tuple]:
        """(pool, array, rows of each holder, which bytes of a row or None)."""
        layout = self.layout
        for stream in () if states_alone else layout.streams:
            entries = layout.entries(stream)
            yield Pool.BLOCKS, stream, [_entry_rows(stream, entries, h) for h in holders], None
        for array in (*layout.rings, *layout.tails):
            wanted = [(whole_rows, None)]
            if isinstance(array, Tail) and array.overlap > 1:
                wanted.append((half_rows, half_columns(array)))
            for positions, columns in wanted:
                size = array.rows(layout.draft)
                rows = [_ring_rows(positions(array, len(h.history)), size, h) for h in holders]
                yield Pool.STATES, array, rows, columns

    def verify_state(self, holder: Holder) -> None:
        """Every row of rings and tails that a request still needs is its true bytes."""
        for pool, array, rows, columns in self._needed([holder], states_alone=True):
            self._compare(pool, array, rows, columns)

    def verify_blocks(self, full: Sequence[tuple[int, Past]]) -> None:
        """Each of these slots has the last block of some tokens."""
        for stream in self.layout.streams:
            entries = self.layout.entries(stream)
            rows = [
                Rows(
                    slot * entries + np.arange(entries),
                    ends(stream, len(past))[-entries:],
                    Holder("a kept block", past, [slot], 0),
                )
                for slot, past in full
            ]
            self._compare(Pool.BLOCKS, stream, rows)

    def _where(
        self, pool: Pool, array: Stream | Ring | Tail, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slots [n] and addresses in the pool [n, copies, bytes] of rows by their numbers."""
        of_row = self._bytes_of[array.name]
        slots, row = np.divmod(rows, len(of_row))
        return slots, slots[:, None, None] * self.pools[pool].shape[1] + of_row[row]

    def _compare(
        self,
        pool: Pool,
        array: Stream | Ring | Tail,
        rows: Sequence[Rows],
        columns: slice | np.ndarray | None = None,
    ) -> None:
        if not rows:
            return
        slots, where = self._where(pool, array, _numbers(rows))
        true = true_bytes(array, np.concatenate([r.holder.history.chain(r.ends) for r in rows]))
        if columns is not None:
            where, true = where[..., columns], true[..., columns]
        wrong = (self.pools[pool].reshape(-1)[where] != true).any((1, 2))
        if wrong.any():
            behind = np.cumsum([len(r.numbers) for r in rows])
            first = int(np.flatnonzero(wrong)[0])
            its = rows[int(np.searchsorted(behind, first, "right"))]
            end = [end for r in rows for end in r.ends][first]
            raise Mismatch(
                f"{array.name} of {its.holder.name!r} at {len(its.holder.history)} tokens: "
                f"{wrong.sum()} wrong, the first belongs to token {end - 1}, slot {slots[first]}"
            )


class Rows(NamedTuple):
    """Numbers slot * rows + row, and behind how many tokens of its holder each was written."""

    numbers: np.ndarray
    ends: range
    holder: Holder


def _numbers(rows: Sequence[Rows]) -> np.ndarray:
    return np.concatenate([r.numbers for r in rows])


def _entry_rows(stream: Stream, entries: int, holder: Holder) -> Rows:
    found = ends(stream, len(holder.history))
    numbers = np.arange(len(found))
    blocks = np.asarray(holder.blocks, np.int64)[numbers // entries]
    return Rows(blocks * entries + numbers % entries, found, holder)


def _ring_rows(positions: range, rows: int, holder: Holder) -> Rows:
    numbers = holder.state * rows + np.arange(positions.start, positions.stop) % rows
    return Rows(numbers, range(positions.start + 1, positions.stop + 1), holder)
