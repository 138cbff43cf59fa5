"""Which scores of a tile count (device code): a thread holds a key, a register a query row."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.shared.split import Share, row_begin, row_sees
from gqa_lowlatency.sm100.args import Scope
from gqa_lowlatency.sm100.plan import TILE


@cute.jit
def some_row_misses(config: DecodeConfig, share: Share, first: Int32, left: Int32) -> Boolean:
    """Whether the tile that begins at key `first` holds a key that some row does not see."""
    end = share.n_keys
    if cutlass.const_expr(config.causal):
        end = share.n_keys - (config.q_tokens - 1)
    return _leaves(config, share, first, row_begin(config, share, Int32(0), left), end)


@cute.jit
def no_row_sees_some(config: DecodeConfig, share: Share, first: Int32) -> Boolean:
    """Whether the tile holds a row of memory that no row of Q sees, and that may be anything."""
    return _leaves(config, share, first, share.lowest, share.n_keys)


@cute.jit
def _leaves(config: DecodeConfig, share: Share, first: Int32, begin: Int32, end: Int32) -> Boolean:
    """Whether the tile holds a key outside [begin, end) that is none of the first ones; begin
    counts where the config has one."""
    leaves = first + TILE > end
    if cutlass.const_expr(config.has_begin):
        before = first < begin
        if cutlass.const_expr(config.sink_tokens):
            before = before & (first + TILE > share.sink_end)
        leaves = leaves | before
    return leaves


@cute.jit
def hide(config: DecodeConfig, scope: Scope, scores: cute.Tensor, key: Int32) -> None:
    """Scores (N,) of `key` become -inf in the rows that do not see it."""
    first = Int32(0)
    if cutlass.const_expr(config.row_tiles > 1):
        first = scope.place.row_tile * config.columns
    for column in cutlass.range(config.columns, unroll_full=True):
        # Columns behind the last row are treated as its token: theirs must not be other keys.
        token = cutlass.min((first + column) // config.group, config.q_tokens - 1)
        sees = row_sees(config, scope.share, key, token, scope.scalars.left)
        scores[column] = scores[column] if sees else -Float32.inf
