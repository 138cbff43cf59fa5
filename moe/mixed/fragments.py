"""Four-bit expert weights, arranged at load time in the order in which warpgroups convert them.

Values do not change, unless an expert's ue8m0 codes exceed 128. Then all its values are scaled
down, and those at 2^-134 of the largest scale factor are lost. The weights are the A operand of
wgmma, in registers, so the data of a thread is contiguous. On Blackwell, the same registers go to
tensor memory. A unit is 64 rows by 64 of K: every thread of a warpgroup has 16 bytes of elements in
it, a word of eight for each 16 of K. The scale factors of its rows follow after all elements. Units
of the same rows follow each other along K, then come those of the next 64 rows.

Thread 4 g + t of warp w has four pairs of neighbours along K for each 16 of K, rows first:

    rows 16 w + g, 16 w + g + 8
    K    2 t, 2 t + 1, 2 t + 8, 2 t + 9

`places` tells where the four bits of an element are in two neighbouring words. The order lets few
instructions convert them to pairs of bf16 (`shared/dequantise.py`).

Rows of a product with SwiGLU alternate by eight, gate then up: a thread's two rows are a pair. A
scale factor is one byte that becomes bf16 without a case distinction. ue8m0: its exponent, larger
by 126, and reduced so that the expert's largest is finite. e4m3: five bits of exponent and three of
mantissa, no subnormals; elements whose scale factor is zero are stored as zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from kernelkit.call.tensors import require_table, require_tma, require_type
from kernelkit.numerics import e2m1
from moe.arguments import check_factor
from moe.formats import format_of
from moe.mixed.config import ACTIVATIONS, DEPTH, ROWS
from moe.packing import LayerWeights, PackedExperts, interleaved_rows, require_packed
from moe.quantized import Quantized
from moe.reference import unswizzle_scales

ELEMENT_BYTES = ROWS * DEPTH // 2
THREADS = 128
WORDS = 4  # words of a thread in a unit
PAIR_ROWS = 8  # alternating rows of gate, then of up
# Left-rotation of a word that moves pair i's code bits to BF16_BITS. Pairs 0-2 are whole in one
# word. The fourth pairs of two words use the bits left over in both: see JOINED.
TURNS = (0, 6, 28)
LAST_TURNS = (26, 4)  # rotations of the fourth pair of both words, once joined
JOINED = 0x60306030  # bits of the first word; others are of the second, rotated right by 2
JOINED_TURN = 2
BF16_BITS = (6, 7, 8, 15)  # positions of the code's bits, from the lowest up
# Exponent bias of the factor of elements: read as bf16, they are 2^-126 of their value.
UE8M0_BIAS, UE8M0_LARGEST = 126, 254
UE5M3_BIAS = 10  # bias of the stored exponent
MOST_BELOW = 11  # e4m3: largest log2 of a row's scale factor over a block's
GLOBAL_SHIFT = 8  # nvfp4: log2 by which elements are reduced, and the factor increased


def places(word: int, pair: int, second: int) -> list[tuple[int, int]]:
    """Return (word, bit) of each bit of a code, from the lowest up. The code is the first or second
    element of a pair of one of two words."""
    wanted = [16 * second + bit for bit in BF16_BITS]
    if pair < len(TURNS):
        return [(word, (bit - TURNS[pair]) % 32) for bit in wanted]
    joined = [(bit - LAST_TURNS[word]) % 32 for bit in wanted]
    return [(0, bit) if JOINED >> bit & 1 else (1, (bit + JOINED_TURN) % 32) for bit in joined]


def unit_bytes(fmt: str) -> int:
    """Bytes of a unit: its elements and scale factors."""
    return ELEMENT_BYTES + ROWS * DEPTH // format_of(fmt).block


@dataclass(frozen=True, eq=False)
class Fragments:
    """A weight [E, rows, K], arranged as described above."""

    data: torch.Tensor  # uint8 [E, bytes]
    factor: torch.Tensor  # fp32 [E]; [E, 2] for gate, up; [E, rows] for x in e4m3
    rows: int
    k: int
    fmt: str
    swiglu: bool  # rows of gate and up alternate by eight
    x: str = "bf16"  # dtype of the activations that the layout is for

    @property
    def experts(self) -> int:
        """E."""
        return len(self.factor)

    def check(self) -> None:
        """Raise ValueError for tensors that `arrange` does not make of such a weight."""
        if self.x not in ACTIVATIONS:
            raise NotImplementedError(f"w.x is {self.x!r}: one of {tuple(ACTIVATIONS)}")
        if self.fmt not in ACTIVATIONS[self.x]:
            raise NotImplementedError(f"w.fmt is {self.fmt!r}: one of {ACTIVATIONS[self.x]}")
        units = -(-self.rows // ROWS) * -(-self.k // DEPTH)
        factors: tuple[int | None, ...] = (None, 2) if self.has_pairs else (None,)
        if self.x == "e4m3":
            factors = (None, self.rows)
        require_table("w.factor", self.factor, torch.float32, factors)
        size = units * unit_bytes(self.fmt)
        require_table("w.data", self.data, torch.uint8, (self.experts, size))
        for name in ("data", "factor"):
            tensor = getattr(self, name)
            if tensor.numel() and not tensor.is_contiguous():
                raise ValueError(f"w.{name} has strides {tensor.stride()}: not contiguous")
        require_tma("w.data", self.data)

    @property
    def has_pairs(self) -> bool:
        """Whether gate and up have a factor each."""
        return self.x != "e4m3" and self.factor.ndim == 2

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored."""
        return self.data.nbytes + self.factor.nbytes


