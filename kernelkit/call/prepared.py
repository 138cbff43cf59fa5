"""Plans: calls whose sizes do not change, prepared once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from kernelkit.call.front import Guards, guards_of, kind, layouts, never
from kernelkit.call.operator import Operator, by_name, one_by_one
from kernelkit.call.tape import ADDRESS_UNIT, Results, Taping
from kernelkit.call.tensors import (
    require_apart,
    require_memory,
    require_no_grad,
    require_no_tangents,
    require_type,
    require_writable,
)


class Plan:
    """A call whose sizes do not change: checked, compiled and described once, launched many times.

    A call bypasses torch's dispatcher. The only checks left are that every tensor has the shape,
    strides, dtype, device and alignment of the planned one. The contents of tensors are not
    checked, even on the CPU. Tensors that are not passed to a call are those of the plan, which
    keeps them. It keeps none of the tensors that every call passes. Use one thread and one stream
    at a time. Launches go to the current stream; CUDA graphs capture them.
    """

    def __init__(
        self,
        operator: Operator,
        given: Mapping[str, Any],
        *,
        moves: Sequence[str] = (),
        results: Sequence[str] = (),
        dry: bool = True,
    ) -> None:
        """Plan a call.

        Args:
            operator: the operator
            given: its arguments
            moves: tensors that every call passes, if the plan was made with them
            results: names of the results, in order, that a call may pass
            dry: whether to launch nothing here, so that checks of earlier steps' results are not
                possible
        """
        flat = operator.schema.flat(given)
        operator.require_usable(flat)
        tensors = one_by_one(flat)
        self._moves = [name for name in moves if name in tensors]
        planned = [tensors.pop(name) for name in self._moves]
        taping = Taping(planned, kept=[*tensors.values()], dry=dry)
        made, tape = taping.run(lambda: self.first_call(operator, flat))
        if tape is None:
            raise ValueError(f"{operator.name}: a plan cannot repeat what this call computes")
        self._replaceable = taping.replaceable()[: len(results)]
        tape.hold(taping.memory(results=not results))
        self._tape = tape
        self._results, self._count = [*results[: len(made)]], len(self._moves)
        self._places = {name: n for n, name in enumerate((*self._moves, *self._results))}
        self._nothing = [None] * len(self._places)
        self._layouts, self._guards = layouts(planned), _guards_of(planned)
        may_be_given = made[: len(self._results)]
        self._places_of_results = [view.place for view in tape.results[: len(self._results)]]
        self._made, self._guards_of_results = layouts(may_be_given), _guards_of(may_be_given)
        self.made = () if results else made

    def first_call(self, operator: Operator, flat: dict[str, Any]) -> Results:
        """Run the planned call once; a family's plan may keep what is chosen on the way."""
        return operator.run(flat)

    def __call__(self, *tensors: torch.Tensor, **named: torch.Tensor | None) -> Results:
        """The results for these tensors: in new tensors, in those given for them, or, where the
        plan has no names for results, in `made`.

        ValueError for a tensor that is laid out differently, is missing, or has no place; on the
        CPU also for a result that lies in the memory of an input.
        """
        inputs: Sequence[Any] = tensors
        results: Sequence[Any] = [*named.values()]
        if len(inputs) != self._count or (named and [*named] != self._results):  # seldom
            slots = self._in_order(tensors, named)
            inputs, results = slots[: self._count], slots[self._count :]
        if forward_ad._current_level >= 0:
            require_no_tangents(dict(zip(self._moves, inputs, strict=True)))
        if _are_odd(inputs) or not self._guards(*inputs):
            self._check_inputs(inputs)
        if results:
            if _are_odd(results) or not self._guards_of_results(*results):
                self._check_results(results)
            if self._tape.gpu is None:
                self._check_apart(inputs, results)
        given = zip(self._places_of_results, results, strict=False) if results else ()
        repeated = self._tape.repeat(inputs, given)
        if repeated is None:
            raise ValueError(self._wrong_addresses(inputs, results))
        return repeated

    def _in_order(
        self, tensors: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor | None]
    ) -> Sequence[Any]:
        """The inputs, None for one that is missing; then the results, if any of them is given."""
        given, written = len(tensors), False
        if given > self._count:
            raise ValueError(self._wrong_tensors(tensors[: self._count], tensors[self._count :]))
        slots: list[Any] = [*tensors, *self._nothing[given:]]
        for name, tensor in named.items():
            place = self._places.get(name, -1)
            if place >= given:
                slots[place] = tensor
                written = written or place >= self._count
            elif tensor is not None:
                raise ValueError(self._wrong_tensors(tensors, [name]))
        return slots if written else slots[: self._count]

    def _check_inputs(self, inputs: Sequence[torch.Tensor | None]) -> None:
        if torch.jit.is_tracing():
            raise NotImplementedError("a plan cannot be traced: call the function that made it")
        here = [tensor for tensor in inputs if tensor is not None]
        for name, tensor in zip(self._moves, inputs, strict=True):
            require_type(name, tensor, torch.Tensor, optional=True)
        if len(here) != self._count:
            raise ValueError(self._wrong_tensors(here))
        named = dict(zip(self._moves, here, strict=True))
        require_memory(**named)
        require_no_grad(**named)
        self._compare(self._moves, inputs, self._layouts)
        self._guards = _guards_of(here)  # know the next ones like these sooner

    def _compare(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor | None], planned: tuple
    ) -> None:
        for name, tensor, *wanted in zip(names, tensors, *planned, strict=False):
            if tensor is None:
                continue
            found = [kind(tensor), tensor.stride()]
            if found != wanted:
                raise ValueError(f"{name} is {found[0]} {found[1]}, expected {wanted} as planned")

    def _check_results(self, results: Sequence[torch.Tensor | None]) -> None:
        for name, tensor in zip(self._results, results, strict=True):
            require_type(name, tensor, torch.Tensor, optional=True)
        named = by_name(self._results, results)
        require_memory(**named)
        require_no_grad(**named)
        self._compare(self._results, results, self._made)
        for name, tensor, own in zip(self._results, results, self._replaceable, strict=True):
            if tensor is not None and not own:
                raise ValueError(f"{name} cannot be given: it shares memory")

    def _check_apart(
        self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]
    ) -> None:
        """ValueError for a result in the memory of an input, but all of it, or of another one."""
        named = dict(zip(self._moves, inputs, strict=True))
        for name, tensor in zip(self._results, results, strict=True):
            if tensor is None:
                continue
            require_writable(**{name: tensor})
            for other, read in named.items():
                require_apart(name, tensor, other, read)
            named[name] = tensor

    def _wrong_tensors(self, inputs: Sequence[Any], more: Sequence[Any] = ()) -> str:
        others = "".join(f", and {item if isinstance(item, str) else 'another'}" for item in more)
        return f"{len(inputs)} tensors{others}: planned with {', '.join(self._places)}"

    def _wrong_addresses(self, inputs: Sequence[torch.Tensor], results: Sequence[Any]) -> str:
        require_memory(**by_name([*self._places], (*inputs, *results)))
        for name, tensor, mask in zip(self._moves, inputs, self._tape.masks, strict=False):
            if tensor.data_ptr() & mask:
                return _misaligned(name, tensor, mask + 1)
        for name, tensor in zip(self._results, results, strict=False):
            if tensor is not None and tensor.data_ptr() % ADDRESS_UNIT:
                return _misaligned(name, tensor, ADDRESS_UNIT)
        here = [*(tensor.data_ptr() for tensor in inputs), *self._tape.made_at]
        wrong = ((a, b, apart) for a, b, apart in self._tape.aliases if here[b] - here[a] != apart)
        a, b, apart = next(wrong)
        names = [*self._moves, *("a tensor of the plan" for _ in self._tape.made)]
        return f"{names[a]} and {names[b]} lay {apart} bytes apart in the plan"


def _misaligned(name: str, tensor: torch.Tensor, unit: int) -> str:
    return f"{name} at {tensor.data_ptr():#x}: multiples of {unit} bytes"


def _guards_of(tensors: Sequence[torch.Tensor]) -> Guards:
    """`guards_of`, which do not look at whether autograd is on: of what requires grad none."""
    if any(tensor.requires_grad for tensor in tensors):
        return never
    return guards_of(tensors)


def _are_odd(tensors: Iterable[Any]) -> bool:
    """Whether guards cannot look at them: asked for a nested tensor, they end the process."""
    try:
        for tensor in tensors:  # sooner done than any() or map()
            if tensor.is_nested:
                return True
    except AttributeError:  # no tensor
        return True
    return False
