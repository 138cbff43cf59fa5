"""Config of the launch that computes both products and the sum of a layer with few rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moe.formats import FORMATS, BlockFormat, format_of
from moe.mixed.config import DEPTH, ROWS

KERNELS = {"sm_90a": "moe.mixed.few.kernel", "sm_100a": "moe.mixed.few.kernel"}
ARCHS = tuple(KERNELS)
WEIGHTS = ("nvfp4", "mxfp4")
MOST_ROWS = 256  # rows of all experts: tokens times slots
WARP_ROWS = 32  # of them, for which one warp makes the tables
MOST_EXPERTS = 512
ITEM_ROWS = 8  # rows of an expert that are multiplied at a time: the N of mma.sync
LEAST_WARPS, MOST_WARPS = 12, 16  # that multiply, as sizes choose them
WARPS = range(1, MOST_WARPS + 1)
STAGES = range(2, 17)
GROUP_ROWS = 16  # rows of weights of an mma.sync
GROUPS = ROWS // GROUP_ROWS  # groups in a chunk
GRANULES = (1, 2, GROUPS)


def warps_for(k13: int, k2: int) -> int:
    """Choose the number of warps that multiply, by K of both products: the largest of those that
    idle least in the last round of a chunk. The first product has about twice as many rows of
    weights."""

    def idle(warps: int) -> float:
        units = [-(-k // DEPTH) for k in (k13, k2)]
        both = [-(-each // warps) * warps / each for each in units]
        return 2 * both[0] * units[0] + both[1] * units[1]

    return min(range(MOST_WARPS, LEAST_WARPS - 1, -1), key=idle)


@dataclass(frozen=True)
class FewConfig:
    """A compiled kernel: tokens in bf16, at most MOST_ROWS rows of their experts."""

    label: ClassVar = ("moe_few_rows", "fmt", "slots")

    fmt: str = "mxfp4"  # format of the weights
    slots: int = 1  # choices of a token
    pair_factor: bool = False  # gate and up of an expert have separate factors
    limit: bool = False  # gate and up are clamped before SwiGLU
    bias13: bool = False  # biases of the first product
    bias2: bool = False  # and of the second
    partial: bool = False  # slots may belong to no expert that is here
    k13: int = 64  # elements of K of the first product
    k2: int = 64  # and of the second
    warps: int = 16  # warps that multiply; each has a part of K
    stages: int = 3  # of the ring
    granule: int = GROUPS  # groups that a CTA has at least of each chunk
    most_rows: int = MOST_ROWS  # rows of all experts
    cooperative: bool = True  # the launch waits until all CTAs can run at the same time

    @property
    def by_warp(self) -> bool:
        """Whether each row has a lane of one warp."""
        return self.most_rows <= WARP_ROWS

    def k(self, phase: int) -> int:
        """Elements of K of the first product, 0, or of the second, 1."""
        return self.k2 if phase else self.k13

    def units(self, phase: int) -> int:
        """Units of K of a product."""
        return -(-self.k(phase) // DEPTH)

    @property
    def format(self) -> BlockFormat:
        """Format of the weights."""
        return FORMATS[self.fmt]

    def check_values(self) -> None:
        """Raise NotImplementedError, naming the value and the limit."""
        format_of(self.fmt)
        named = {
            "fmt": (self.fmt, WEIGHTS), "warps": (self.warps, WARPS),
            "stages": (self.stages, STAGES), "granule": (self.granule, GRANULES),
            "most_rows": (self.most_rows, (WARP_ROWS, MOST_ROWS)),
        }  # fmt: skip
        for name, (value, possible) in named.items():
            if value not in possible:
                raise NotImplementedError(f"{name} {value!r}: one of {(*possible,)}")
