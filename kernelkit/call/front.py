"""Public functions in front of operators: their options, their short way, and wrong names.

Options are written once, as items `name: Annotated[type, default]` of a TypedDict. A function takes
them as `**options: Unpack[Options]`, which type checkers follow through every overload and through
plans; `spelled` shows them to `help`, `inspect.signature` and `typing.get_type_hints`.

`Calls` is the one cache of calls. What a public function makes of its arguments, and an operator of
those, takes longer than all that is left to do where both were done before. So `fronted` looks at
what the user wrote, and at nothing else: at the values of options and the layouts of tensors. Where
an operator served such a call by a tape of just these tensors, the tape is repeated at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, is_not, itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.guards import TensorGuards  # what torch's compiled graphs compare with
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from kernelkit.call.ranges import ranged
from kernelkit.call.tape import Results, Tape

Function = TypeVar("Function", bound=Callable)
Guards = Callable[..., bool]
Order = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
_NONE: Mapping[str, str] = MappingProxyType({})

# ---- the cache of calls

KEPT = 64  # calls
CLOSE = 0.75  # a wrong name that is so similar to an argument's is a misspelling of it

# All tensors at once, by functions in C: half the time of a loop over tensors and attributes.
kind = attrgetter("shape", "dtype", "device")
_strides = torch.Tensor.stride
_shape = attrgetter("shape")
_modes = torch._C._len_torch_dispatch_stack
_is_profiled = torch._C._autograd._profiler_enabled
_is_deterministic = torch._C._get_deterministic_algorithms  # then memory is filled that is made
# Dispatch keys that torch considers in any call, besides those of tensors.
_ORDINARY = DispatchKeySet(DispatchKey.BackendSelect).add(DispatchKey.ADInplaceOrView)


class Served(NamedTuple):
    """Record of an operator's call: its tape, its tensors, and the results."""

    tape: Tape
    tensors: Sequence[torch.Tensor]
    results: Sequence[Any]


@dataclass(slots=True)
class _Known:
    """A call that was served. fit: guards of what its key does not say, None for nothing. order:
    the tape's tensors of the call's, None for the same ones. latest: its turn when it last was."""

    fit: Guards | None
    tape: Tape
    order: Order | None
    latest: int


class Calls(threading.local):
    """Calls of one thread that were served, the last ones used; a tape serves one call at a time.

    known: what decides of a call -> how it was served.
    """

    def __init__(self) -> None:
        _every.add(self)
        self.known: dict[Hashable, _Known] = {}
        self._turns = itertools.count()

    def repeat(self, key: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Results | None:
        """Return the results of a call like one that is known, or None."""
        try:
            whole = (*key, _is_deterministic(), *map(_shape, tensors))
            known = self.known.get(whole)
        except (RuntimeError, TypeError):  # of nested tensors, of sizes that are symbols
            return None
        if known is None:
            return None
        if known.fit is not None and not known.fit(*tensors):
            return None
        known.latest = next(self._turns)  # an OrderedDict would hash the whole key once more
        order = known.order
        results = known.tape.repeat(tensors if order is None else order(tensors))
        if results is not None and _listening.served is not None:
            _listening.served.append(Served(known.tape, tensors, results))
        return results

    def keep(
        self,
        key: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        tape: Tape,
        fit: Guards | None = None,
        order: Order | None = None,
    ) -> None:
        """Serve calls like this one by the tape."""
        try:
            whole = (*key, _is_deterministic(), *map(_shape, tensors))
            self.known[whole] = _Known(fit, tape, order, next(self._turns))
        except (RuntimeError, TypeError):
            return
        if len(self.known) > KEPT:
            del self.known[min(self.known, key=lambda call: self.known[call].latest)]

    def learn(
        self, key: Sequence[Any], tensors: Sequence[torch.Tensor], served: list[Served], got: Any
    ) -> None:
        """Serve calls like this one by the tape of the one operator that served it.

        The tape must have had just the tensors of the call, of which one may occur twice, and `got`
        must be some of its results: then neither the function nor torch's dispatcher had anything
        to do.
        """
        if len(served) != 1:
            return
        odd = torch._C._dispatch_tls_local_include_set() - _ORDINARY  # keys of transformations
        if odd.raw_repr():
            return
        (tape, taken, made), here = served[0], [*map(id, tensors)]
        there, offered = [*map(id, taken)], [*map(id, made)]
        shown = got if type(got) is tuple and len(got) > 1 else () if got is None else (got,)
        wanted = [*map(id, shown)]
        if {*here} != {*there} or not {*wanted} <= {*offered}:
            return
        places = [*map(here.index, there)]
        order = None if places == [*range(len(here))] else _picking(places)
        if wanted != offered:
            tape = tape.giving(map(offered.index, wanted))
        self.keep(key, tensors, tape, guards_of(tensors), order)


def _picking(places: Sequence[int]) -> Order:
    """Return a function that selects the tensors at these places."""
    if len(places) == 1:  # of which itemgetter would give the tensor itself
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places)


