"""Expert weights as the kernels read them, packed once when a model is loaded.

A layer has w13 [E, 2I, H], gate and up of its first product, and w2 [E, H, I]. Both are packed in a
block-scaled format, with one global scale per expert if the format has one. Scale factors are
swizzled, and every expert begins a new block of 128 rows (`moe.formats`). The rows of w13
alternate, so that a tile of the first product holds gate and up of the same columns:

    [gate 0 .. g - 1, up 0 .. g - 1, gate g .. 2g - 1, ...]    g: the granularity

Either product may have a bias in fp32 (gpt-oss); that of the first one is in this row order.

`pack` accepts bf16, fp16 or fp32; `pack_quantised` accepts a checkpoint's weights in the same
format. Both read the values (on a GPU the host waits) and refuse those that no kernel can multiply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from kernelkit.call.tensors import (
    DTYPE_NAMES,
    as_number,
    require_memory,
    require_rank,
    require_table,
    require_tensors,
    require_type,
)
from kernelkit.plan import hw
from moe.config import DEFAULT_GRANULARITY, GRANULARITIES
from moe.formats import FORMATS, BlockFormat, format_of
from moe.quantized import ELEMENT_DTYPES, SCALE_DTYPES, Quantized, laid_out, of_bytes
from moe.reference import NAN_CODE, dequantise, encode_scale, quantise_blocks, swizzle_scales

# Rows of w13 as it is given: all of gate first, all of up first, or one of each in turn (gpt-oss).
ORDERS = ("gate_up", "up_gate", "alternating")
Biases = tuple[torch.Tensor | None, torch.Tensor | None]


class LayerWeights:
    """Sizes of a layer's weights in any layout: w13 of [E, 2I, H], w2 of [E, H, I]."""

    w13: Any
    w2: Any
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None

    @property
    def biases(self) -> Biases:
        """Biases of both products."""
        return self.bias13, self.bias2

    @property
    def experts(self) -> int:
        """E."""
        return self.w2.data.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.w13.k

    @property
    def intermediate(self) -> int:
        """I."""
        return self.w2.k

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        biases = (bias.nbytes for bias in self.biases if bias is not None)
        return self.w13.nbytes + self.w2.nbytes + sum(biases)


@dataclass(frozen=True, eq=False)
class PackedExperts(LayerWeights):
    """Packed experts of a layer; both weights have the same format."""

    w13: Quantized  # [E, 2I, H], rows alternate by `granularity`
    w2: Quantized  # [E, H, I]
    granularity: int = DEFAULT_GRANULARITY
    bias13: torch.Tensor | None = None  # fp32 [E, 2I], in the order of the packed rows
    bias2: torch.Tensor | None = None  # fp32 [E, H]
    model_type: str | None = None  # of config.json, if it is known: some need an activation

    def __post_init__(self) -> None:
        for name, w in {"w13": self.w13, "w2": self.w2}.items():
            require_kind(name, w, Quantized)
            require_rank(f"{name}.data", w.data, "[E, rows, K]")
            if w.encode_scale is not None and len(w.encode_scale) != len(w.data):
                raise ValueError(
                    f"{name} has {len(w.encode_scale)} global scales for {len(w.data)} experts"
                )
        require_tensors(w13=self.w13.data, w2=self.w2.data)
        require_type("model_type", self.model_type, str, optional=True)
        if self.w13.fmt != self.w2.fmt:
            raise ValueError(f"w13 is in {self.w13.fmt}, w2 in {self.w2.fmt}: one format for both")
        form = FORMATS[self.w13.fmt]
        shape13, shape2 = (
            (*w.data.shape[:2], w.data.shape[2] * form.per_byte) for w in (self.w13, self.w2)
        )
        _check_sizes(shape13, shape2, form)
        granularity = _check_granularity(self.granularity, shape2[2])
        object.__setattr__(self, "granularity", granularity)
        scale2, scale13 = self.w2.decode_scale, self.w13.decode_scale
        if scale2 is not None and scale2.ndim == 2:
            raise ValueError("w2 has two global scales per expert, but neither gate nor up")
        packed = self.w13.granularity
        if packed not in (None, self.granularity):
            raise ValueError(
                f"granularity {self.granularity}, but gate and up of w13 alternate every "
                f"{packed} rows"
            )
        if (
            scale13 is not None and scale13.ndim == 2 and packed is None
        ):  # needed to dequantise the weights
            w13 = laid_out(replace(self.w13), granularity=self.granularity)
            object.__setattr__(self, "w13", w13)
        self._check_biases()

    def _check_biases(self) -> None:
        for name, of in {"bias13": self.w13, "bias2": self.w2}.items():
            bias = getattr(self, name)
            if bias is not None:
                require_tensors(**{"w13": self.w13.data, name: bias})
                require_table(name, bias, torch.float32, tuple(of.data.shape[:2]))

    @property
    def fmt(self) -> str:
        """The format of both."""
        return self.w13.fmt


