"""Torch operators of kernels, made from a dataclass of arguments and a function that runs it.

They provide the schema, an operator that is opaque to tracers, and cheap repetition of eager calls.

A family writes one dataclass and one function `run(arguments) -> results`, which checks, chooses,
allocates and launches. A field that is a dataclass is flattened in the schema, `x_data` for
`x.data`. A field that may be a tensor or a word becomes two arguments, `scale` and `scale_word`.

On a GPU the first call of a layout is recorded on a tape (`kernelkit.call.tape`), and later calls
of the same layouts and options repeat the tape. They skip the first call's checks, since nothing
checked has changed; written memory is still apart from read memory. They also skip torch's
dispatcher if it would do nothing to them and nobody watches. On the CPU every call is checked,
including the contents of tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from kernelkit.call.front import Calls, is_watched, layouts, note, noting, noting_nothing, returned
from kernelkit.call.launch import NoTarget
from kernelkit.call.ranges import ranged
from kernelkit.call.tape import Results, Taping
from kernelkit.call.tensors import (
    as_number,
    require_apart,
    require_int64,
    require_memory,
    require_no_grad,
    require_no_tangents,
    require_own_elements,
    require_strided,
    require_tensors,
    require_type,
    require_writable,
)
from kernelkit.compile.compiler import collecting

NAMESPACE = "blackwell_kernels"


class Operator:
    """The operator `blackwell_kernels::<name>`, and `<name>_out` if there is a field `out`.

    arguments: a frozen dataclass whose fields are tensors, numbers, words, dtypes, or dataclasses
        of such
    run: does the work, and returns a tuple of new tensors; with `out` the first of them is `out`
    empty: makes results like those of `run`, without checks, for tracers; sizes may be symbols
    results: number of results
    writes: names of other arguments that are written to. They overlap no other argument; `out` may
        be q itself.
    pools: whether only parts of the written arguments are written; `run` checks which
    hosted: arguments that may be in host memory while others are on a GPU; `run` checks how

    calls: recorded calls that need no dispatcher
    tapes: recorded calls that came through torch's dispatcher
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
        self.calls, self.tapes, self._writes = Calls(), Calls(), ("out", *writes)
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
        results = self.calls.repeat(key, tensors)
        if results is not None:
            return returned(results)
        with noting() as served:
            results = self._dispatch(flat)
        self.calls.learn(key, tensors, served, results)
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
                require_memory(**self.schema.by_path(tensors))
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
            require_strided(**self.schema.by_path(flat))
            require_int64(**flat)
        else:
            self.require_usable(flat)
        return self.schema.build(flat)

    def require_usable(self, flat: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """TypeError or ValueError for leaves of the schema that no kernel can take: tensors without
        memory or on several devices, and numbers beyond int64. Returns the tensors by path."""
        tensors = self.schema.by_path(flat)
        require_memory(**tensors)
        require_int64(**flat)
        require_tensors(**{path: t for path, t in tensors.items() if path not in self._hosted})
        return tensors

    def run(self, flat: dict[str, Any]) -> Results:
        """The whole way down. flat: leaves of the schema that are not at their default."""
        self._require_written(self.require_usable(flat))
        return self._run(self.schema.build(flat))

    def check(self, flat: dict[str, Any]) -> None:
        """Raise what `run` would for tensors without memory; nothing is compiled or launched.

        Without an `arch` the checks of the arguments are made, and none of an architecture's own.
        """
        with collecting(), contextlib.suppress(NoTarget):
            self.run(flat)

    def _require_written(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """ValueError for a written tensor that cannot be written, or overlaps another argument."""
        written = {path: t for path, t in tensors.items() if self._is_written(path)}
        if not written:
            return
        require_writable(**written)
        if self._pools:
            return
        others = dict(tensors)
        for path, tensor in written.items():
            require_own_elements(path, tensor)
            del others[path]
            for other, read in others.items():
                require_apart(path, tensor, other, read)

    def _is_written(self, path: str) -> bool:
        return path.split("[")[0].replace(".", "_") in self._writes

    def recall(self, names: Sequence[str], tensors: Sequence[Any], options: dict) -> Results:
        """The results, by the tape of an earlier call of this thread, if one had these layouts and
        options and its memory lay as this call's does; else the whole way down, and a tape of it.
        """
        here, present = _present(tensors)
        # By places among so many names: with and without `out` they mean other tensors.
        key = len(names), here, layouts(present), tuple(options.items())
        results = self.tapes.repeat(key, present)
        if results is not None:
            return results
        flat = by_name(names, tensors) | options
        paths = [*self.schema.by_path(flat)]
        written = [n for n, path in enumerate(paths) if self._is_written(path)]
        with noting_nothing():  # of operators within this one
            results, tape = Taping(present, written=written).run(lambda: self.run(flat))
        if tape is not None and not tape.reads:
            self.tapes.keep(key, present, tape)
            note(tape, present, results)
        return results

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


class _Call:
    """Callable that torch invokes: the implementation of an operator, and its fake."""

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
    _, given = _present(tensors)
    return all(t.device.type == "meta" and not isinstance(t, FakeTensor) for t in given)


def _require_no_meta_beside_others(names: Sequence[str], tensors: Sequence[Any]) -> None:
    """ValueError for tensors without memory beside others: torch would ask for shapes alone."""
    given = one_by_one(by_name(names, tensors))
    meta = [name for name, tensor in given.items() if tensor.device.type == "meta"]
    if meta and len(meta) < len(given):
        devices = {name: str(tensor.device) for name, tensor in given.items()}
        raise ValueError(f"tensors are on different devices: {devices}")


def _require_no_fake_beside_others(given: Mapping[str, Any]) -> None:
    """TypeError for tensors of a tracer's fake mode beside others, which have memory."""
    tensors = one_by_one(given)
    fake = [name for name, tensor in tensors.items() if isinstance(tensor, FakeTensor)]
    if fake and len(fake) < len(tensors):
        raise TypeError(f"{fake[0]} is a FakeTensor: either all tensors are, or none is")


def one_by_one(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments, those of sequences by their number."""
    tensors = {}
    for name, value in given.items():
        several = isinstance(value, list | tuple)
        for number, item in enumerate(value if several else [value]):
            if isinstance(item, torch.Tensor):
                tensors[f"{name}[{number}]" if several else name] = item
    return tensors


def _on_gpu(tensors: Sequence[Any]) -> bool:
    first = tensors[0]
    return (first[0] if isinstance(first, list | tuple) else first).is_cuda


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


# ---- schemas

SCHEMA_TYPES = {
    torch.Tensor: "Tensor",
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
}
WORD = "_word"
_hints = cache(typing.get_type_hints)  # half a millisecond for the arguments of attention


@dataclass(frozen=True)
class Leaf:
    """Argument of an operator.

    name: name in the schema
    path: dotted path from the dataclass
    kind: a key of SCHEMA_TYPES
    optional: whether None is allowed
    default: MISSING if there is none
    alone: whether the field has this kind only; a field of two kinds has two leaves
    many: whether the argument is a sequence of this kind
    """

    name: str
    path: str
    kind: type
    optional: bool
    default: Any = MISSING
    alone: bool = True
    many: bool = False
    exact: frozenset[type] = dataclasses.field(init=False)  # types that need no second look

    def __post_init__(self) -> None:
        """No cached property: a tracer cannot enter the lock of one."""
        optional = {type(None)} if self.optional else set()
        exact = frozenset() if self.many else frozenset({self.kind, *optional})
        object.__setattr__(self, "exact", exact)

    @property
    def is_tensor(self) -> bool:
        """Whether it goes by position."""
        return self.kind is torch.Tensor

    def checked(self, value: Any) -> Any:
        """Return the value, a number as Python's own; TypeError for a value of another kind."""
        if self.kind in (int, float) and not self.many:
            return as_number(self.path, value, self.kind, optional=self.optional)
        for item in value if self.many else (value,):
            require_type(self.path, item, self.kind, optional=self.optional)
        return value

    def declared(self, letter: str = "") -> str:
        """Return the declaration in a schema; `letter` marks written memory, '' for none."""
        written = f"({letter}!)" if letter else ""
        sequence = "[]" * self.many
        text = f"{SCHEMA_TYPES[self.kind]}{written}{'?' * self.optional}{sequence} {self.name}"
        if self.default is MISSING:
            return text
        if self.many:  # a schema has no default of a list of tensors
            return text.replace("[] ", "[]? ") + "=None"
        literal = f'"{self.default}"' if isinstance(self.default, str) else self.default
        return f"{text}={literal}"


class Schema:
    """Schema of a dataclass of arguments.

    tensors: its tensor leaves, passed by position; those with a default are last
    others: other leaves, passed by name
    """

    def __init__(self, arguments: type) -> None:
        self.arguments = arguments
        leaves = [*_leaves(arguments)]
        self.tensors = [leaf for leaf in leaves if leaf.is_tensor]
        self.tensors.sort(key=lambda leaf: leaf.default is not MISSING)
        self.others = [leaf for leaf in leaves if not leaf.is_tensor]
        self._defaults = {leaf.name: leaf.default for leaf in leaves if leaf.default is not MISSING}
        self._paths = {leaf.name: leaf.path for leaf in leaves}
        self._of_field: dict[str, list[tuple[Leaf, tuple[str, ...]]]] = {}
        for leaf in leaves:
            field, *path = leaf.path.split(".")
            self._of_field.setdefault(field, []).append((leaf, tuple(path)))
        self._plain = {
            leaf.name: (leaf, leaf.exact, leaf.is_tensor, leaf.default)
            for leaf in leaves
            if leaf.name == leaf.path and leaf.alone and not leaf.many
        }
        hints = _hints(arguments)
        self._nested = {
            name: kind
            for name, kind in ((field, _split(hints[field])) for field in self._of_field)
            if kind[0] and dataclasses.is_dataclass(kind[0][0])
        }

    def by_path(self, flat: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors among leaves as users write them, those of a sequence as `parts[0]`."""
        return one_by_one({self._paths[name]: value for name, value in flat.items()})

    def text(self, results: int, writes: tuple[str, ...] = (), without: str = "") -> str:
        """'(Tensor q, ..., *, bool causal=False, ...) -> (Tensor, Tensor)'. writes: names of
        tensors that the operator writes to. without: a tensor that is no argument of it."""
        letters = dict(zip(writes, "abcdefgh", strict=False))
        parts = [t.declared(letters.get(t.name, "")) for t in self.tensors if t.name != without]
        if self.others:
            parts += ["*", *(leaf.declared() for leaf in self.others)]
        return f"({', '.join(parts)}) -> ({', '.join(['Tensor'] * results)})"

    def flat(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values of fields -> values of leaves, those left out that have their default.

        TypeError for a value of another type, NotImplementedError for a tensor of which autograd
        expects gradients.
        """
        found: dict[str, Any] = {}
        grad = torch.is_grad_enabled()
        for field, value in given.items():
            plain = self._plain.get(field)
            if plain is None:
                self._flatten(field, value, found, grad)
                continue
            leaf, exact, is_tensor, default = plain
            if type(value) not in exact:
                value = leaf.checked(value)
            if is_tensor:
                if value is None:
                    continue
                if grad and value.requires_grad:
                    require_no_grad(**{field: value})
            elif value is default or value == default:
                continue
            found[field] = value
        if forward_ad._current_level >= 0:
            for leaf in self.tensors:
                require_no_tangents(_by_path(leaf, found.get(leaf.name)))
        return found

    def _flatten(self, field: str, value: Any, found: dict[str, Any], grad: bool) -> None:
        """The leaves of a field that is a dataclass, a sequence, or of two kinds."""
        if field not in self._of_field:
            raise TypeError(f"{self.arguments.__name__} has no argument {field}")
        if field in self._nested:
            _check_nested(field, value, *self._nested[field])
        for leaf, path in self._of_field[field]:
            item = _at(field, value, path)
            if item is MISSING:
                if leaf.default is MISSING and not leaf.optional:
                    raise TypeError(f"{leaf.path} is missing: one of the parts before it is None")
                continue
            if not leaf.alone and isinstance(item, str) != (leaf.kind is str):
                item = None
            if type(item) not in leaf.exact:
                item = leaf.checked(item)
            if leaf.is_tensor:
                if item is None:
                    continue
                if grad:
                    _refuse_grad(leaf, item)
            elif item is leaf.default or item == leaf.default:
                continue
            found[leaf.name] = item

    def build(self, flat: dict[str, Any]) -> Any:
        """The dataclass, of values of leaves; those left out have their default."""
        return _build(self.arguments, self._defaults | flat, "")


def _leaves(
    kind: type, prefix: str = "", path: str = "", base: Any = MISSING, optional: bool = False
) -> Iterator[Leaf]:
    """Yield the leaves of a dataclass.

    Its defaults are the values of the instance `base`, if given. `optional` is whether None is
    allowed in its place.
    """
    hints = _hints(kind)
    for field in dataclasses.fields(kind):
        default = field.default if base is MISSING else getattr(base, field.name)
        name, where = prefix + field.name, path + field.name
        hint = hints[field.name]
        many = typing.get_origin(hint) is tuple
        kinds, nullable = _split(typing.get_args(hint)[0] if many else hint)
        if dataclasses.is_dataclass(kinds[0]):
            inner = MISSING if default is None else default
            yield from _leaves(kinds[0], f"{name}_", f"{where}.", inner, optional or nullable)
            continue
        if default is MISSING and (optional or nullable) and not many:
            default = None
        for item in kinds:
            alone = len(kinds) == 1
            own = name if item is not str or alone else name + WORD
            value = default if alone or default is MISSING or isinstance(default, item) else None
            may_be_none = nullable or not alone or (optional and value is None)
            yield Leaf(own, where, item, may_be_none, value, alone, many)


def _split(hint: Any) -> tuple[tuple[type, ...], bool]:
    """The types of a hint, and whether None is one."""
    kinds = typing.get_args(hint) or (hint,)
    nothing = type(None)
    return tuple(kind for kind in kinds if kind is not nothing), nothing in kinds


def _refuse_grad(leaf: Leaf, value: Any) -> None:
    for item in value if leaf.many else (value,):
        if item is not None and item.requires_grad:
            require_no_grad(**_by_path(leaf, value))


def _by_path(leaf: Leaf, value: Any) -> dict[str, torch.Tensor]:
    """The tensors of a leaf as users name them, those of a sequence by their number."""
    if not leaf.many:
        return {} if value is None else {leaf.path: value}
    return {f"{leaf.path}[{n}]": item for n, item in enumerate(value or ()) if item is not None}


def _at(field: str, value: Any, path: Sequence[str]) -> Any:
    """value.a.b, MISSING where something on the way is None. torch.compile traces it, which it does
    not do with an attrgetter."""
    try:
        for name in path:
            if value is None:
                return MISSING
            value = getattr(value, name)
    except AttributeError as error:
        raise TypeError(f"{field} has a {type(value).__name__} without {name}") from error
    return value


def _check_nested(field: str, value: Any, kinds: tuple[type, ...], optional: bool) -> None:
    if not (isinstance(value, kinds) or (value is None and optional)):
        words = f"{kinds[0].__name__}{' or None' * optional}"
        raise TypeError(f"{field} is {type(value).__name__}, expected {words}")


@cache
def _fields(kind: type) -> tuple[tuple[str, type | None, bool, bool, Any], ...]:
    """Return for each field of a dataclass: (name, its dataclass if nested, whether it has two
    kinds, whether None is allowed, default)."""
    found = []
    for field in dataclasses.fields(kind):
        kinds, nullable = _split(_hints(kind)[field.name])
        nested = kinds[0] if dataclasses.is_dataclass(kinds[0]) else None
        found.append((field.name, nested, len(kinds) > 1, nullable, field.default))
    return tuple(found)


def _build(kind: type, flat: Mapping[str, Any], prefix: str) -> Any:
    values = {}
    for field, nested, several, nullable, default in _fields(kind):
        name, value = prefix + field, None
        if nested is None:
            value = flat.get(name)
            if several and value is None:
                value = flat.get(name + WORD)
        elif not nullable or _is_there(nested, flat, name):
            value = _build(nested, flat, f"{name}_")
        if value is None and not nullable:
            if default is MISSING:
                raise TypeError(f"{name} is missing")
            value = default
        values[field] = value
    return kind(**values)


def _is_there(kind: type, flat: Mapping[str, Any], name: str) -> bool:
    """An optional dataclass is there if one of the fields is that cannot be left out."""
    needed = [field for field, *_, default in _fields(kind) if default is MISSING]
    return not needed or any(flat.get(f"{name}_{inner}") is not None for inner in needed)
