"""Public functions in front of an operator: the short way of a call like an earlier one, and the
answer to a wrong name.

What a function makes of its arguments, and an operator of those, takes longer than all that is left
to do where both were done before. So `fronted` looks at what the user wrote, and at nothing else:
at the values of options and the layouts of tensors. Where the operator served such a call by a tape
of just these tensors, the tape is repeated at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.autograd import forward_ad

from kernelkit.call.operator import Operator, is_watched, returned
from kernelkit.call.options import Function, require_names
from kernelkit.call.ranges import ranged
from kernelkit.call.tape import Tape

# Types of which two values that are equal are the same. Of floats 0.0 and -0.0 are not.
_PLAIN = frozenset({bool, int, str, type(None), torch.dtype})
_NONE: Mapping[str, str] = MappingProxyType({})
_Noted = tuple[Tape, Sequence[torch.Tensor], Sequence[Any]]


def fronted(
    operator: Operator, hints: Mapping[str, str] = _NONE, *others: Operator
) -> Callable[[Function], Function]:
    """A public function that checks and arranges the arguments of one call of `operator`, or of one
    of the others, does nothing else with tensors, and returns results of it. hints: names that
    users of other libraries will try -> the name here, which the answer to a wrong name is.

    A call on a GPU whose options and layouts were seen before, with plain values, tensors, and
    sequences and dataclasses of such, goes past the function and the operator.
    """

    def around(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return _asked(function, hints, args, options)
            key: list[Any] = [function, torch.is_grad_enabled(), len(args), *options]
            tensors: list[torch.Tensor] = []
            if (
                not _spell((*args, *options.values()), key, tensors)
                or is_watched(tensors)
                or forward_ad._current_level >= 0
            ):
                return _asked(function, hints, args, options)
            tapes = operator.tapes
            results = tapes.repeat(key, tensors)
            if results is not None:
                return returned(results)
            noted: list[_Noted] = []
            for each in (operator, *others):
                each.tapes.noted = noted
            try:
                results = _asked(function, hints, args, options)
            finally:
                for each in (operator, *others):
                    each.tapes.noted = None
            if len(noted) == 1:
                _learn(operator, key, tensors, noted[0], results)
            return results

        name = f"{function.__module__.partition('.')[0]}.{function.__name__}"
        return cast(Function, ranged(call, name))

    return around


def _spell(values: Iterable[Any], key: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Add to the key what decides of values, and the tensors among them. False where that cannot be
    compared."""
    for value in values:
        kind: type = type(value)
        if kind in _PLAIN:
            key += kind, value
        elif isinstance(value, torch.Tensor):
            key.append(torch.Tensor)
            tensors.append(value)
        elif kind is float:
            key.append(value.hex())
        elif kind is tuple or kind is list:
            key += kind, len(value)
            if not _spell(value, key, tensors):
                return False
        else:
            fields = _fields(kind)
            if fields is None:
                return False
            key.append(kind)
            if not _spell(fields(value), key, tensors):
                return False
    return True


@functools.cache
def _fields(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """What gives the values of the fields of a dataclass; None for another type."""
    if not dataclasses.is_dataclass(kind):
        return None
    names = [field.name for field in dataclasses.fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: [getattr(value, name) for name in names]


def _learn(
    operator: Operator, key: Sequence[Any], tensors: Sequence[torch.Tensor], noted: _Noted, got: Any
) -> None:
    """The tape that was noted serves calls of this key, if its tensors are those of the call, and
    `got` is some of its results."""
    tape, taken, made = noted
    shown = got if type(got) is tuple and len(got) > 1 else () if got is None else (got,)
    here, there = [*map(id, tensors)], [*map(id, taken)]
    wanted, offered = [*map(id, shown)], [*map(id, made)]
    if sorted(here) != sorted(there) or not {*wanted} <= {*offered}:
        return
    places = [*map(here.index, there)]
    order = None if places == [*range(len(places))] else itemgetter(*places)
    operator.tapes.learn(key, tensors, tape.giving(map(offered.index, wanted)), order)


def _asked(function: Callable, hints: Mapping[str, str], args: tuple, options: dict) -> Any:
    """What the function returns; a wrong name is answered with the right one."""
    try:
        return function(*args, **options)
    except TypeError:
        require_names(function, options, hints)
        raise