@dataclass(frozen=True, eq=False)
class CheckpointWeight:
    """A quantised weight [E, N, K] of a checkpoint: not interleaved, not swizzled.

    data: elements in their own dtype or as bytes. uint8 [E, N, K / 2] of e2m1, the even element in
    the low bits; e4m3 [E, N, K].
    scales: [E, N, K / block] in their own dtype or as bytes.
    decode_scale: fp32 [E], multiplies the values (`weight_scale_2` of ModelOpt); or encode_scale,
    its reciprocal (`weight_global_scale` of compressed-tensors). For w13 also [E, 2], one for gate
    and one for up.
    """

    data: torch.Tensor
    scales: torch.Tensor
    encode_scale: torch.Tensor | None = None
    decode_scale: torch.Tensor | None = None


def pack(
    w13: torch.Tensor,
    w2: torch.Tensor,
    fmt: str = "nvfp4",
    *,
    granularity: int = DEFAULT_GRANULARITY,
    order: str = "gate_up",
    encode_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    biases: Biases | None = None,
) -> PackedExperts:
    """Quantise and pack w13 [E, 2I, H] and w2 [E, H, I] in bf16, fp16 or fp32, expert by expert.

    What the layer computes in is chosen afterwards. With these experts `fused_moe` quantises
    activations as well, to the format that `activations` names: 'nvfp4' with weights in nvfp4 is
    11 to 17 % off, 'mxfp8' with weights in mxfp4 or mxfp8 3 to 5 %. `moe.arrange(pack(...))` keeps
    activations in bf16: 0.3 % off. These are errors in the norm relative to fp64 with the same
    weights; moe/README.md has them by model.

    Args:
        granularity: 8, 16, 32 or 64, a divisor of I.
        order: of the rows of w13, one of ORDERS.
        encode_scales: the global scales of w13 and of w2, fp32 [E]. By default each maps the
            largest magnitude of its expert to the largest number of the format.
        biases: of w13 [E, 2I], in the order of its rows, and of w2 [E, H], in bf16, fp16 or fp32;
            None for none.

    Raises:
        TypeError, ValueError: naming the value and the limit, for sizes that no kernel supports and
            for weights that are not finite.
    """
    form = format_of(fmt)
    require_tensors(w13=w13, w2=w2)
    require_memory(w13=w13, w2=w2)
    w13, w2 = w13.detach(), w2.detach()
    for name, w in {"w13": w13, "w2": w2}.items():
        require_rank(name, w, "[E, N, K]")
        if w.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} is {w.dtype}, expected bf16, fp16 or fp32")
    _check_sizes(w13.shape, w2.shape, form)
    rows = interleaved_rows(w2.shape[2], granularity, order).to(w13.device)
    encode13, encode2 = _pair("encode_scales", encode_scales)
    bias13, bias2 = _packed_biases(biases, w13, w2, rows)
    return PackedExperts(
        laid_out(quantise_experts("w13", w13, form, encode13, rows), granularity=granularity),
        quantise_experts("w2", w2, form, encode2),
        granularity,
        bias13,
        bias2,
    )


