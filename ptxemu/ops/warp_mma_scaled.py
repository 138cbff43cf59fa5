"""mma.sync with block scales: kind::mxf8f6f4, mxf4 and mxf4nvf4 of sm_120a. PTX ISA "mma", "Block
Scaling for mma.sync".

A row of A and a column of B have a scale factor, one byte, for each of their 1, 2 or 4 parts along
K. Of the four lanes 4 g ... 4 g + 3, two neighbouring ones hold the factors of rows g and g + 8,
one those of column g: the thread ids say which. The byte id is that of the first factor in the
32-bit operand.
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.state import Warp
from ptxemu.machine.sums import require_free_order
from ptxemu.numerics import formats
from ptxemu.ops.warp_fragments import COLUMNS, accumulated, columns_of_b, registers, rows_of_a
from ptxemu.ops.warp_mma import refused, shape_of
from ptxemu.ops.warp_mma_sparse import with_zeros
from ptxemu.syntax.tree import Instr

_NARROW = "e4m3 e5m2 e2m1 e2m3 e3m2"
_VECTORS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
# kind, type of the factors: how many a row may have; the first is meant where the opcode is silent
_FACTORS: dict[tuple[str, str], tuple[int, ...]] = {
    ("mxf8f6f4", "ue8m0"): (1,),
    ("mxf4", "ue8m0"): (2,),
    ("mxf4nvf4", "ue8m0"): (0, 2),
    ("mxf4nvf4", "ue4m3"): (0, 4),
}
_FLAGS = f"aligned row col block_scale {' '.join(_VECTORS)}"
_SPARSE = "mma.sp::ordered_metadata.sync"


def multiply_scaled(c: Lower, i: Instr, f: Match) -> list[Value]:
    """d, a, b, c, {metadata, selector,} factors of A, {byte, thread}, factors of B, {...}."""
    sparse = i.parts[1] != "sync"
    d, a, b, addend = (c.each(operand) for operand in i.operands[:4])
    kind, count = _require(i, f, sparse, [len(part) for part in (d, a, b, addend)])
    factors = i.operands[-4:]
    metadata, selector = i.operands[4:6] if sparse else (None, None)
    words = [*a, *b, *addend, *_word(c, i, factors[0]), *_word(c, i, factors[2])]
    if metadata is not None:
        words.append(metadata)
    rows = tuple(c.srcs(words, "u32"))
    ids = c.srcs((*c.each(factors[1]), *c.each(factors[3])), "u16")
    if selector is not None:
        ids.append(c.src(selector, "u32"))
    chosen = ", ".join(f"{{{k}}}" for k in range(len(ids)))
    packed = kind != "mxf8f6f4"
    types = tuple("packed e2m1" if packed and t == "e2m1" else t for t in f.types)
    return c.effect(
        f"scaled_multiply(w, {{rows}}, {(len(a), len(b))}, {types!r}, {count}, ({chosen}))",
        *ids,
        results=[("f32", False)] * 4,
        matrix=True,
        rows=rows,
    )


def _word(c: Lower, i: Instr, operand: object) -> tuple[object, ...]:
    """The register with scale factors, which compilers also write as a vector of one."""
    words = c.each(operand)
    if len(words) != 1:
        raise refused(i)
    return words


for _kind, _types, _factor, _dense, _sparse in (
    ("mxf8f6f4", _NARROW, "ue8m0", "m16n8k32", "m16n8k64"),
    ("mxf4", "e2m1", "ue8m0", "m16n8k64", "m16n8k128"),
    ("mxf4nvf4", "e2m1", "ue8m0 ue4m3", "m16n8k64", "m16n8k128"),
):
    for _name, _shape in (("mma.sync", _dense), (_SPARSE, _sparse)):
        op(
            _name,
            types=("f32", _types, _types, "f32", _factor),
            flags=f"{_FLAGS} {_shape} kind::{_kind}",
            section="mma" if _name == "mma.sync" else "mma.sp",
        )(multiply_scaled)


def _require(i: Instr, f: Match, sparse: bool, given: list[int]) -> tuple[str, int]:
    """The kind, and the scale factors of a row."""
    (m, k), kind = shape_of(f), f.pick("kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4")[6:]
    bits = "e2m1" if kind == "mxf8f6f4" else "packed e2m1"  # so many as any type of the kind
    vector = [n for name, n in _VECTORS.items() if name in f.flags]
    allowed = _FACTORS.get((kind, f.type), ())
    count = vector[0] if len(vector) == 1 else 0 if vector else next(iter(allowed), 0)
    wanted = [4, registers(bits, m * k >> sparse), registers(bits, k * COLUMNS), 4]
    whole = "block_scale" in f.flags and "aligned" in f.flags and ".row.col." in i.opcode
    if not whole or not count or count not in allowed or given != wanted:
        raise refused(i)
    if len(i.operands) != (10 if sparse else 8):
        raise refused(i)
    return kind, count


@runtime
def scaled_multiply(
    w: Warp,
    words: np.ndarray,
    counts: tuple[int, int],
    types: tuple[str, ...],
    factors: int,
    ids: tuple[int, ...],
) -> np.ndarray:
    """[register, lane] of D = (A times its factors) (B times its factors) + C. counts: registers of
    A and B; factors: of a row; ids: byte and thread of A, of B, and the sparsity selector."""
    require_free_order(w.machine, "mma.sync with block scales", types[0])
    words = np.ascontiguousarray(words).view(np.uint32)
    a_count, b_count = counts
    a, b, c, scale_a, scale_b, metadata = np.split(words, np.cumsum((a_count, b_count, 4, 1, 1)))
    byte_a, thread_a, byte_b, thread_b = (_id(value) for value in ids[:4])
    _require_ids((byte_a, byte_b), (thread_a, thread_b), factors)
    left, right = rows_of_a(a, types[1], 2), columns_of_b(b, types[2])
    if len(metadata):
        left = with_zeros(left, metadata[0], _id(ids[4]), types[1])
    lanes_a = scale_a.reshape(8, 4)[:, 2 * thread_a : 2 * thread_a + 2].T.ravel()
    lanes_b = scale_b.reshape(8, 4)[:, thread_b]
    with np.errstate(all="ignore"):
        product = _scaled(left, lanes_a, byte_a, factors, types[4]) @ (
            _scaled(right, lanes_b, byte_b, factors, types[4]).T
        )
        return accumulated(product, c, types[:4])


def _id(value: object) -> int:
    """A selector, which has to be equal in all lanes."""
    lanes = np.unique(np.asarray(value))
    if lanes.size != 1:
        raise HardwareRefusal(f"a selector of mma that differs between lanes: {lanes.tolist()}")
    return int(lanes[0])


def _require_ids(bytes_: tuple[int, int], threads: tuple[int, int], factors: int) -> None:
    """Factors may not cross the end of the 32 bits, and begin at a multiple of their number."""
    if any(byte % factors or byte not in range(4) for byte in bytes_):
        raise HardwareRefusal(f"byte ids {bytes_} of {factors} scale factors")
    if threads[0] not in range(2) or threads[1] not in range(4):
        raise HardwareRefusal(f"thread ids {threads}; limits are 1 of A and 3 of B")


def _scaled(
    matrix: np.ndarray, lanes: np.ndarray, first: int, count: int, type_: str
) -> np.ndarray:
    """float64 [line, along K] times a factor for each of `count` parts of a line; lanes: the word
    with the factors of each line. float64, as the product of two powers of two may exceed f32
    where what it is multiplied with is small."""
    codes = np.ascontiguousarray(lanes).view(np.uint8).reshape(-1, 4)[:, first : first + count]
    if type_ == "ue8m0":
        factors = formats.ue8m0_to_f32(codes)
    else:
        factors = formats.e4m3_to_f32(codes & 0x7F)
    blocks = matrix.reshape(len(matrix), count, -1).astype(np.float64)
    return (blocks * factors[:, :, None]).reshape(matrix.shape)
