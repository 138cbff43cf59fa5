"""Expected memory contents of `ptx/*.ptx` where they are more than one expression.

Written from the manual and from what each program says; nothing of ptxemu is used here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np

from lab.silicon.conformance.exact_arithmetic import ieee, values_of
from lab.silicon.conformance.integer_semantics import Form, integer, wrapped


def nested_if(t: int) -> int:
    if t % 2 == 0:
        return t + ((t ^ 255) if t > 20 else 1000)
    return t + 1 + (7 * t if t < 16 else t + 300)


def exits_early(t: int) -> int:
    lane = t % 32
    if lane < 4:
        return 7
    if lane < 20:
        return lane + 100
    return 8 if t > 31 else 12


def phi_moves() -> np.ndarray:
    lanes = np.arange(32)
    varying, uniform = [lanes + 10, lanes + 20, lanes + 30], [np.full(32, k) for k in (1, 2, 3)]
    rows = [np.choose((np.arange(3)[:, None] + lanes % 4 + 1) % 3, [v[None] for v in varying])]
    rows.append(np.choose((np.arange(3)[:, None] - lanes % 4 - 1) % 3, [u[None] for u in uniform]))
    return np.concatenate(rows)


def guarded(a: np.ndarray) -> np.ndarray:
    first = np.arange(32) < 12
    total = np.where(first, a, 18).astype(np.uint32) + np.uint32(5)
    return np.concatenate([np.where(first, total, 0), np.full(32, 5)])


def promoted(a: np.ndarray) -> np.ndarray:
    part = np.arange(32) < 9
    product = np.where(part, (a[0] + a[1]) * np.uint32(3), a[0] * a[1])
    return np.concatenate([product, np.full(32, 11), np.where(part, 3, a[1])])


def grouped(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    values = a.reshape(8, 32)
    product = (values * b[:, None]).astype(np.float32)
    pairs = zip(product.ravel().tolist(), values[::-1].ravel().tolist(), strict=True)
    fused = np.array([ieee("fma", "f32", "rn", (x, y, 0.5)) for x, y in pairs], np.float32)
    bounded = np.maximum(fused.reshape(8, 32), b[0])
    rows = bounded[np.arange(8) ^ 1] - values
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return np.concatenate([rows.reshape(-1), total])


def shuffle_source(mode: str, b: int, c: int, lane: int) -> tuple[int, bool]:
    """(source lane, in range), after the pseudocode of shfl.sync."""
    b, bound, segment = b & 31, c & 31, c >> 8 & 31
    least, most = lane & segment, lane & segment | bound & ~segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": least | b & ~segment}[mode]
    valid = source >= most if mode == "up" else source <= most
    return (source if valid else lane), valid


def shuffles(a: np.ndarray, forms: list) -> np.ndarray:
    rows = []
    for mode, b, c in forms:
        found = [shuffle_source(mode, int(np.resize(b, 32)[lane]), c, lane) for lane in range(32)]
        rows += [[a[source] for source, _ in found], [valid for _, valid in found]]
    return np.array(rows)


def votes() -> np.ndarray:
    lanes = np.arange(32)
    part = lanes & 2 != 0
    rows = [0b11111, 1, 0xFFFFFFFF, lanes == 0]
    return np.array(
        [np.broadcast_to(row, 32) for row in rows]
        + [np.where(part, row, 0) for row in (0xCCCCCCCC, 0b01100, lanes == 2, 0)]
    )


def warp_groups(a: np.ndarray) -> np.ndarray:
    lanes = np.arange(32)
    half, quarter = lanes // 16, lanes // 8
    bits = np.uint32(1) << lanes.astype(np.uint32)

    def among(chosen: np.ndarray) -> list[int]:
        return [int(bits[chosen & (half == half[lane])].sum()) for lane in range(32)]

    return np.array(
        [
            among(a > 3),
            [int(a[half == half[lane]].sum()) for lane in range(32)],
            [int(bits[(half == half[lane]) & (a == a[lane])].sum()) for lane in range(32)],
            [int((a[quarter == quarter[lane]] > 3).any()) for lane in range(32)],
            a[quarter * 8],
            np.where(lanes % 8 == 0, quarter * 8, 99),
        ]
    )


def _combining(form: str) -> Callable[[int, int], int]:
    """The function of "add.u32" and the like, on words."""
    name, kind = form.split(".")
    if name == "inc":
        return lambda old, x: 0 if old >= x else old + 1
    if name == "dec":
        return lambda old, x: x if old == 0 or old > x else old - 1
    _, call = integer(name, Form((kind,), frozenset()))
    return lambda a, b: call(wrapped(a, kind), wrapped(b, kind)) & 0xFFFFFFFF


def reductions(a: np.ndarray, forms: list[str]) -> np.ndarray:
    return np.array(
        [
            [functools.reduce(_combining(form), values.tolist())] * 32
            for form in forms
            for values in (a, np.full(32, a[5]))
        ]
    )


def float_reductions(a: np.ndarray, forms: list[str]) -> np.ndarray:
    rows = []
    for form in forms:
        for values in (a[:32], a[32:]):
            values = np.abs(values) if "abs" in form else values
            numbers = values[~np.isnan(values)]
            if not len(numbers) or ("NaN" in form and len(numbers) < 32):
                rows.append([np.nan] * 32)
                continue
            key = lambda x: (x, math.copysign(1, x))  # noqa: E731
            rows.append([(min if "min" in form else max)(numbers.tolist(), key=key)] * 32)
    return np.array(rows)


def matches(a: np.ndarray) -> np.ndarray:
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    same = [int(bits[a == x].sum()) for x in a]
    low = [int(bits[:8][a[:8] == a[lane]].sum()) if lane < 8 else 0 for lane in range(32)]
    return np.array([same, [0] * 32, [0xFFFFFFFF] * 32, same, low])


def copied(a: np.ndarray) -> np.ndarray:
    """Return what memory_widths writes: pieces of `a` at the same offsets."""
    out = np.zeros_like(a)
    for start, end in ((0, 32), (64, 128), (128, 512), (512, 1024), (1024, 2048)):
        out[start:end] = a[start:end]
    return out


def wide_copies(a: np.ndarray) -> np.ndarray:
    swapped = a[32:64] << np.uint64(32) | a[32:64] >> np.uint64(32)
    pairs = np.stack([a[64:128].reshape(32, 2)[:, 1], np.full(32, 5, np.uint64)], 1).reshape(-1)
    backwards = a[128:256].reshape(32, 4)[:, ::-1].reshape(-1)
    word = a[1] << np.uint64(32) | a[1] >> np.uint64(32)
    fixed = np.uint64(7 << 32 | 0x3F800000)
    uniform = np.repeat(np.array([a[1], word, fixed]), 32)
    return np.concatenate([a[:32], swapped, pairs, a[128:192], backwards, uniform])


def spaces(a: np.ndarray) -> np.ndarray:
    lanes = np.arange(48)
    table = np.array([10, 20, 30, 64])
    guarded = np.where(lanes < 40, a[::-1], 1) + 1
    rows = [a[::-1], guarded, a + lanes + 77, np.full(48, 7), table[lanes % 4] + 20]
    return np.concatenate(rows)


def cluster_exchange() -> np.ndarray:
    """Return what cluster_memory reads: numbers of the next CTA and of rank 2, the leader's
    counter."""
    ctas, lanes = np.arange(8)[:, None], np.arange(32)
    base, rank = ctas // 4 * 4, ctas % 4
    following = (base + (rank + 1) % 4) * 100 + lanes
    second = (base + 2) * 100 + lanes
    return np.stack([following, second, (rank + 1) % 4 * 1000 + 20 + 0 * lanes])


def peer_reductions(a: np.ndarray) -> np.ndarray:
    """Return what async_reduce leaves in each of two CTAs: sums of words, the larger words, and
    a sum of 64 bits."""
    sums, largest, totals = [], [], []
    for sent in a.reshape(2, 32)[::-1]:
        words = np.arange(32, dtype=np.uint32)
        words[:8] += sent.reshape(4, 8).sum(0, dtype=np.uint32)
        total = 5 + int(sent.sum(dtype=np.uint64))
        sums.append(words)
        largest.append(np.maximum(sent.view(np.int32), 1000).view(np.uint32))
        totals.append(np.resize(np.array([total & 0xFFFFFFFF, total >> 32], np.uint32), 32))
    return np.stack([sums, largest, totals])


def indices() -> np.ndarray:
    rows = []
    for cta, t in np.ndindex(16, 16):
        x, y = cta % 4, cta // 4
        in_cluster = [x % 2 + y % 2 * 2, x % 2, y % 2]
        below = (1 << t) - 1
        masks = [below, 0xFFFFFFFF ^ below]
        thread, cluster = [t % 4, t // 4 % 2, t // 8], [x // 2, y // 2]
        rows.append([*thread, *in_cluster, *cluster, 2, 4, t, 2, *masks, 1, 9])
    return np.array(rows)


def atomics(m: np.ndarray, a: np.ndarray, forms: list[str]) -> np.ndarray:
    """Lanes one after the other."""
    out = [int(x) for x in m]
    for k, form in enumerate(forms):
        out[k] = functools.reduce(_combining(form), a.tolist(), out[k])
    for lane, x in enumerate(a.tolist()):
        out[16 + lane % 4] = out[16 + lane % 4] + x & 0xFFFFFFFF
    out[20] = out[20] + 30 & 0xFFFFFFFF
    for lane in range(32):
        out[21] = 77 if out[21] == lane else out[21]
    out[22] = int(a[9])
    total = (out[25] << 32 | out[24]) + sum(int(x) << 20 for x in a) & (1 << 64) - 1
    most = max(out[27] << 32 | out[26], *(int(x) << 20 for x in a))
    out[24:28] = total & 0xFFFFFFFF, total >> 32, most & 0xFFFFFFFF, most >> 32
    return np.array(out)


def float_atomics(m: np.ndarray, a: np.ndarray) -> np.ndarray:
    total = a.sum()
    return m + np.array([total, 32, total, -total, -total, total, total, 64, 0, 0], np.float32)


def async_copies(a: np.ndarray) -> np.ndarray:
    t = np.arange(64)
    small = np.where(t % 2, a[:64], 0)
    ignored = np.where(t[:, None] < 20, 0, a[256:384].reshape(64, 2))
    half = a[256:512].reshape(64, 4).copy()
    half[:, 2:] = 0
    return np.concatenate(
        [a[:256], small, ignored.reshape(-1), np.zeros(64), half[::-1].reshape(-1)]
    )


def _places(
    box: tuple[int, ...], shape: tuple[int, ...], position: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(index in the box, index in the tensor) of every element of a box that is inside."""
    for index in np.ndindex(*box):
        where = tuple(i + p for i, p in zip(index, position[::-1], strict=True))
        if all(0 <= w < n for w, n in zip(where, shape, strict=True)):
            yield index, where


