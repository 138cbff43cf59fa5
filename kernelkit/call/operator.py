"""Torch operators of kernels: from a dataclass of arguments and a function that runs it come the
operator that tracers see whole, and the cheap repetition of an eager call.

A family writes one dataclass and one function `run(arguments) -> results`, which checks, chooses,
allocates and launches. On a GPU the first call of a layout is taken down on a tape
(`kernelkit.call.tape`), and later calls of the same layouts and options repeat the tape: they skip
what the first one checked, since nothing that it looked at has changed (what is written still lies
apart from what is read), and torch's dispatcher, where it would do nothing to them and nobody
watches. On the CPU every call is checked, also what tensors hold.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING
from operator import attrgetter
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.guards import TensorGuards  # what torch's compiled graphs compare with
from torch._subclasses import FakeTensor
from torch.overrides import has_torch_function

from kernelkit.call.launch import NoTarget
from kernelkit.call.ranges import ranged
from kernelkit.call.schema import Schema
from kernelkit.call.tape import Results, Tape, Taping
from kernelkit.call.tensors import (
    require_apart,
    require_int64,
    require_memory,
    require_own_elements,
    require_strided,
    require_tensors,
)
from kernelkit.call.writable import require_writable
from kernelkit.compile.compiler import collecting
from kernelkit.compile.signature import leaves

NAMESPACE = "blackwell_kernels"
TAPES = 64  # of an operator and a thread

# All tensors at once, by functions in C: half the time of a loop over tensors and attributes.
kind = attrgetter("shape", "dtype", "device")
_strides = torch.Tensor.stride
_shape = attrgetter("shape")
_modes = torch._C._len_torch_dispatch_stack
_is_profiled = torch._C._autograd._profiler_enabled
# Keys that torch's dispatcher looks at in any call, beside those of tensors.
_ORDINARY = DispatchKeySet(DispatchKey.BackendSelect).add(DispatchKey.ADInplaceOrView)
_is_deterministic = torch._C._get_deterministic_algorithms  # then memory is filled that is made
Guards = Callable[..., bool]
Order = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def never(*tensors: torch.Tensor) -> bool:
    """Guards that no tensors pass."""
    return False


def layouts(tensors: Sequence[torch.Tensor]) -> tuple:
    """What a call depends on besides addresses and contents, to be compared and hashed."""
    return tuple(map(kind, tensors)), tuple(map(_strides, tensors))


class Operator:
    """The operator `blackwell_kernels::<name>`, and `<name>_out` where a field `out` may be given.

    arguments: a frozen dataclass whose fields are tensors, numbers, words, dtypes, or dataclasses
    of such. run: does the work, and returns a tuple of new tensors; with `out` the first of them is
    that tensor. empty: makes results like those, without checks, for tracers: sizes may be symbols.
    results: how many there are. writes: names of other arguments that are written to. What is
    written overlaps no other argument, but `out` may be q itself. pools: only parts of the written
    arguments are written, and `run` checks which. hosted: arguments that may be in the host's
    memory where others are on a GPU, and `run` checks how.
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
        pools: bool = False,
        hosted: tuple[str, ...] = (),
    ) -> None:
        self.name, self.schema, self._run, self._pools = name, Schema(arguments), run, pools
        self._hosted = hosted
        self.tapes, self._writes = _Tapes(), ("out", *writes)
        self._splits: dict[tuple[str, ...], tuple[list[str], list[str], bool]] = {}
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

    @ranged
    def __call__(self, given: Mapping[str, Any]) -> Any:
        """The results, of fields of the dataclass by name; those left out have their default.

        TypeError for a value of another type, NotImplementedError for a tensor that requires grad,
        and whatever `run` raises.
        """
        flat = self.schema.flat(given)
        if torch.compiler.is_compiling():
            return self._dispatch(flat)
        key, tensors = self._split(flat)
        if not tensors or not _on_gpu(tensors) or is_watched(tensors):
            return self._dispatch(flat)
        results = self.tapes.repeat(key, tensors)
        if results is not None:
            return returned(results)
        self.tapes.latest = None
        results = self._dispatch(flat)
        self.tapes.know(key, tensors, results)
        return results

    def _split(self, flat: dict[str, Any]) -> tuple[tuple, list[torch.Tensor]]:
        """(names, which tensors sequences have, and options; tensors in the schema's order)."""
        names = tuple(flat)
        split = self._splits.get(names)
        if split is None:
            tensors = [leaf for leaf in self.schema.tensors if leaf.name in flat]
            placed = [leaf.name for leaf in tensors]
            others = [name for name in names if name not in placed]
            split = self._splits[names] = placed, others, any(leaf.many for leaf in tensors)
        placed, others, many = split
        found = [flat[name] for name in placed]
        form, found = _present(found) if many else ((), found)
        return (names, form, *[flat[name] for name in others]), found

    def _dispatch(self, flat: dict[str, Any]) -> Any:
        """The results, by way of torch's dispatcher, which knows tracers, modes and subclasses."""
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
                require_int64(**flat)
                _require_no_fake_beside_others(tensors)
                require_all_memory(tensors)
                raise
        if out is None:
            return results
        if results is None:
            return out
        return (out, *(results if isinstance(results, tuple | list) else (results,)))

    def arguments(self, given: Mapping[str, Any], *, alone: bool = False) -> Any:
        """The dataclass, of checked types. alone: no kernel is to take the tensors as they are, so
        that they may lack memory and be on several devices."""
        flat = self.schema.flat(given)
        if alone:
            require_strided(**_one_by_one(flat))
            require_int64(**flat)
        else:
            self.require_usable(flat)
        return self.schema.build(flat)

    def require_usable(self, flat: Mapping[str, Any]) -> None:
        """TypeError or ValueError for leaves of the schema that no kernel can take: tensors without
        memory or on several devices, and numbers beyond int64."""
        require_all_memory(flat)
        require_int64(**flat)
        together = _one_by_one({n: t for n, t in flat.items() if n not in self._hosted})
        require_tensors(**{self.schema.path(name): t for name, t in together.items()})

    def run(self, flat: dict[str, Any]) -> Results:
        """The whole way down. flat: leaves of the schema that are not at their default."""
        self.require_usable(flat)
        self._require_written(flat)
        return self._run(self.schema.build(flat))

    def check(self, flat: dict[str, Any]) -> None:
        """Raise what `run` would for tensors without memory; nothing is compiled or launched.

        Without an `arch` the checks of the arguments are made, and none of an architecture's own.
        """
        with collecting(), contextlib.suppress(NoTarget):
            self.run(flat)

    def _require_written(self, flat: Mapping[str, Any]) -> None:
        """ValueError for a written tensor that cannot be written, or overlaps another argument."""
        written = {n: t for n, t in _one_by_one(flat).items() if n.split("[")[0] in self._writes}
        if not written:
            return
        require_writable(**written)
        if self._pools:
            return
        others = {self.schema.path(name): t for name, t in _one_by_one(flat).items()}
        for name, tensor in written.items():
            path = self.schema.path(name)
            require_own_elements(path, tensor)
            del others[path]
            for other, read in others.items():
                require_apart(path, tensor, other, read)

    def recall(self, names: Sequence[str], tensors: Sequence[Any], options: dict) -> Results:
        """The results, by the tape of an earlier call of this thread, if one had these layouts and
        options and its memory lay as this call's does; else the whole way down, and a tape of it.
        """
        here, present = _present(tensors)
        # By places among so many names: with and without `out` they mean other tensors.
        layout = layouts(present), _is_deterministic()
        key = len(names), here, layout, tuple(options.items())
        kept = self.tapes.kept
        tape = kept.get(key)
        if tape is not None:
            repeated = tape.repeat(present)
            if repeated is not None:
                kept.move_to_end(key)
                self.tapes.latest = [*map(id, present)], tape
                return repeated
        given = by_name(names, tensors)
        written = [n for n, name in enumerate(_one_by_one(given)) if name in self._writes]
        flat = given | options
        results, tape = Taping(present, written=written).run(lambda: self.run(flat))
        self.tapes.latest = None  # what is noted there is of operators within this one
        if tape is not None and not tape.reads:
            self.tapes.latest = [*map(id, present)], tape
            kept[key] = tape
            kept.move_to_end(key)
            if len(kept) > TAPES:
                kept.popitem(last=False)
        return results

    def forget(self) -> None:
        """Drop the tapes of this thread."""
        self.tapes.kept.clear()
        self.tapes.known.clear()

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
    call at a time.

    known: by what is compared soonest, the tapes that serve a call without the dispatcher: with the
    guards of the rest, and where the tape's tensors stand among the call's, None for one to one.
    latest: the tape that the last call came to, and the ids of its tensors. noted: where there is a
    list, each call that was served adds its tape, tensors and results.
    """

    def __init__(self) -> None:
        self.kept: OrderedDict[Hashable, Tape] = OrderedDict()
        self.known: dict[Hashable, tuple[Guards, Tape, Order | None]] = {}
        self.latest: tuple[list[int], Tape] | None = None
        self.noted: list[tuple[Tape, Sequence[torch.Tensor], Sequence[Any]]] | None = None

    def repeat(self, key: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Results | None:
        """The results of a call like one that is known, or None."""
        try:
            known = self.known.get((*key, _is_deterministic(), *map(_shape, tensors)))
        except (RuntimeError, TypeError):  # of nested tensors, of sizes that are symbols
            return None
        if known is None:
            return None
        fit, tape, order = known
        if not fit(*tensors):
            return None
        results = tape.repeat(tensors if order is None else order(tensors))
        if self.noted is not None and results is not None:
            self.noted.append((tape, tensors, results))
        return results

    def know(self, key: Sequence[Any], tensors: Sequence[torch.Tensor], results: Any) -> None:
        """The latest tape serves calls like this one, if it was given just what the call was: then
        the dispatcher had nothing to do."""
        latest, self.latest = self.latest, None
        odd = torch._C._dispatch_tls_local_include_set() - _ORDINARY  # keys of transformations
        if latest is None or latest[0] != [*map(id, tensors)] or odd.raw_repr():
            return
        self.learn(key, tensors, latest[1])
        if self.noted is not None:
            made = [] if results is None else leaves(results)
            self.noted.append((latest[1], tensors, made))

    def learn(
        self,
        key: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        tape: Tape,
        order: Order | None = None,
    ) -> None:
        """The tape serves calls like this one."""
        try:
            whole = (*key, _is_deterministic(), *map(_shape, tensors))
            self.known.pop(whole, None)
        except (RuntimeError, TypeError):
            return
        self.known[whole] = guards_of(tensors), tape, order
        if len(self.known) > 2 * TAPES:  # of the operator, and of a function in front of it
            del self.known[next(iter(self.known))]


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
        return self._returned(self._operator.run(by_name(self._names, tensors) | options))

    def fake(self, *tensors: torch.Tensor | None, **options: Any) -> Any:
        """Shapes, dtypes and strides alone."""
        _require_no_meta_beside_others(self._names, tensors)
        given = by_name(self._names, tensors) | options
        if _is_plain_meta(tensors):
            self._operator.check(given)
        arguments = self._operator.schema.build(given)
        try:
            return self._returned(self._empty(arguments))
        except IndexError as error:
            shapes = {n: tuple(t.shape) for n, t in by_name(self._names, tensors).items()}
            raise ValueError(f"shapes {shapes}: too few dimensions") from error

    def _returned(self, results: Results) -> Any:
        if self._nothing:
            return None
        return results[self._first] if self._single else results[self._first :]


def _is_plain_meta(tensors: Sequence[Any]) -> bool:
    """Whether tensors are those of a caller on the device meta, and not a tracer's."""
    given = [*_one_by_one({str(n): t for n, t in enumerate(tensors)}).values()]
    return all(t.device.type == "meta" and not isinstance(t, FakeTensor) for t in given)


def _require_no_meta_beside_others(names: Sequence[str], tensors: Sequence[Any]) -> None:
    """ValueError for tensors without memory beside others: torch would ask for shapes alone."""
    given = _one_by_one(by_name(names, tensors))
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


def require_all_memory(given: Mapping[str, Any]) -> None:
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


def is_watched(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch shows operators of these to somebody: a subclass, a mode, a profiler."""
    return has_torch_function(tensors) or _modes() > 0 or _is_profiled()


def _on_gpu(tensors: Sequence[Any]) -> bool:
    first = tensors[0]
    return (first[0] if isinstance(first, list | tuple) else first).is_cuda


def returned(results: Results) -> Any:
    """As an operator returns results: one is no tuple, and none is None."""
    return results if len(results) > 1 else next(iter(results), None)


def by_name(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, Any]:
    """Map each name to its tensor, leaving out those that are None."""
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
