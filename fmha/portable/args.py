"""Bundles of the mma.sync kernel, with the shape of every field."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32

from fmha.shared.args import Globals, Inputs, Scalars, Work
from fmha.shared.two_rows import Reference


@dataclass(frozen=True)
class Buffers:
    """Shared addresses of the CTA's buffers; buffers after v are those of the team."""

    q: Int32  # [rows of all teams][columns]
    k: Int32  # [stage][key][columns]
    v: Int32
    sums: Int32  # [warp][query tile of 16 rows][see `teams.py`]
    p: Int32  # [row][key]
    factors: Int32  # [row] fp32
    moved: Int32  # [query tile of 16 rows] int32: whether factors are not 1


@dataclass(frozen=True)
class Scope:
    """Objects that a warp may use."""

    inputs: Inputs
    tensors: Globals
    scalars: Scalars
    buffers: Buffers


@dataclass(frozen=True)
class Place:
    """Position of a warp and its lane. q, k and v: addresses where the lane begins to read
    matrices.
    """

    thread: Int32
    lane: Int32
    team: Int32
    slice: Int32  # slice of v_head_dim, and of head_dim or of the keys of a tile
    q: Int32  # its team's rows, its slice
    k: Int32  # in stage 0, its slice
    v: Int32


@dataclass(frozen=True)
class Seen:
    """Scores of a warp for the key tile from `key` on.

    masked: whether some row may not see the whole tile.
    """

    work: Work
    place: Place
    key: Int32
    masked: Boolean


@dataclass(frozen=True)
class Weights:
    """Registers of a lane for a key tile.

    scores: S, then its weights, for each 16 rows that the warp weighs.
    p: the weights rounded as the A operand, for each 16 rows of O.
    """

    scores: tuple[cute.Tensor, ...]  # fp32
    p: tuple[cute.Tensor, ...]


@dataclass(frozen=True)
class Tile:
    """Registers of a lane for a query block."""

    part: Weights
    o: tuple[cute.Tensor, ...]  # fp32, for each 16 rows of the team
    references: tuple[Reference, ...]  # for each 16 rows that the warp weighs
