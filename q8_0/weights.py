"""`Weights`: a matrix in Q8_0 together with the layout that its bytes are in.

Both layouts are uint8, so the bytes alone do not say which one they are in, and a reader of the
wrong one would give plausible garbage. Therefore no kernel here takes bytes: it takes this handle,
which refuses data whose shape belongs to the other layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.call.tensors import (
    as_number,
    require_memory,
    require_strided,
    require_type,
    require_types,
)
from q8_0.blocks import (
    ALIGN,
    INTERLEAVED,
    LAYOUTS,
    MAX_SIZE,
    SCALE_BYTES,
    SOA,
    blocks_of,
    interleaved_bytes,
    scales_offset,
    soa_bytes,
)


@dataclass(frozen=True, eq=False)
class Weights:
    """A matrix [rows, cols] of weights d * q, see `q8_0.blocks`.

    data: uint8. In 'interleaved' [rows, cols // 32 * 34], rows in one piece with an even stride and
    address: GGUF's own bytes, of which nothing is copied. In 'soa' [soa_bytes(rows, cols)], one
    piece at a multiple of 16 bytes. layout: which of the two; it is never guessed.

    TypeError or ValueError, naming the value and the limit, for data that do not fit the layout.
    """

    data: torch.Tensor
    rows: int
    cols: int
    layout: str

    def __post_init__(self) -> None:
        require_types(data=self.data)
        if self.data.is_nested:
            require_strided(data=self.data)
        for name in ("rows", "cols"):
            object.__setattr__(self, name, as_number(name, getattr(self, name), int))
        require_type("layout", self.layout, str)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r}: one of {LAYOUTS}")
        sizes = (*self.data.shape, self.rows, self.cols)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return  # a tracer's: its sizes are symbolic and cannot be checked
        if not 1 <= self.rows <= MAX_SIZE:
            raise ValueError(f"rows {self.rows}: from 1 to {MAX_SIZE}")
        blocks_of(self.cols)
        found, wanted = tuple(self.data.shape), self._shapes()
        if self.data.dtype != torch.uint8 or found != wanted[self.layout]:
            (other,) = (layout for layout in LAYOUTS if layout != self.layout)
            hint = f"; that is the shape of {other!r}" if found == wanted[other] else ""
            raise ValueError(
                f"data is {self.data.dtype} {found}, expected torch.uint8 {wanted[self.layout]} "
                f"for layout {self.layout!r} of {self.rows} x {self.cols}{hint}"
            )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the data by layout."""
        return {
            INTERLEAVED: (self.rows, interleaved_bytes(self.cols)),
            SOA: (soa_bytes(self.rows, self.cols),),
        }

    @property
    def blocks(self) -> int:
        """Number of blocks of a row."""
        return blocks_of(self.cols)

    @property
    def row_stride(self) -> int:
        """Bytes from a row of quants ('soa') or of blocks ('interleaved') to the next one."""
        return self.cols if self.layout == SOA else self.data.stride(0)

    @property
    def quants(self) -> torch.Tensor:
        """int8 [rows, cols], a view; ValueError for a layout that has no such view."""
        self._require_soa("quants")
        return self.data[: self.rows * self.cols].view(torch.int8).view(self.rows, self.cols)

    @property
    def scales(self) -> torch.Tensor:
        """fp16 [rows, cols // 32], a view; ValueError for a layout that has no such view."""
        self._require_soa("scales")
        begin = scales_offset(self.rows, self.cols)
        return self.data[begin:].view(torch.float16).view(self.rows, self.blocks)

    @property
    def nbytes(self) -> int:
        """Number of bytes of quants and scales."""
        return self.rows * (self.cols + self.blocks * SCALE_BYTES)

    def require_layout(self, layout: str, who: str) -> None:
        """ValueError where `who` reads another layout."""
        if self.layout != layout:
            raise ValueError(f"{who} reads layout {layout!r}, these weights have {self.layout!r}")

    def require_place(self, name: str = "weights") -> None:
        """TypeError or ValueError unless the data lie as kernels read them; called per launch."""
        data = self.data
        require_memory(**{f"{name}.data": data})
        if data.shape[-1] > 1 and data.stride(-1) != 1:
            raise ValueError(f"{name}.data has last stride {data.stride(-1)}, expected 1")
        align = ALIGN if self.layout == SOA else SCALE_BYTES
        stride = data.stride(0) if self.layout == INTERLEAVED and self.rows > 1 else 0
        address = 0 if data.device.type == "meta" else data.data_ptr()
        if address % align or stride % align:
            raise ValueError(
                f"{name}.data at address {address:#x}, rows every {stride} bytes: both are "
                f"multiples of {align} for layout {self.layout!r}"
            )
        if stride and stride < data.shape[1]:
            raise ValueError(
                f"{name}.data has rows of {data.shape[1]} bytes every {stride}: they overlap"
            )

    def _require_soa(self, what: str) -> None:
        if self.layout != SOA:
            raise ValueError(
                f"{what} of layout {self.layout!r} are not a view of its bytes: `repack` to {SOA!r}"
            )


def empty(rows: int, cols: int, layout: str, device: torch.device | str | None = None) -> Weights:
    """Weights that nobody has written yet."""
    rows, cols = as_number("rows", rows, int), as_number("cols", cols, int)
    shape = (rows, interleaved_bytes(cols)) if layout == INTERLEAVED else (soa_bytes(rows, cols),)
    return Weights(torch.empty(shape, dtype=torch.uint8, device=device), rows, cols, layout)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element, 0 without memory ('meta')."""
    return 0 if tensor.device.type == "meta" else tensor.data_ptr()
