"""Torch operators of kernels: from a dataclass of arguments and a function that runs it come the
operator that tracers see whole, the cheap repetition of an eager call, and plans.

A family writes one dataclass and one function `run(arguments) -> results`, which checks, chooses,
allocates and launches. On a GPU the first call of a layout is taken down on a tape
(`kernelkit.tape`), and later calls of the same layouts and options repeat the tape: they skip what
the first one checked, since nothing that it looked at has changed. On the CPU every call is
checked, also what tensors hold.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from operator import attrgetter
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards  # what torch's compiled graphs compare with
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from kernelkit.schema import Schema
from kernelkit.tape import ADDRESS_UNIT, Results, Tape, Taping
from kernelkit.tensors import (
    require_apart,
    require_memory,
    require_no_grad,
    require_no_tangents,
    require_type,
)

NAMESPACE = "blackwell_kernels"
TAPES = 64  # of an operator and a thread

# All tensors at once, by functions in C: half the time of a loop over tensors and attributes.
_kind = attrgetter("shape", "dtype", "device")
_strides = torch.Tensor.stride
_nested = attrgetter("is_nested")


def layouts(tensors: Sequence[torch.Tensor]) -> tuple:
    """What a call depends on besides addresses and contents, to be compared and hashed."""
    return tuple(map(_kind, tensors)), tuple(map(_strides, tensors))


class Operator:
    """The operator `blackwell_kernels::<name>`, and `<name>_out` where a field `out` may be given.

    arguments: a frozen dataclass whose fields are tensors, numbers, words, dtypes, or dataclasses
    of such. run: does the work, and returns a tuple of new tensors; with `out` the first of them is
    that tensor. empty: makes results like those, without checks, for tracers: sizes may be symbols.
    results: how many there are. writes: names of other arguments that are written to.
    """

    def __init__(
        self,
        name: str,
        arguments: type,
        run: Callable[[Any], Results],
        empty: Callable[[Any], Results],
        *,
        results: int,
        writes: tuple[str, ...] = (),
    ) -> None:
        self.name, self.schema, self._run = name, Schema(arguments), run
        self._tapes = _Tapes()
        names = [leaf.name for leaf in self.schema.tensors]
        self._needed = [leaf.name for leaf in self.schema.tensors if leaf.default is MISSING]
        self._out = "out" in names and "out" not in self._needed
        left_out = "out" if self._out else ""
        plain = [name for name in names if name != left_out]
        text = self.schema.text(results, writes, without=left_out)
        self.default = self._register(name, text, _Call(self, plain, empty, results), not writes)
        self.written: Any = None
        if self._out:
            text = self.schema.text(results - 1, ("out", *writes))
            call = _Call(self, names, empty, results, written=True)
            self.written = self._register(f"{name}_out", text, call, functional=False)

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """The results, of fields of the dataclass by name; those left out have their default.

        TypeError for a value of another type, NotImplementedError for a tensor that requires grad,
        and whatever `run` raises.
        """
        flat = self.schema.flat(given)
        out = flat.get("out") if self._out else None
        operator = self.default if out is None else self.written
        needed = [flat.pop(name) for name in self._needed]
        if torch.compiler.is_compiling():
            results = operator(*needed, **flat)
        else:  # `flat` has refused what autograd would be asked for, so its layer has nothing to do
            try:
                with torch._C._AutoDispatchBelowAutograd():
                    results = operator(*needed, **flat)
            except (RuntimeError, AssertionError):  # what torch says of them names no argument
                tensors = dict(zip(self._needed, needed, strict=True)) | flat
                _require_int64(flat)
                _require_no_fake_beside_others(tensors)
                _require_memory(tensors)
                raise
        if out is None:
            return results
        if results is None:
            return out
        return (out, *(results if isinstance(results, tuple | list) else (results,)))

    def arguments(self, given: Mapping[str, Any]) -> Any:
        """The dataclass, of checked types."""
        flat = self.schema.flat(given)
        _require_memory(flat)
        return self.schema.build(flat)

    def run(self, flat: dict[str, Any]) -> Results:
        """The whole way down. flat: leaves of the schema that are not at their default."""
        _require_memory(flat)
        return self._run(self.schema.build(flat))

    def recall(self, names: Sequence[str], tensors: Sequence[Any], options: dict) -> Results:
        """The results, by the tape of an earlier call of this thread, if one had these layouts and
        options and its memory lay as this call's does; else the whole way down, and a tape of it.
        """
        here, present = _present(tensors)
        # By places among so many names: with and without `out` they mean other tensors.
        key = len(names), here, layouts(present), tuple(options.items())
        kept = self._tapes.kept
        tape = kept.get(key)
        repeated = None if tape is None else tape.repeat(present)
        if repeated is not None:
            kept.move_to_end(key)
            return repeated
        flat = _by_name(names, tensors) | options
        results, tape = Taping(present).run(lambda: self.run(flat))
        if tape is not None and not tape.reads:
            kept[key] = tape
            kept.move_to_end(key)
            if len(kept) > TAPES:
                kept.popitem(last=False)
        return results

    def forget(self) -> None:
        """Drop the tapes of this thread."""
        self._tapes.kept.clear()

    def _register(self, name: str, text: str, call: _Call, functional: bool) -> Any:
        qualified = f"{NAMESPACE}::{name}"
        # What `custom_op` does, without the layers that it puts around each call.
        torch.library.define(qualified, text)
        torch.library.impl(qualified, "default", call)
        torch.library.register_fake(qualified, call.fake)
        if functional:  # torch takes no backward for an operator that writes, not one that refuses

            def refuse(context: Any, *gradients: Any) -> None:
                raise NotImplementedError(f"{qualified} has no backward; use no_grad()")

            torch.library.register_autograd(qualified, refuse)
        return getattr(getattr(torch.ops, NAMESPACE), name).default


class _Tapes(threading.local):
    """Tapes by what they depend on, the latest last. Each thread has its own: a tape serves one
    call at a time."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Hashable, Tape] = OrderedDict()


