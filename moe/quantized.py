"""A quantised tensor: packed elements, swizzled scale factors, global scales.

torch has no arithmetic on these dtypes, and of float4_e2m1fn_x2 little but `view`: make such a
tensor from bytes by `.view(torch.float4_e2m1fn_x2)`, read it by `.view(torch.uint8)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from kernelkit.call.tensors import require_strided, require_tensors
from moe.formats import FORMATS, BlockFormat, format_of, row_blocks, scale_bytes

ELEMENT_DTYPES = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn}
SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "ue8m0": torch.float8_e8m0fnu}


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantised tensor: value = element * scale factor * decode_scale.

    data: [rows, K] or [E, rows, K]; e2m1 has two elements per byte, so that its last size is K / 2.
    scales: 1-D, swizzled as in `moe.formats`; every expert begins a new block of 128 rows.
    encode_scale: fp32 [1], [rows] or [E], the factor of the values before quantising; [E, 2] if
    gate and up, whose rows alternate, have separate ones; None in a format without.
    decode_scale: 1 / encode_scale, rounded once, so that no kernel divides again.
    fmt: a key of `moe.formats.FORMATS`.

    The creator of rows by expert, or of alternating gate and up, records that in `offsets` (on the
    CPU) and `granularity`. A product with different ones is refused; None: unknown.
    """

    data: torch.Tensor
    scales: torch.Tensor
    encode_scale: torch.Tensor | None
    decode_scale: torch.Tensor | None
    fmt: str

    # Layout, if the creator recorded it. No dataclass fields, since operators do not see them.
    offsets = None  # tuple of ints: where the rows of each expert begin, in host memory
    granularity = None  # alternating rows of gate, then of up

    def __post_init__(self) -> None:
        scales = {"encode_scale": self.encode_scale, "decode_scale": self.decode_scale}
        given = {name: scale for name, scale in scales.items() if scale is not None}
        require_tensors(data=self.data, scales=self.scales, **given)
        for name, tensor in ({"data": self.data, "scales": self.scales} | given).items():
            if tensor.is_nested:
                require_strided(**{name: tensor})
        if any(isinstance(size, torch.SymInt) for size in (*self.data.shape, *self.scales.shape)):
            return  # a tracer: its sizes cannot be checked
        form = format_of(self.fmt)
        global_scales = self._global_scales(form)
        _require_dtype("data", self.data, ELEMENT_DTYPES[form.element], f" for {form.name}")
        _require_dtype("scales", self.scales, SCALE_DTYPES[form.scale], f" for {form.name}")
        if self.data.ndim not in (2, 3):
            raise ValueError(f"data has shape {tuple(self.data.shape)}: [rows, K] or [E, rows, K]")
        self._check_scales(scale_bytes(1, form.columns(self.k)))
        shapes = ((1,), (self.data.shape[0],), *self._pairs)
        for name, scale in global_scales.items():
            _require_dtype(name, scale, torch.float32)
            encode = global_scales["encode_scale"]
            if tuple(scale.shape) not in shapes or scale.shape != encode.shape:
                require_strided(**{name: scale})
                raise ValueError(
                    f"{name} has shape {tuple(scale.shape)}, expected one of {shapes}, like "
                    f"encode_scale {tuple(encode.shape)}"
                )

    @property
    def _pairs(self) -> tuple[tuple[int, int], ...]:
        """Shape of separate global scales of gate and of up, if they are possible."""
        return ((self.data.shape[0], 2),) if self.data.ndim == 3 else ()

    @property
    def has_pairs(self) -> bool:
        """Whether gate and up of an expert have separate global scales."""
        return self.decode_scale is not None and self.decode_scale.ndim == 2

    def _global_scales(self, form: BlockFormat) -> dict[str, torch.Tensor]:
        """Return the global scales by name: both of them or none, depending on the format."""
        scales = {"encode_scale": self.encode_scale, "decode_scale": self.decode_scale}
        given = {name: scale for name, scale in scales.items() if scale is not None}
        if len(given) != (len(scales) if form.has_global else 0):
            wanted = "both global scales" if form.has_global else "no global scale"
            raise ValueError(f"{form.name} has {wanted}, not {' and '.join(given) or 'none'}")
        return given

    def _check_scales(self, block_bytes: int) -> None:
        """Raise ValueError unless the scale factors are whole blocks of 128 rows and enough of
        them."""
        of_experts = self.data.ndim == 3
        matrices = self.data.shape[0] if of_experts else 1
        least = matrices * row_blocks(self.rows) * block_bytes
        size = self.scales.numel()
        # Rows sorted by expert may have more blocks, matrices of experts have what they need.
        fits = size == least if of_experts else size >= least and size % block_bytes == 0
        if self.scales.ndim != 1 or not fits:
            raise ValueError(
                f"scales have shape {tuple(self.scales.shape)}: 1-D, {least} bytes for data of "
                f"{tuple(self.data.shape)}, {block_bytes} for every 128 rows of K = {self.k}"
            )

    @property
    def format(self) -> BlockFormat:
        """Format that `fmt` names."""
        return FORMATS[self.fmt]

    @property
    def rows(self) -> int:
        """Number of rows, of each expert if there are experts."""
        return self.data.shape[-2]

    @property
    def k(self) -> int:
        """Elements of a row."""
        return self.data.shape[-1] * self.format.per_byte

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored."""
        tensors = (self.data, self.scales, self.encode_scale, self.decode_scale)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def of_bytes(
    data: torch.Tensor,
    scales: torch.Tensor,
    fmt: str,
    encode_scale: torch.Tensor | None = None,
    decode_scale: torch.Tensor | None = None,
) -> Quantized:
    """Build a Quantized from elements and scale factors in uint8 or their own dtype. One global
    scale is enough; the other is 1 over it."""
    return Quantized(*_parts(data, scales, format_of(fmt), encode_scale, decode_scale), fmt)


def made_of(
    data: torch.Tensor,
    scales: torch.Tensor,
    fmt: str,
    encode_scale: torch.Tensor | None = None,
    decode_scale: torch.Tensor | None = None,
) -> Quantized:
    """Build the result of `of_bytes` from a kernel's results, without checking sizes and dtypes."""
    made = object.__new__(Quantized)
    parts = *_parts(data, scales, FORMATS[fmt], encode_scale, decode_scale), fmt
    for field, part in zip(fields(Quantized), parts, strict=True):
        object.__setattr__(made, field.name, part)
    return made


def _parts(
    data: torch.Tensor,
    scales: torch.Tensor,
    form: BlockFormat,
    encode_scale: torch.Tensor | None,
    decode_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The tensors of a `Quantized`."""
    data, scales = data.view(ELEMENT_DTYPES[form.element]), scales.view(SCALE_DTYPES[form.scale])
    if encode_scale is None and decode_scale is not None:
        encode_scale = decode_scale.reciprocal()
    if decode_scale is None and encode_scale is not None:
        decode_scale = encode_scale.reciprocal()
    return data, scales, encode_scale, decode_scale


def laid_out(
    matrix: Quantized, *, offsets: torch.Tensor | None = None, granularity: int | None = None
) -> Quantized:
    """Record in `matrix` how rows are laid out, and return it. Offsets on a GPU are not read."""
    if offsets is not None and offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        object.__setattr__(matrix, "offsets", tuple(offsets.tolist()))
    if granularity is not None:
        object.__setattr__(matrix, "granularity", granularity)
    return matrix


def _require_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype, why: str = "") -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}{why}")
