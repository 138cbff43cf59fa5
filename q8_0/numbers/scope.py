"""What roles of the product of numbers share: operands, pipelines, and the walk over tiles (device
code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint16, Uint32

from kernelkit.device.boxes import Box, TmaTensor
from kernelkit.device.pipelines import Ring
from q8_0.numbers.config import PIECE_STEPS, STEP_K, TILE_ROWS, UNIT, NumbersConfig
from q8_0.numbers.params import NumbersParams
from q8_0.numbers.plan import NumbersPlan

TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


@dataclass(frozen=True)
class Pipes:
    """Edges of the plan as barriers."""

    x: Ring
    w: Ring | None = None
    copied: Ring | None = None


@dataclass(frozen=True)
class Share:
    """Part of K that a CTA multiplies."""

    rank: Int32  # of the CTA among those that share a tile
    first: Int32  # its first stage of weights
    stages: Int32  # its number of stages of weights
    steps: Int32  # its number of steps


@dataclass(frozen=True)
class Scope:
    """Context of a CTA.

    x, w: tokens, and quants of 'soa'
    smem: shared addresses by name
    member: number of the CTA in its pair
    cluster, clusters: number of its cluster, and of clusters
    """

    x: TmaTensor
    w: TmaTensor | None
    params: NumbersParams
    pipes: Pipes
    x_buffer: cute.Pointer
    w_buffer: cute.Pointer
    scales: Int32
    out: Int32
    mail: Int32
    mail_barrier: Int32
    member: Int32
    share: Share
    cluster: Int32
    clusters: Int32

    @property
    def items(self) -> Int32:
        """Number of tiles of a cluster in all."""
        return Int32(self.params.token_tiles) * Int32(self.params.row_tiles)


@dataclass(frozen=True)
class Item:
    """First token and first row of a CTA's tile."""

    token: Int32
    row: Int32


@cute.jit
def share_of(config: cutlass.Constexpr[NumbersConfig], blocks: Int32, rank: Int32) -> Share:
    """Return the part of K of CTA `rank` of those that share a tile. It does not depend on the
    layout, so that sums do not."""
    cols = blocks * 32
    steps = (cols + STEP_K - 1) // STEP_K
    first, end = Int32(0), steps
    if cutlass.const_expr(config.split > 1):
        pieces = (steps + PIECE_STEPS - 1) // PIECE_STEPS
        first = pieces * rank // config.split * PIECE_STEPS
        end = cutlass.min(pieces * (rank + 1) // config.split * PIECE_STEPS, steps)
    size = config.stage_steps
    return Share(rank, first // size, (end - first + size - 1) // size, end - first)


@cute.jit
def item_of(plan: cutlass.Constexpr[NumbersPlan], scope: Scope, number: Int32) -> Item:
    """Return the tile of this CTA in its cluster's item `number`.

    Tokens come first, `group` tiles of them, so that neighbours share rows of the weights, and
    tokens of a group stay in L2.
    """
    config, params = plan.config, scope.params
    size, tiles, row_tiles = (
        Uint32(word) for word in (params.group, params.token_tiles, params.row_tiles)
    )
    group = Uint32(number) // (size * row_tiles)  # unsigned: a signed quotient takes twice as long
    rest = Uint32(number) - group * (size * row_tiles)
    own = cutlass.min(size, tiles - group * size)
    row = rest // own
    token = group * size + rest - row * own
    row = Int32(row) * (2 if config.pair else 1) + scope.member
    return Item(Int32(token) * config.tile_tokens, row * TILE_ROWS)


def x_box(plan: NumbersPlan) -> Box:
    """Return the box of tokens of a TMA copy: half of a tile in a pair."""
    config = plan.config
    return Box(config.tile_tokens // (2 if config.pair else 1), UNIT, TYPES[config.dtype])


@dataclass(frozen=True)
class PlainBox(Box):
    """Box whose lines follow each other in shared memory, as they are."""

    def layout(self) -> cute.Layout:
        """(rows, columns)."""
        return cute.make_layout((self.rows, self.columns), stride=(self.columns, 1))

    def at(self, buffer: cute.Pointer, index: Int32) -> cute.Tensor:
        """Box `index` of a buffer, (rows, columns)."""
        return cute.make_tensor(buffer + index * (self.rows * self.columns), self.layout())


def w_box(plan: NumbersPlan) -> Box:
    """Return the box of a stage of weights: quants, or pairs of bytes of blocks."""
    if plan.config.interleaved:
        return PlainBox(TILE_ROWS, plan.config.row_bytes // 2, Uint16)
    return Box(TILE_ROWS, STEP_K, Uint8)


# ---- Shared and global memory by address


@cute.jit
def load_half(address: Int32, offset: cutlass.Constexpr) -> Uint32:
    """Two bytes of shared memory at an even address, zeros above."""
    return cute.arch.inline_ptx(
        f"ld.shared.u16 {{$w0}}, [{{$r0}} + {offset}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


@cute.jit
def load_word(address: Int32, offset: cutlass.Constexpr) -> Uint32:
    """Four bytes of shared memory."""
    return cute.arch.inline_ptx(
        f"ld.shared.b32 {{$w0}}, [{{$r0}} + {offset}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


@cute.jit
def store_half(address: Int32, value: Uint16) -> None:
    """Two bytes to shared memory."""
    cute.arch.inline_ptx("st.shared.b16 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def half_if(exists: cutlass.Boolean, address: Int64) -> Uint16:
    """Two bytes of global memory, zeros unless they exist: a predicate, not a branch."""
    return cute.arch.inline_ptx(
        "{ .reg .pred there; .reg .b16 x; mov.b16 x, 0; setp.ne.s32 there, {$r1}, 0; "
        "@there ld.global.b16 x, [{$r0}]; mov.b16 {$w0}, x; }",
        write_only_types=[Uint16],
        read_only_args=[address, Int32(exists)],
    )
