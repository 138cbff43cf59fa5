"""A checksum of a range of slots (device code); `kvcache.movement.reference.checksum` defines the
bits.

Sums do not depend on the order in which CTAs and threads add.
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.plan.hw import WARP_THREADS
from kvcache.movement.config import VECTOR_BYTES, VECTORS, ChecksumConfig, ChecksumParams
from kvcache.movement.device import int64_at, load_bytes, zeros
from kvcache.movement.reference import KEYS, SHIFTS

WORDS = VECTOR_BYTES // 4


class Checksum(TableKernel):
    """The kernel of one ChecksumConfig; table: `ChecksumParams`."""

    config: ChecksumConfig

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """CTAs take turns at the pieces of all slots."""
        config, params = self.config, table.unpack(ChecksumParams)
        pool, pieces = params.pool, Int32(params.pieces)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        sSums = SmemAllocator().allocate_tensor(Uint32, cute.make_layout((config.warps, 2)))
        for item in cutlass.range(cta, Int32(params.count) * pieces, ctas, unroll=1):
            index = Int32(Uint32(item) // Uint32(pieces))
            slot = int64_at(params.slots, index)
            if slot >= 0 and slot < pool.count:
                begin = Int64(item - index * pieces) * params.piece_bytes
                size = cutlass.min(pool.nbytes - begin, params.piece_bytes)
                address = pool.address + slot * pool.stride
                first, second = self.sums_of_piece(address, begin, Int32(size))
                for step in (1, 2, 4, 8, 16):
                    first += cute.arch.shuffle_sync_bfly(first, step)
                    second += cute.arch.shuffle_sync_bfly(second, step)
                if thread % WARP_THREADS == 0:
                    warp = thread // WARP_THREADS
                    sSums[warp, 0], sSums[warp, 1] = first, second
                cute.arch.sync_threads()
                if thread < 2:
                    total = Uint32(0)
                    for warp in cutlass.range_constexpr(config.warps):
                        total += sSums[warp, thread]
                    place = params.sums + Int64(index) * 8 + Int64(thread) * 4
                    word = cute.make_ptr(Uint32, place, AddressSpace.gmem, assumed_align=4)
                    cute.arch.atomic_add(word, total, sem="relaxed", scope="gpu")
                cute.arch.sync_threads()

    @cute.jit
    def sums_of_piece(self, slot: Int64, begin: Int64, size: Int32) -> tuple[Uint32, Uint32]:
        """Both sums over what a thread has of a piece, which begins at `begin` of a slot."""
        thread, _, _ = cute.arch.thread_idx()
        step = self.config.threads * VECTOR_BYTES
        source, before = slot + begin, Uint32(begin // 4 + 1)
        first, second = Uint32(0), Uint32(0)
        for place in cutlass.range(thread * VECTOR_BYTES, size, step * VECTORS, unroll=1):
            loaded = []
            for index in cutlass.range_constexpr(VECTORS):
                words = zeros(WORDS)
                if place + index * step < size:
                    load_bytes(source + Int64(place + index * step), words)
                loaded.append(words)
            for index in cutlass.range_constexpr(VECTORS):
                here = place + index * step
                if here < size:
                    key = (before + Uint32(here) // 4) * Uint32(KEYS[0])
                    for word in cutlass.range_constexpr(WORDS):
                        mixed = loaded[index][word] ^ (key + Uint32(word * KEYS[0] % (1 << 32)))
                        mixed *= Uint32(KEYS[1])
                        mixed ^= mixed >> SHIFTS[0]
                        first += mixed
                        mixed *= Uint32(KEYS[2])
                        second += mixed ^ mixed >> SHIFTS[1]
        return first, second


def host_function(config: ChecksumConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Checksum(config).with_table(ChecksumParams)
