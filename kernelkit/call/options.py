"""Options of a public function, each written once: an item of a TypedDict with type and default.

The function takes them as `**options: Unpack[Options]`, which type checkers follow through every
overload and through plans. An item is written `name: Annotated[type, default]`. The decorator
`spelled` shows the items to `help`, `inspect.signature` and `typing.get_type_hints` as arguments.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from itertools import compress
from operator import is_not
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

Function = TypeVar("Function", bound=Callable)
_NONE: Mapping[str, str] = MappingProxyType({})


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
    libraries will try -> the name here."""
    known = inspect.signature(function).parameters
    for wrong in options:
        if wrong in known:
            continue
        close = difflib.get_close_matches(wrong, known, 1)
        right = hints.get(wrong) or (close[0] if close else "")
        advice = f"; it is called {right} here" if right else ""
        raise TypeError(f"{function.__name__} has no argument {wrong}{advice}")
