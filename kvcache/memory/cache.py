"""The cache: a manager, the memory that it manages, and the kernels that do what it plans.

Copies on write, restores and checkpoints run on the current stream, in the order of the calls.
The host tier has a stream of its own, and nothing waits for it but who reads what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from kernelkit.call.launch import choose_target
from kernelkit.call.tensors import device_of
from kvcache.books.checkpoints import Policy
from kvcache.books.errors import CorruptedBlock, StepOpen
from kvcache.books.manager import Admission, Manager
from kvcache.books.requests import Placeholders, Request, Tokens
from kvcache.books.slot_pool import Sizes
from kvcache.books.step import Step
from kvcache.books.work import Pool, Work
from kvcache.checks import require
from kvcache.layouts.layout import Layout
from kvcache.layouts.rows import Rows, TailRows
from kvcache.memory.storage import SEALED, Canary, Mover, Storage
from kvcache.movement.launch import ARCHS


@dataclass(frozen=True)
class Arrival:
    """Blocks that a fetch brings to `request`; do not read them before `event` is over."""

    request: Request
    blocks: frozenset[int]
    event: torch.cuda.Event


class Cache:
    """Requests with their keys and values on `device`; `Manager` documents each call.

    deferred: see `Manager`; by default on a GPU.
    canary: guard every slot, seal complete ones, and check the slots of a hit or of the host tier
        before they are read, which waits for the device; `verify` checks everything.
    backend, arch: of the kernels.
    """

    def __init__(
        self,
        layout: Layout,
        sizes: Sizes,
        *,
        device: torch.device | str = "cpu",
        policy: Policy | None = None,
        deferred: bool | None = None,
        canary: bool = False,
        keep_events: bool = False,
        backend: str = "auto",
        arch: str | None = None,
    ) -> None:
        self.device = device_of(device)
        if self.device.type == "meta":
            raise NotImplementedError("device meta: a cache needs memory on the CPU or a CUDA GPU")
        choose_target(self.device, backend, arch, ARCHS)
        on_gpu = self.device.type == "cuda"
        require("canary", canary, bool)
        require("deferred", deferred, bool, optional=True)
        deferred = on_gpu if deferred is None else deferred
        self.manager = Manager(
            layout, sizes, policy=policy, deferred=deferred, keep_events=keep_events
        )
        self.layout, self.storage = layout, Storage(layout, sizes, self.device)
        self._mover = Mover(self.storage, backend=backend, arch=arch)
        self.canary = Canary(self.storage, backend=backend, arch=arch) if canary else None
        self._side = torch.cuda.Stream(self.device) if on_gpu else None
        self._arrivals: list[Arrival] = []
        self._open: Step | None = None

    # -- life of a request -------------------------------------------------------------------

    def admit(
        self, name: str, prompt: Tokens, *, salt: bytes = b"", use_cache: bool = True
    ) -> Admission:
        """See `Manager.admit`. CorruptedBlock where what was hit is not what was stored."""
        self._require_closed("admit")
        admission = self.manager.admit(name, prompt, salt=salt, use_cache=use_cache)
        self._await_arrivals([admission.request])  # which may have hit what is on its way
        checkpoints = [c.source_slot for c in admission.copies if c.source is Pool.CHECKPOINTS]
        request = admission.request
        with self._undone_by(lambda: self.manager.free(request), admission):
            self._look({Pool.BLOCKS: list(request.blocks), Pool.CHECKPOINTS: checkpoints})
            self._mover.move(admission.copies)
        return admission

    def fork(self, request: Request, name: str) -> Admission:
        """See `Manager.fork`."""
        self._require_closed("fork")
        admission = self.manager.fork(request, name)
        self._await_arrivals([request])
        with self._undone_by(lambda: self.manager.free(admission.request), admission):
            self._mover.move(admission.copies)
        return admission

    def free(self, request: Request) -> None:
        """See `Manager.free`."""
        self._require_closed("free")
        self.manager.require(request, resident=False)
        self._unseal_host(request)
        self.manager.free(request)

    def preempt(self, request: Request) -> np.ndarray:
        """See `Manager.preempt`."""
        self._require_closed("preempt")
        self.manager.require(request, resident=False)
        self._unseal_host(request)
        return self.manager.preempt(request)

    def rollback(self, request: Request, tokens: int) -> None:
        """See `Manager.rollback`."""
        self._require_closed("rollback")
        self.manager.rollback(request, tokens)

    def resolve(self, request: Request, tokens: Tokens) -> None:
        """See `Manager.resolve`."""
        self._require_closed("resolve")
        self.manager.resolve(request, tokens)

    # -- steps -------------------------------------------------------------------------------

    @contextmanager
    def step(
        self, batch: Mapping[Request, Tokens | Placeholders], *, marks: bool = False
    ) -> Iterator[Step]:
        """The next tokens of some requests; within the block the caller writes their entries.

        An exception in the block frees these requests, as if the step had never been. marks: the
        caller also writes `Step.marks`; see `Manager.append`.
        """
        step = self.begin(batch, marks=marks)
        try:
            yield step
        except BaseException:
            self.abandon(step)
            raise
        self.finish(step)

    def begin(self, batch: Mapping[Request, Tokens | Placeholders], *, marks: bool = False) -> Step:
        """`Manager.append`, and the copies before it; `finish` or `abandon` ends it."""
        self._require_closed("begin")
        step = self.manager.append(batch, marks=marks)
        self._open = step
        self._await_arrivals(step.requests)
        try:
            self._unseal(Pool.BLOCKS, self._written(step))
            self._mover.move(step.copies)
        except BaseException:
            self.abandon(step)
            raise
        return step

    def finish(self, step: Step) -> None:
        """All work of the step is launched: checkpoints are taken, its slots wait for it."""
        self._require_open(step)
        try:
            self._mover.move(step.after)
            self._seal(Pool.BLOCKS, self._written(step, full=True))
            self._seal(Pool.CHECKPOINTS, step.checkpoints)
        except BaseException:
            self.abandon(step)
            raise
        self._open = None
        self._issued(step)

    def abandon(self, step: Step) -> None:
        """See `Manager.abandon`; what was launched may still be on its way."""
        self._require_open(step)
        self._open = None
        self.manager.abandon(step)
        self._issued(step)

    def _written(self, step: Step, *, full: bool = False) -> list[int]:
        """Blocks that a step writes to, or those of them that are full behind it."""
        size = self.layout.block_tokens
        return [
            block
            for request, start in zip(step.requests, step.starts.tolist(), strict=True)
            for block in request.blocks[
                start // size : request.length // size if full else len(request.blocks)
            ]
        ]

    # -- host tier ---------------------------------------------------------------------------

    def offload(self, request: Request) -> Work:
        """See `Manager.offload`; the copies run beside what the current stream does next."""
        self._require_closed("offload")
        work = self.manager.offload(request)
        with self._beside(), self._undone_by(lambda: self.manager.free(request), work):
            self._mover.move(work.copies)
            for pool in (Pool.HOST_BLOCKS, Pool.HOST_STATES):
                self._seal(pool, [copy.target_slot for copy in work.copies if copy.target is pool])
        return work

    def fetch(self, request: Request) -> Work:
        """See `Manager.fetch`; the next step of the request waits for it, others do not."""
        self._require_closed("fetch")
        self.manager.require(request, resident=False)
        host_states = [request.host_state] if request.host_state >= 0 else []
        with self._beside():
            self._look({Pool.HOST_BLOCKS: request.host_blocks, Pool.HOST_STATES: host_states})
        work = self.manager.fetch(request)
        with self._beside():
            with self._undone_by(lambda: self._lose(request, work), work):
                self._mover.move(work.copies)
                # Those behind the full ones change again.
                full = request.length // self.layout.block_tokens
                self._unseal(Pool.BLOCKS, list(request.blocks))
                self._seal(Pool.BLOCKS, list(request.blocks[:full]))
            event = self._event()
            if event is not None:
                self._arrivals.append(Arrival(request, frozenset(request.blocks), event))
        return work

    def _lose(self, request: Request, work: Work) -> None:
        """The request did not come back, and nobody may find the blocks that it should be in."""
        brought = [copy.target_slot for copy in work.copies if copy.target is Pool.BLOCKS]
        self.manager.discard(Pool.BLOCKS, brought)
        self.manager.free(request)

    def _beside(self) -> AbstractContextManager:
        """The stream of the host tier, behind what the current one has been given."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._side)

    def _await_arrivals(self, requests: Sequence[Request]) -> None:
        """The current stream goes on when what these read has come back."""
        coming = [arrival for arrival in self._arrivals if not arrival.event.query()]
        self._arrivals = []
        if not coming:
            return
        blocks = {block for request in requests for block in request.blocks}
        for arrival in coming:
            if arrival.request in requests or not blocks.isdisjoint(arrival.blocks):
                torch.cuda.current_stream(self.device).wait_event(arrival.event)
            else:
                self._arrivals.append(arrival)

    # -- what layers read and write ----------------------------------------------------------

    def rows(self, name: str, copy: int) -> Rows:
        """Return the entries of one copy of a stream or ring, as kernels address them."""
        return self.storage.rows(name, copy)

    def marks(self, name: str, copy: int) -> Rows:
        """Return the rows of a copy of a ring in checkpoints, which `Step.marks_of` refers to."""
        return self.storage.marks(name, copy)

    def tail(self, name: str, copy: int) -> TailRows:
        """Return the tail of a compressor, as kernels address it."""
        return self.storage.tail(name, copy)

    def pages(
        self, name: str, copy: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """A view [slots, rows, *shape] of entries that are plain numbers, for paged attention."""
        return self.storage.pages(name, copy, dtype, shape)

    # -- canary ------------------------------------------------------------------------------

    def verify(self) -> None:
        """CorruptedBlock unless every guard and every seal is whole; waits for the device."""
        if self.canary is None:
            raise ValueError("nothing was sealed: pass Cache(..., canary=True)")
        if self._side is not None:
            self._side.synchronize()
        for pool in self.canary.guarded:
            self._complain(pool, self.canary.broken_guards(pool), "the guard")
        self._look({pool: sorted(self.canary.sealed[pool]) for pool in SEALED})

    def _look(self, slots: Mapping[Pool, list[int]]) -> None:
        """CorruptedBlock where one that is sealed is not what it was; it is not found again."""
        if self.canary is None:
            return
        for pool, mine in slots.items():
            broken = self.canary.broken_seals(pool, mine)
            if not pool.on_host:  # from there it would come back
                self.canary.unseal(pool, broken)
            self.manager.discard(pool, broken)
            self._complain(pool, broken, "the content")

    def _complain(self, pool: Pool, broken: list[int], what: str) -> None:
        if broken:
            raise CorruptedBlock(pool.value, broken, self.manager.readers(pool, broken), what)

    def _seal(self, pool: Pool, slots: list[int]) -> None:
        if self.canary:
            self.canary.seal(pool, slots)

    def _unseal(self, pool: Pool, slots: Sequence[int]) -> None:
        if self.canary:
            self.canary.unseal(pool, slots)

    def _unseal_host(self, request: Request) -> None:
        """Remove the seals of the request's slots in the host tier."""
        self._unseal(Pool.HOST_BLOCKS, request.host_blocks)
        self._unseal(Pool.HOST_STATES, [request.host_state])

    # -- order -------------------------------------------------------------------------------

    @contextmanager
    def _undone_by(self, undo: Callable[[], None], work: Work) -> Iterator[None]:
        try:
            yield
        except BaseException:
            undo()
            raise
        finally:
            self._issued(work)

    def _issued(self, work: Work) -> None:
        """`work` is over when what the current stream has been given is."""
        self.manager.issued(work, self._event())

    def _event(self) -> torch.cuda.Event | None:
        """Record an event on the current stream; return None unless the device is a GPU."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _require_closed(self, what: str) -> None:
        if self._open is not None:
            names = [request.name for request in self._open.requests]
            raise StepOpen(f"{what} while a step of {names} is open: finish or abandon it first")

    def _require_open(self, step: Step) -> None:
        require("step", step, Step)
        if self._open is not step:
            raise StepOpen("this step is not open: it was finished or abandoned before")
