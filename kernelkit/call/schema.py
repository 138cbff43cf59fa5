"""The schema of a torch operator whose arguments are the fields of a dataclass, and the way between
the two, by name.

A field that is a dataclass itself stands for its own fields, `x_data` for `x.data`. What may be a
tensor or a word is two arguments, `scale` and `scale_word`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad

from kernelkit.call.tensors import as_number, require_no_grad, require_no_tangents, require_type

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
    """One argument of an operator.

    name: in the schema. path: from the dataclass, dotted. kind: a key of SCHEMA_TYPES. optional:
    None will do. default: MISSING where there is none. alone: what the field holds is of this kind,
    and not perhaps of another, which is another argument. many: it holds a sequence of them.
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
        """In a schema. letter: of the memory that the operator writes to, '' for none."""
        written = f"({letter}!)" if letter else ""
        sequence = "[]" * self.many
        text = f"{SCHEMA_TYPES[self.kind]}{written}{'?' * self.optional}{sequence} {self.name}"
        if self.default is MISSING:
            return text
        literal = f'"{self.default}"' if isinstance(self.default, str) else self.default
        return f"{text}={literal}"


class Schema:
    """Of a dataclass of arguments.

    tensors: its leaves that are, those that may be left out last, as they go by position. others:
    go by name.
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

    def path(self, name: str) -> str:
        """Return a leaf's name as users write it; `parts[0]` of a sequence keeps its number."""
        leaf, bracket, number = name.partition("[")
        return f"{self._paths[leaf]}{bracket}{number}"

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
    """Leaves of a dataclass. base: an instance whose values are the defaults; optional: that stands
    where None might."""
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
    """Of a dataclass: (name, the dataclass that it is, whether it is of two kinds, whether None is
    one, default) of each field."""
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
