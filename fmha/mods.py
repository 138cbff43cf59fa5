"""Functions of positions, `mask_mod` and `score_mod`: from Python to the text that a kernel is
compiled for.

A function is called once with symbols in place of (b, h, q, k). What it does to them is written
down as a program: one line of text, which is part of a kernel's config. So functions that compute
the same share a kernel, in every process. Tensors that a function reads by these symbols become
tables, arguments of each launch; numbers become constants of the program.

A program is 'tables|instructions|result'. Tables are dtypes with their rank, 'i32.2'.
Instructions are 'operation operands', separated by ';'. An operand is an argument (`ARGUMENTS`),
the result of an instruction ('%2'), or a constant ('7', '0x1.8p+0', 'True').
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kernelkit.call.tensors import plain_table, require_type

INT, FLOAT, BOOL = "int", "float", "bool"
# Arguments of a program, and their types. A mask has no score.
ARGUMENTS = {"b": INT, "h": INT, "q": INT, "k": INT, "s": FLOAT}
MASK, SCORE = ("b", "h", "q", "k"), ("s", "b", "h", "q", "k")
MAX_INSTRUCTIONS, MAX_TABLES, MAX_RANK = 256, 8, 4
MAX_INT = (1 << 31) - 1
TABLE_TYPES = {
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.bool: "bool",
}
ELEMENT_TYPES = {"i32": INT, "i64": INT, "f32": FLOAT, "bf16": FLOAT, "fp16": FLOAT, "bool": BOOL}

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
NUMERIC = ("add", "sub", "mul", "minimum", "maximum")  # of two numbers of one type
OF_INTS = ("floordiv", "mod", "shl", "shr")
LOGIC = ("and", "or", "xor")  # of two bools, or bit by bit of two ints
OF_FLOAT = ("exp", "exp2", "log", "log2", "tanh", "sqrt", "rsqrt", "sin", "cos", "floor")

# Names of torch's functions, of methods and of Python's operators, without underscores at their
# ends and without an r for reflected operands -> the operation.
NAMES = {
    **{name: name for name in (*COMPARISONS, *NUMERIC, *OF_INTS, *LOGIC, *OF_FLOAT)},
    "subtract": "sub",
    "multiply": "mul",
    "min": "minimum",
    "max": "maximum",
    "div": "div",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "lshift": "shl",
    "rshift": "shr",
    "bitwise_left_shift": "shl",
    "bitwise_right_shift": "shr",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
    "logical_not": "not",
    "bitwise_not": "not",
    "invert": "not",
    **{f"{kind}_{name}": name for name in LOGIC for kind in ("logical", "bitwise")},
    **{name: name for name in ("neg", "abs", "where", "clamp", "sigmoid", "square")},
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "float": "to_float",
    "int": "to_int",
    "long": "to_int",
    "bool": "to_bool",
}
AVAILABLE = (
    "arithmetic, comparisons, & | ^ ~, torch.where, minimum, maximum, clamp, abs, exp, exp2, log, "
    "log2, tanh, sigmoid, sqrt, rsqrt, sin, cos, floor, and elements of tensors"
)


@dataclass(frozen=True)
class Mod:
    """A traced function of positions. Reuse it: a function is traced anew by every call.

    program: see the module.
    tables: tensors that the function reads, in the order of the program's tables.
    """

    program: str
    tables: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Instruction:
    """operation: a name of the lists above, or 'load0' for an element of table 0.

    operands: arguments, results ('%2'), and constants as Python numbers.
    """

    operation: str
    operands: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """A parsed program. tables: (dtype, rank) of each."""

    tables: tuple[tuple[str, int], ...]
    instructions: tuple[Instruction, ...]
    result: Any


@lru_cache(1024)
def parsed(text: str) -> Program:
    """Parse a program. ValueError for anything else."""
    try:
        tables, body, result = text.split("|")
        kinds = [table.split(".") for table in tables.split()]
        steps = [line.split() for line in body.split(";") if line]
        return Program(
            tuple((kind, int(rank)) for kind, rank in kinds),
            tuple(Instruction(name, tuple(map(_operand, rest))) for name, *rest in steps),
            _operand(result),
        )
    except ValueError as error:
        raise ValueError(f"not a program of a mask or of scores: {text[:100]!r}") from error


def _operand(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if text in ARGUMENTS or text.startswith("%"):
        return text
    return int(text) if text.lstrip("-").isdigit() else float.fromhex(text)


def kernel_table(table: torch.Tensor) -> torch.Tensor:
    """Return a table as kernels read it: at least one dimension, the last one contiguous, bools as
    bytes. A copy where elements of the last dimension lie apart, or share memory."""
    if table.dtype == torch.bool:
        table = table.view(torch.uint8)
    if not table.ndim:
        table = table.reshape(1)
    if table.stride(-1) != 1 and table.shape[-1] > 1:
        table = table.contiguous()
    return plain_table(table)


def trace_mask_mod(function: Callable[..., Any] | Mod) -> Mod:
    """Trace a mask: function(b, h, q, k) says whether position q of head h sees position k.

    b is the number of the entry, h that of the query head, q and k are positions among the keys of
    the entry. The function is written as for FlexAttention: operators and functions of torch, with
    `&`, `|`, `~` and `torch.where` instead of `and`, `or`, `not` and `if`.

    Raises:
        TypeError, NotImplementedError: for a function that cannot be traced, naming its line.
    """
    return _traced("mask_mod", function, MASK, BOOL)


def trace_score_mod(function: Callable[..., Any] | Mod) -> Mod:
    """Trace a function of scores: function(score, b, h, q, k) returns the score to use instead.

    A score is scale q.k, in natural-log units; -inf hides the key. See `trace_mask_mod`.
    """
    return _traced("score_mod", function, SCORE, FLOAT)


def _traced(name: str, function: Any, arguments: Sequence[str], kind: str) -> Mod:
    if isinstance(function, Mod):
        return function
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}, expected a function")
    if torch.compiler.is_compiling():
        raise TypeError(
            f"{name} within torch.compile: trace it before, mod = fmha.trace_{name}(function), and "
            "pass mod"
        )
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        wanted = ", ".join(arguments).replace("s, ", "score, ")
        raise TypeError(f"{name} takes ({wanted}): {error}") from error
    tracer = Tracer(name)
    try:
        with _Watch(tracer):
            found = function(*(Symbol(tracer, ARGUMENTS[each], each) for each in arguments))
            result = tracer.result(found, kind)
    except Exception as error:
        where = _place_in(function, error)
        raise NotImplementedError(f"{name} cannot be traced{where}: {error}") from error
    tables = " ".join(f"{TABLE_TYPES[table.dtype]}.{table.ndim}" for table in tracer.tables)
    return Mod(f"{tables}|{';'.join(tracer.lines)}|{result.name}", tuple(tracer.tables))


def _place_in(function: Any, error: Exception) -> str:
    """Return the line of the user's code where an error arose, as words."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    ours = (__file__, torch.__file__.removesuffix("__init__.py"))
    lines = [(f.f_code, line) for f, line in frames if not f.f_code.co_filename.startswith(ours)]
    code = getattr(function, "__code__", None)
    if not lines and code is None:
        return ""
    code, line = lines[-1] if lines else (code, code.co_firstlineno)
    text = linecache.getline(code.co_filename, line).strip()
    return f" at {code.co_filename}:{line}, `{text}`" if text else f" at {code.co_filename}:{line}"


