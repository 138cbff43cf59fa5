"""Requests for inspection: stops, regions, watches, conditions; as dataclasses or command words.

All are frozen, so that they can be part of `Options` and of the key of a compiled kernel.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ptxemu.host_tensor import HostTensor
from ptxemu.numerics import swizzle as swizzles
from ptxemu.numerics.formats import ELEMENTS, TENSOR_COLUMNS

# `--when`: an expression over numbers, evaluated node by node; nothing else is allowed.
#
# Names are `step`, `warp`, `lane`, `cta`, `cta_x`, `cta_y`, `cta_z`, and registers of the PTX, with
# or without their %. A register is a number if its active lanes agree, else an array of them; the
# condition holds if it does for any active lane. `all(...)` and `any(...)` override this, and
# `s32(...)`, `s64(...)` and `f32(...)` reinterpret bits, which count as unsigned unless the
# register is declared a float.

COORDINATES = ("step", "warp", "lane", "cta", "cta_x", "cta_y", "cta_z")
_REGISTER = re.compile(r"%([A-Za-z_$][\w$]*)")
_LONGEST = 1000  # characters
_WIDEST = 128  # places of a shift

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _bits_as(dtype: str) -> Callable[[Any], Any]:
    width = np.dtype(dtype).itemsize

    def convert(value: Any) -> Any:
        raw = np.atleast_1d(value)
        if raw.dtype.kind == "f":
            raw = raw.astype(f"f{width}").view(f"u{width}")
        mask = (1 << 8 * width) - 1
        found = np.array([int(x) & mask for x in raw.tolist()], f"u{width}").view(dtype)
        return found if np.ndim(value) else found[0].item()

    return convert


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "any": lambda value: bool(np.any(value)),
    "all": lambda value: bool(np.all(value)),
    "abs": abs,
    "s32": _bits_as("i4"),
    "s64": _bits_as("i8"),
    "f32": _bits_as("f4"),
}


class Condition:
    """A condition; "" always holds. Raises ValueError for an invalid expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LONGEST:
            raise ValueError(f"a condition of {len(text)} characters; at most {_LONGEST}")
        try:
            tree = ast.parse(_REGISTER.sub(r" R_\1", text).strip() or "True", mode="eval")
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"condition {text!r}: {error}") from None
        self._body = tree.body
        for node in ast.walk(tree.body):
            self._require_known(node)

    def _require_known(self, node: ast.AST) -> None:
        plain = (ast.Name, ast.Load, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.boolop)
        known = isinstance(node, (*plain, ast.unaryop)) or type(node) in {*_BINARY, *_COMPARISONS}
        if isinstance(node, ast.Constant):
            known = isinstance(node.value, int | float)
        if isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
            known = known and len(node.args) == 1 and not node.keywords
        if not known:
            what = type(node).__name__
            raise ValueError(f"condition {self.text!r}: {what} is not allowed in a condition")

    @cached_property
    def names(self) -> frozenset[str]:
        """Registers that it speaks of, without %."""
        found = {node.id for node in ast.walk(self._body) if isinstance(node, ast.Name)}
        return frozenset(name.removeprefix("R_") for name in found - {*COORDINATES, *_FUNCTIONS})

    def holds(self, values: Mapping[str, Any]) -> bool:
        """values: COORDINATES and registers, without %, by name.

        Raises ValueError for a name that has no value, and for what cannot be computed.
        """
        try:
            return bool(np.any(self._value(self._body, values)))
        except KeyError as error:
            raise ValueError(f"condition {self.text!r}: unknown name {error}") from None
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise ValueError(f"condition {self.text!r}: {error}") from None

    def _value(self, node: Any, values: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return values[node.id.removeprefix("R_")]
        if isinstance(node, ast.Call):
            return _FUNCTIONS[node.func.id](self._value(node.args[0], values))  # type: ignore[attr-defined]
        if isinstance(node, ast.BoolOp):
            parts = [self._value(part, values) for part in node.values]
            together = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return together.reduce(np.broadcast_arrays(*parts))
        if isinstance(node, ast.UnaryOp):
            return self._unary(node.op, self._value(node.operand, values))
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, values), self._value(node.right, values)
            if isinstance(node.op, ast.LShift) and np.max(right) > _WIDEST:
                raise OverflowError(f"a shift by {right}")
            return _BINARY[type(node.op)](left, right)
        return self._comparison(node, values)

    @staticmethod
    def _unary(op: ast.unaryop, value: Any) -> Any:
        if isinstance(op, ast.Not):
            return np.logical_not(value)
        if isinstance(op, ast.Invert):
            return ~value
        return -value if isinstance(op, ast.USub) else value

    def _comparison(self, node: ast.Compare, values: Mapping[str, Any]) -> Any:
        operands = [self._value(part, values) for part in (node.left, *node.comparators)]
        holds: Any = True
        for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
            holds = np.logical_and(holds, _COMPARISONS[type(op)](left, right))
        return holds


