"""Slots of one pool: held, kept, waiting or free.

A slot is `held` by reference counts. It is `kept` if it has no holder but can be found by its key;
the least recently held is reused first. It is `waiting` while device work that may touch it is in
flight, else free. Batches are slices of a list, so that a block costs tens of nanoseconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from kvcache.books.errors import DoubleFree, HostTierFull, InvariantBroken, PoolExhausted
from kvcache.checks import MAX_SLOTS, whole

NO_TICKET = 0  # a ticket that is always over


@dataclass(frozen=True)
class Sizes:
    """Slots of each pool that requests can have, MAX_SLOTS at most."""

    blocks: int
    states: int = 0
    checkpoints: int = 0
    host_blocks: int = 0
    host_states: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            slots = whole(item.name, getattr(self, item.name), None, MAX_SLOTS)
            object.__setattr__(self, item.name, slots)  # what is below 0 is a manager's to refuse


class SlotPool:
    """Slots `first` .. `first + slots - 1`; those below are never handed out.

    on_evict(slot, key): a kept slot is about to be handed out as something else.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        *,
        first: int = 0,
        on_host: bool = False,
    ) -> None:
        if slots < 0:
            raise ValueError(f"{slots} {name}: at least 0")
        self.name, self.slots, self.first, self.on_host = name, slots, first, on_host
        self.on_evict: Callable[[int, bytes], None] = lambda slot, key: None
        end = first + slots
        self._free = list(range(end - 1, first - 1, -1))
        self._holders = [0] * end
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently held first
        self._waiting: deque[tuple[int, Sequence[int]]] = deque()  # (ticket, slots), in order
        self._waits_for: dict[int, int] = {}  # slot -> the ticket of its last entry there
        self._busy: dict[int, int] = {}  # held slot -> ticket of work of a former holder
        self._key_of: dict[int, bytes] = {}
        self._slot_of: dict[bytes, int] = {}
        self._over = NO_TICKET

    # -- taking and giving back --------------------------------------------------------------

    @property
    def available(self) -> int:
        """Slots that `take` can give."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        """Slots with holders."""
        return self.slots - self.available - self.waiting

    @property
    def waiting(self) -> int:
        """Slots without holders that device work in flight may touch."""
        return len(self._waits_for)

    @property
    def kept(self) -> int:
        """Slots without holders that are found by their key."""
        return len(self._kept)

    def holders(self, slot: int) -> int:
        """Return the number of holders of a slot."""
        return self._holders[slot]

    def busy(self, slot: int) -> bool:
        """Whether device work of one who held it before may still read it."""
        return self._busy.get(slot, NO_TICKET) > self._over

    def require(self, count: int, request: str) -> None:
        """PoolExhausted, in the name of `request`, unless `count` slots are available."""
        if count > self.available:
            error = HostTierFull if self.on_host else PoolExhausted
            raise error(self.name, request, count, self.available, self.waiting)

    def take(self, count: int, request: str = "") -> list[int]:
        """`count` slots, held once each; all or PoolExhausted."""
        free, holders = self._free, self._holders
        if count > len(free):
            self.require(count, request)
            self._evict(count - len(free))
        if count == 1:
            slot = free.pop()
            holders[slot] = 1
            return [slot]
        if not count:
            return []
        slots = free[-count:]
        del free[-count:]
        for slot in slots:
            holders[slot] = 1
        return slots

    def share(self, slots: Sequence[int]) -> None:
        """Add one holder to each slot; a slot without holders must have a key."""
        holders = self._holders
        for slot in slots:
            if not holders[slot]:
                self._revive(slot)
            holders[slot] += 1

    def release(self, slots: Sequence[int], ticket: int = NO_TICKET) -> None:
        """Remove one holder from each slot, in the order in which the slots are to be reused.

        ticket: of the last device work that may touch them.

        Raise DoubleFree, and release nothing, if a slot is given back more often than it is held.
        """
        holders, keys = self._holders, self._key_of
        idle = []
        for index, slot in enumerate(slots):
            if slot < self.first or not holders[slot]:
                for done in slots[:index]:
                    holders[done] += 1
                raise DoubleFree(f"slot {slot} of {self.name} is given back, but nobody holds it")
            holders[slot] -= 1
            if not holders[slot]:
                idle.append(slot)
            elif ticket > self._over:
                self._busy[slot] = ticket
        if ticket > self._over:
            self._wait(idle, ticket)
        elif not keys:
            self._free += idle
        else:
            self._settle(idle)

    def over(self, ticket: int) -> None:
        """Device work up to `ticket` is over: what waited for it does not wait any more."""
        if ticket <= self._over:
            return
        self._over = ticket
        self._busy = {slot: last for slot, last in self._busy.items() if last > ticket}
        while self._waiting and self._waiting[0][0] <= self._over:
            entered, slots = self._waiting.popleft()
            # A slot that was shared again, or given back again later, is not this entry's.
            ripe = [slot for slot in slots if self._waits_for.get(slot) == entered]
            for slot in ripe:
                del self._waits_for[slot]
            self._settle(ripe)

    # -- keys --------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The slot registered under `key`."""
        return self._slot_of.get(key)

    def key(self, slot: int) -> bytes | None:
        """Return the key under which `slot` is registered, or None."""
        return self._key_of.get(slot)

    def register(self, slot: int, key: bytes) -> bool:
        """Find `slot` by `key` from now on; False where another slot has the key already."""
        if key in self._slot_of or slot in self._key_of:
            return False
        self._slot_of[key] = slot
        self._key_of[slot] = key
        return True

    def unregister(self, slot: int) -> bytes:
        """Forget the key of `slot`, and return it."""
        key = self._key_of.pop(slot)
        del self._slot_of[key]
        if slot in self._kept:
            del self._kept[slot]
            self._free.append(slot)
        return key

    def registered(self) -> list[bytes]:
        """All keys."""
        return list(self._slot_of)

    # -- inside ------------------------------------------------------------------------------

    def _wait(self, slots: Sequence[int], ticket: int) -> None:
        for slot in slots:
            self._busy.pop(slot, None)
            self._waits_for[slot] = ticket
        self._waiting.append((ticket, slots))

    def _settle(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._key_of:
                self._kept[slot] = None
            else:
                self._free.append(slot)

    def _revive(self, slot: int) -> None:
        if slot not in self._key_of:
            raise DoubleFree(f"slot {slot} of {self.name} is shared, but nobody holds it")
        if slot in self._kept:
            del self._kept[slot]
        else:  # it waits: who holds it now may read, and not write, until that is over
            self._busy[slot] = self._waits_for.pop(slot)

    def _evict(self, count: int) -> None:
        for _ in range(count):
            slot, _ = self._kept.popitem(last=False)
            key = self._key_of.pop(slot)
            del self._slot_of[key]
            self._free.append(slot)
            self.on_evict(slot, key)

    def check(self, expected: dict[int, int]) -> None:
        """InvariantBroken unless the holders are `expected` (slot -> count) and books add up."""
        counted = {s: n for s, n in enumerate(self._holders) if n}
        if counted != expected:
            wrong = {
                s: (counted.get(s, 0), expected.get(s, 0))
                for s in counted.keys() | expected.keys()
                if counted.get(s) != expected.get(s)
            }
            raise InvariantBroken(f"{self.name}: holders (counted, expected) {wrong}")
        places = [*self._free, *self._kept, *self._waits_for, *counted]
        everything = range(self.first, self.first + self.slots)
        if sorted(places) != list(everything):
            raise InvariantBroken(f"{self.name}: free, kept, waiting, held do not partition slots")
        if any(slot not in self._key_of for slot in self._kept):
            raise InvariantBroken(f"{self.name}: a kept slot without a key")
        if {k: s for s, k in self._key_of.items()} != self._slot_of:
            raise InvariantBroken(f"{self.name}: keys and slots do not name each other")
        if any(slot in self._key_of for slot in self._free):
            raise InvariantBroken(f"{self.name}: a free slot has a key")
