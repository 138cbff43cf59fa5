"""The block-scaled number formats, where the scale factor of a block lies, and tensors in them.

A block is `block` consecutive elements of a row, along K; one scale factor belongs to it. With R
rows and C = K / block columns of scale factors, one byte each, they are stored in atoms of 128 rows
and 4 columns, 512 bytes that tcgen05.cp moves into tensor memory as they are ("128x4", the layout
of CUTLASS and of cuBLAS's VEC16_UE4M3 and VEC32_UE8M0):

    byte of (row, column) = (row / 128) ceil(C / 4) 512 + (column / 4) 512
                          + (row % 32) 16 + (row % 128 / 32) 4 + column % 4

Bytes of no row or of no column are 0, which is no NaN in either scale format. The atoms beside each
other are a block of 128 rows. Of rows sorted by expert, every expert begins at a fresh block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch

from kernelkit.call.tensors import require_strided, require_tensors, require_types

SCALE_ROWS = 128  # of an atom
SCALE_COLUMNS = 4
SCALE_ATOM_BYTES = SCALE_ROWS * SCALE_COLUMNS

SCALINGS = ("token", "tensor")  # whose largest magnitude a global scale is computed from

E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class BlockFormat:
    """value = element * scale, divided by the global scale where there is one.

    element: 'e2m1' (two per byte along K, the even one in the low 4 bits) or 'e4m3'.
    block: elements that share a scale factor. scale: 'e4m3' (never negative) or 'ue8m0'.
    largest: the largest element. has_global: fp32 factors beside, of a tensor, row or expert.
    """

    name: str
    element: str
    block: int
    scale: str
    largest: float
    has_global: bool

    @cached_property
    def per_byte(self) -> int:
        """Elements of a byte."""
        return 2 if self.element == "e2m1" else 1

    @cached_property
    def amax_target(self) -> float:
        """What the largest magnitude of a tensor becomes times its global scale: 2688 of NVFP4."""
        if not self.has_global:
            raise ValueError(f"{self.name} has no global scale")
        return self.largest * E4M3_LARGEST

    def columns(self, k: int) -> int:
        """Scale factors of a row of k elements. ValueError unless blocks divide the row."""
        if k < self.block or k % self.block:
            raise ValueError(f"K = {k} in {self.name}: a positive multiple of {self.block}")
        return k // self.block


FORMATS = {
    form.name: form
    for form in (
        BlockFormat("nvfp4", "e2m1", 16, "e4m3", E2M1_LARGEST, has_global=True),
        BlockFormat("mxfp4", "e2m1", 32, "ue8m0", E2M1_LARGEST, has_global=False),
        BlockFormat("mxfp8", "e4m3", 32, "ue8m0", E4M3_LARGEST, has_global=False),
    )
}


def format_of(name: str) -> BlockFormat:
    """The format of this name, or TypeError or ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"fmt is {type(name).__name__}, expected str: one of {[*FORMATS]}")
    if name not in FORMATS:
        raise ValueError(f"format {name!r}: one of {', '.join(FORMATS)}")
    return FORMATS[name]


def scale_atoms(columns: int) -> int:
    """Atoms beside each other that hold `columns` scale factors of a row."""
    return -(-columns // SCALE_COLUMNS)


def scale_atoms_of(fmt: str, k: int) -> int:
    """Atoms beside each other that hold the scale factors of a row of k elements."""
    return scale_atoms(FORMATS[fmt].columns(k))


def scale_bytes(blocks: int, columns: int) -> int:
    """Bytes of the scale factors of `blocks` blocks of 128 rows."""
    return blocks * scale_atoms(columns) * SCALE_ATOM_BYTES


def row_blocks(rows: int) -> int:
    """Blocks of 128 rows that hold `rows` rows."""
    return -(-rows // SCALE_ROWS)


def scale_blocks(rows: int, experts: int) -> int:
    """Blocks of 128 rows that always suffice for `rows` rows sorted by expert, whatever the counts.

    Every expert that has rows adds at most one block that is not full, so that nobody reads the
    counts to allocate.
    """
    used = min(rows, experts)  # experts that have rows
    return (rows - used) // SCALE_ROWS + used


# ---- tensors in these formats
#
# torch has no arithmetic on these dtypes, and of float4_e2m1fn_x2 little but `view`: make such a
# tensor from bytes by `.view(torch.float4_e2m1fn_x2)`, read it by `.view(torch.uint8)`.

ELEMENT_DTYPES = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn}
SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "ue8m0": torch.float8_e8m0fnu}


