"""Keys of a tile from the caches to shared memory (device code).

Eight lanes have one key: four keys a warp. A lane looks up where its key is one tile before it
copies, so that no copy waits for a table. Entries that do not exist are zeros in shared memory, and
are marked: their bytes in the cache are never read.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from kernelkit.device import warp_mma
from kernelkit.device.boxes import turn
from kernelkit.device.shared_words import store
from kernelkit.device.words import index_if
from kernelkit.plan import hw
from mla.attention.config import Keys
from mla.attention.kernel_arguments import Source
from mla.attention.portable.plan import CHUNK, KEYS, LANES_OF_KEY, PortablePlan
from mla.attention.portable.widen import widened

NONE = -1  # of a table: no entry
Found = tuple[Int32 | Int64, ...]  # what the tables say of a key


@dataclass(frozen=True)
class Reach:
    """Tiles of a query entry: `tiles[s]` of source s, of which `ends[s]` keys may be seen."""

    ends: tuple[Int32, ...]
    tiles: tuple[Int32, ...]


@dataclass(frozen=True)
class Places:
    """Addresses in shared memory."""

    keys: Int32
    raw: Int32
    exists: Int32


@cute.jit
def key_of_lane() -> Int32:
    """Return the key of the tile that this lane copies."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return warp * (hw.WARP_THREADS // LANES_OF_KEY) + cute.arch.lane_idx() // LANES_OF_KEY


