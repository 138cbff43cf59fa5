"""Signatures of compiled host functions, and arguments laid out for them.

The function has an array of pointers, one for each argument and one for its result. A tensor is its
address, followed by the sizes (int32) and strides (int64, in elements) that were left open at
compile time. The others are part of the kernel and are checked here.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

_CODES = {"ptr": "Q", "i32": "i", "i64": "q", "f32": "f"}  # of LLVM types, for `struct`
_SCALARS = re.compile(r"array<(\d+) x i64>|ptr|i32|i64|f32")
_NUMBERS = {"Int32": "i32", "Int64": "i64", "Float32": "f32"}
_SEQUENCES = (tuple, list)
_STREAM, _TABLE, _TENSOR, _NOTHING = "stream", "table", "tensor", "nothing"


@dataclass(frozen=True)
class Argument:
    """Argument of a compiled function.

    kind: 'tensor', 'table', 'stream', 'nothing' (None, no argument at run time), or the type of a
        number
    types: LLVM types of what the argument points to
    bits: bits of an element of a tensor
    shape, strides: in elements, None for values that each launch provides
    """

    kind: str
    types: tuple[str, ...] = ()
    bits: int = 0
    shape: tuple[int | None, ...] = ()
    strides: tuple[int | None, ...] = ()

    @property
    def layout(self) -> str:
        """Format for `struct`, with natural alignment and a multiple of 8 bytes."""
        if self.kind == _TABLE:
            return self.types[0].replace("array<", "").replace(" x i64>", "q")
        return "".join(_CODES[name] for name in self.types) + "0q"


class Signature:
    """Arguments of a compiled function in their order."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self.arguments = tuple(arguments)
        present = [argument for argument in self.arguments if argument.kind != _NOTHING]
        self._offsets, layout = [], ""
        for argument in present:
            self._offsets.append(struct.calcsize("@" + layout + "0q"))
            layout += "0q" + argument.layout
        self._result = struct.calcsize("@" + layout)
        self._struct = struct.Struct("@" + layout + "q")
        kinds = [argument.kind for argument in present]
        self._stream = self._offsets[kinds.index(_STREAM)] if _STREAM in kinds else None

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {k: [*v] if isinstance(v, tuple) else v for k, v in asdict(argument).items()}
            for argument in self.arguments
        ]

    @classmethod
    def from_json(cls, stored: Iterable[dict[str, Any]]) -> Signature:
        """Parse the result of `to_json`."""
        fields: list[dict[str, Any]] = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()} for item in stored
        ]
        return cls([Argument(**item) for item in fields])

    def pack(self, values: Sequence[Any], stream: int = 0) -> Packed:
        """The pointers for one call or many.

        values: those of all arguments but the stream, nested as they like: tensors, numbers,
        `ParamTable`s, None. Raises ValueError for what the kernel was not compiled for.
        """
        words: list[Any] = []
        addresses: list[int] = []
        offsets = iter(self._offsets)
        given = [*leaves(values), *([stream] if self._stream is not None else [])]
        if len(given) != len(self.arguments):
            raise ValueError(f"{len(given)} arguments, expected {len(self.arguments)}")
        for position, (argument, value) in enumerate(zip(self.arguments, given, strict=True)):
            if argument.kind == _NOTHING:
                if value is not None:
                    raise ValueError(f"argument {position} is {value!r}, compiled for None")
                continue
            offset = next(offsets)
            if argument.kind == _TENSOR:
                words += _words_of(position, argument, value)
                addresses.append(offset)
            elif argument.kind == _TABLE:
                words += value.numbers
                addresses += [offset + 8 * place for place, _, _ in value.addresses]
            else:
                words.append(value)
        words.append(0)
        return Packed(self, words, addresses)

    def place(self, buffer: Any) -> tuple[list[int], int | None, int]:
        """Addresses in a buffer: of all arguments, of the stream, of the result."""
        base = ctypes.addressof(buffer)
        stream = None if self._stream is None else base + self._stream
        return [base + offset for offset in self._offsets], stream, base + self._result

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arguments and the result."""
        return self._struct.size

    def fill(self, buffer: Any, words: Sequence[Any]) -> None:
        try:
            self._struct.pack_into(buffer, 0, *words)
        except struct.error as error:
            raise ValueError(f"numbers {words}: {error}") from error


class Packed:
    """Arguments in memory that this object owns; of tensors it keeps addresses alone."""

    def __init__(
        self, signature: Signature, words: Sequence[Any], addresses: Sequence[int]
    ) -> None:
        """addresses: where in the memory the addresses of tensors stand."""
        self._buffer = ctypes.create_string_buffer(signature.nbytes)
        signature.fill(self._buffer, words)
        arguments, stream, result = signature.place(self._buffer)
        self.pointers = (ctypes.c_void_p * (len(arguments) + 1))(*arguments, result)
        self._addresses = [ctypes.addressof(self._buffer) + offset for offset in addresses]
        self._stream = stream
        self._result = result

    @property
    def address_words(self) -> list[ctypes.c_uint64]:
        """The words that hold addresses of tensors, in the order of `addressed`."""
        return [ctypes.c_uint64.from_address(address) for address in self._addresses]

    @property
    def stream_word(self) -> ctypes.c_uint64:
        """The word that holds the stream's handle."""
        if self._stream is None:
            return ctypes.c_uint64(0)
        return ctypes.c_uint64.from_address(self._stream)

    @property
    def result_word(self) -> ctypes.c_int32:
        """The word that the host function leaves a cudaError_t in."""
        return ctypes.c_int32.from_address(self._result)


