"""Notes about the memory accesses of a recorded launch, made by the primitives that execute them.

Each access takes two 64-bit words. The lower 16 bits of the first word encode the memory, whether
the access stores, and the bytes of a lane. The upper bits count how often the memory is busy with
the access. The second word is the lowest address.

Shared memory serves 32 banks of 4 bytes at a time. It serves a whole warp if lanes access 4 bytes
or less, half a warp for 8 bytes, and a quarter for 16. A word that several lanes read is served
once. Global memory is counted in sectors of 32 bytes.
"""

from __future__ import annotations

from ptxemu.native.routines import p_i64, p_u8, p_u32, routine

SHARED, GLOBAL, COPIED = MEMORIES = ("shared", "global", "copied")  # by cp.async
SIZE_BITS = 8
BANKS, WORD, SECTOR = 32, 4, 32
# Words of the notes: where the next access goes, where they end, the word that each bank serves.
NEXT, ROOM, _SERVED = range(3)
FIRST = _SERVED + BANKS


@routine
def note_shared(notes: p_i64, addresses: p_u32, active: p_u8, what: int) -> int:
    """Note a shared memory access; return 1, and note nothing, if there is no room.

    what: the lower 16 bits of the first word.
    """
    place = notes[NEXT]
    if place + 2 > notes[ROOM]:
        return 1
    nbytes = what & 255
    words = max(nbytes >> 2, 1)
    lanes = max(32 // words, 8)
    passes = 0
    lowest = 1 << 40
    for begin in range(0, 32, 8):
        if begin % lanes == 0:
            waiting = 0
            for lane in range(begin, begin + lanes):
                if active[lane] != 0:
                    waiting |= 1 << lane
                    lowest = min(lowest, addresses[lane] & 0xFFFFFF)
            while waiting != 0:
                passes += 1
                for bank in range(BANKS):
                    notes[_SERVED + bank] = -1
                for lane in range(begin, begin + lanes):
                    if (waiting >> lane) & 1 != 0:
                        first = (addresses[lane] & 0xFFFFFF) >> 2
                        free = 1
                        for word in range(first, first + words):
                            served = notes[_SERVED + (word & 31)]
                            if served != -1 and served != word:
                                free = 0
                        if free != 0:
                            for word in range(first, first + words):
                                notes[_SERVED + (word & 31)] = word
                            waiting &= ~(1 << lane)
    notes[place] = what | passes << 16
    notes[place + 1] = lowest
    notes[NEXT] = place + 2
    return 0


@routine
def note_global(notes: p_i64, addresses: p_i64, active: p_u8, what: int) -> int:
    """Note a global memory access. Equal sectors of successive lanes are counted once."""
    place = notes[NEXT]
    if place + 2 > notes[ROOM]:
        return 1
    nbytes = what & 255
    passes = 0
    lowest = -1
    last = -1
    for lane in range(32):
        if active[lane] != 0:
            first = addresses[lane]
            if lowest == -1 or first < lowest:
                lowest = first
            sector = first >> 5
            final = (first + nbytes - 1) >> 5
            if sector == last:
                sector += 1
            passes += max(final - sector + 1, 0)
            last = final
    notes[place] = what | passes << 16
    notes[place + 1] = lowest
    notes[NEXT] = place + 2
    return 0


def kind(memory: str, store: bool, nbytes: int) -> int:
    """The lower 16 bits of an access."""
    return (MEMORIES.index(memory) << 1 | store) << SIZE_BITS | nbytes