@dataclass
class Tracer:
    """The program of one function while it is traced.

    what: name of the argument that the function is given for.
    """

    what: str
    lines: list[str] = field(default_factory=list)
    tables: list[torch.Tensor] = field(default_factory=list)
    known: dict[str, Symbol] = field(default_factory=dict)

    def emit(self, kind: str, operation: str, *operands: Symbol) -> Symbol:
        """Return the result of an instruction, an earlier one where it is the same."""
        line = " ".join((operation, *(operand.name for operand in operands)))
        if line not in self.known:
            if len(self.lines) == MAX_INSTRUCTIONS:
                raise NotImplementedError(f"more than {MAX_INSTRUCTIONS} operations")
            self.known[line] = Symbol(self, kind, f"%{len(self.lines)}")
            self.lines.append(line)
        return self.known[line]

    def symbol(self, value: Any) -> Symbol:
        """Return a symbol of a symbol, a number, or a tensor of no dimensions."""
        if isinstance(value, Symbol):
            return value
        if isinstance(value, Rows):
            raise NotImplementedError(f"a tensor with {value.left} indices too few")
        if isinstance(value, torch.Tensor):
            if value.ndim:
                shape = tuple(value.shape)
                raise NotImplementedError(f"a tensor of shape {shape} as a number: index it")
            return self.load(value, ())
        if isinstance(value, bool):
            return Symbol(self, BOOL, str(value))
        if isinstance(value, Integral):
            if not -MAX_INT <= int(value) <= MAX_INT:
                raise NotImplementedError(f"{value}: within int32")
            return Symbol(self, INT, str(int(value)))
        if isinstance(value, Real):
            return Symbol(self, FLOAT, float(value).hex())
        raise NotImplementedError(f"a {type(value).__name__} as a number")

    def load(self, table: torch.Tensor, indices: Sequence[Any]) -> Symbol:
        """Return an element of a tensor."""
        if table.dtype not in TABLE_TYPES:
            supported = ", ".join(str(dtype) for dtype in TABLE_TYPES)
            raise NotImplementedError(f"a tensor of {table.dtype}: one of {supported}")
        if table.ndim > MAX_RANK:
            raise NotImplementedError(f"a tensor of {table.ndim} dimensions: at most {MAX_RANK}")
        if not table.numel():
            raise NotImplementedError("an element of a tensor that has none")
        operands = [self.to_int(self.symbol(index)) for index in indices]
        number = next((n for n, known in enumerate(self.tables) if known is table), None)
        if number is None:
            number = len(self.tables)
            if number == MAX_TABLES:
                raise NotImplementedError(f"more than {MAX_TABLES} tensors")
            self.tables.append(table)
        return self.emit(ELEMENT_TYPES[TABLE_TYPES[table.dtype]], f"load{number}", *operands)

    def result(self, value: Any, kind: str) -> Symbol:
        """Return what the function returned, as `kind`."""
        if value is None:
            raise NotImplementedError("it returns None")
        found = self.symbol(value)
        if kind == FLOAT and found.kind != BOOL:
            return self.to_float(found)
        if found.kind != kind:
            raise NotImplementedError(f"it returns {found.kind}, expected {kind}")
        return found

    def to_float(self, value: Symbol) -> Symbol:
        if value.kind == FLOAT:
            return value
        if value.constant is not None:
            return self.symbol(float(value.constant))
        return self.emit(FLOAT, "float", self.to_int(value))

    def to_int(self, value: Symbol) -> Symbol:
        if value.kind == INT:
            return value
        if value.kind == FLOAT:
            return self.emit(INT, "int", value)
        return self.emit(INT, "where", value, self.symbol(1), self.symbol(0))

    def to_bool(self, value: Symbol) -> Symbol:
        if value.kind != BOOL and value.constant is not None:
            return self.symbol(bool(value.constant))
        return value if value.kind == BOOL else self.perform("ne", value, 0)

    def alike(self, *values: Any) -> tuple[Symbol, ...]:
        """Return numbers of one type: floats where one of them is."""
        found = [self.symbol(value) for value in values]
        convert = self.to_float if any(each.kind == FLOAT for each in found) else self.to_int
        return tuple(map(convert, found))

    def perform(self, operation: str, *values: Any, **bounds: Any) -> Symbol:
        """Return the result of an operation of `NAMES` on symbols and numbers.

        bounds: `low` and `high` of a clamp.
        """
        if operation == "clamp":
            return self.clamp(*values, **bounds)
        if operation in COMPARISONS:
            return self.emit(BOOL, operation, *self.alike(*values))
        if operation in NUMERIC:
            pair = self.alike(*values)
            if operation in ("add", "sub") and pair[0].kind == INT and pair[1].constant == 0:
                return pair[0]
            return self.emit(pair[0].kind, operation, *pair)
        if operation in OF_FLOAT:
            return self.emit(FLOAT, operation, *map(self.to_float, map(self.symbol, values)))
        if operation in OF_INTS:
            return self._of_ints(operation, *map(self.symbol, values))
        if operation in (*LOGIC, "not"):
            found = [self.symbol(value) for value in values]
            if not all(each.kind == BOOL for each in found):
                if any(each.kind == FLOAT for each in found):
                    raise NotImplementedError(f"{operation} of a float")
                found = [self.to_int(each) for each in found]
            neutral = str(operation == "and")  # FlexAttention's and_masks begins with it
            if operation in ("and", "or") and neutral in (found[0].name, found[1].name):
                return found[found[0].name == neutral]
            return self.emit(found[0].kind, operation, *found)
        found_method: Callable[..., Symbol] = getattr(self, operation)
        return found_method(*map(self.symbol, values))

    def _of_ints(self, operation: str, a: Symbol, b: Symbol) -> Symbol:
        if FLOAT in (a.kind, b.kind):
            if operation == "floordiv":
                return self.perform("floor", self.div(a, b))
            raise NotImplementedError(f"{operation} of a float")
        if b.constant is not None and b.constant <= 0 and operation in ("floordiv", "mod"):
            raise NotImplementedError(f"a divisor of {b.constant}: above 0")
        return self.emit(INT, operation, self.to_int(a), self.to_int(b))

    def div(self, a: Symbol, b: Symbol) -> Symbol:
        a, b = self.to_float(a), self.to_float(b)
        if b.constant:
            return self.emit(FLOAT, "mul", a, self.symbol(1.0 / b.constant))
        return self.emit(FLOAT, "div", a, b)

    def neg(self, a: Symbol) -> Symbol:
        return self.perform("sub", 0, a)

    def abs(self, a: Symbol) -> Symbol:
        return self.perform("maximum", a, self.neg(a))

    def square(self, a: Symbol) -> Symbol:
        return self.perform("mul", a, a)

    def sigmoid(self, a: Symbol) -> Symbol:
        return self.div(self.symbol(1.0), self.perform("add", self.perform("exp", -a), 1.0))

    def where(self, condition: Symbol, a: Symbol, b: Symbol) -> Symbol:
        condition = self.to_bool(condition)
        if a.kind != b.kind:
            a, b = self.alike(a, b)
        return self.emit(a.kind, "where", condition, a, b)

    def clamp(self, a: Symbol, low: Any = None, high: Any = None) -> Symbol:
        if low is not None:
            a = self.perform("maximum", a, low)
        return a if high is None else self.perform("minimum", a, high)