KINDS = ("smem", "tmem", "regs")
SPACES = {"global": "global", "smem": "shared", "shared": "shared", "tmem": "tensor"}
CtaName = int | tuple[int, int, int] | None  # linear index in the grid, x fastest, or coordinates


@dataclass(frozen=True)
class Region:
    """A matrix in shared memory whose layout the user knows.

    Attributes:
        start: Byte offset in the CTA's shared memory, as in addresses of the PTX.
        rows: Number of rows.
        columns: Elements per row; a row is contiguous except for the swizzle.
        dtype: Key of `layouts.ELEMENTS`: f32, bf16, e4m3, u8, ...
        swizzle: Key of `machine.swizzle.BY_NAME`. If a row is longer than the swizzle's span (128
            bytes for "128B"), blocks of that width of all rows follow each other, as in TMA boxes.

    Raises ValueError for unknown names.
    """

    name: str
    start: int
    rows: int
    columns: int
    dtype: str
    swizzle: str = "none"

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ELEMENTS)
        _one_of("swizzle", self.swizzle, swizzles.BY_NAME)
        if self.start < 0 or self.rows < 1 or self.columns < 1:
            raise ValueError(f"region {self.name}: offset >= 0, rows and columns >= 1 are needed")

    @classmethod
    def parse(cls, text: str) -> Region:
        """Parse "name=offset,rows,columns,dtype[,swizzle]"; numbers as in Python."""
        name, equals, rest = text.partition("=")
        words = [word.strip() for word in rest.split(",")]
        if not equals or not name.strip() or not 4 <= len(words) <= 5:
            raise ValueError(f"{text!r} is not name=offset,rows,columns,dtype[,swizzle]")
        start, rows, columns = (_number(word, text) for word in words[:3])
        return cls(name.strip(), start, rows, columns, *words[3:])


@dataclass(frozen=True)
class Stop:
    """Take a picture whenever a warp reaches a line.

    Attributes:
        at: "file.py:257" (the end of a path is enough), in the kernel or in inlined code; or
            "ptx:120", a line of the PTX text.
        dump: Subset of KINDS.
        cta: CTA to picture; None: all.
        warp: Warp to picture; None: all.
        when: Condition, see `Condition`; `step` counts the warp's arrivals from 0.
        regions: Matrices in shared memory; tiles that TMA moves are found without names.
        limit: Pictures per launch; further arrivals are counted and reported.

    Raises ValueError for invalid values.
    """

    at: str
    dump: tuple[str, ...] = KINDS
    cta: CtaName = None
    warp: int | None = None
    when: str = ""
    regions: tuple[Region, ...] = ()
    limit: int = 16

    def __post_init__(self) -> None:
        if not re.fullmatch(r".+:\d+", self.at):
            raise ValueError(f"at={self.at!r}; must be file.py:LINE or ptx:LINE")
        if not self.dump:
            raise ValueError(f"dump is empty; must be some of {', '.join(KINDS)}")
        for kind in self.dump:
            _one_of("dump", kind, KINDS)
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}; must be >= 1")
        Condition(self.when)