def units_of(size: int, unit: int) -> int:
    """Units that hold so many rows, or so much of K."""
    return -(-size // unit)


@dataclass(frozen=True, eq=False)
class ArrangedExperts(LayerWeights):
    """Weights of a layer, made by `arrange`."""

    w13: Fragments
    w2: Fragments
    bias13: torch.Tensor | None = None  # fp32 [E, rows], in the order of the rows of w13
    bias2: torch.Tensor | None = None  # fp32 [E, rows]
    h_scale: torch.Tensor | None = None  # fp32 [1], for e4m3: multiplies h before it is rounded
    h_decode_scale: torch.Tensor | None = None  # fp32 [1]: 1 / h_scale
    model_type: str | None = None  # as of PackedExperts

    def __post_init__(self) -> None:
        require_type("model_type", self.model_type, str, optional=True)

    @property
    def x(self) -> str:
        """dtype of activations as they are multiplied."""
        return self.w13.x


def arrange(
    experts: PackedExperts, activations: str = "bf16", *, h_scale: float = 1.0
) -> ArrangedExperts:
    """Arrange the weights of a layer in nvfp4 or mxfp4 for `mixed_gemm`, on Hopper and on
    Blackwell: the same bytes in another order, once at load time, expert by expert. The layer then
    computes in `activations`: bf16 is 0.3 % off, e4m3 3 to 5 % (in the norm, relative to fp64 with
    the same weights).

    Args:
        activations: 'bf16', or on Hopper, for weights in mxfp4, 'e4m3', which is faster with many
            rows and less exact. Weights are exact with both, except that e4m3 loses small elements
            if a row's scale factors are further apart than 2^11: they are rounded to multiples of
            2^-12 of the row's largest scale.
        h_scale: in e4m3, multiplies the output of SwiGLU before it is rounded; values beyond 448
            then saturate. With a limit the output is at most limit (limit + beta), 56 for gpt-oss.

    Raises:
        TypeError, NotImplementedError, ValueError: naming the value and the limit.
    """
    require_packed("experts", experts)
    require_type("activations", activations, str)
    if experts.intermediate % PAIR_ROWS:
        raise ValueError(f"I = {experts.intermediate}: a multiple of {PAIR_ROWS}")
    rows = interleaved_rows(experts.intermediate, experts.granularity).argsort()
    order = rows[interleaved_rows(experts.intermediate, PAIR_ROWS)]
    bias13 = experts.bias13
    if bias13 is not None:
        bias13 = bias13[:, order.to(bias13.device)].contiguous()
    scales: list[torch.Tensor | None] = [None, None]
    if activations == "e4m3":
        check_factor("h_scale", h_scale)
        place = {"dtype": torch.float32, "device": experts.w2.data.device}
        scales = [torch.tensor([s], **place) for s in (float(h_scale), 1 / float(h_scale))]
    return ArrangedExperts(
        fragments(experts.w13, order, activations),
        fragments(experts.w2, None, activations),
        bias13,
        experts.bias2,
        *scales,
        model_type=experts.model_type,
    )


def fragments(w: Quantized, order: torch.Tensor | None = None, x: str = "bf16") -> Fragments:
    """Arrange w [E, N, K] in nvfp4 or mxfp4 for products with x. order: int64 [N], the source row
    of each row; rows of gate and up alternate by eight."""
    if x not in ACTIVATIONS:
        raise NotImplementedError(f"activations {x!r}: one of {tuple(ACTIVATIONS)}")
    if w.fmt not in ACTIVATIONS[x]:
        raise NotImplementedError(f"weights in {w.fmt} with {x}: one of {ACTIVATIONS[x]}")
    every = [*_experts(w, order, x)]
    data = torch.stack([data for data, _ in every])
    factor = torch.stack([factor for _, factor in every])
    if w.decode_scale is not None:
        factor = (factor[:, None] if w.has_pairs else factor) * w.decode_scale
    return Fragments(data, factor, w.rows, w.k, w.fmt, order is not None, x)


def _experts(
    w: Quantized, order: torch.Tensor | None, x: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (bytes, factor) of each expert."""
    form = w.format
    columns = form.columns(w.k)
    rows = slice(None) if order is None else order.to(w.data.device)
    encode = _of_ue8m0 if form.scale == "ue8m0" else _of_e4m3
    for data, scales in zip(w.data, w.scales.reshape(len(w.data), -1), strict=True):
        codes = data.view(torch.uint8)[rows]
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
        scale = unswizzle_scales(scales, w.rows, columns).view(torch.uint8)[rows]
        codes = codes.masked_fill(_spread(scale, form.block) == 0, 0) if form.has_global else codes
        if x == "e4m3":
            codes, scale, factor = _below_largest(codes, scale)
            words = _words_of_e4m3(_padded(codes, DEPTH))
        else:
            scale, factor = encode(scale)
            words = _words_of_bf16(_padded(codes, DEPTH))
        yield _unit_data(words, _padded(scale, DEPTH // form.block)), factor


def _spread(scale: torch.Tensor, block: int) -> torch.Tensor:
    return scale.repeat_interleave(block, dim=1)


def _of_ue8m0(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exponents of the elements' factors, and the factor that undoes their reduction."""
    excess = (codes.amax().int() + UE8M0_BIAS - UE8M0_LARGEST).clamp(min=0)
    moved = codes.int() + UE8M0_BIAS - excess
    return moved.clamp(min=0).to(torch.uint8), torch.exp2(excess.float())


def _of_e4m3(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode scale factors in five bits of exponent and three of mantissa."""
    mantissa, exponent = torch.frexp(codes.view(torch.float8_e4m3fn).float())
    stored = (exponent - 1 + UE5M3_BIAS) * 8 + (mantissa * 16).int() - 8
    stored = torch.where(codes == 0, 0, stored)
    factor = torch.tensor(2.0**GLOBAL_SHIFT, dtype=torch.float32, device=codes.device)
    return stored.to(torch.uint8), factor


def _padded(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Pad with zeros to whole units."""
    below = -len(values) % ROWS
    return torch.nn.functional.pad(values, (0, -values.shape[1] % columns, 0, below))


def _below_largest(
    codes: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split scale factors into powers of two below the largest of their row, and a factor of the
    row.

    Returns codes [rows, K], these powers [rows, K / 32], and fp32 [rows], the factor for elements
    with the largest scale factor.
    """
    largest = scale.amax(1)
    below = largest[:, None].int() - scale.int()
    factor = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), largest.int() - 127 - 6)
    lost = (below - MOST_BELOW).clamp(min=0)
    block = codes.shape[1] // scale.shape[1]
    smaller = e2m1.values_of(codes) * torch.exp2(-_spread(lost, block).float())
    rounded = torch.where(_spread(lost, block) > 0, e2m1.codes_of(smaller), codes)
    return rounded, below.clamp(max=MOST_BELOW).to(torch.uint8), factor.float()


def _words_of_bf16(codes: torch.Tensor) -> torch.Tensor:
    """int32 [unit of rows, warp, g, unit of K, t, word] of uint8 codes [rows, K], whole units."""
    tall, deep = len(codes) // ROWS, codes.shape[1] // DEPTH
    # Row: unit, warp, half, g. K: unit, two steps, step of them, half, t, first or second.
    parts = codes.view(tall, 4, 2, 8, deep, 2, 2, 2, 4, 2).int()
    words = [parts.new_zeros(()), parts.new_zeros(())]
    for word, pair, second in product(range(2), range(4), range(2)):
        code = parts[:, :, pair % 2, :, :, :, word, pair // 2, :, second]
        for number, (target, bit) in enumerate(places(word, pair, second)):
            words[target] = words[target] | (code >> number & 1) << bit
    # (unit, warp, g, unit, two steps, t, word) to (.., t, two steps, word)
    return torch.stack(words, dim=-1).transpose(4, 5).flatten(-2)


def _words_of_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Arrange codes in words, for x in e4m3.

    A word has a row's elements of 32 of K: 4 t .. and 16 + 4 t ... Each step of 32 has a word of
    row g, then one of row g + 8. Magnitudes are nibbles in order. The signs are above them: of the
    second four elements in even nibbles, of the first four in odd ones.
    """
    tall, deep = len(codes) // ROWS, codes.shape[1] // DEPTH
    # Row: unit, warp, half, g. K: unit, step, half, t, which of four.
    parts = codes.view(tall, 4, 2, 8, deep, 2, 2, 4, 4).int()
    words = parts.new_zeros(())
    for half, which in product(range(2), range(4)):
        code = parts[..., half, :, which]
        sign = 8 * which + (3 if half else 7)
        words = words | (code & 7) << 4 * (4 * half + which) | (code >> 3) << sign
    # (unit, warp, half, g, unit, step, t) to (unit, warp, g, unit, t, step, half)
    return words.permute(0, 1, 3, 4, 6, 5, 2).flatten(-2)


def _unit_data(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Words as above and scale factors [rows, K / block], both whole units: bytes."""
    tall, deep = words.shape[0], words.shape[3]
    ordered = words.permute(0, 3, 1, 2, 4, 5).contiguous()  # unit, unit, warp, g, t, word
    elements = ordered.view(torch.uint8).reshape(tall, deep, ELEMENT_BYTES)
    scale = scale.view(tall, 4, 2, 8, deep, -1).permute(0, 4, 1, 3, 2, 5)  # .., g, half, block
    return torch.cat((elements, scale.reshape(tall, deep, -1)), dim=-1).flatten()