def tile(tensor: np.ndarray, position: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """A box of a tensor (outermost first) at a position (innermost first), zero outside."""
    out = np.zeros(box, tensor.dtype)
    for index, where in _places(box, tensor.shape, position):
        out[index] = tensor[where]
    return out


def untile(
    box: np.ndarray,
    shape: tuple[int, ...],
    position: tuple[int, ...],
    into: np.ndarray | None = None,
) -> np.ndarray:
    """A tensor of zeros (or `into`) with a box stored at a position (innermost first)."""
    out = np.zeros(shape, box.dtype) if into is None else into
    for index, where in _places(box.shape, shape, position):
        out[where] = box[index]
    return out


def stored_2d(a: np.ndarray) -> np.ndarray:
    tensor = a[:3840].reshape(48, 80)
    out = untile(tile(tensor, (-8, 3), (8, 64)), (48, 80), (16, 2))
    return untile(tile(tensor, (40, 44), (8, 64)), (48, 80), (32, 43), out)


def tmem_16x256b(a: np.ndarray) -> np.ndarray:
    """tcgen05.ld.16x256b.x2 from column 16: register 4j + {0, 1} of lane t is row t / 4, column
    8j + 2 (t % 4) + {0, 1}; registers {2, 3} are eight rows below."""
    cells = a.reshape(128, 32)
    out = np.empty((128, 8), a.dtype)
    for thread in range(128):
        first, t = thread // 32 * 32, thread % 32
        for r in range(8):
            out[thread, r] = cells[
                first + t // 4 + r // 2 % 2 * 8, 16 + r // 4 * 8 + t % 4 * 2 + r % 2
            ]
    return out


def _e2m1(packed: np.ndarray) -> np.ndarray:
    """The two values of each byte, the lower bits first."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1)
    return values_of("e2m1", nibbles).reshape(*packed.shape[:-1], -1)


def block_scaled(a: np.ndarray, b: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Return D, (128, 32), of e2m1 over K = 128; every 16 along K have a ue4m3 scale, codes up to
    8.

    a, b: [step of 64, half of it, row, 16 bytes].
    s: [step, A or B, row % 32, row / 32, block].
    """
    factors = s.reshape(2, 2, 32, 4, 4).swapaxes(2, 3).reshape(2, 2, 128, 4) * 2.0**-9
    total = np.zeros((128, 32))
    for step in range(2):
        scaled = []
        for which, codes in enumerate((a.reshape(2, 2, 128, 16), b.reshape(2, 2, 32, 16))):
            packed = np.concatenate([*codes[step]], axis=1)
            scaled.append(_e2m1(packed) * factors[step, which, : len(packed)].repeat(16, 1))
        total += scaled[0] @ scaled[1].T
    return total


def block_scaled_pair(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Return D [CTA, lane, column], (128, 64), of e2m1 over K = 64.

    Every 16 elements along K have a ue4m3 scale factor, with codes up to 8. Lanes from 64 on hold
    the columns from 32 on.

    x: [CTA, 4096 bytes], A as [half of K, row of 64, 16 bytes], then 32 rows of B likewise.
    s: [CTA, 2048 bytes], A's as [row % 32, row / 32, block], then B's as [half of B's rows, row, 4,
    block].
    """
    operands = []
    for start, rows in ((0, 64), (2048, 32)):
        packed = x.reshape(2, 4096)[:, start : start + 32 * rows].reshape(2, 2, rows, 16)
        packed = np.concatenate([packed[:, 0], packed[:, 1]], axis=-1)
        operands.append(_e2m1(packed))
    b = operands[1].reshape(64, 64)
    out = np.empty((2, 128, 32))
    for cta, codes in enumerate(s.reshape(2, 2048)):
        of_a = codes[:512].reshape(32, 4, 4).swapaxes(0, 1)[:2].reshape(64, 4)
        of_b = codes[512:1536].reshape(2, 32, 4, 4)[:, :, 0].reshape(64, 4)
        scaled_a = operands[0][cta] * (of_a * 2.0**-9).repeat(16, 1)
        d = scaled_a @ (b * (of_b * 2.0**-9).repeat(16, 1)).T
        out[cta, :64], out[cta, 64:] = d[:, :32], d[:, 32:]
    return out


def narrow_a(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (128, 32) over two steps of K = 32: A in e2m1, then in e3m2, times B in e4m3, codes up
    to 8. A keeps 16 elements in the first 8 or 12 of 16 bytes.

    a, b: [step, half of K, row, 16 bytes].
    """
    a, b = a.reshape(2, 2, 128, 16), b.reshape(2, 2, 32, 16) * 2.0**-9
    total = np.zeros((128, 32))
    for step, form in enumerate(("e2m1", "e3m2")):
        size = 4 + 2 * step  # bits
        stream = np.unpackbits(a[step, :, :, : 2 * size], axis=-1, bitorder="little")
        codes = stream.reshape(2, 128, 16, size) @ (1 << np.arange(size))
        values = values_of(form, codes)
        total += np.concatenate([*values], axis=1) @ np.concatenate([*b[step]], axis=1).T
    return total


def shifted_a(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (128, 32) of e4m3 codes up to 8: A times the first B, plus A with its rows moved by
    one within each 32 times the second.

    a: [half of K, row, 16 bytes].
    b: [step, half of K, row, 16 bytes].
    """
    rows = np.concatenate([*a.reshape(2, 128, 16)], axis=1) * 2.0**-9
    first, second = (np.concatenate([*half], axis=1) for half in b.reshape(2, 2, 32, 16) * 2.0**-9)
    moved = [rows[min(row + 1, row | 31)] for row in range(128)]
    return rows @ first.T + np.array(moved) @ second.T


def byte_matrices(a: np.ndarray) -> np.ndarray:
    """stmatrix of b8: a lane's bytes become columns of 16x8 matrices, stored as rows of 16 bytes.

    Byte e of lane t's register is element (t / 4 + 8 (e / 2), 2 (t % 4) + e % 2) of a matrix.

    a: [lane, matrix, byte].
    """
    out = np.empty((4, 8, 16), np.uint8)
    for t, registers in enumerate(a.reshape(32, 4, 4)):
        for e in range(4):
            out[:, 2 * (t % 4) + e % 2, t // 4 + 8 * (e // 2)] = registers[:, e]
    return np.concatenate([out, out[:2], out[2:3]]).reshape(-1)


def param_values(v: np.ndarray, w: np.ndarray) -> np.ndarray:
    kinds = {0: "u1", 1: "i1", 2: "u2", 4: "i2", 7: "u1", 12: "u4"}
    scalars = [np.frombuffer(v, kind, 1, at)[0] for at, kind in kinds.items()] + [w[6]]
    rows = [np.full(32, int(x) & 0xFFFFFFFF) for x in scalars]
    return np.concatenate([*rows, w, w])


def partial_warps(a: np.ndarray) -> np.ndarray:
    first = np.arange(52) < 32
    odd = np.where(first, (a[:32] & 1).sum(), (a[32:] & 1).sum())
    picked = np.where(first, a[19], a[51])
    trips = [sum(range(3, max(t % 8, 4))) for t in range(52)]
    return np.concatenate([a[::-1], odd ^ picked, trips])


def matrix_fragments(a: np.ndarray, transposed: bool) -> np.ndarray:
    """ldmatrix: lane t gets elements 2 (t % 4) and + 1 of row (or column) t / 4 of every matrix."""
    matrices = a.reshape(-1, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).reshape(-1).view(np.uint32)


def added_boxes(x: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Boxes of 2 x 8 added at (4, 1) and, over the end, at (12, 3); coordinates innermost first."""
    out, boxes = x.reshape(4, 16).copy(), a.reshape(2, 2, 8)
    out[1:3, 4:12] += boxes[0]
    out[3, 12:16] += boxes[1][0, :4]
    return out
