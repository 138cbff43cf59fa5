"""Tiles of keys that this CTA processes, and keys that a row sees (device code).

`gqa_lowlatency/split.py` documents how keys are split, and computes the same on the host.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.shared.args import Place, Scalars, Tables, Tensors
from kernelkit.device.online_softmax import Branch, lowest_bits, window_of

BITS = 8  # of a token's word: there are at most as many query tokens
BYTE = (1 << BITS) - 1


@dataclass(frozen=True)
class Share:
    """Share of a CTA: tiles [begin, begin + count) of those with visible keys; `active` CTAs have
    any.
    """

    n_keys: Int32  # of the entry
    lowest: Int32  # first key that any row sees, by its window and the first key of its entry
    sink_end: Int32  # all rows see the keys below, if the config has sink tokens
    sink_tiles: Int32
    first: Int32
    begin: Int32
    count: Int32
    active: Int32
    tree: Uint64 | None  # byte t: the query tokens that token t sees


@cute.jit
def locate(
    config: DecodeConfig,
    tensors: Tensors,
    tables: Tables,
    scalars: Scalars,
    tile: cutlass.Constexpr,
) -> tuple[Place, Share]:
    """Return the place and share of this CTA.

    The grid is (CTAs of all clusters of a KV head, KV heads x tiles of rows, entries).
    """
    cta, _, _ = cute.arch.block_idx()
    ctas = config.cluster  # a power of two known at compile time, so division is a shift
    if cutlass.const_expr(config.parts):
        ctas, _, _ = cute.arch.grid_dim()
    place = place_of(config)
    n_keys = tensors.k.shape[1]
    if cutlass.const_expr(tables.lens is not None):
        n_keys = tables.lens[place.entry]
    lowest = lowest_of(config, tables, scalars, place.entry, n_keys)
    share = share_of(config, n_keys, lowest, scalars, cta, ctas, tile)
    if cutlass.const_expr(config.tree):
        share = replace(share, tree=bytes_of_tree(config, tables, place.entry))
    return place, share


@cute.jit
def bytes_of_tree(config: DecodeConfig, tables: Tables, entry: Int32) -> Uint64:
    """Return byte t for token t: the words of at most eight tokens fit in one register pair."""
    tree = Uint64(0)
    for token in cutlass.range_constexpr(config.q_tokens):
        word = Uint64(tables.tree[entry * config.q_tokens + token])
        tree = tree | (word & BYTE) << BITS * token
    return tree


@cute.jit
def lowest_of(
    config: DecodeConfig, tables: Tables, scalars: Scalars, entry: Int32, n_keys: Int32
) -> Int32:
    """Return the first key of an entry that any row sees, if there is one."""
    lowest = Int32(0)
    if cutlass.const_expr(config.left):
        lowest = cutlass.max(n_keys - config.q_tokens - scalars.left, 0)
    if cutlass.const_expr(config.first):
        lowest = cutlass.max(lowest, tables.first[entry])
    return lowest


@cute.jit
def place_of(config: DecodeConfig) -> Place:
    """Return this CTA's place in such a grid, without reading memory."""
    cta, head_tile, entry = cute.arch.block_idx()
    head, row_tile = head_tile // config.row_tiles, head_tile % config.row_tiles
    return Place(entry, head, row_tile, cta // config.cluster, cta % config.cluster)


@cute.jit
def share_of(
    config: DecodeConfig,
    n_keys: Int32,
    lowest: Int32,
    scalars: Scalars,
    rank: Int32,
    ctas: Int32,
    tile: cutlass.Constexpr,
) -> Share:
    """Return the share of CTA `rank` among the `ctas` that share the keys of this KV head and
    entry.
    """
    sink_end, sink_tiles = Int32(0), Int32(0)
    first = lowest // tile
    if cutlass.const_expr(config.sink_tokens):
        sink_end = cutlass.min(scalars.sink_tokens, n_keys)
        sink_tiles = cutlass.min((sink_end + tile - 1) // tile, first)
    last = (n_keys + tile - 1) // tile
    if cutlass.const_expr(config.first):
        first = first if lowest < n_keys else last  # a CTA without keys looks up no page
    tiles = sink_tiles + cutlass.max(last - first, 0)
    base = tiles // ctas
    more = tiles - base * ctas
    begin = rank * base + cutlass.min(rank, more)
    count = base + Int32(rank < more)
    return Share(
        n_keys, lowest, sink_end, sink_tiles, first, begin, count, cutlass.min(tiles, ctas), None
    )


@cute.jit
def tile_start(share: Share, index: Int32, tile: cutlass.Constexpr) -> Int32:
    """Return the first key of the index-th tile that holds visible keys."""
    number = index
    if index >= share.sink_tiles:
        number = index - share.sink_tiles + share.first
    return number * tile


@cute.jit
def any_row_sees(config: DecodeConfig, share: Share, key: Int32) -> Boolean:
    """Return whether a key exists and some row sees it; other keys may hold anything, even NaN."""
    return _within(config, share, key, share.lowest, share.n_keys)


@cute.jit
def row_sees(config: DecodeConfig, share: Share, key: Int32, token: Int32, left: Int32) -> Boolean:
    """Return whether query token `token` sees a key, as far as `branch_bits` does not hide it."""
    behind = config.q_tokens - 1 - token  # tokens that are newer
    if cutlass.const_expr(config.tree and config.left):
        earlier = branch_of(config, share, token).word & (Uint64(1) << token) - 1
        behind = config.q_tokens - 1 - Int32(cute.arch.popc(Uint32(earlier)))
    end = share.n_keys
    if cutlass.const_expr(config.causal):
        end = share.n_keys - behind
    return _within(config, share, key, row_begin(config, share, behind, left), end)


@cute.jit
def branch_of(config: DecodeConfig, share: Share, token: Int32) -> Branch:
    """Return the query tokens that a token sees."""
    token = cutlass.min(token, config.q_tokens - 1)
    return Branch(share.tree >> BITS * token & BYTE, share.n_keys - config.q_tokens)


@cute.jit
def branch_bits(config: DecodeConfig, share: Share, token: Int32, first: Int32) -> Uint32:
    """Return whether a token sees keys first .. first + 31, by the tree alone."""
    branch = branch_of(config, share, token)
    start = branch.begin - first
    return lowest_bits(start) | window_of(branch.word, start)


@cute.jit
def row_begin(config: DecodeConfig, share: Share, behind: Int32, left: Int32) -> Int32:
    """Return the first key that a token sees; `behind` tokens are newer."""
    begin = share.lowest
    if cutlass.const_expr(config.left):
        begin = share.n_keys - 1 - behind - left
        if cutlass.const_expr(config.first):
            begin = cutlass.max(begin, share.lowest)
    return begin


@cute.jit
def _within(config: DecodeConfig, share: Share, key: Int32, begin: Int32, end: Int32) -> Boolean:
    """Return whether a key is in [begin, end), or before `end` among the sink tokens.

    `begin` is ignored if the config has none.
    """
    seen = key < end
    if cutlass.const_expr(config.has_begin):
        inside = key >= begin
        if cutlass.const_expr(config.sink_tokens):
            inside = inside | (key < share.sink_end)
        seen = seen & inside
    return seen