def pack_quantised(
    w13: CheckpointWeight,
    w2: CheckpointWeight,
    fmt: str = "nvfp4",
    *,
    granularity: int = DEFAULT_GRANULARITY,
    order: str = "gate_up",
    biases: Biases | None = None,
) -> PackedExperts:
    """Arrange a checkpoint's weights in the format `fmt`: no value changes. What the layer computes
    in is chosen afterwards, as with `pack`.

    Args:
        granularity, order, biases: as of `pack`.

    Raises:
        TypeError, ValueError: naming the value and the limit, for sizes that no kernel supports and
            for codes and global scales that are no numbers.
    """
    form = format_of(fmt)
    for name, w in {"w13": w13, "w2": w2}.items():
        require_kind(name, w, CheckpointWeight)
        _check_checkpoint(name, w, form)
    shape13, shape2 = ((*w.data.shape[:2], w.data.shape[2] * form.per_byte) for w in (w13, w2))
    _check_sizes(shape13, shape2, form)
    rows = interleaved_rows(shape2[2], granularity, order).to(w13.data.device)
    bias13, bias2 = _packed_biases(biases, w13.data, w2.data, rows)
    return PackedExperts(
        laid_out(_laid_out("w13", w13, form, rows), granularity=granularity),
        _laid_out("w2", w2, form, slice(None)),
        granularity,
        bias13,
        bias2,
    )


def require_kind(name: str, value: object, kind: type) -> None:
    """Raise TypeError for another type, without showing the value, which may be large."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {type(value).__name__}, expected {kind.__name__}")


def require_packed(name: str, packed: object) -> None:
    """Raise as `require_kind` does unless `packed` is a PackedExperts, and as `require_memory` does
    for its tensors."""
    require_kind(name, packed, PackedExperts)
    experts = cast(PackedExperts, packed)
    biases = {"bias13": experts.bias13, "bias2": experts.bias2}
    tensors = {f"{name}.{field}": bias for field, bias in biases.items() if bias is not None}
    for field in ("w13", "w2"):
        parts = vars(getattr(experts, field)).items()
        tensors |= {f"{name}.{field}.{n}": t for n, t in parts if isinstance(t, torch.Tensor)}
    require_memory(**tensors)


def _pair(name: str, pair: object) -> Biases:
    """Check and return the biases of w13 and of w2."""
    if pair is None:
        return None, None
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"{name} is {type(pair).__name__}, expected two tensors or None")
    for place, each in enumerate(pair):
        require_type(f"{name}[{place}]", each, torch.Tensor, optional=True)
        if each is not None:
            require_memory(**{f"{name}[{place}]": each})
    first, second = (None if each is None else each.detach() for each in pair)
    return first, second


def _packed_biases(
    biases: object, w13: torch.Tensor, w2: torch.Tensor, rows: torch.Tensor
) -> Iterator[torch.Tensor | None]:
    """Convert biases to fp32, that of w13 in the order `rows`."""
    for place, (bias, w) in enumerate(zip(_pair("biases", biases), (w13, w2), strict=True)):
        name = f"biases[{place}]"
        if bias is not None:
            require_tensors(**{"w13": w13, name: bias})
            if bias.dtype not in DTYPE_NAMES:
                raise ValueError(f"{name} is {bias.dtype}, expected bf16, fp16 or fp32")
            require_table(name, bias, bias.dtype, tuple(w.shape[:2]))
            top = bias.abs().amax(1).float()
            _require_each(name, "largest magnitude", top, top.isfinite(), "finite")
            bias = (bias if place else bias[:, rows]).to(torch.float32, copy=True).contiguous()
        yield bias


def unpack(
    packed: PackedExperts, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of w13 [E, 2I, H], all of gate first, and of w2 [E, H, I]."""
    require_packed("packed", packed)
    require_type("dtype", dtype, torch.dtype)
    if not dtype.is_floating_point:
        raise ValueError(f"dtype {dtype}: a floating-point dtype")
    rows = interleaved_rows(packed.intermediate, packed.granularity)
    w13 = dequantise(packed.w13, dtype=dtype)
    return w13[:, rows.argsort().to(w13.device)], dequantise(packed.w2, dtype=dtype)


