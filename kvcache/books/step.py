"""A step of some requests: which tokens it appends and where every layer puts and finds them.

The arrays are what kernels take: slot mappings int64, -1 where a token writes nothing; block tables
and lengths int32. `Step.tensors` and `Step.fill` bring them to a device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvcache.books.requests import Request
from kvcache.books.work import Copy, Mark, Work
from kvcache.checks import require
from kvcache.layouts.layout import Layout, Ring, Stream

if TYPE_CHECKING:
    import torch

NOWHERE = -1  # in a slot mapping
ROWS_OF, ENDS_OF, MARKS_OF = "rows_of.", "ends_of.", "marks_of."
MAPPINGS = (ROWS_OF, ENDS_OF, MARKS_OF)
PLAIN = ("cu_tokens", "positions", "owners", "starts", "lengths", "state_slots", "block_tables")


@dataclass(eq=False)
class Step(Work):
    """The tokens starts[i] .. lengths[i] - 1 of requests[i], one request after another.

    copies: copies before the step writes (copy on write).
    after: copies once the step has written (checkpoints).
    marks: checkpoints that its layers write, from their own tokens; see `marks_of`.
    block_tables: int32 [B, W]; after the blocks of a request 0, the null block.
    state_slots: int32 [B], -1 without states.
    starts, lengths: int32 [B], tokens before and after.
    """

    layout: Layout = field(kw_only=True)
    requests: tuple[Request, ...] = ()
    after: tuple[Copy, ...] = ()
    marks: tuple[Mark, ...] = field(default=(), kw_only=True)
    starts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    state_slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    block_tables: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.int32))

    @cached_property
    def cu_tokens(self) -> np.ndarray:
        """int32 [B + 1]: where the tokens of a request begin among those of the step."""
        return np.concatenate(([0], np.cumsum(self.lengths - self.starts))).astype(np.int32)

    @cached_property
    def owners(self) -> np.ndarray:
        """int32 [T]: whose each token is, an index of `requests`."""
        return np.repeat(np.arange(len(self.requests), dtype=np.int32), self.lengths - self.starts)

    @property
    def longest(self) -> int:
        """The most tokens that a request has in this step."""
        return int((self.lengths - self.starts).max(initial=0))

    @cached_property
    def positions(self) -> np.ndarray:
        """int64 [T]: of each token in its request."""
        counts = self.lengths - self.starts
        return np.arange(self.cu_tokens[-1], dtype=np.int64) + np.repeat(
            self.starts - self.cu_tokens[:-1], counts
        )

    def rows_of(self, name: str) -> np.ndarray:
        """Slot mapping int64 [T] of the stream, ring or tail `name`: slot * rows + row, or -1.

        Of a stream it names the rows of entries that these tokens complete. Of a ring or tail only
        the last tokens have rows: those that would overwrite each other have none.
        """
        array, positions, owners = self.layout.find(name), self.positions, self.owners
        if isinstance(array, Stream):
            entries = self.layout.entries(array)
            blocks = self.block_tables[owners, positions // self.layout.block_tokens]
            numbers = blocks.astype(np.int64) * entries + positions // array.ratio % entries
            return np.where(self._completes(array), numbers, NOWHERE)
        rows = array.rows(self.layout.draft)
        numbers = self.state_slots.astype(np.int64)[owners] * rows + positions % rows
        return np.where(positions >= self.lengths[owners] - rows, numbers, NOWHERE)

    @property
    def checkpoints(self) -> list[int]:
        """Slots of the checkpoints that the step makes, by copies and by its layers."""
        return [*(copy.target_slot for copy in self.after), *(mark.slot for mark in self.marks)]

    def marks_of(self, name: str) -> np.ndarray:
        """Slot mapping int64 [T] of `marks` for the ring `name`: slot * (window - 1) + row, or -1.

        It refers to the rows of `Layout.mark`. Only for layouts that can mark.
        """
        ring = self.layout.find(name)
        if not (self.layout.can_mark and isinstance(ring, Ring)):
            raise TypeError(f"{name!r} is not a ring that a step can mark")
        rows, found = ring.window - 1, np.full(self.cu_tokens[-1], NOWHERE, np.int64)
        for owner, boundary, slot in self.marks:
            first = self.cu_tokens[owner] + boundary - rows - self.starts[owner]
            found[first : first + rows] = slot * rows + np.arange(rows)
        return found

    def ends_of(self, name: str) -> np.ndarray:
        """int32 [E]: the tokens that complete an entry of the stream `name`, in their order."""
        return np.flatnonzero(self._completes(self._stream(name))).astype(np.int32)

    def _stream(self, name: str) -> Stream:
        stream = self.layout.find(name)
        if not isinstance(stream, Stream):
            raise TypeError(f"{name!r} is not a stream")
        return stream

    def _completes(self, stream: Stream) -> np.ndarray:
        return (self.positions + 1) % stream.ratio == 0

    def entries(self, name: str) -> np.ndarray:
        """int32 [B]: entries of a stream that the requests have after the step."""
        return self.lengths // self._stream(name).ratio

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array by its name: 'rows_of.<name>' of all, 'ends_of.<name>' of streams, and
        'marks_of.<name>' of rings that can be marked."""
        found = {name: getattr(self, name) for name in PLAIN}
        for array in self.layout.arrays:
            found[f"{ROWS_OF}{array.name}"] = self.rows_of(array.name)
        for stream in self.layout.streams:
            found[f"{ENDS_OF}{stream.name}"] = self.ends_of(stream.name)
        if self.layout.can_mark:
            for ring in self.layout.rings:
                found[f"{MARKS_OF}{ring.name}"] = self.marks_of(ring.name)
        return found

    def tensors(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """`arrays` as tensors on `device`.

        To a GPU they travel from pinned memory on the current stream, without a wait.
        """
        import torch

        from kernelkit.call.tensors import brought, device_of

        place, arrays = device_of(device), self.arrays().items()
        return {name: brought(torch.from_numpy(array), place) for name, array in arrays}

    def fill(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Write `arrays` into tensors that stay where they are, as a captured graph needs them.

        They may be larger. What is left over is padding: tokens that write nothing, requests of no
        tokens, null blocks. ValueError for one that is too small.
        """
        import torch

        require("buffers", buffers, Mapping)
        arrays = self.arrays()
        for name, buffer in buffers.items():
            if name not in arrays:
                raise ValueError(f"{name!r} is not an array of a step: {', '.join(arrays)}")
            require(f"the buffer of {name}", buffer, torch.Tensor)
            if not buffer.is_cuda:
                _check_memory(f"the buffer of {name}", buffer)
            _check_fits(name, arrays[name], buffer)
        for name, buffer in buffers.items():
            array = arrays[name]
            padded = np.full(buffer.shape, self._padding(name), array.dtype)
            padded[tuple(slice(size) for size in array.shape)] = array
            source = torch.from_numpy(padded)
            buffer.copy_(source.pin_memory() if buffer.is_cuda else source, non_blocking=True)

    def _padding(self, name: str) -> int:
        if name == "cu_tokens":
            return int(self.cu_tokens[-1])
        return NOWHERE if name == "state_slots" or name.startswith(MAPPINGS) else 0


def block_tables(requests: Collection[Request]) -> np.ndarray:
    """int32 [B, W]: their blocks, behind them the null block."""
    counts = [len(request.blocks) for request in requests]
    tables = np.zeros((len(requests), max(counts, default=0)), np.int32)
    for row, request, count in zip(tables, requests, counts, strict=True):
        row[:count] = np.frombuffer(request.blocks, np.int32) if count else 0
    return tables


def _check_memory(name: str, buffer: torch.Tensor) -> None:
    """TypeError or ValueError for a buffer that has no elements of its own to write to."""
    import torch

    from kernelkit.call.tensors import require_memory, require_own_elements, require_writable

    require_memory(**{name: buffer})
    require_writable(**{name: buffer})
    require_own_elements(name, buffer)
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name} is an inference tensor: fill it in inference mode, too")
    if buffer.device.type == "meta":
        raise ValueError(f"{name} is on the device meta: there is no memory to write to")


def _check_fits(name: str, array: np.ndarray, buffer: torch.Tensor) -> None:
    """ValueError for a buffer that cannot hold an array."""
    if len(buffer.shape) != array.ndim or any(map(int.__gt__, array.shape, buffer.shape)):
        raise ValueError(
            f"{name} {array.shape} does not fit into a buffer of {tuple(buffer.shape)}"
        )
    plain = not (buffer.dtype.is_floating_point or buffer.dtype.is_complex)
    if not (plain and buffer.dtype.is_signed) or buffer.itemsize < array.itemsize:
        raise ValueError(f"{name} is {array.dtype}, but its buffer is {buffer.dtype}")
