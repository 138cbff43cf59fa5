"""A tape of what a call did: operations of torch and launches of ours, in order, to be done again
with other tensors.

To check, describe and convert the arguments of a call costs the host more than most launches cost
the GPU. Another call whose tensors are laid out the same way needs none of that: it allocates,
computes and launches what the first one did, at other addresses. `Taping` writes a tape while a
call runs: it sees every operation of torch on the way, so that nothing is forgotten, and knows
tensors by their storage. A tape keeps no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernelkit.launch import PreparedLaunch, watching
from kernelkit.signature import leaves

Results = tuple[torch.Tensor, ...]
_ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
ADDRESS_UNIT = 16  # bytes; no kernel asks more of the address of an argument
_address = torch.Tensor.data_ptr
# What torch's own compiled graphs allocate with: a third of the time of torch.empty_strided.
# Private, there is nothing public like it, and torch's type information lacks it.
_empty_strided_cuda = import_module("torch._C._dynamo.guards")._empty_strided_cuda


def _bytes_in_front(tensor: torch.Tensor) -> int | torch.SymInt:
    """Of its storage. Tensors without elements have an address of 0, but a place there."""
    return tensor.storage_offset() * tensor.itemsize


@dataclass(frozen=True)
class View:
    """A tensor over the memory of one of the tensors of a call.

    place: which, counted in the order of inputs and then of what is made. offset: bytes between
    the two addresses.
    """

    place: int
    offset: int | torch.SymInt
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same view, where the tensors are now."""
        tensor = tensors[self.place]
        if self.whole:
            return tensor
        storage = tensor.untyped_storage()
        begin = _bytes_in_front(tensor) + self.offset
        view = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return view.set_(storage, begin // self.dtype.itemsize, self.size, self.stride)


class Tape:
    """Actions on a list of tensors, the inputs first: each may append what it makes.

    launches: how many of the actions are. reads: whether the host looked at values, which a
    repetition does not. masks: low bits that the address of an input must not have. aliases: (two
    inputs, bytes between them) of inputs that lay in one storage, so that nobody knows whose memory
    a launch was given.
    """

    def __init__(self) -> None:
        self.actions: list[Callable[[list[torch.Tensor]], None]] = []
        self.results: tuple[View, ...] = ()
        self.masks: list[int] = []
        self.aliases: list[tuple[int, int, int]] = []
        self.launches = 0
        self.reads = False
        self._seen: list[int] = []

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the addresses of other inputs will do, which are laid out like the first ones."""
        addresses = list(map(_address, tensors))
        if addresses == self._seen:
            return True
        if any(map(int.__and__, addresses, self.masks)):
            return False
        if any(addresses[b] - addresses[a] != apart for a, b, apart in self.aliases):
            return False
        self._seen = addresses
        return True

    def repeat(self, inputs: Sequence[torch.Tensor], results: Sequence[Any] = ()) -> Results:
        """Do it again. results: tensors for the results to be in, which the tape allocated, None
        for new ones.

        The caller has compared layouts, and asked whether the inputs fit. One thread at a time.
        """
        tensors = [*inputs]
        given = [item for item in zip(self.results, results, strict=False) if item[1] is not None]
        if given:
            self._act_on(tensors, {view.place: tensor for view, tensor in given})
        else:
            for act in self.actions:
                act(tensors)
        return tuple([
            tensors[view.place] if view.whole else view.of(tensors) for view in self.results
        ])  # fmt: skip

    def _act_on(self, tensors: list[torch.Tensor], given: dict[int, torch.Tensor]) -> None:
        """Everything but the allocation of what is given."""
        for act in self.actions:
            if isinstance(act, _Make) and act.place in given:
                tensors.append(given[act.place])
            else:
                act(tensors)

    def hold(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Allocate no more what `memory` has: place -> tensor."""
        for number, act in enumerate(self.actions):
            if isinstance(act, _Make) and act.place in memory:
                self.actions[number] = _Make(act.place, partial(_same, memory[act.place]))


def zeros_that_stay(size: int, like: torch.Tensor) -> torch.Tensor:
    """int32 [size] of zeros, which launches leave behind as zeros: a plan makes them once."""
    taping = _active.get()
    if taping is None:
        return like.new_zeros(size, dtype=torch.int32)
    return taping.zeros_that_stay(size, like)


_active: ContextVar[Taping | None] = ContextVar("taping", default=None)


class Taping(TorchDispatchMode):
    """Writes a tape: `run` a call within."""

    def __init__(self, inputs: Sequence[torch.Tensor], *, dry: bool = False) -> None:
        """dry: operations of torch are done, launches are only described."""
        super().__init__()
        self._dry = dry
        self._tape, self._repeatable = Tape(), True
        self._tensors: list[torch.Tensor] = []  # kept, so that no memory is used twice
        self._places: dict[int, list[int]] = {}
        self._device = inputs[0].device if inputs else None
        for tensor in inputs:
            self._add(tensor)
        self._tape.masks = [math.gcd(_address(t), ADDRESS_UNIT) - 1 for t in inputs]

    def run(self, call: Callable[[], Results]) -> tuple[Results, Tape | None]:
        """The results of the call, and its tape; None where something cannot be repeated."""
        token = _active.set(self)
        try:
            with self, watching(self._launched, launching=not self._dry):
                results = call()
        finally:
            _active.reset(token)
        views = [self._view(tensor) for tensor in results]
        self._tape.results = tuple(view for view in views if view is not None)
        return results, self._tape if self._repeatable else None

    def memory(self, *, results: bool = False) -> dict[int, torch.Tensor]:
        """What was allocated: place -> tensor, the results only if they are wished for."""
        kept = set() if results else {view.place for view in self._tape.results}
        made = [act.place for act in self._tape.actions if isinstance(act, _Make)]
        return {place: self._tensors[place] for place in made if place not in kept}

    def replaceable(self) -> list[bool]:
        """For each result whether it is just what was allocated: another may take its place."""
        made = {act.place for act in self._tape.actions if isinstance(act, _Make)}
        return [view.whole and view.place in made for view in self._tape.results]

    def zeros_that_stay(self, size: int, like: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            made = like.new_zeros(size, dtype=torch.int32)
        maker = partial(torch.zeros, size, dtype=torch.int32, device=like.device)
        self._tape.actions.append(_Make(len(self._tensors), maker))
        self._add(made)
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._repeatable:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        outputs = _tensors_in(result)
        if not outputs and func._schema.returns:
            self._tape.reads = True
            return
        made = [tensor for tensor in outputs if self._place(tensor) is None]
        if any(tensor.device != self._device for tensor in made):
            self._tape.reads = True  # from a GPU to the host, as tolist() does
        if not made and not func._schema.is_mutable:
            return  # a view: what matters is how launches and other operations see it
        if made != outputs and made:
            self._repeatable = False
            return
        if func._schema.name in _ALLOCATIONS:
            self._tape.actions.append(_Make(len(self._tensors), _maker(result)))
        else:
            given = _mapped((args, kwargs), self._view_in_place)
            self._tape.actions.append(partial(_compute, func, given, bool(made)))
        for tensor in made:
            self._add(tensor)

    def _launched(
        self, prepared: PreparedLaunch | None, addressed: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        if prepared is None or not self._repeatable:
            self._repeatable = False
            return
        self._tape.launches += 1
        places, offsets, words = [], [], []
        for word, (tensor, offset) in zip(prepared.words, addressed, strict=True):
            address = _address(tensor)
            if not address:
                continue  # of nothing, which stays nothing
            place = self._place(tensor)
            if place is None:
                self._repeatable = False
                return
            places.append(place)
            offsets.append(address + offset - _address(self._tensors[place]))
            words.append(word)
        self._tape.actions.append(_Launch(prepared, places, offsets, words))

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        if storage:
            self._places.setdefault(storage, []).append(len(self._tensors))
        self._tensors.append(tensor)

    def _place(self, tensor: torch.Tensor) -> int | None:
        """The tensor in whose memory this one is: of several the one that begins where it does."""
        places = self._places.get(tensor.untyped_storage().data_ptr())
        if not places:  # a tensor without memory is known by itself
            known = (place for place, other in enumerate(self._tensors) if other is tensor)
            return next(known, None)
        if len(places) == 1:
            return places[0]
        here = _address(tensor)
        same = [place for place in places if _address(self._tensors[place]) == here]
        if len(same) != 1:
            self._note_aliases(same or places)
        return (same or places)[0]

    def _note_aliases(self, places: Sequence[int]) -> None:
        first, *others = places
        for other in others:
            apart = _address(self._tensors[other]) - _address(self._tensors[first])
            if (first, other, apart) not in self._tape.aliases:
                self._tape.aliases.append((first, other, apart))

    def _view(self, tensor: torch.Tensor) -> View | None:
        """None for a tensor from nowhere, with which nothing can be repeated."""
        place = self._place(tensor)
        if place is None:
            self._repeatable = False
            return None
        known = self._tensors[place]
        layout = tensor.dtype, tuple(tensor.shape), tensor.stride()
        whole = layout == (known.dtype, tuple(known.shape), known.stride())
        offset = _bytes_in_front(tensor) - _bytes_in_front(known)
        return View(place, offset, *layout, whole and not offset)

    def _view_in_place(self, value: Any) -> Any:
        return self._view(value) if isinstance(value, torch.Tensor) else value


class _Launch:
    """A launch at the addresses of some tensors."""

    def __init__(
        self,
        prepared: PreparedLaunch,
        places: Sequence[int],
        offsets: Sequence[int],
        words: Sequence[Any],
    ) -> None:
        self._launch, self._places = prepared.launch, places
        self._offsets, self._words = offsets, words
        self._addresses: list[int] = []

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        addresses = [tensors[place].data_ptr() for place in self._places]
        if addresses != self._addresses:  # often they are those of the call before
            for word, begin, offset in zip(self._words, addresses, self._offsets, strict=True):
                word.value = begin + offset
            self._addresses = addresses
        self._launch(tensors)


class _Make:
    """An allocation, of the tensor at `place`."""

    __slots__ = ("maker", "place")

    def __init__(self, place: int, maker: Callable[[], torch.Tensor]) -> None:
        self.place, self.maker = place, maker

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        tensors.append(self.maker())


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _compute(func: Any, given: tuple[tuple, dict], adds: bool, tensors: list) -> None:
    args, kwargs = _mapped(given, lambda item: item.of(tensors) if type(item) is View else item)
    result = func(*args, **kwargs)
    if adds:
        tensors += _tensors_in(result)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same sequences and dictionaries, what they hold changed."""
    if isinstance(value, tuple | list):
        return type(value)([_mapped(item, change) for item in value])
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return change(value)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def _maker(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Allocates one like `tensor`; on the current device, if that is a GPU."""
    layout = tuple(tensor.shape), tensor.stride()
    if tensor.device.type == "cuda":
        return partial(_empty_strided_cuda, *layout, tensor.dtype)
    return partial(torch.empty_strided, *layout, dtype=tensor.dtype, device=tensor.device)