def unpack_biases(packed: PackedExperts) -> Biases:
    """Return the biases of w13 [E, 2I], all of gate first, and of w2 [E, H]; None for none."""
    require_packed("packed", packed)
    bias = packed.bias13
    if bias is not None:
        rows = interleaved_rows(packed.intermediate, packed.granularity).argsort()
        bias = bias[:, rows.to(bias.device)]
    return bias, packed.bias2


def interleaved_rows(intermediate: int, granularity: int, order: str = "gate_up") -> torch.Tensor:
    """Return int64 [2I]: the row of w13, in this order, that each packed row is."""
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(f"order {order!r}: one of {', '.join(ORDERS)}")
    granularity = _check_granularity(granularity, intermediate)
    row = torch.arange(2 * intermediate)
    gate, up = (row[::2], row[1::2]) if order == "alternating" else row.chunk(2)
    if order == "up_gate":
        gate, up = up, gate
    groups = (half.unflatten(0, (-1, granularity)) for half in (gate, up))
    return torch.stack(tuple(groups), dim=1).flatten()


def quantise_experts(
    name: str,
    w: torch.Tensor,
    form: BlockFormat,
    encode: torch.Tensor | None,
    rows: torch.Tensor | slice = slice(None),
) -> Quantized:
    """Quantise `rows` of every expert of w [E, N, K], one expert at a time to limit fp32 memory."""
    amax = torch.stack([each.abs().amax() for each in w]).float()
    _require_each(name, "largest magnitude", amax, amax.isfinite(), "finite")
    if form.has_global:
        encode = encode_scale(amax, form.name) if encode is None else encode
        require_tensors(**{name: w, f"encode scale of {name}": encode})
        _require_global_scale(f"encode scale of {name}", encode, len(w))
    elif encode is not None:
        raise ValueError(f"encode_scales with {form.name}, which has none")
    data, scales = [], []
    for expert, each in enumerate(w):
        g = None if encode is None else encode[expert : expert + 1]
        packed, codes = quantise_blocks(each[rows].float(), form, g)
        data.append(packed.view(torch.uint8))
        scales.append(swizzle_scales(codes).view(torch.uint8))
    return of_bytes(torch.stack(data), torch.cat(scales), form.name, encode)


def _laid_out(
    name: str, w: CheckpointWeight, form: BlockFormat, rows: torch.Tensor | slice
) -> Quantized:
    """Arrange `rows` of every expert of w without changing values."""
    data = w.data.view(torch.uint8)[:, rows].contiguous()
    codes = w.scales.view(torch.uint8)[:, rows]
    _check_codes(f"{name}.scales", codes, NAN_CODE[form.scale] - 1)
    if form.element == "e4m3":
        _check_codes(f"{name}.data", data & 0x7F, NAN_CODE["e4m3"] - 1)
    scales = torch.cat([swizzle_scales(each) for each in codes])
    encode, decode = (
        None if scale is None else _of_experts(name, scale.detach(), len(data))
        for scale in (w.encode_scale, w.decode_scale)
    )
    return of_bytes(data, scales, form.name, encode, decode)


