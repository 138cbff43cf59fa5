"""Attention to latent keys with mma.sync: a CTA has the rows of one tile and a part of the keys.

The grid is entries x tiles of rows x parts, in one dimension, parts first.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32
from cutlass.memory import SmemAllocator

from mla.attention.config import LatentConfig
from mla.attention.kernel_arguments import KernelArguments, Source
from mla.attention.portable.attend import (
    Scratch,
    State,
    accumulate,
    fresh_state,
    load_queries,
    score,
    weigh,
)
from mla.attention.portable.finish import Place, finish, leave_statistics
from mla.attention.portable.keys import Places, Reach, fetch, look_up, widen_keys
from mla.attention.portable.plan import KEYS, PortablePlan
from mla.attention.signature import example_arguments


class LatentPortable:
    """Host function and kernel of one config."""

    def __init__(self, config: LatentConfig, arch: str) -> None:
        self.config = config
        self.plan = PortablePlan(config, arch)

    @cute.jit
    def __call__(self, given: KernelArguments, stream: CUstream) -> None:
        """Launch `parts` CTAs for each entry and tile of its rows."""
        self.kernel(given).launch(
            grid=(given.q.shape[0] * self.tiles(given) * given.parts, 1, 1),
            block=(self.plan.threads, 1, 1),
            stream=stream,
            use_pdl=self.config.pdl,
        )

    def tiles(self, given: KernelArguments) -> Int32:
        """Return the tiles of query rows of an entry."""
        return (given.q.shape[1] * self.config.heads + self.plan.rows - 1) // self.plan.rows

    @cute.kernel
    def kernel(self, given: KernelArguments) -> None:
        """Run one CTA."""
        config, plan = self.config, self.plan
        if cutlass.const_expr(config.pdl):
            cute.arch.griddepcontrol_wait()
        sources = (given.keys,) if config.extra is None else (given.keys, given.extra)
        smem = SmemAllocator().allocate(plan.smem.bytes, byte_alignment=128).toint()
        begins = {name: smem + begin for name, (begin, _) in plan.smem.offsets().items()}
        places = Places(*(begins[name] for name in ("keys", "raw", "exists")))
        names = ("keys", "scores", "weights", "exists", "factors", "statistics")
        scratch = Scratch(*(begins[name] for name in names))
        cta, _, _ = cute.arch.block_idx()
        unit, part = cta // given.parts, cta % given.parts
        entry, first_row = unit // self.tiles(given), unit % self.tiles(given) * plan.rows
        reach = self.reach_of(given, sources, entry, first_row)
        begin, count, active = self.share(reach, part, given.parts)
        place = Place(entry, first_row, unit, part, active)
        if count > 0 or part == 0:
            state = fresh_state(plan)
            scale_log2 = given.scale_log2
            if cutlass.const_expr(config.key_scale):
                scale_log2 *= given.tables.key_scale[0]
            if count > 0:
                self.walk(given, sources, (places, scratch), place, reach, (begin, count), state)
            leave_statistics(plan, scratch, state, scale_log2)
            cute.arch.sync_threads()
            finish(plan, scratch, begins["arrived"], place, state, given)
        if cutlass.const_expr(config.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def reach_of(
        self, given: KernelArguments, sources: tuple[Source, ...], entry: Int32, first_row: Int32
    ) -> Reach:
        """Return the keys that rows of this CTA may see, and their tiles."""
        config, plan, ends = self.config, self.plan, []
        for number in cutlass.range_constexpr(len(sources)):
            ends.append(self.keys_of(sources[number], number, entry))
        if cutlass.const_expr(config.causal):
            ends[0] = self.end_of(given, ends[0], first_row + plan.rows - 1)
        tiles = [(cutlass.max(end, 0) + KEYS - 1) // KEYS for end in ends]
        return Reach(tuple(ends), tuple(tiles))

    @cute.jit
    def keys_of(self, source: Source, number: cutlass.Constexpr, entry: Int32) -> Int32:
        """Return the keys of an entry, at most those that the table has room for."""
        keys = self.config.sources[number]
        most = source.places.shape[1] * (1 if keys.listed else keys.rows)
        if cutlass.const_expr(keys.counts):
            most = cutlass.min(source.counts[entry], most)
        return Int32(most)

    @cute.jit
    def end_of(self, given: KernelArguments, n_keys: Int32, row: Int32) -> Int32:
        """Return the keys that a query row may see by the causal mask, of `n_keys`."""
        tokens = given.q.shape[1]
        token = cutlass.min(row // self.config.heads, tokens - 1)
        return n_keys - (tokens - 1 - token)

    @cute.jit
    def share(self, reach: Reach, part: Int32, parts: Int32) -> tuple[Int32, Int32, Int32]:
        """Return this part's first tile, its number of tiles, and how many parts have any."""
        tiles = reach.tiles[0]
        for number in cutlass.range_constexpr(1, len(reach.tiles)):
            tiles += reach.tiles[number]
        base = tiles // parts
        more = tiles - base * parts
        begin = part * base + cutlass.min(part, more)
        return begin, base + Int32(part < more), cutlass.min(tiles, parts)

    @cute.jit
    def walk(
        self,
        given: KernelArguments,
        sources: tuple[Source, ...],
        memory: tuple[Places, Scratch],
        place: Place,
        reach: Reach,
        share: tuple[Int32, Int32],
        state: State,
    ) -> None:
        """Process the tiles of this part."""
        plan, (places, scratch), (begin, count) = self.plan, memory, share
        found = look_up(plan, sources, reach, place.entry, begin)
        fetch(plan, sources, reach, places, begin, Int32(0), found)
        found = look_up(plan, sources, reach, place.entry, begin + 1)
        queries = load_queries(plan, given.q, place.entry, place.first_row)
        ends = self.ends_of_rows(given, sources, place)
        scale_log2 = given.scale_log2
        if cutlass.const_expr(self.config.key_scale):
            scale_log2 *= given.tables.key_scale[0]
        for step in cutlass.range(count, unroll=1):
            tile, stage = begin + step, step % 2
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()  # all warps are done with the previous tile
            keys = scratch.keys
            if cutlass.const_expr(plan.direct):
                keys += stage * (KEYS * plan.row_bytes)
            else:
                widen_keys(plan, reach, places, tile)
                cute.arch.sync_warp()  # the raw keys of this warp are free
            if step + 1 < count:
                fetch(plan, sources, reach, places, tile + 1, 1 - stage, found)
            found = look_up(plan, sources, reach, place.entry, tile + 2)
            if cutlass.const_expr(not plan.direct):
                cute.arch.sync_threads()  # the keys are there
            score(plan, scratch, keys, queries)
            cute.arch.sync_threads()
            number, first_key = self.in_source(reach, tile)
            marks = scratch.exists + stage * (KEYS * 4)
            row_ends = self.row_ends(ends, number)
            weigh(plan, scratch, marks, row_ends, first_key, scale_log2, state)
            cute.arch.sync_threads()
            accumulate(plan, scratch, keys, state)

    @cute.jit
    def in_source(self, reach: Reach, tile: Int32) -> tuple[Int32, Int32]:
        """Return the source of a tile, and the number of its first key there."""
        number, first = Int32(0), tile
        if cutlass.const_expr(len(reach.tiles) > 1):
            if tile >= reach.tiles[0]:
                number, first = Int32(1), tile - reach.tiles[0]
        return number, first * KEYS

    @cute.jit
    def ends_of_rows(
        self, given: KernelArguments, sources: tuple[Source, ...], place: Place
    ) -> cute.Tensor:
        """Return how many keys each row of this warp may see, (rows of the warp, sources)."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ends = cute.make_rmem_tensor((plan.rows_of_warp, len(sources)), Int32)
        for number in cutlass.range_constexpr(len(sources)):
            n_keys = self.keys_of(sources[number], number, place.entry)
            for index in cutlass.range_constexpr(plan.rows_of_warp):
                ends[index, number] = n_keys
                if cutlass.const_expr(self.config.causal and number == 0):
                    row = place.first_row + warp * plan.rows_of_warp + index
                    ends[index, number] = self.end_of(given, n_keys, row)
        return ends

    @cute.jit
    def row_ends(self, ends: cute.Tensor, number: Int32) -> cute.Tensor:
        """Return the ends of the rows in one source."""
        chosen = cute.make_rmem_tensor(self.plan.rows_of_warp, Int32)
        for index in cutlass.range_constexpr(self.plan.rows_of_warp):
            chosen[index] = ends[index, 0]
            if cutlass.const_expr(self.config.extra is not None):
                chosen[index] = ends[index, 1] if number == 1 else ends[index, 0]
        return chosen


def host_function(config: LatentConfig, arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return LatentPortable(config, arch), *example_arguments(config)