@cute.jit
def look_up(
    plan: PortablePlan, sources: tuple[Source, ...], reach: Reach, entry: Int32, tile: Int32
) -> Found:
    """Load what the table of each source says of this lane's key of a tile, NONE past the end and
    of a tile of the other source. `fetch` waits for it, this function does not.
    """
    found, first = [], Int32(0)
    for number in cutlass.range_constexpr(len(sources)):
        keys, places = plan.config.sources[number], sources[number].places
        index = (tile - first) * KEYS + key_of_lane()
        inside = (tile >= first) & (index < reach.ends[number])
        if cutlass.const_expr(number + 1 < len(sources)):
            inside = inside & (tile < first + reach.tiles[number])
        column = index if cutlass.const_expr(keys.listed) else index // keys.rows
        place = Int64(entry) * places.stride[0] + Int64(column) * places.stride[1]
        address = places.iterator.toint() + place * (places.element_type.width // 8)
        found.append(index_if(inside, address, Int64 if keys.wide_index else Int32, NONE))
        first += reach.tiles[number]
    return tuple(found)


@cute.jit
def fetch(
    plan: PortablePlan,
    sources: tuple[Source, ...],
    reach: Reach,
    places: Places,
    tile: Int32,
    stage: Int32,
    found: Found,
) -> None:
    """Begin to copy the keys of a tile, as one group. found: from `look_up`.

    stage: number of the tile, modulo 2.
    """
    if cutlass.const_expr(len(sources) == 1):
        _fetch_from(plan, 0, sources[0], places, tile, stage, found[0])
    else:
        if tile < reach.tiles[0]:
            _fetch_from(plan, 0, sources[0], places, tile, stage, found[0])
        else:
            _fetch_from(plan, 1, sources[1], places, tile - reach.tiles[0], stage, found[1])
    cute.arch.cp_async_commit_group()


@cute.jit
def _fetch_from(
    plan: PortablePlan,
    number: cutlass.Constexpr,
    source: Source,
    places: Places,
    tile: Int32,
    stage: Int32,
    found: Int32 | Int64,
) -> None:
    keys = plan.config.sources[number]
    form, key = keys.form, key_of_lane()
    lane = cute.arch.lane_idx() % LANES_OF_KEY
    data, scales, exists = _address(keys, source, tile * KEYS + key, Int64(found))
    if lane == 0:
        store(places.exists + (stage * KEYS + key) * 4, Int32, (Int32(exists),))
    for step in cutlass.range_constexpr(-(-form.data_bytes // (CHUNK * LANES_OF_KEY))):
        chunk = lane + step * LANES_OF_KEY
        target = _target(plan, places, key, chunk, stage)
        if cutlass.const_expr((step + 1) * CHUNK * LANES_OF_KEY <= form.data_bytes):
            warp_mma.copy_chunk_unless(target, data + chunk * CHUNK, ~exists)
        elif chunk * CHUNK < form.data_bytes:
            warp_mma.copy_chunk_unless(target, data + chunk * CHUNK, ~exists)
    if cutlass.const_expr(form.scale_bytes > 0):
        behind = places.raw + key * plan.raw_bytes + form.data_bytes
        _copy_scales(form.scale_bytes, behind, scales, exists, lane)


@cute.jit
def _target(plan: PortablePlan, places: Places, key: Int32, chunk: Int32, stage: Int32) -> Int32:
    """Return where a chunk of a key goes."""
    if cutlass.const_expr(plan.direct):
        return places.keys + stage * (KEYS * plan.row_bytes) + key_offset(plan, key, chunk)
    return places.raw + key * plan.raw_bytes + chunk * CHUNK


@cute.jit
def _copy_scales(
    nbytes: cutlass.Constexpr, target: Int32, scales: Int64, exists: Boolean, lane: Int32
) -> None:
    if cutlass.const_expr(nbytes < CHUNK):
        if lane == 0:
            size = Int32(nbytes) if exists else Int32(0)
            cute.arch.inline_ptx(
                f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {nbytes}, {{$r2}};",
                read_only_args=[target, scales, size],
            )
    elif lane < nbytes // CHUNK:
        warp_mma.copy_chunk_unless(target + lane * CHUNK, scales + lane * CHUNK, ~exists)


@cute.jit
def _address(
    keys: cutlass.Constexpr[Keys], source: Source, index: Int32, found: Int64
) -> tuple[Int64, Int64, Boolean]:
    """Return the addresses of a key's data and scales, and whether there is such an entry."""
    slots, form = source.store.shape[0], keys.form
    if cutlass.const_expr(keys.listed):
        exists = (found >= 0) & (found < Int64(slots) * keys.rows)
        number = Uint32(found) if exists else Uint32(0)
        slot, row = Int32(number // keys.rows), Int32(number % keys.rows)
    else:
        exists = (found >= 0) & (found < Int64(slots))
        slot, row = (Int32(found), index % keys.rows) if exists else (Int32(0), Int32(0))
    if cutlass.const_expr(form.plain):
        data = source.store[slot, row, None].iterator.toint()
        scales = data
    else:
        line = source.store[slot, None].iterator.toint()
        data = line + Int64(source.data_offset) + Int64(row) * form.data_bytes
        scales = line + Int64(source.scale_offset) + Int64(row) * form.scale_bytes
    return data, scales, exists


@cute.jit
def key_offset(plan: PortablePlan, key: Int32, chunk: Int32) -> Int32:
    """Return the offset of a 16-byte chunk of a key in its stage; eight keys cover all banks."""
    moved = turn(key, hw.SMEM_LINE_BYTES)
    return key * plan.row_bytes + (chunk ^ moved) * CHUNK


@cute.jit
def widen_keys(plan: PortablePlan, reach: Reach, places: Places, tile: Int32) -> None:
    """Turn the raw keys that this warp copied into bf16, each lane those of its own key."""
    if cutlass.const_expr(len(plan.config.sources) == 1):
        _widen_from(plan, 0, places)
    else:
        if tile < reach.tiles[0]:
            _widen_from(plan, 0, places)
        else:
            _widen_from(plan, 1, places)


@cute.jit
def _widen_from(plan: PortablePlan, number: cutlass.Constexpr, places: Places) -> None:
    form, key = plan.config.sources[number].form, key_of_lane()
    lane = cute.arch.lane_idx() % LANES_OF_KEY
    raw = places.raw + key * plan.raw_bytes
    for step in cutlass.range_constexpr(plan.row_bytes // (CHUNK * LANES_OF_KEY)):
        chunk = lane + step * LANES_OF_KEY
        words = widened(form, plan.arch, raw, chunk, step * LANES_OF_KEY)
        store(places.keys + key_offset(plan, key, chunk), Uint32, words)