class _Call:
    """What torch calls: the implementation of an operator, and its fake."""

    def __init__(
        self,
        operator: Operator,
        names: Sequence[str],
        empty: Callable[[Any], Results],
        results: int,
        written: bool = False,
    ) -> None:
        self._operator, self._names, self._empty = operator, names, empty
        self._first = 1 if written else 0  # of the results that are returned
        self._single = results - self._first == 1
        self._nothing = results == self._first
        self.__name__ = operator.name

    def __call__(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        if _on_gpu(tensors):
            return self._returned(self._operator.recall(self._names, tensors, options))
        return self._returned(self._operator.run(_by_name(self._names, tensors) | options))

    def fake(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        """Shapes, dtypes and strides alone."""
        _require_no_meta_beside_others(self._names, tensors)
        arguments = self._operator.schema.build(_by_name(self._names, tensors) | options)
        try:
            return self._returned(self._empty(arguments))
        except IndexError as error:
            shapes = {n: tuple(t.shape) for n, t in _by_name(self._names, tensors).items()}
            raise ValueError(f"shapes {shapes}: too few dimensions") from error

    def _returned(self, results: Results) -> Any:
        if self._nothing:
            return None
        return results[self._first] if self._single else results[self._first :]


class Plan:
    """A call whose sizes do not change: checked, compiled and described once, launched many times.

    A call goes past torch's dispatcher, and the only checks left are that every tensor has the
    shape, strides, dtype and device of the one it was planned with, and an address that is aligned
    as that was. What tensors hold is not looked at, on the CPU neither. Tensors that a call is not
    given are those of the plan, which keeps them; of those that every call is given it keeps none.
    One thread and one stream at a time; launches go to the current stream, CUDA graphs capture
    them.
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
        """given: as for the operator. moves: tensors that every call is given, where the plan was
        made with them. results: names of the results, in order, that a call may be given. dry:
        nothing is launched here, so that what later steps check of earlier ones is not there.
        """
        flat = operator.schema.flat(given)
        _require_memory(flat)
        tensors = {n: t for n, t in flat.items() if isinstance(t, torch.Tensor)}
        self._moves = [name for name in moves if name in tensors]
        planned = [tensors.pop(name) for name in self._moves]
        taping = Taping(planned, kept=[*tensors.values()], dry=dry)
        made, tape = taping.run(lambda: self.first_call(operator, flat))
        if tape is None:
            raise ValueError(f"{operator.name}: a plan cannot repeat what this call computes")
        tape.hold(taping.memory(results=not results))
        self._tape = tape
        self._results, self._count = [*results[: len(made)]], len(self._moves)
        self._places = {name: n for n, name in enumerate((*self._moves, *self._results))}
        self._nothing = [None] * len(self._places)
        self._layouts, self._guards = layouts(planned), _guards(planned)
        self._same: tuple[int, ...] = ()
        self._guards_of_distinct = self._guards
        may_be_given = made[: len(self._results)]
        self._places_of_results = [view.place for view in tape.results[: len(self._results)]]
        self._made, self._guards_of_results = layouts(may_be_given), _guards(may_be_given)
        self._replaceable = taping.replaceable()[: len(self._results)]
        self.made = () if results else made

    def first_call(self, operator: Operator, flat: dict[str, Any]) -> Results:
        """What is planned, done once; a plan of a family may keep what is chosen on the way."""
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
        if _are_odd(inputs) or not self._guards.check(*inputs):
            self._check_inputs(inputs)
        if results:
            if _are_odd(results) or not self._guards_of_results.check(*results):
                self._check_results(results)
            if self._tape.gpu is None:
                self._check_apart(inputs, results)
        repeated = self._tape.repeat(inputs, zip(self._places_of_results, results, strict=False))
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
        distinct = {id(tensor): tensor for tensor in inputs}
        same = tuple(map([*distinct].index, map(id, inputs)))
        if same == self._same and not _are_odd(distinct.values()):
            if self._guards_of_distinct.check(*distinct.values()):
                return
        here = [tensor for tensor in inputs if tensor is not None]
        for name, tensor in zip(self._moves, inputs, strict=True):
            require_type(name, tensor, torch.Tensor, optional=True)
        if len(here) != self._count:
            raise ValueError(self._wrong_tensors(here))
        named = dict(zip(self._moves, here, strict=True))
        _require_memory(named)
        require_no_grad(**named)
        self._compare(self._moves, inputs, self._layouts)
        self._guards = _guards(here)  # know the next ones like these sooner
        # A tensor that is given twice, as keys and values, is none that guards take.
        self._same = same
        self._guards_of_distinct = _guards([t for t in distinct.values() if t is not None])

    def _compare(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor | None], planned: tuple
    ) -> None:
        for name, tensor, *wanted in zip(names, tensors, *planned, strict=False):
            if tensor is None:
                continue
            found = [_kind(tensor), tensor.stride()]
            if found != wanted:
                raise ValueError(f"{name} is {found[0]} {found[1]}, planned was {wanted}")

    def _check_results(self, results: Sequence[torch.Tensor | None]) -> None:
        for name, tensor in zip(self._results, results, strict=True):
            require_type(name, tensor, torch.Tensor, optional=True)
        named = _by_name(self._results, results)
        _require_memory(named)
        require_no_grad(**named)
        self._compare(self._results, results, self._made)
        for name, tensor, own in zip(self._results, results, self._replaceable, strict=True):
            if tensor is not None and not own:
                raise ValueError(f"{name} cannot be given: it is no memory of its own")

    def _check_apart(
        self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]
    ) -> None:
        """ValueError for a result in the memory of an input, but all of it, or of another one."""
        named = dict(zip(self._moves, inputs, strict=True))
        for name, tensor in zip(self._results, results, strict=True):
            if tensor is None:
                continue
            for other, read in named.items():
                require_apart(name, tensor, other, read)
            named[name] = tensor

    def _wrong_tensors(self, inputs: Sequence[Any], more: Sequence[Any] = ()) -> str:
        others = "".join(f", and {item if isinstance(item, str) else 'another'}" for item in more)
        return f"{len(inputs)} tensors{others}: planned with {', '.join(self._places)}"

    def _wrong_addresses(self, inputs: Sequence[torch.Tensor], results: Sequence[Any]) -> str:
        _require_memory(dict(zip(self._places, (*inputs, *results), strict=False)))
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


def _require_no_meta_beside_others(names: Sequence[str], tensors: Sequence[Any]) -> None:
    """ValueError for tensors without memory beside others: torch would ask for shapes alone."""
    given = _one_by_one(_by_name(names, tensors))
    meta = [name for name, tensor in given.items() if tensor.device.type == "meta"]
    if meta and len(meta) < len(given):
        devices = {name: str(tensor.device) for name, tensor in given.items()}
        raise ValueError(f"tensors are on different devices: {devices}")


def _require_no_fake_beside_others(given: Mapping[str, Any]) -> None:
    """TypeError for tensors of a tracer's fake mode beside others, which have memory."""
    tensors = _one_by_one(given)
    fake = [name for name, tensor in tensors.items() if isinstance(tensor, FakeTensor)]
    if fake and len(fake) < len(tensors):
        raise TypeError(f"{fake[0]} is a FakeTensor: either all tensors are, or none is")


def _require_memory(given: Mapping[str, Any]) -> None:
    """What `require_memory` raises, also for tensors of sequences."""
    require_memory(**_one_by_one(given))


def _one_by_one(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments, those of sequences by their number."""
    tensors = {}
    for name, value in given.items():
        several = isinstance(value, list | tuple)
        for number, item in enumerate(value if several else [value]):
            if isinstance(item, torch.Tensor):
                tensors[f"{name}[{number}]" if several else name] = item
    return tensors


def _require_int64(flat: Mapping[str, Any]) -> None:
    """ValueError for an int that no operator of torch takes."""
    for name, value in flat.items():
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{name} {value}: within int64")


def _misaligned(name: str, tensor: torch.Tensor, unit: int) -> str:
    return f"{name} at {tensor.data_ptr():#x}: multiples of {unit} bytes"


def _on_gpu(tensors: Sequence[Any]) -> bool:
    first = tensors[0]
    return (first[0] if isinstance(first, list | tuple) else first).is_cuda


def _by_name(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, Any]:
    """Those that there are."""
    return {n: t for n, t in zip(names, tensors, strict=False) if t is not None}


def _present(tensors: Sequence[Any]) -> tuple[tuple, list[torch.Tensor]]:
    """(which there are, these), those of sequences one by one."""
    here: list[Any] = []
    present: list[torch.Tensor] = []
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor):
            here.append(place)
            present.append(tensor)
        elif tensor is not None:
            here.append((place, tuple(item is not None for item in tensor)))
            present += [item for item in tensor if item is not None]
    return tuple(here), present


def _are_odd(tensors: Iterable[Any]) -> bool:
    """Whether guards cannot look at them: asked for a nested tensor, they end the process."""
    try:
        return True in map(_nested, tensors)
    except AttributeError:  # no tensor
        return True


def _guards(tensors: Sequence[torch.Tensor]) -> TensorGuards:
    """check(*tensors) is true for tensors of these layouts; it may be false for them as well,
    since it also looks at what autograd and inference mode make of a tensor."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def named(hints: Mapping[str, str]) -> Callable[[Callable], Callable]:
    """A public function that answers a wrong name with the right one. hints: names that users of
    other libraries will try -> the name here."""

    def around(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except TypeError:
                require_names(function, options, hints)
                raise

        return call

    return around


def require_names(function: Callable, options: Mapping[str, Any], hints: Mapping[str, str]) -> None:
    """TypeError for an option that is no argument of a function; hints: as for `named`."""
    known = inspect.signature(function).parameters
    for wrong in options:
        if wrong in known:
            continue
        close = difflib.get_close_matches(wrong, known, 1)
        right = hints.get(wrong) or (close[0] if close else "")
        advice = f"; it is called {right} here" if right else ""
        raise TypeError(f"{function.__name__} has no argument {wrong}{advice}")
