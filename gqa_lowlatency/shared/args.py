"""Bundles of device code, with the shape of every field."""

from dataclasses import dataclass

from cutlass import Int32

from gqa_lowlatency.kernel_arguments import Scalars, Tables, Tensors

__all__ = ["Place", "Scalars", "Tables", "Tensors"]


@dataclass(frozen=True)
class Place:
    """Position of a CTA: its work, and its share of the keys by part (which cluster) and rank."""

    entry: Int32
    head: Int32  # KV head
    row_tile: Int32
    part: Int32
    rank: Int32
