"""tcgen05 operand descriptors, and the matrices in shared memory that they describe.

`SmemDesc` is the 64-bit shared-memory matrix descriptor, `InstrDesc` the 32-bit instruction
descriptor. Matrices come out as float32, rows of M or N by columns of K.
Sources: PTX ISA, "Shared memory descriptor", "Canonical layouts" and "Instruction descriptor" of
tcgen05; CUTLASS cute/arch/mma_sm100_desc.hpp states the same canonical layouts.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.tensor_core import decode, line_bytes
from ptxemu.numerics import swizzle as swizzles
from ptxemu.numerics.swizzle import Swizzle

_WINDOW = 1024  # bytes: a multiple of every swizzle period
_WORD = 8  # bytes moved per index: divides every chunk that is contiguous in shared memory

_LAYOUTS: dict[int, Swizzle] = {
    0: swizzles.NONE,
    1: swizzles.SWIZZLE_128B_ATOM_32B,
    2: swizzles.SWIZZLE_128B,
    4: swizzles.SWIZZLE_64B,
    6: swizzles.SWIZZLE_32B,
}


@dataclass(frozen=True)
class SmemDesc:
    """A decoded shared memory descriptor.

    start: byte offset in shared memory.
    leading: byte offset (LBO).
    stride: byte offset (SBO).
    """

    start: int
    leading: int
    stride: int
    swizzle: Swizzle
    # what has been read with it: where the words of a matrix are, by its form
    images: dict[Any, Image] = field(init=False, default_factory=dict, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)  # it is a key all the time

    def __post_init__(self) -> None:
        parts = self.start, self.leading, self.stride, self.swizzle
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash


class Image(NamedTuple):
    """Places of a matrix in shared memory.

    words: places of the 8-byte words, intp [line, word].
    end: one past the largest place.
    """

    words: np.ndarray
    end: int


@lru_cache(maxsize=4096)
def smem_desc(value: int) -> SmemDesc:
    """Decode a 64-bit shared-memory matrix descriptor.

    Raises HardwareRefusal for reserved values, UnsupportedPtx for a non-zero base offset with a
    swizzle and for the absolute leading-dimension mode (sm_103a).
    """
    layout = value >> 61 & 0x7
    if layout not in _LAYOUTS:
        raise HardwareRefusal(f"matrix descriptor {value:#018x}: swizzle mode {layout} is invalid")
    if value >> 46 & 0x7 != 1 or value >> 53 & 0xFF or value & 0xC000_C000:
        raise HardwareRefusal(f"matrix descriptor {value:#018x}: reserved or constant bits wrong")
    absolute, base = value >> 52 & 1, value >> 49 & 0x7
    if absolute or (base and layout):  # without a swizzle there is no pattern to be off: Triton
        raise UnsupportedPtx(f"matrix descriptor {value:#018x}: base offset or absolute LBO mode")
    return SmemDesc(
        start=(value & 0x3FFF) << 4,
        leading=(value >> 16 & 0x3FFF) << 4,
        stride=(value >> 32 & 0x3FFF) << 4,
        swizzle=_LAYOUTS[layout],
    )


_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_E2M1 = {1: "packed e2m1"}

# kind: (K of a dense MMA, half that of a sparse one, formats of A and B by code, those of D)
_KINDS: dict[str, tuple[int, dict[int, str], dict[int, str]]] = {
    "f16": (16, {0: "f16", 1: "bf16"}, {0: "f16", 1: "f32"}),
    "tf32": (8, {2: "tf32"}, {1: "f32"}),
    "f8f6f4": (32, _F8F6F4, {0: "f16", 1: "f32"}),
    "i8": (32, {0: "u8", 1: "s8"}, {2: "s32"}),
    "mxf8f6f4": (32, _F8F6F4, {}),
    "mxf4": (64, _E2M1, {}),
    "mxf4nvf4": (64, _E2M1, {}),
}
_PACKED_KINDS = ("mxf4", "mxf4nvf4")
_SPARSE = 1 << 2
_SELECTORS = {"f16": 2, "tf32": 2}  # so many; 1 of other kinds
_PACKED_VERSION = 1 << 12
_K_SIZE = 1 << 3 | 1 << 31  # of the packed kinds; 0 is K = 64
# Those of fewer than 8 bits lie in bytes of their own here, 16 of them along M or N in 16 bytes
# with padding, as TMA writes them. CUTLASS's page on Blackwell lists TN, NT, TT and NN for them.
_MN_MAJOR_FORMATS = {"f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "e2m1", "e2m3", "e3m2"}
_SCALE_FORMATS = {0: "ue4m3", 1: "ue8m0"}


@dataclass(frozen=True)
class InstrDesc:
    """A decoded instruction descriptor; formats are keys of FORMATS.

    m, n, k: shape of the whole MMA (both CTAs of a pair).
    sparse: whether only half of a row of A is stored.
    selector: selector of the sparsity metadata.
    stationary: whether the instruction is tcgen05.mma.ws.
    scale_format: format of the scale factors; None unless block-scaled. Block-scaled kinds have
        d_format f32.
    a_scale_id, b_scale_id: scale ids of the block-scaled kinds, else 0.
    """

    kind: str
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    d_format: str
    a_mn_major: bool
    b_mn_major: bool
    a_negate: bool
    b_negate: bool
    saturate: bool
    scale_format: str | None = None
    a_scale_id: int = 0
    b_scale_id: int = 0
    sparse: bool = False
    selector: int = 0
    stationary: bool = False

    def __hash__(self) -> int:  # asked for with every MMA
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    @property
    def a_k(self) -> int:
        """Elements of a row of A that are stored."""
        return self.k // 2 if self.sparse else self.k

    def data_path(self, ctas: int) -> tuple[int, int]:
        """M and CTAs of a dense MMA whose A and D lie in tensor memory as those of this one: of a
        sparse M = 128 each CTA of a pair has 64 rows as one alone would (PTX ISA, "Layout C"); with
        .ws the parts of N, 4 or 2 for M = 32 or 64, have lanes of their own ("Layout G", "E")."""
        if self.stationary:
            return 128, 128 // self.m
        return (64, 1) if self.sparse and self.m // ctas == 64 else (self.m, ctas)

    def shape_of_a(self, ctas: int) -> tuple[int, int, str, bool]:
        """Return rows, stored part of K, format, and whether MN-major, for A of one of so many
        CTAs."""
        return self.m // ctas, self.a_k, self.a_format, self.a_mn_major

    def shape_of_b(self, ctas: int) -> tuple[int, int, str, bool]:
        """Return rows, K, format, and whether MN-major, for B of one of so many CTAs."""
        return self.n // ctas, self.k, self.b_format, self.b_mn_major


@lru_cache(maxsize=1024)
def instr_desc(kind: str, value: int) -> InstrDesc:
    """Decode a 32-bit instruction descriptor of `kind` (f16, tf32, f8f6f4, i8, mxf8f6f4, ...).

    Raises HardwareRefusal for reserved values and what sm_100a does not have, UnsupportedPtx for
    .ws shifts. Bit 12 of the packed kinds is the version of sparsity, 0 on sm_100a: a dense MMA
    ignores it (CUTLASS's descriptors for them set it). So f16 does with bit 29, which a kernel of
    cuDNN for sm_100a sets; where a GPU has several K it chooses one.
    """
    scaled, packed = kind.startswith("mx"), kind in _PACKED_KINDS
    sparse, selector = bool(value & _SPARSE), value & 0x3
    _require_selector(kind, sparse, selector, value)
    if packed and sparse and value & _PACKED_VERSION:
        raise HardwareRefusal(f"instruction descriptor {value:#010x}: other version of sparsity")
    if packed and value & _K_SIZE:
        raise HardwareRefusal(f"instruction descriptor {value:#010x}: K is 64 on sm_100a")
    k, operand_formats, d_formats = _KINDS[kind]
    common: dict[str, Any] = {
        "kind": kind,
        "n": (value >> 17 & 0x3F) << 3,
        "k": 2 * k if sparse else k,
        "sparse": sparse,
        "selector": selector,
        "a_format": _format(operand_formats, "A format", value, 7, 0x7),
        "b_format": _format(operand_formats, "B format", value, 10, 0x3 if packed else 0x7),
        "a_negate": bool(value >> 13 & 1),
        "b_negate": bool(value >> 14 & 1),
        "a_mn_major": bool(value >> 15 & 1),
        "b_mn_major": bool(value >> 16 & 1),
    }
    if scaled:
        desc = InstrDesc(
            **common,
            m=(value >> 27 & 0x3) << 7,
            d_format="f32",
            saturate=False,
            scale_format=_SCALE_FORMATS[value >> 23 & 1],
            a_scale_id=value >> 29 & 0x3,
            b_scale_id=value >> 4 & 0x3,
        )
        reserved = 1 << 3 | 1 << 6 | 0x7 << 24 | 1 << 31
    else:
        desc = InstrDesc(
            **common,
            m=(value >> 24 & 0x1F) << 4,
            d_format=_format(d_formats, "D format", value, 4, 0x3),
            saturate=bool(value >> 3 & 1),
        )
        reserved = 1 << 6 | 1 << 23 | (kind != "f16") << 29
        if value >> 30:
            raise UnsupportedPtx(f"instruction descriptor {value:#010x}: .ws maximum shift")
    if value & reserved:
        raise HardwareRefusal(f"instruction descriptor {value:#010x}: reserved bits are set")
    _require_consistent(desc, value)
    return desc


@lru_cache(maxsize=1024)
def stationary_desc(kind: str, value: int) -> InstrDesc:
    """Decode the instruction descriptor of tcgen05.mma.ws, whose B is the stationary operand."""
    return replace(instr_desc(kind, value), stationary=True)


def _require_selector(kind: str, sparse: bool, selector: int, value: int) -> None:
    """Check the selector, the half of the metadata's 64 bits that some kinds use."""
    count = _SELECTORS.get(kind, 1) if sparse else 1
    if selector >= count:
        what = f"must be below {count}" if sparse else "and the MMA is dense"
        told = f"instruction descriptor {value:#010x}: sparsity selector {selector}, {what}"
        raise UnsupportedPtx(told) if count > 1 else HardwareRefusal(told)


def _format(names: dict[int, str], field: str, value: int, shift: int, mask: int) -> str:
    code = value >> shift & mask
    if code not in names:
        raise HardwareRefusal(f"instruction descriptor {value:#010x}: {field} {code} is invalid")
    return names[code]


def _require_consistent(desc: InstrDesc, value: int) -> None:
    """Refuse field combinations that the instruction does not have."""
    wrong = {
        "16-bit D of 16-bit operands other than f16": desc.kind == "f16"
        and desc.d_format == "f16"
        and not desc.a_format == desc.b_format == "f16",
        "saturation of a floating-point kind": desc.saturate and desc.kind != "i8",
        "negation of integers": desc.kind == "i8" and (desc.a_negate or desc.b_negate),
        "MN-major A of a format that has none": desc.a_mn_major
        and desc.a_format not in _MN_MAJOR_FORMATS,
        "MN-major B of a format that has none": desc.b_mn_major
        and desc.b_format not in _MN_MAJOR_FORMATS,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise HardwareRefusal(f"instruction descriptor {value:#010x}: {what}")


# (integer kind, cta_group): legal N; M is 64 or 128 rows per CTA
_LEGAL_N: dict[tuple[bool, int], set[int]] = {
    (False, 1): set(range(8, 257, 8)),
    (False, 2): set(range(16, 257, 16)),
    (True, 1): {8, 24, *range(16, 257, 16)},
    (True, 2): set(range(32, 257, 32)),
}


@lru_cache(maxsize=1024)
def require_shape(desc: InstrDesc, cta_group: int) -> None:
    """Refuse M and N that an MMA of `cta_group` 1 or 2 does not support: PTX ISA, "Matrix Shape".

    For some sparse forms, CUTLASS (cute/arch/mma_sm100_umma.hpp) asks for N in steps of 16 and
    32; the manual's table has the steps of dense forms.
    """
    if desc.stationary:
        _require_stationary(desc)
        return
    legal_m: tuple[int, ...] = (64, 128) if cta_group == 1 else (128, 256)
    if desc.sparse and desc.scale_format is not None:
        legal_m = legal_m[1:]
    legal_n = _LEGAL_N[desc.kind == "i8", cta_group]
    if desc.b_mn_major and line_bytes(desc.b_format, 1) == 1:
        step = 16 * cta_group  # nvidia-cutlass-dsl, cute/nvgpu/tcgen05/mma.py, asks for it
        legal_n = {n for n in legal_n if n % step == 0}
    if desc.m not in legal_m or desc.n not in legal_n:
        raise HardwareRefusal(
            f"MMA kind::{desc.kind} cta_group::{cta_group} of M={desc.m} N={desc.n}, must be M of"
            f" {legal_m} and N of {sorted(legal_n)}"
        )


def _require_stationary(desc: InstrDesc) -> None:
    """Refuse M and N that tcgen05.mma.ws does not have."""
    legal_n = (64, 128) if desc.sparse else (64, 128, 256)
    if desc.m not in (32, 64, 128) or desc.n not in legal_n:
        raise HardwareRefusal(
            f"MMA .ws of M={desc.m} N={desc.n}, must be M of (32, 64, 128) and N of {legal_n}"
        )


def read_operand(
    smem: np.ndarray, desc: SmemDesc, rows: int, k: int, fmt: str, mn_major: bool = False
) -> np.ndarray:
    """Read the operand that `desc` describes from `smem` (uint8, whole CTA, C-contiguous).

    fmt: key of tensor_core.FORMATS. Returns float32 (rows, k), C-contiguous if K-major, the
    transpose of a C-contiguous array if MN-major. Raises HardwareRefusal past the end of smem.
    """
    values = decode(fmt, _taken(smem, image_of(desc, (rows, k, fmt, mn_major))))
    return values.T if mn_major else values


def image_of(desc: SmemDesc, form: tuple[int, int, str, bool]) -> Image:
    """Return the places of the operand; form: rows, k, format, whether MN-major."""
    if form not in desc.images:
        _, _, fmt, mn_major = form
        _require_layout(desc, line_bytes(fmt, 1), mn_major)
        desc.images[form] = _image(desc, operand_shape(*form), mn_major)
    return desc.images[form]


def matrix_bytes(
    smem: np.ndarray, desc: SmemDesc, shape: tuple[int, int], mn_major: bool = False
) -> np.ndarray:
    """The bytes of a matrix, uint8 `shape`: (lines, bytes of a line)."""
    form = shape, mn_major
    if form not in desc.images:
        desc.images[form] = _image(desc, shape, mn_major)
    return _taken(smem, desc.images[form])


def _image(desc: SmemDesc, shape: tuple[int, int], mn_major: bool) -> Image:
    phase = desc.start % _WINDOW
    index, words = operand_words(replace(desc, start=phase), shape, mn_major)
    base = (desc.start - phase) // _WORD
    return Image(index + base, base + words)


def _taken(smem: np.ndarray, image: Image) -> np.ndarray:
    if image.end > len(smem) // _WORD:
        raise HardwareRefusal(
            f"MMA operand ends at SMEM offset {image.end * _WORD:#x}, limit is {len(smem):#x}"
        )
    return smem.view(np.uint64).take(image.words).view(np.uint8)


def operand_shape(rows: int, k: int, fmt: str, mn_major: bool) -> tuple[int, int]:
    """Return (lines, bytes of a line) of an operand in shared memory."""
    return (k, line_bytes(fmt, rows)) if mn_major else (rows, line_bytes(fmt, k))


@lru_cache(maxsize=4096)
def operand_words(desc: SmemDesc, shape: tuple[int, int], mn_major: bool) -> tuple[np.ndarray, int]:
    """Index of the operand's 8-byte words, intp (outer, inner bytes / 8), and one past the largest.

    `desc.start` counts from an aligned window, so that tiles of one layout share the array.
    """
    index = byte_offsets(desc, shape, mn_major, _WORD) // _WORD
    index.flags.writeable = False
    return index, int(index.max()) + 1


def byte_offsets(desc: SmemDesc, shape: tuple[int, int], mn_major: bool, unit: int) -> np.ndarray:
    """Swizzled byte offset of every `unit` bytes of `shape` (lines, bytes along a line), intp.

    A line is a row of a K-major operand, a k of an MN-major one. Canonical layouts: groups of 8
    lines (4 with 32-byte atoms), each line cut into panels one swizzle span wide. Which of LBO and
    SBO steps over panels and which over groups depends on the layout.
    """
    span = desc.swizzle.span
    group = 4 if desc.swizzle is swizzles.SWIZZLE_128B_ATOM_32B else 8
    panel_step, group_step = desc.leading, desc.stride
    if not desc.swizzle.bits and mn_major:
        panel_step, group_step = desc.stride, desc.leading
    elif desc.swizzle.bits and not mn_major:
        panel_step = span  # swizzled K-major ignores LBO: one line is one panel
        if shape[1] > span:  # of a sparse A's B; nothing says where the next panel is
            raise UnsupportedPtx(f"K-major operand of {shape[1]} bytes with {desc.swizzle.name}")
    line = np.arange(shape[0], dtype=np.intp)[:, None]
    byte = np.arange(0, shape[1], unit, dtype=np.intp)[None, :]
    linear = line // group * group_step + line % group * span
    linear = linear + byte // span * panel_step + byte % span
    return desc.swizzle.apply(desc.start + linear)


def _require_layout(desc: SmemDesc, element_bytes: int, mn_major: bool) -> None:
    """The layout with 32-byte atoms exists for MN-major tf32, and is the only one known for it."""
    atoms_of_32 = desc.swizzle is swizzles.SWIZZLE_128B_ATOM_32B
    if atoms_of_32 and not (mn_major and element_bytes == 4):
        raise HardwareRefusal(
            "swizzle mode 1 (32-byte atoms) on an operand other than MN-major tf32"
        )
    if mn_major and element_bytes == 4 and not atoms_of_32:
        raise UnsupportedPtx(f"MN-major tf32 operand with swizzle {desc.swizzle.name}")