@dataclass(frozen=True)
class Watch:
    """Record the writes to a range, in order.

    Attributes:
        space: "global", "shared" or "tensor".
        first: Address, offset, or first column.
        count: Number of bytes, or of columns.
        cta: CTA of shared or tensor memory; None: every CTA, each with a separate history.
        parameter: For global memory: `first` counts from the pointer at the start of that kernel
            parameter (for a tensor map: from its tensor).
        name: Name for reports.

    Raises ValueError for an unknown space or an invalid range.
    """

    space: str
    first: int
    count: int
    cta: CtaName = None
    parameter: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _one_of("space", self.space, ("global", "shared", "tensor"))
        if self.first < 0 or self.count < 1:
            raise ValueError(
                f"watch of {self.count} at {self.first}; must be at least one, from 0 on"
            )
        if self.space == "tensor" and self.first + self.count > TENSOR_COLUMNS:
            raise ValueError(
                f"watch of columns up to {self.first + self.count}; limit {TENSOR_COLUMNS}"
            )

    @property
    def title(self) -> str:
        """The name, or the range in words."""
        last = self.first + self.count - 1
        if self.space == "tensor":
            return self.name or f"TMEM columns {self.first}..{last}"
        where = "" if self.parameter is None else f" of parameter {self.parameter}"
        return self.name or f"{self.space} memory {self.first:#x}..{last:#x}{where}"

    @classmethod
    def tensor(cls, tensor: Any, name: str = "") -> Watch:
        """Watch the first to the last byte of a torch tensor or numpy array, which may be a
        view."""
        found = HostTensor(tensor)
        return cls("global", found.address, found.extent, name=name)

    @classmethod
    def parse(cls, text: str) -> Watch:
        """Parse "SPACE:FIRST+COUNT[@CTA]"; SPACE is global, smem, tmem or param0, param1, ..."""
        found = re.fullmatch(r"(\w+?)(\d*):(\w+)\+(\w+)(?:@([\d,]+))?", text.strip())
        if (
            not found
            or found[1] not in (*SPACES, "param")
            or (found[1] == "param") != bool(found[2])
        ):
            raise ValueError(
                f"{text!r} is not SPACE:FIRST+COUNT[@CTA], SPACE global, smem, tmem or param<N>"
            )
        return cls(
            SPACES.get(found[1], "global"),
            _number(found[3], text),
            _number(found[4], text),
            cta=None if found[5] is None else parse_cta(found[5]),
            parameter=int(found[2]) if found[2] else None,
        )


@dataclass(frozen=True)
class Inspect:
    """Requested inspection of each launch; all fields may be empty.

    Attributes:
        stops: Lines at which to take pictures.
        watches: Ranges whose writes are recorded.
        keep: Number of newest writes kept for each watch.
        last: Number of last events to keep; they are printed if the launch fails.
        folder: Folder for pictures as files; "" keeps them only in the report.
        quiet: Print nothing; else histories, and events of a failed launch, go to stderr.
    """

    stops: tuple[Stop, ...] = ()
    watches: tuple[Watch, ...] = ()
    keep: int = 20
    last: int = 0
    folder: str = ""
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.keep < 1 or self.last < 0:
            raise ValueError(f"keep={self.keep}, last={self.last}; must be >= 1 and >= 0")


def parse_cta(text: str) -> int | tuple[int, int, int]:
    """Parse "3", the index in the grid, or "x,y,z", of which z may be missing."""
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words) or len(words) > 3:
        raise ValueError(f"cta {text!r}; must be an index, or coordinates x,y,z")
    if len(words) == 1:
        return int(words[0])
    x, y, z = (*map(int, words), *(0,) * (3 - len(words)))
    return x, y, z


def _number(word: str, text: str) -> int:
    try:
        return int(word, 0)
    except ValueError:
        raise ValueError(f"{word!r} in {text!r} is not a number") from None


def _one_of(what: str, name: str, known: Any) -> None:
    if name not in known:
        raise ValueError(f"{what} {name!r}; must be one of {', '.join(known)}")