class Symbol:
    """A number that is known only in the kernel.

    kind: its type.
    name: the operand of a program.
    """

    def __init__(self, tracer: Tracer, kind: str, name: str) -> None:
        self.tracer, self.kind, self.name = tracer, kind, name

    @property
    def constant(self) -> Any:
        """The number of a constant; None for others."""
        if self.name in ARGUMENTS or self.name.startswith("%"):
            return None
        return _operand(self.name)

    @property
    def dtype(self) -> torch.dtype:
        """What the kernel computes in."""
        return {INT: torch.int32, FLOAT: torch.float32, BOOL: torch.bool}[self.kind]

    def __getattr__(self, name: str) -> Any:
        operation = NAMES.get(name)
        if operation is None:
            raise NotImplementedError(f".{name} of a position or score: there is {AVAILABLE}")
        return lambda *values, **named: self.tracer.perform(operation, self, *values, **_low(named))

    def to(self, dtype: torch.dtype, **_: Any) -> Symbol:
        """Convert to the kernel's type of this kind."""
        require_type("dtype", dtype, torch.dtype)
        if dtype == torch.bool:
            return self.tracer.to_bool(self)
        convert = self.tracer.to_float if dtype.is_floating_point else self.tracer.to_int
        return convert(self)

    def type_as(self, other: Symbol) -> Symbol:
        return self.to(other.dtype)

    def new_ones(self, *_: Any, dtype: torch.dtype = torch.int32, **__: Any) -> Symbol:
        """Return a constant, as FlexAttention's `and_masks` asks for one."""
        return self.tracer.symbol(1).to(dtype)

    def new_zeros(self, *_: Any, dtype: torch.dtype = torch.int32, **__: Any) -> Symbol:
        return self.tracer.symbol(0).to(dtype)

    def __bool__(self) -> bool:
        raise NotImplementedError(
            "`if`, `and`, `or`, `not`, `min` and `max` depend on a position or score: use "
            "torch.where, &, |, ~, torch.minimum, torch.maximum"
        )

    def __index__(self) -> int:
        raise NotImplementedError("a position as an index of what is no tensor")

    def __float__(self) -> float:
        raise NotImplementedError("math functions take numbers: use those of torch")

    __int__ = __index__
    __iter__ = None
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return _call(function, args, kwargs or {})