def _of_experts(name: str, scale: torch.Tensor, experts: int) -> torch.Tensor:
    """Return global scales, fp32 [E]; for w13 [E, 2] of gate and up, unless all pairs are equal."""
    pairs = name == "w13" and scale.ndim == 2 and scale.shape[1] == 2
    for each in scale.unbind(1) if pairs else (scale,):
        _require_global_scale(f"global scale of {name}", each.contiguous(), experts)
    if pairs and torch.equal(scale[:, 0], scale[:, 1]):
        scale = scale[:, 0]
    return scale.contiguous()


def _require_global_scale(name: str, scale: torch.Tensor, experts: int) -> None:
    require_table(name, scale, torch.float32, (experts,))
    usable = scale.isfinite() & (scale > 0)
    _require_each(name, "value", scale, usable, "positive and finite")


def _require_each(
    name: str, what: str, values: torch.Tensor, good: torch.Tensor, wanted: str
) -> None:
    """Raise ValueError for the first expert that is not good, with its values."""
    bad = (~good).nonzero()
    if len(bad):
        expert = int(bad[0, 0])
        raise ValueError(f"{name}, expert {expert}: {what} {values[expert].tolist()}, not {wanted}")


def _check_checkpoint(name: str, w: CheckpointWeight, form: BlockFormat) -> None:
    """Check dtypes and shapes of one weight. Codes and global scales are checked where they are
    read."""
    given = {"data": w.data, "scales": w.scales}
    one = {"encode_scale": w.encode_scale, "decode_scale": w.decode_scale}
    one = {field: scale for field, scale in one.items() if scale is not None}
    if len(one) != int(form.has_global):
        wanted = "one of encode_scale and decode_scale" if form.has_global else "no global scale"
        raise ValueError(
            f"{name} has {', '.join(one) or 'no global scale'}: {form.name} has {wanted}"
        )
    named: dict[str, Any] = {f"{name}.{field}": each for field, each in (given | one).items()}
    require_tensors(**named)
    require_memory(**named)
    dtypes = {"data": ELEMENT_DTYPES[form.element], "scales": SCALE_DTYPES[form.scale]}
    for field, tensor in given.items():
        require_rank(f"{name}.{field}", tensor, "[E, N, bytes]")
        if tensor.dtype not in (torch.uint8, dtypes[field]):
            raise ValueError(
                f"{name}.{field} is {tensor.dtype}, expected torch.uint8 or {dtypes[field]}"
            )
    expected = (*w.data.shape[:2], form.columns(w.data.shape[2] * form.per_byte))
    if w.scales.shape != expected:
        raise ValueError(f"{name}.scales has shape {tuple(w.scales.shape)}, expected {expected}")


def _check_codes(name: str, codes: torch.Tensor, largest: int) -> None:
    """Raise ValueError for a NaN and, in e4m3 scale factors, a sign: the MMA supports neither."""
    for expert, top in enumerate(codes.flatten(1).amax(1).tolist()):
        if top > largest:
            raise ValueError(f"{name}, expert {expert}: code {top:#x}, at most {largest:#x}")


def _check_sizes(w13: Sequence[int], w2: Sequence[int], form: BlockFormat) -> None:
    """Raise ValueError unless they are [E, 2I, H] and [E, H, I], and TMA can read rows of both."""
    experts, hidden, intermediate = w2
    if tuple(w13) != (experts, 2 * intermediate, hidden) or experts < 1:
        raise ValueError(f"w13 {tuple(w13)} with w2 {tuple(w2)}: not [E, 2I, H] with [E, H, I]")
    unit = max(form.block, hw.TMA_ALIGN_BYTES * form.per_byte)  # both are powers of two
    for name, k in {"H": hidden, "I": intermediate}.items():
        if k < 1 or k % unit:
            raise ValueError(f"{name} = {k} in {form.name}: a positive multiple of {unit}")


def _check_granularity(granularity: int, intermediate: int) -> int:
    granularity = as_number("granularity", granularity, int)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity {granularity}: one of {GRANULARITIES}")
    if intermediate % granularity:
        raise ValueError(f"I = {intermediate}: a multiple of granularity {granularity}")
    return granularity