def leaves(value: Any) -> list[Any]:
    """Flatten nested tuples, lists and dataclasses, in order."""
    fields: dict[str, Any] | None = getattr(type(value), "__dataclass_fields__", None)
    if fields is not None:
        value = [getattr(value, name) for name in fields]
    elif not isinstance(value, _SEQUENCES):
        return [value]
    found: list[Any] = []
    for item in value:
        if isinstance(item, _SEQUENCES) or hasattr(type(item), "__dataclass_fields__"):
            found += leaves(item)
        else:
            found.append(item)
    return found


def addressed(values: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors whose addresses a launch is given, in order, also in tables; and the bytes from
    the beginning of each to the address that is given."""
    found = []
    for value in leaves(values):
        if isinstance(value, torch.Tensor):
            found.append((value, 0))
        else:
            found += [(tensor, offset) for _, tensor, offset in getattr(value, "addresses", ())]
    return found


def _words_of(position: int, argument: Argument, tensor: Any) -> list[int]:
    """Address, open sizes, open strides."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"argument {position} is {type(tensor).__name__}, expected a tensor")
    shape, strides = tensor.shape, tensor.stride()
    if len(shape) != len(argument.shape) or tensor.element_size() * 8 != argument.bits:
        raise ValueError(
            f"argument {position} is {tensor.dtype} {tuple(shape)}, compiled for "
            f"{len(argument.shape)} dimensions of {argument.bits} bits"
        )
    words, behind = [tensor.data_ptr()], []
    for size, fixed, stride, fixed_stride in zip(
        shape, argument.shape, strides, argument.strides, strict=True
    ):
        if fixed is None:
            words.append(size)
        elif size != fixed:
            found = f"argument {position} has shape {tuple(shape)}"
            raise ValueError(f"{found}, compiled for {argument.shape}")
        if fixed_stride is None:
            behind.append(stride)
        elif stride != fixed_stride and size > 1:
            found = f"argument {position} has strides {strides}"
            raise ValueError(f"{found}, compiled for {argument.strides}")
    return words + behind


# ---- the signature of what the DSL compiled


def signature_of(examples: Sequence[Any], function_type: str) -> Signature:
    """Return the signature of a function.

    Args:
        examples: the arguments that it was compiled with
        function_type: its LLVM type as the DSL prints it, which determines the layout of arguments
    """
    kinds = described(examples)
    types = iter(_parameters(function_type))
    arguments = []
    for argument in kinds:
        if argument.kind == _NOTHING:
            arguments.append(argument)
            continue
        given = next(types)
        found = tuple(match.group() for match in _SCALARS.finditer(given))
        if not _agrees(argument, found):
            raise RuntimeError(f"the DSL lowered {argument} to {given}")
        arguments.append(Argument(**{**vars(argument), "types": found}))
    if next(types, None) is not None:
        raise RuntimeError(f"{function_type} takes more than {len(arguments)} arguments")
    return Signature(arguments)


def described(examples: Sequence[Any]) -> list[Argument]:
    """Arguments of a function that is compiled with these, all but their types. Those that are None
    leave no trace in its code."""
    return [_described(example) for example in leaves(examples)]


def _described(example: Any) -> Argument:
    name = type(example).__name__
    if example is None:
        return Argument(_NOTHING)
    if name == "CUstream":
        return Argument(_STREAM)
    if name == "ParamTable":
        return Argument(_TABLE)
    if name in _NUMBERS:
        return Argument(_NUMBERS[name])
    if name == "_FakeTensor":
        shape, strides = (
            tuple(size if isinstance(size, int) else None for size in sizes)
            for sizes in (example.shape, example.stride)
        )
        return Argument(_TENSOR, (), example.element_type.width, shape, strides)
    raise TypeError(f"an argument of type {name} of a kernel's host function")


def _agrees(argument: Argument, types: tuple[str, ...]) -> bool:
    if argument.kind == _TENSOR:
        sizes, strides = argument.shape.count(None), argument.strides.count(None)
        return types == ("ptr", *["i32"] * sizes, *["i64"] * strides)
    if argument.kind == _TABLE:
        return len(types) == 1 and types[0].startswith("array")
    return types == (("ptr",) if argument.kind == _STREAM else (argument.kind,))


def _parameters(function_type: str) -> Iterator[str]:
    """The types between the outermost parentheses of `!llvm.func<i32 (...)>`, one by one."""
    inside = function_type[function_type.index("(") + 1 : function_type.rindex(")")]
    depth, start = 0, 0
    for position, letter in enumerate(inside):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            yield inside[start:position].strip()
            start = position + 1
    if inside[start:].strip():
        yield inside[start:].strip()
