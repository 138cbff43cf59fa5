"""A PTX program with its launch, inputs and expected outputs: read from a file, run, checked.

The header of `ptx/*.ptx` is comment lines, up to the first line that is none:

    // One sentence that says what is exercised.
    // launch: grid=2 block=64,2 cluster=2 smem=1024    all optional: 1, 32, 1, 0
    // in a: u32 64 rand                                name: dtype count generator
    // out d: u32 64 = a + 1                            name: dtype count = expression
    // inout s: u32 1 zeros = [a.sum()]                 an output that does not start as zeros
    // map m: a u16 dims=64,32 box=64,8 swizzle=128B    tensor map of buffer `a`, dim 0 contiguous
    // value n: u32 4 rand                              passed by value, as so many bytes
    // tolerance d: 1e-6                                relative; without it every bit counts

Each of in, out, inout, map and value is one kernel parameter, in order: a 64-bit pointer, the 128
bytes of the map, or the value's bytes. Expressions see numpy as `np`, the buffers as they are
before the launch, and everything in `isa_reference`; they are Python, so a program is code of the
tests and not a file of a stranger. dtypes are numpy's, plus bf16 (as u16 codes).
Generators: see `generate`.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import ptxemu
from lab.silicon.conformance import isa_reference
from lab.silicon.conformance.values import EDGES, edges
from ptxemu.machine import tensor_map
from ptxemu.machine.im2col import PixelBox

FOLDER = Path(__file__).resolve().parents[3] / "tests" / "ptxemu" / "ptx"
POLICIES = ("round-robin", "random", "adversarial")
DTYPES = {f"u{n}": f"u{n // 8}" for n in (8, 16, 32, 64)}
DTYPES |= {f"s{n}": f"i{n // 8}" for n in (8, 16, 32, 64)}
DTYPES |= {"f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8"}


@dataclass
class Buffer:
    """Global memory behind one pointer parameter; `expected` is None for an input."""

    name: str
    data: np.ndarray
    expected: np.ndarray | None = None
    tolerance: float = 0.0


@dataclass
class Value:
    """A parameter that is passed by value."""

    name: str
    data: np.ndarray


@dataclass
class Map:
    """A tensor map parameter: a dense tensor over the buffer called `of`; with `pixels` in im2col
    mode."""

    name: str
    of: str
    dtype: str
    dims: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "none"
    pixels: PixelBox | None = None
    nan_fill: bool = False

    def strides(self) -> tuple[int, ...]:
        """Bytes, of dimensions 1 and up."""
        bits = tensor_map.DTYPES[self.dtype][1]
        return tuple(bits * int(np.prod(self.dims[:k])) // 8 for k in range(1, len(self.dims)))


@dataclass
class Program:
    """PTX text with one entry, and everything that a launch of it needs."""

    name: str
    text: str
    grid: tuple[int, ...] = (1,)
    block: tuple[int, ...] = (32,)
    cluster: tuple[int, ...] = (1,)
    smem: int = 0
    params: list[Buffer | Map | Value] = field(default_factory=list)

    def buffers(self) -> list[Buffer]:
        return [param for param in self.params if isinstance(param, Buffer)]

    def outputs(self) -> list[Buffer]:
        return [buffer for buffer in self.buffers() if buffer.expected is not None]


# -- data -----------------------------------------------------------------------------------


def generate(how: str, name: str, dtype: str, count: int, seed: str = "") -> np.ndarray:
    """arange | zeros | ones | rand (ints: every bit; floats: normal) | small (-4..4 or 0..8) |
    special (every edge of the type, then rand); the same for the same name and seed, always."""
    kind = np.dtype(DTYPES[dtype])
    rng = np.random.default_rng(zlib.crc32(f"{name} {dtype}{seed}".encode()))
    if how in ("arange", "zeros", "ones"):
        return (np.arange(count) if how == "arange" else np.full(count, how == "ones")).astype(kind)
    if how == "small":
        low = 0 if kind.kind == "u" else -4
        return rng.integers(low, 9 if low == 0 else 5, count).astype(kind)
    if how not in ("rand", "special"):
        raise ValueError(f"unknown generator {how!r}")
    if kind.kind == "f":
        values = rng.standard_normal(count) * np.exp2(rng.integers(-6, 7, count))
        with np.errstate(over="ignore"):
            values = values.astype(kind)
    else:
        values = rng.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)
    if how == "special":
        chosen = rng.permutation(count)[: min(2 * EDGES, count // 2)]
        edges_of_type = edges(dtype).astype(f"u{kind.itemsize}").view(kind)
        values[chosen] = np.resize(edges_of_type, len(chosen))
    return values


# -- reading a file -------------------------------------------------------------------------

_DECLARATION = re.compile(r"(in|out|inout|value) (\w+): (\w+) (\d+)(?: (\w+))?(?: = (.+))?$")
_MAP = re.compile(r"map (\w+): (\w+) (\w+) dims=([\d,]+) box=([\d,]+)(?: swizzle=(\w+))?$")
_PAIR = re.compile(r"(\w+)=([\d,]+)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def read(path: Path, seed: str = "") -> Program:
    """The program of a `.ptx` file, on other random inputs for another seed.

    Raises ValueError for a header line that is not understood.
    """
    program = Program(path.stem, path.read_text())
    expressions: dict[str, str] = {}
    for line in program.text.split("\n")[1:]:
        if not line.startswith("//"):
            break
        _header_line(program, line[2:].strip(), expressions, seed)
    scope = {name: value for name, value in vars(isa_reference).items() if not name.startswith("_")}
    scope |= {"np": np}
    scope |= {
        param.name: param.data.copy() for param in program.params if not isinstance(param, Map)
    }
    for buffer in program.buffers():
        if buffer.name in expressions:
            with np.errstate(all="ignore"):
                value = eval(expressions[buffer.name], scope)
            buffer.expected = np.empty_like(buffer.data)
            buffer.expected[:] = np.asarray(value).reshape(-1)
    return program


def _header_line(program: Program, line: str, expressions: dict[str, str], seed: str) -> None:
    declared, mapped = _DECLARATION.match(line), _MAP.match(line)
    if declared:
        role, name, dtype, count, how, expression = declared.groups()
        data = generate(how or "zeros", name, dtype, int(count), seed)
        program.params.append(Value(name, data) if role == "value" else Buffer(name, data))
        if role in ("out", "inout"):
            expressions[name] = expression
    elif mapped:
        name, of, dtype, dims, box, mode = mapped.groups()
        program.params.append(Map(name, of, dtype, _numbers(dims), _numbers(box), mode or "none"))
    elif line.startswith("launch:"):
        for key, value in _PAIR.findall(line):
            setattr(program, key, int(value) if key == "smem" else _numbers(value))
    elif line.startswith("tolerance "):
        name, bound = line.removeprefix("tolerance ").split(":")
        next(b for b in program.buffers() if b.name == name).tolerance = float(bound)
    elif line and not line.startswith("#"):
        raise ValueError(f"{program.name}: header line {line!r}")


# -- running and checking -------------------------------------------------------------------


def aimed_at(program: Program, target: str) -> Program:
    """The program for another GPU than it is written for."""
    return dataclasses.replace(program, text=program.text.replace("sm_100a", target))


def emulate(
    program: Program, module: ptxemu.Module, options: ptxemu.Options
) -> dict[str, np.ndarray]:
    """The outputs after a launch of `module`, which is `program.text` loaded."""
    live = {buffer.name: aligned_copy(buffer.data) for buffer in program.buffers()}
    params = [_raw(param, live) for param in program.params]
    module.launch(
        grid=program.grid,
        block=program.block,
        cluster=(*program.cluster, 1, 1)[:3],
        smem_bytes=program.smem,
        params=params,
        memory=list(live.values()),
        options=options,
        non_portable=True,  # `hw_runner` allows it for every kernel
    )
    return {buffer.name: live[buffer.name] for buffer in program.outputs()}


def _raw(param: Buffer | Map | Value, live: dict[str, np.ndarray]) -> bytes:
    """A kernel parameter, with the buffers in their places."""
    if isinstance(param, Value):
        return param.data.tobytes()
    if isinstance(param, Buffer):
        return live[param.name].ctypes.data.to_bytes(8, "little")
    address, shape = live[param.of].ctypes.data, (param.dims, param.strides(), param.box)
    how = param.dtype, param.swizzle, param.nan_fill
    if param.pixels is not None:
        return tensor_map.encode_im2col(address, *shape, param.pixels, *how)
    return tensor_map.encode(address, *shape, *how)


def aligned_copy(data: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 256 bytes, as device allocations are."""
    raw = np.zeros(data.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    copy = raw[start : start + data.nbytes].view(data.dtype)
    copy[:] = data
    return copy


def check(program: Program, outputs: dict[str, np.ndarray]) -> None:
    """Raise AssertionError that names the output and the first elements that differ."""
    for buffer in program.outputs():
        found, expected = outputs[buffer.name], buffer.expected
        same = found.view(f"u{found.itemsize}") == expected.view(f"u{found.itemsize}")
        if found.dtype.kind == "f":
            same |= np.isnan(found) & np.isnan(expected)
        if buffer.tolerance:
            same |= np.abs(found - expected) <= buffer.tolerance * np.maximum(
                np.abs(expected), 1e-30
            )
        wrong = np.flatnonzero(~same)
        assert not len(wrong), (
            f"{program.name}: {buffer.name} differs in {len(wrong)} of {len(found)} elements; "
            "first " + ", ".join(f"[{k}] {found[k]!r} expected {expected[k]!r}" for k in wrong[:4])
        )