@dataclass(frozen=True, eq=False)
class Quantized:
    """value = element * scale factor * decode_scale.

    data: [rows, K] or [E, rows, K]; of e2m1 two elements per byte, so that K / 2 is its last size.
    scales: 1-D, swizzled as `moe.formats` says; every expert begins at a fresh 128 rows.
    encode_scale: fp32 [1], [rows] or [E], what the values were multiplied by before; [E, 2] where
    gate and up, whose rows alternate, have one each; None in a format without. decode_scale: 1 /
    encode_scale, rounded once, so that no kernel divides again.
    fmt: a key of `moe.formats.FORMATS`.

    Who makes one of rows by expert, or of gate and up in turn, leaves that in `offsets` (on the
    CPU) and `granularity`, and a product with others is refused; None is not known.
    """

    data: torch.Tensor
    scales: torch.Tensor
    encode_scale: torch.Tensor | None
    decode_scale: torch.Tensor | None
    fmt: str

    # How it was laid out, as far as who made it knew: no fields, since operators do not see them.
    offsets = None  # tuple of ints: where the rows of each expert begin, in host memory
    granularity = None  # rows of gate, then of up, that alternate

    def __post_init__(self) -> None:
        scales = {"encode_scale": self.encode_scale, "decode_scale": self.decode_scale}
        given = {name: scale for name, scale in scales.items() if scale is not None}
        require_types(data=self.data, scales=self.scales, **given)
        for name, tensor in ({"data": self.data, "scales": self.scales} | given).items():
            if tensor.is_nested:
                require_strided(**{name: tensor})
        if any(isinstance(size, torch.SymInt) for size in (*self.data.shape, *self.scales.shape)):
            return  # a tracer's, on whose sizes no check could decide
        form = format_of(self.fmt)
        global_scales = self._global_scales(form)
        require_tensors(data=self.data, scales=self.scales, **global_scales)
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
        """The shape of global scales of gate and of up, where there may be such."""
        return ((self.data.shape[0], 2),) if self.data.ndim == 3 else ()

    @property
    def has_pairs(self) -> bool:
        """Whether gate and up of an expert have a global scale each."""
        return self.decode_scale is not None and self.decode_scale.ndim == 2

    def _global_scales(self, form: BlockFormat) -> dict[str, torch.Tensor]:
        """The global scales by name, both of them or none, as the format has it."""
        scales = {"encode_scale": self.encode_scale, "decode_scale": self.decode_scale}
        given = {name: scale for name, scale in scales.items() if scale is not None}
        if len(given) != (len(scales) if form.has_global else 0):
            wanted = "both global scales" if form.has_global else "no global scale"
            raise ValueError(f"{form.name} has {wanted}, not {' and '.join(given) or 'none'}")
        return given

    def _check_scales(self, block_bytes: int) -> None:
        """ValueError unless the scale factors are whole blocks of 128 rows and enough of them."""
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
        """What `fmt` names."""
        return FORMATS[self.fmt]

    @property
    def rows(self) -> int:
        """Rows, of each expert where there are experts."""
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
    """Elements and scale factors that are uint8, or what they are already; of the global scales one
    is enough, the other is 1 over it."""
    return Quantized(*_parts(data, scales, format_of(fmt), encode_scale, decode_scale), fmt)


def made_of(
    data: torch.Tensor,
    scales: torch.Tensor,
    fmt: str,
    encode_scale: torch.Tensor | None = None,
    decode_scale: torch.Tensor | None = None,
) -> Quantized:
    """What `of_bytes` makes, of results of a kernel: sizes and dtypes are right and not checked."""
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
    """The same, which remembers how it was laid out. Offsets on a GPU are not read."""
    if offsets is not None and offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        object.__setattr__(matrix, "offsets", tuple(offsets.tolist()))
    if granularity is not None:
        object.__setattr__(matrix, "granularity", granularity)
    return matrix


def _require_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype, why: str = "") -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}{why}")