def _operator(operation: str, reflected: bool) -> Callable[..., Any]:
    def method(self: Symbol, *others: Any) -> Any:
        values = (*others, self) if reflected else (self, *others)
        return self.tracer.perform(operation, *values)

    return method


_BINARY = {
    **{name: name for name in ("add", "sub", "mul", "mod", "floordiv", "and", "or", "xor")},
    "truediv": "div",
    "lshift": "shl",
    "rshift": "shr",
}
for _name, _operation in _BINARY.items():
    setattr(Symbol, f"__{_name}__", _operator(_operation, False))
    setattr(Symbol, f"__r{_name}__", _operator(_operation, True))
for _name in (*COMPARISONS, "neg", "abs"):
    setattr(Symbol, f"__{_name}__", _operator(_name, False))
Symbol.__invert__ = _operator("not", False)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Rows:
    """A tensor with fewer indices than dimensions."""

    tracer: Tracer
    table: torch.Tensor
    indices: tuple[Any, ...]

    @property
    def left(self) -> int:
        """Indices that are missing."""
        return self.table.ndim - len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return _element(self.tracer, self.table, (*self.indices, *_tuple(index)))


def _tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _element(tracer: Tracer, table: torch.Tensor, indices: tuple[Any, ...]) -> Symbol | Rows:
    if len(indices) > table.ndim:
        raise NotImplementedError(f"{len(indices)} indices of a tensor of {table.ndim} dimensions")
    for index in indices:
        if isinstance(index, slice) or index is None or index is Ellipsis:
            raise NotImplementedError("slices, None and ... beside a position: give all indices")
    if len(indices) < table.ndim:
        return Rows(tracer, table, indices)
    return tracer.load(table, indices)


