"""A cache with its kernels, and a model of what every request should hold, on the CPU or a GPU.

As in `naive.py`, the contents that a token writes are a function of the tokens up to it, so that
rows of another request, old rows and missing rows are noticed. Entries are written by the append
kernels to the places in `Step.rows_of`; rows of tails, which have no kernel yet, are written by
torch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from kernelkit.call.tensors import brought
from kernelkit.numerics.tolerance import Report, compare_lse, compare_output
from kvcache.books.requests import Request
from kvcache.books.step import Step
from kvcache.books.work import Pool
from kvcache.layouts.layout import GUARD_BYTES, Stream, Tail
from kvcache.memory.cache import Cache
from kvcache.movement.api import append_rows
from lab.soak.small_caches import History, ends, half_rows, whole_rows

NAN_BYTE = 0xFF  # bf16 and fp32 of such bytes are NaN
STEP, SPREAD = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd, without a pattern


def ids(count: int, seed: int = 0) -> list[int]:
    """Random tokens, different for each seed."""
    pick = random.Random(seed)
    return [pick.randrange(1000) for _ in range(count)]


@lru_cache(1024)
def _keys(name: str, copy: int, columns: int, device: str) -> torch.Tensor:
    text = hashlib.shake_128(f"{name} {copy}".encode()).digest(columns * 8)
    return torch.frombuffer(bytearray(text), dtype=torch.int64).to(device)


def numbers(name: str, copy: int, hashes: torch.Tensor, columns: int) -> torch.Tensor:
    """bf16 [n, columns] from -2 to 2: the contents that tokens with these hashes write to a
    copy."""
    mixed = (hashes[:, None] ^ _keys(name, copy, columns, str(hashes.device))) * STEP
    mixed = (mixed ^ (mixed >> 29)) * SPREAD
    return (((mixed >> 40) & 0xFF) - 128).bfloat16() / 64


class Shadow:
    """`cache`, and the true history of its requests."""

    def __init__(self, cache: Cache, *, poison: bool = True) -> None:
        self.cache, self.layout = cache, cache.layout
        self.histories: dict[Request, History] = {}
        if poison:
            for pool in Pool:
                reserved = int(pool in (Pool.BLOCKS, Pool.STATES))
                cache.storage.pools[pool][reserved:, :-GUARD_BYTES] = NAN_BYTE

    # -- life of a request -------------------------------------------------------------------

    def admit(self, name: str, prompt: Sequence[int], chunk: int = 0, **options) -> Request:
        """Admit a request, and append the part of its prompt that was not found, `chunk` tokens at
        a time."""
        request = self.enter(name, prompt, **options)
        prompt = list(prompt)
        while request.length < len(prompt):
            wanted = min(chunk or len(prompt), len(prompt) - request.length)
            room = self.cache.manager.room(request, wanted)
            self.append({request: prompt[request.length : request.length + room]})
        return request

    def enter(self, name: str, prompt: Sequence[int], **options) -> Request:
        """Admit a request with the part of its prompt that was found."""
        admission = self.cache.admit(name, prompt, **options)
        history = History(options.get("salt", b""), prompt[: admission.hit])
        history.restored()
        self.histories[admission.request] = history
        return admission.request

    def fork(self, request: Request, name: str) -> Request:
        child = self.cache.fork(request, name).request
        self.histories[child] = History(request.salt, self.histories[request].tokens)
        self.histories[child].restored()
        return child

    def rollback(self, request: Request, tokens: int) -> None:
        self.cache.rollback(request, tokens)
        self.histories[request].cut(request.length)

    def fetch(self, request: Request) -> None:
        self.cache.fetch(request)
        self.histories[request].restored()

    def free(self, request: Request) -> None:
        self.cache.free(request)
        del self.histories[request]

    # -- tokens ------------------------------------------------------------------------------

    def append(self, batch: Mapping[Request, Sequence[int]]) -> Step:
        """Run a step, with everything that its layers write."""
        with self.cache.step(batch) as step:
            self.write(step)
        return step

    def write(self, step: Step) -> dict[str, torch.Tensor]:
        """Write what the layers of a model write in an open step; return the step's tensors."""
        for request in step.requests:
            self.histories[request].extend(request.tokens[len(self.histories[request]) :])
        tensors = step.tensors(self.cache.device)
        hashes = torch.cat([
            self.hashes(request, range(start + 1, end + 1))
            for request, start, end in zip(
                step.requests, step.starts.tolist(), step.lengths.tolist(), strict=True
            )
        ])  # fmt: skip
        for array in (*self.layout.streams, *self.layout.rings):
            columns, slots = array.record.data_bytes // 2, tensors[f"rows_of.{array.name}"]
            for copy in range(array.copies):
                values = numbers(array.name, copy, hashes, columns)
                append_rows((self.cache.rows(array.name, copy), values), None, slots)
        for tail in self.layout.tails:
            self._write_tail(tail, hashes, tensors[f"rows_of.{tail.name}"])
        return tensors

    def _write_tail(self, tail: Tail, hashes: torch.Tensor, slots: torch.Tensor) -> None:
        kept, rows = slots >= 0, tail.rows(self.layout.draft)
        place = slots[kept] // rows, slots[kept] % rows
        for copy in range(tail.copies):
            for part, view in enumerate(self.cache.tail(tail.name, copy).parts()):
                values = numbers(f"{tail.name} {part}", copy, hashes[kept], view.shape[2])
                view[place] = values.float()

    # -- expected and actual contents -----------------------------------------------------------

    def hashes(self, request: Request, ends: Iterable[int]) -> torch.Tensor:
        """Hashes of the first `end` tokens of a request, for each of `ends`, int64."""
        chain = self.histories[request].chain(ends).astype("int64")
        return brought(torch.from_numpy(chain), self.cache.device)

    def entries(
        self, request: Request, name: str, copy: int, *, newest: bool = False
    ) -> torch.Tensor:
        """The true entries, bf16 [n, columns]: of a stream, or those of a ring that the next token
        sees, or, with `newest`, that the newest token sees."""
        array, length = self.layout.find(name), request.length
        if isinstance(array, Stream):
            positions = ends(array, length)
        else:
            positions = range(whole_rows(array, length - newest).start + 1, length + 1)
        return numbers(name, copy, self.hashes(request, positions), array.record.data_bytes // 2)

    def wrong(self, request: Request) -> torch.Tensor:
        """Number of a request's rows on the device that differ from the expected ones: [1], on the
        device."""
        wrong = torch.zeros(1, dtype=torch.int64, device=self.cache.device)
        blocks = self._to(request.blocks)
        for array in (*self.layout.streams, *self.layout.rings):
            if isinstance(array, Stream):
                size = self.layout.entries(array)
                entry = torch.arange(request.length // array.ratio, device=blocks.device)
                place = blocks[entry // size], entry % size
            else:
                rows = array.rows(self.layout.draft)
                ring = [p % rows for p in whole_rows(array, request.length)]
                place = request.state, self._to(ring)
            for copy in range(array.copies):
                found = self.cache.rows(array.name, copy).data()[place]
                wrong += _differ(found, self.entries(request, array.name, copy))
        for tail in self.layout.tails:
            wrong += self._wrong_tail(request, tail)
        return wrong

    def _wrong_tail(self, request: Request, tail: Tail) -> torch.Tensor:
        wrong = torch.zeros(1, dtype=torch.int64, device=self.cache.device)
        half = tail.width * (tail.overlap - 1)
        for positions, end in ((whole_rows, None), (half_rows, half)):
            found = list(positions(tail, request.length))
            rows = self._to([position % tail.rows(self.layout.draft) for position in found])
            hashes = self.hashes(request, [position + 1 for position in found])
            for copy in range(tail.copies):
                for part, view in enumerate(self.cache.tail(tail.name, copy).parts()):
                    true = numbers(f"{tail.name} {part}", copy, hashes, view.shape[2]).float()
                    wrong += _differ(view[request.state, rows][:, :end], true[:, :end])
        return wrong

    def _to(self, values: Sequence[int]) -> torch.Tensor:
        return brought(torch.tensor(values, dtype=torch.int64), self.cache.device)

    def check(self) -> None:
        """Check that everything on the device is right, and the bookkeeping consistent."""
        self.cache.manager.check()
        for request in self.histories:
            if request.resident:
                wrong = int(self.wrong(request))
                assert not wrong, f"{request!r}: {wrong} rows are not its own"


def verdicts(found: Sequence[torch.Tensor], exact: Any, rounded: Any) -> tuple[Report, Report]:
    """Compare O in bf16 and LSE with fp64, by the tolerance of the packages."""
    o, lse = (tensor.cpu().double() for tensor in found)
    return (
        compare_output(o, exact.o, rounded.o, torch.bfloat16),
        compare_lse(lse, exact.lse, rounded.lse),
    )


def _differ(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Count the rows that differ in any byte."""
    found, true = (x.contiguous().view(torch.uint8) for x in (found, true))
    return (found.flatten(1) != true.flatten(1)).any(1).sum()
