"""A tape of what a call did: operations of torch and launches of ours, in order, to be done again
with other tensors.

To check, describe and convert the arguments of a call costs the host more than most launches cost
the GPU. Another call whose tensors are laid out the same way needs none of that: it allocates,
computes and launches what the first one did, at other addresses. `Taping` writes a tape while a
call runs: it sees every operation of torch on the way, so that nothing is forgotten, and knows
tensors by their storage. A tape keeps no tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernelkit.call.launch import PreparedLaunch, current_device, watching
from kernelkit.call.tensors import reach
from kernelkit.compile.signature import leaves

Results = tuple[torch.Tensor, ...]
Action = Callable[[list[Any], list[int]], None]  # on tensors and their addresses
Maker = Callable[[], torch.Tensor]
_ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
ADDRESS_UNIT = 16  # bytes; no kernel asks more of the address of an argument
_address = torch.Tensor.data_ptr
# What torch's own compiled graphs allocate with: a third of the time of torch.empty_strided.
# Private, there is nothing public like it, and torch's type information lacks it.
_empty_strided_cuda = import_module("torch._C._dynamo.guards")._empty_strided_cuda


def _bytes_in_front(tensor: torch.Tensor) -> int | torch.SymInt:
    """Bytes of the storage before the tensor, even if it has no elements and its address is 0."""
    return tensor.storage_offset() * tensor.itemsize


@dataclass(frozen=True)
class View:
    """A tensor over the memory of one of the tensors of a call.

    place: index of that tensor: inputs first, then created tensors
    offset: bytes between the two addresses
    """

    place: int
    offset: int | torch.SymInt
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this view of the present tensors."""
        tensor = tensors[self.place]
        if self.whole:
            return tensor
        storage = tensor.untyped_storage()
        begin = _bytes_in_front(tensor) + self.offset
        with torch._C._AutoDispatchBelowAutograd():  # as within an operator
            view = torch.empty(0, dtype=self.dtype, device=tensor.device)
            return view.set_(storage, begin // self.dtype.itemsize, self.size, self.stride)


class Tape:
    """Actions on a list of tensors and the list of their addresses, the inputs first. Each action
    may put what it creates in its place.

    makers: (place, allocator of the tensor there), all run before the actions
    used: places that actions read
    results: results of a repetition
    made, made_at: tensors after the inputs, and their addresses; None and 0 if an action creates
        them anew
    masks: low bits that the address of an input must not have
    empty: number of inputs without elements, whose address is 0
    aliases: (i, j, distance) for inputs that shared a storage, or of which one is written and
        overlaps the other. A replay must keep the distance.
    apart: (written, read, low, high): a replay is refused if address[read] - address[written]
        is between low and high, since the inputs would overlap
    gpu: device index of the inputs, None for the CPU
    launches: number of actions that are launches
    reads: whether the host read values, which a repetition does not
    """

    def __init__(self) -> None:
        self.makers: list[tuple[int, Maker]] = []
        self.actions: list[Action] = []
        self.used: set[int] = set()
        self.results: tuple[View, ...] = ()
        self.made: list[torch.Tensor | None] = []
        self.made_at: list[int] = []
        self.masks: list[int] = []
        self.empty = 0
        self.aliases: list[tuple[int, int, int]] = []
        self.apart: list[tuple[int, int, int, int]] = []
        self.gpu: int | None = None
        self.launches = 0
        self.reads = False
        self._seen: list[int] = []
        self._pick: Callable[[list[Any]], Results] | None = None

    def repeat(
        self, inputs: Sequence[torch.Tensor], given: Iterable[tuple[int, torch.Tensor | None]] = ()
    ) -> Results | None:
        """Do it again, or nothing at all where the addresses of the inputs, which are laid out like
        the first ones, will not do: then None. given: (place, tensor) of what is to be there
        instead of what the tape would make, where there is a tensor.

        The caller has compared layouts. One thread at a time.
        """
        if self.gpu is not None and current_device() != self.gpu:
            with torch.cuda.device(self.gpu):
                return self.repeat(inputs, given)
        addresses = [*map(_address, inputs), *self.made_at]
        if addresses != self._seen:
            if not self._fit(addresses):
                return None
            self._seen = [*addresses]
        tensors: list[Any] = [*inputs, *self.made]
        for place, tensor in given:
            if tensor is not None:
                tensors[place], addresses[place] = tensor, tensor.data_ptr()
                if addresses[place] % ADDRESS_UNIT or (not addresses[place] and tensor.numel()):
                    return None
        for place, maker in self.makers:
            if tensors[place] is None:
                made = tensors[place] = maker()
                addresses[place] = made.data_ptr()
        for act in self.actions:
            act(tensors, addresses)
        if self._pick is not None:
            return self._pick(tensors)
        return tuple([view.of(tensors) for view in self.results])

    def _fit(self, addresses: list[int]) -> bool:
        if any(map(int.__and__, addresses, self.masks)):
            return False
        if addresses[: len(self.masks)].count(0) != self.empty:
            return False  # the memory of an input has been freed
        for a, b, least, most in self.apart:
            if least < addresses[b] - addresses[a] < most:
                return False
        return all(addresses[b] - addresses[a] == apart for a, b, apart in self.aliases)

    def give(self, results: Iterable[View]) -> None:
        """A repetition returns these."""
        self.results = tuple(results)
        several = len(self.results) > 1 and all(view.whole for view in self.results)
        self._pick = itemgetter(*[view.place for view in self.results]) if several else None

    def giving(self, numbers: Iterable[int]) -> Tape:
        """This tape, which returns those of the results alone: what nobody looks at is not made."""
        other = copy(self)
        other.give([self.results[number] for number in numbers])
        needed = self.used.union(view.place for view in other.results)
        other.makers = [(place, maker) for place, maker in self.makers if place in needed]
        return other

    def hold(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Allocate no more what `memory` has: place -> tensor."""
        for place, tensor in memory.items():
            self.made[place - len(self.masks)] = tensor
            self.made_at[place - len(self.masks)] = tensor.data_ptr()
        self.makers = [(place, maker) for place, maker in self.makers if place not in memory]


def zeros_that_stay(size: int, like: torch.Tensor) -> torch.Tensor:
    """int32 [size] of zeros, which launches leave behind as zeros: a plan makes them once."""
    taping = _active.get()
    if taping is None:
        return like.new_zeros(size, dtype=torch.int32)
    return taping.zeros_that_stay(size, like)


_active: ContextVar[Taping | None] = ContextVar("taping", default=None)


class Taping(TorchDispatchMode):
    """Writes a tape: `run` a call within."""

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        kept: Sequence[torch.Tensor] = (),
        written: Sequence[int] = (),
        dry: bool = False,
    ) -> None:
        """Begin to record a call.

        Args:
            inputs: tensors that a repetition passes
            kept: further inputs, which belong to the tape and are used by every repetition
            written: places of inputs that the call writes to
            dry: whether launches are only described; operations of torch are done
        """
        super().__init__()
        self._dry = dry
        self._tape, self._repeatable = Tape(), True
        self._tensors: list[torch.Tensor] = []  # kept, so that no memory is used twice
        self._places: dict[int, list[int]] = {}
        self._device = next((tensor.device for tensor in (*inputs, *kept)), None)
        if self._device is not None and self._device.type == "cuda":
            self._tape.gpu = self._device.index
        for tensor in (*inputs, *kept):
            self._know(tensor)
        self._tape.made, self._tape.made_at = [*kept], [*map(_address, kept)]
        self._tape.masks = [math.gcd(_address(t), ADDRESS_UNIT) - 1 for t in inputs]
        self._tape.empty = [*map(_address, inputs)].count(0)
        self._keep_apart(inputs, written)

    def run(self, call: Callable[[], Results]) -> tuple[Results, Tape | None]:
        """The results of the call, and its tape; None where something cannot be repeated."""
        token = _active.set(self)
        try:
            with self, watching(self._launched, launching=not self._dry):
                results = call()
        finally:
            _active.reset(token)
        views = [self._view(tensor) for tensor in results]
        self._tape.give(view for view in views if view is not None)
        return results, self._tape if self._repeatable else None

    def memory(self, *, results: bool = False) -> dict[int, torch.Tensor]:
        """Return allocated tensors by place. Results are included only if `results`, or if they
        have no elements: such may be shared by all calls."""
        kept = set() if results else {view.place for view in self._tape.results}
        made = {place: self._tensors[place] for place, _ in self._tape.makers}
        return {n: tensor for n, tensor in made.items() if n not in kept or not tensor.numel()}

    def replaceable(self) -> list[bool]:
        """Return for each result whether it is a whole allocation, which another tensor may
        replace."""
        made = {place for place, _ in self._tape.makers}
        return [view.whole and view.place in made for view in self._tape.results]

    def zeros_that_stay(self, size: int, like: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            made = like.new_zeros(size, dtype=torch.int32)
        maker = partial(torch.zeros, size, dtype=torch.int32, device=like.device)
        self._tape.makers.append((len(self._tensors), maker))
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
        outputs, (returns, writes, allocates) = _tensors_in(result), _sort_of(func)
        if not outputs and returns:
            self._tape.reads = True
            return
        made = [tensor for tensor in outputs if self._place(tensor) is None]
        if any(tensor.device != self._device for tensor in made):
            self._tape.reads = True  # from a GPU to the host, as tolist() does
        if not made and not writes:
            return  # a view: what matters is how launches and other operations see it
        if made != outputs and made:
            self._repeatable = False
            return
        if allocates:
            self._tape.makers.append((len(self._tensors), _maker(result)))
        else:
            given = _mapped((args, kwargs), self._view_in_use)
            place = len(self._tensors) if made else None
            self._tape.actions.append(partial(_compute, func, given, place))
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
        self._tape.used.update(places)
        self._tape.actions.append(_Launch(prepared, places, offsets, words))

    def _add(self, tensor: torch.Tensor) -> None:
        """Register a tensor that an action creates."""
        self._tape.made.append(None)
        self._tape.made_at.append(0)
        self._know(tensor)

    def _know(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        if storage:
            self._places.setdefault(storage, []).append(len(self._tensors))
        self._tensors.append(tensor)

    def _keep_apart(self, inputs: Sequence[torch.Tensor], written: Sequence[int]) -> None:
        """Record that written inputs lie apart from all others, or at a distance that was
        checked."""
        read = [place for place in range(len(inputs)) if place not in written]
        both = itertools.combinations(written, 2)
        for here, there in itertools.chain(itertools.product(written, read), both):
            one, other = inputs[here], inputs[there]
            least, most = -reach(other), reach(one)
            if least < _address(other) - _address(one) < most:
                self._note_aliases((here, there))
            else:
                self._tape.apart.append((here, there, least, most))

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

    def _view_in_use(self, value: Any) -> Any:
        view = self._view(value) if isinstance(value, torch.Tensor) else None
        if view is None:
            return value
        self._tape.used.add(view.place)
        return view


class _Launch:
    """A launch at the addresses of some tensors."""

    def __init__(
        self,
        prepared: PreparedLaunch,
        places: Sequence[int],
        offsets: Sequence[int],
        words: Sequence[Any],
    ) -> None:
        self._launch = prepared.launch_here
        moves = [*zip(words, places, offsets, strict=True)]
        self._moves = [(word, place) for word, place, offset in moves if not offset]
        self._shifts = [move for move in moves if move[-1]]  # to add costs more than to write
        self._addresses: list[int] = []

    def __call__(self, tensors: list[Any], addresses: list[int]) -> None:
        if addresses != self._addresses:  # often they are those of the call before
            for word, place in self._moves:
                word.value = addresses[place]
            for word, place, offset in self._shifts:
                word.value = addresses[place] + offset
            self._addresses = [*addresses]
        self._launch(tensors)


@cache
def _sort_of(func: Any) -> tuple[bool, bool, bool]:
    """Whether an operation returns anything, writes to an argument, does nothing but allocate."""
    schema = func._schema
    return bool(schema.returns), schema.is_mutable, schema.name in _ALLOCATIONS


def _compute(
    func: Any, given: tuple[tuple, dict], place: int | None, tensors: list, addresses: list[int]
) -> None:
    """place: of the first tensor that it makes."""
    with torch._C._AutoDispatchBelowAutograd():  # as within an operator
        args, kwargs = _mapped(given, lambda item: item.of(tensors) if type(item) is View else item)
        result = func(*args, **kwargs)
    if place is not None:
        for made in _tensors_in(result):
            tensors[place], addresses[place] = made, made.data_ptr()
            place += 1


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy nested sequences and dictionaries, with `change` applied to what they hold."""
    if isinstance(value, tuple | list):
        return type(value)([_mapped(item, change) for item in value])
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return change(value)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def _maker(tensor: torch.Tensor) -> Maker:
    """Allocates one like `tensor`; on the current device, if that is a GPU. As torch does where it
    is asked to fill what it allocates."""
    layout = tuple(tensor.shape), tensor.stride()
    if tensor.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        return partial(_empty_strided_cuda, *layout, tensor.dtype)
    return partial(torch.empty_strided, *layout, dtype=tensor.dtype, device=tensor.device)