class _Watch(TorchFunctionMode):
    """Within the block torch's functions of symbols are traced, those of tensors run."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inside = [item for arg in (*args, *kwargs.values()) for item in _tuple(arg)]
        if not any(isinstance(item, Symbol | Rows) for item in inside):
            return function(*args, **kwargs)
        if getattr(function, "__name__", "") == "__getitem__":
            return _element(self.tracer, args[0], _tuple(args[1]))
        return _call(function, args, kwargs)


def _call(function: Any, args: tuple, kwargs: dict) -> Any:
    """Trace a function of torch that got symbols."""
    name = getattr(function, "__name__", str(function))
    plain = name.strip("_")
    reflected = name.startswith("__r") and plain.removeprefix("r") in _BINARY
    plain = plain.removeprefix("r") if reflected else plain
    operation = NAMES.get(plain) or _BINARY.get(plain)
    found = next(item for item in (*args, *kwargs.values()) if isinstance(item, Symbol))
    if operation is None or (kwargs and operation not in ("clamp", "where")):
        raise NotImplementedError(f"torch.{name} of a position or score: there is {AVAILABLE}")
    values = args[::-1] if reflected else args
    return found.tracer.perform(operation, *values, **_low(kwargs))


def _low(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Rename torch's bounds of clamp."""
    return {{"min": "low", "max": "high"}.get(name, name): v for name, v in kwargs.items()}