_every: weakref.WeakSet[Calls] = weakref.WeakSet()


def forget() -> None:
    """Drop every call that this thread has kept, where what it depends on has changed."""
    for calls in [*_every]:
        calls.known.clear()


class _Listening(threading.local):
    """served: where there is a list, operators of this thread add what served their calls."""

    served: list[Served] | None = None


_listening = _Listening()


@contextmanager
def noting() -> Iterator[list[Served]]:
    """Within the block the calls of operators are noted; a block around it sees them, too."""
    outer, _listening.served = _listening.served, []
    try:
        yield _listening.served
    finally:
        noted, _listening.served = _listening.served, outer
    if outer is not None:
        outer += noted


@contextmanager
def noting_nothing() -> Iterator[None]:
    """Within the block calls of operators are parts of another one, which is noted as a whole."""
    outer, _listening.served = _listening.served, None
    try:
        yield
    finally:
        _listening.served = outer


def note(tape: Tape, tensors: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
    """Tell whoever listens what served a call."""
    if _listening.served is not None:
        _listening.served.append(Served(tape, tensors, results))


def layouts(tensors: Sequence[torch.Tensor]) -> tuple:
    """Return a hashable key of all that a call depends on besides addresses and contents."""
    return tuple(map(kind, tensors)), tuple(map(_strides, tensors))


def never(*tensors: torch.Tensor) -> bool:
    """Guards that no tensors pass."""
    return False


def guards_of(tensors: Sequence[torch.Tensor]) -> Guards:
    """guards(*others): true for tensors of these layouts, the same ones in the same places; it may
    be false for them as well, since it also looks at what autograd and modes make of a tensor."""
    first: dict[int, int] = {}
    for place, tensor in enumerate(tensors):
        first.setdefault(id(tensor), place)
    places = [*first.values()]
    distinct = [tensors[place] for place in places]
    check = TensorGuards(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if len(distinct) == len(tensors):
        return check
    # Torch's guards take no tensor twice, as keys and values.
    again = [(n, first[id(t)]) for n, t in enumerate(tensors) if first[id(t)] != n]

    def guards(*others: torch.Tensor) -> bool:
        for place, earlier in again:
            if others[place] is not others[earlier]:
                return False
        return check(*map(others.__getitem__, places))

    return guards


def is_watched(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch shows operators of these to somebody: a subclass, a mode, a profiler."""
    return has_torch_function(tensors) or _modes() > 0 or _is_profiled()


def returned(results: Results) -> Any:
    """Results as an operator returns them: one is no tuple, and none is None."""
    return results if len(results) > 1 else next(iter(results), None)


# ---- the short way of a call

# Types of which two values that are equal are the same. Of floats 0.0 and -0.0 are not.
_PLAIN = frozenset({bool, int, str, type(None), torch.dtype})


def fronted(hints: Mapping[str, str] = _NONE) -> Callable[[Function], Function]:
    """Decorator of a public function that checks and arranges the arguments of one call of an
    operator, does nothing else with tensors, and returns the operator's results.

    A GPU call skips the function and the operator if a call with the same options and layouts was
    seen before. Its arguments have to be plain values, tensors, or sequences and dataclasses of
    such.

    Args:
        hints: name that users of other libraries will try -> the name here; the error for a wrong
            name shows it.
    """

    def around(function: Function) -> Function:
        calls = Calls()

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return _asked(function, hints, args, options)
            key: list[Any] = [torch.is_grad_enabled(), len(args), *options]
            tensors: list[torch.Tensor] = []
            if (
                not _spell((*args, *options.values()), key, tensors)
                or is_watched(tensors)
                or forward_ad._current_level >= 0
            ):
                return _asked(function, hints, args, options)
            results = calls.repeat(key, tensors)
            if results is not None:
                return returned(results)
            with noting() as served:
                got = _asked(function, hints, args, options)
            calls.learn(key, tensors, served, got)
            return got

        vars(call)["calls"] = calls
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
    """Return a getter of the field values of a dataclass; None for another type."""
    if not dataclasses.is_dataclass(kind):
        return None
    names = [field.name for field in dataclasses.fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: [getattr(value, name) for name in names]


def _asked(function: Callable, hints: Mapping[str, str], args: tuple, options: dict) -> Any:
    """Call the function; for a wrong name raise an error with the right one, and for arguments that
    are given by position and should not be, one with the names of the others."""
    try:
        return function(*args, **options)
    except TypeError:
        require_names(function, options, hints)
        _require_positions(function, args)
        raise


def _require_positions(function: Callable, args: tuple) -> None:
    """Raise TypeError for more arguments by position than a function has."""
    parameters = inspect.signature(function).parameters.values()
    own = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(args) > len(own):
        raise TypeError(
            f"{function.__name__} has {len(args)} arguments by position: it takes "
            f"{', '.join(own)}, and all others by name"
        )


# ---- options


def spelled(options: type) -> Callable[[Function], Function]:
    """Decorator: the signature and annotations of a function that takes `**options` of this
    TypedDict name each of them. The function itself is returned, so a call costs nothing more."""
    hints = get_type_hints(options, include_extras=True)
    items = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=hint.__metadata__[0],
            annotation=hint.__origin__,
        )
        for name, hint in hints.items()
    ]

    def around(function: Function) -> Function:
        plain = inspect.signature(function)
        own = [each for each in plain.parameters.values() if each.kind is not each.VAR_KEYWORD]
        shown = plain.replace(parameters=[*own, *items])
        hinted = {each.name: each.annotation for each in shown.parameters.values()}
        function.__annotations__ = hinted | {"return": plain.return_annotation}
        vars(function)["__signature__"] = shown
        return function

    return around


def defaults_of(function: Callable) -> dict[str, Any]:
    """Map each argument that has a default to it."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def given_options(
    function: Callable, options: Mapping[str, object], defaults: Mapping[str, object]
) -> dict[str, Any]:
    """Options that are not at their default: an operator parses every one that it is given.

    TypeError for one that is no argument of the function. defaults: `defaults_of` the function.
    """
    for name in options:
        if name not in defaults:
            require_names(function, options)
    plain = map(defaults.__getitem__, options)
    return dict(compress(options.items(), map(is_not, options.values(), plain)))


def require_names(
    function: Callable, options: Mapping[str, object], hints: Mapping[str, str] = _NONE
) -> None:
    """TypeError for an option that is no argument of a function. hints: names that users of other
    libraries will try -> the name here, or what to do instead."""
    known = inspect.signature(function).parameters
    for wrong in options:
        if wrong in known:
            continue
        hint, close = hints.get(wrong, ""), difflib.get_close_matches(wrong, known, 1, CLOSE)
        advice = f": {hint}" if hint else f"; did you mean {close[0]}?" if close else ""
        if hint in known:
            advice = f"; it is called {hint} here"
        raise TypeError(f"{function.__name__} has no argument {wrong}{advice}")
