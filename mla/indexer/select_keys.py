"""Keys of candidates: from scores, in shared memory, and in lists of those that are left (device
code). `mla.indexer.select_config` says what a key is.

Warps step over vectors of their candidates, 32 at a time, or over the items of their lists. Where
nothing is kept, keys are made of scores whenever they are read.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32

from kernelkit.plan.hw import WARP_THREADS
from kvcache.movement.device import load_bytes, zeros
from mla.indexer.select_config import NO_NUMBER, VECTOR_BYTES, SelectConfig

WORDS = VECTOR_BYTES // 4
HALF, LOW = 16, 0xFFFF
AT_ONCE = 4  # loads in flight, of a thread


@dataclass(frozen=True)
class Share:
    """What a CTA has of a row: the address of its first score, that candidate's number and how many
    there are; of its warp the first step and the one behind its last."""

    scores: Int64
    begin: Int32
    size: Int32
    first: Int32
    end: Int32


@dataclass(frozen=True)
class Shared:
    """Shared memory: of all digits counts of bins and of groups; of warps and of the CTA how many
    keys are larger and equal; what is found of the k-th largest; keys; items (key, number) of the
    lists of all warps."""

    bins: cute.Tensor
    groups: cute.Tensor
    warps: cute.Tensor
    totals: cute.Tensor
    found: cute.Tensor
    keys: cute.Tensor
    items: cute.Tensor


class Keys:
    """Of one SelectConfig."""

    def __init__(self, config: SelectConfig) -> None:
        self.config = config

    @cute.jit
    def vector_of(self, step: Int32) -> Int32:
        """The lane's vector of a step."""
        return step * WARP_THREADS + cute.arch.lane_idx()

    @cute.jit
    def steps_of(
        self, share: Share, listed: Int32, is_list: cutlass.Constexpr[bool]
    ) -> tuple[Int32, Int32]:
        """The warp's first step, and the one behind its last, of a list or of its candidates."""
        if cutlass.const_expr(is_list):
            return Int32(0), (listed + WARP_THREADS - 1) // WARP_THREADS
        return share.first, share.end

    @cute.jit
    def read(
        self,
        share: Share,
        shared: Shared,
        step: Int32,
        listed: Int32,
        is_list: cutlass.Constexpr[bool],
    ) -> cute.Tensor:
        """A lane's keys of a step, one of a list; listed: how many are."""
        config = self.config
        if cutlass.const_expr(is_list):
            found = zeros(1)
            if self.vector_of(step) < listed:
                found[0] = shared.items[2 * self.listed_at(step)]
            return found
        if cutlass.const_expr(not config.capacity):
            return self.fetch(share, step)
        return self.kept(shared, step)

    @cute.jit
    def kept(self, shared: Shared, step: Int32) -> cute.Tensor:
        """A lane's keys of a step, from shared memory."""
        words, vector = zeros(WORDS), self.vector_of(step)
        cute.autovec_copy(cute.local_tile(shared.keys, (WORDS,), (vector,)), words)
        return self.unpacked(words)

    @cute.jit
    def keep(self, shared: Shared, step: Int32, keys: cute.Tensor) -> None:
        """A lane's keys of a step, to shared memory."""
        words, vector = self.packed(keys), self.vector_of(step)
        cute.autovec_copy(words, cute.local_tile(shared.keys, (WORDS,), (vector,)))

    @cute.jit
    def whole(self, share: Share) -> Int32:
        """The step behind the warp's last of those that candidates fill, AT_ONCE at a time."""
        steps = cutlass.min(share.end, share.size // self.config.step) - share.first
        return share.first + cutlass.max(steps, 0) // AT_ONCE * AT_ONCE

    @cute.jit
    def fetch_whole(self, share: Share, begin: Int32) -> list:
        """Keys of AT_ONCE steps that candidates fill."""
        loaded = []
        for index in cutlass.range_constexpr(AT_ONCE):
            loaded.append(self.load(share, self.vector_of(begin + index)))
        return [self.keys_of(words) for words in loaded]

    @cute.jit
    def listed_at(self, step: Int32) -> Int32:
        """Where the lane's item of a step is."""
        thread, _, _ = cute.arch.thread_idx()
        return thread // WARP_THREADS * self.config.listed + self.vector_of(step)

    @cute.jit
    def number_of(
        self, shared: Shared, step: Int32, listed: Int32, is_list: cutlass.Constexpr[bool]
    ) -> Int32:
        """Of the first of a lane's keys in the CTA's share; see `read`."""
        number = self.vector_of(step) * self.config.vector
        if cutlass.const_expr(is_list):
            number = Int32(0)
            if self.vector_of(step) < listed:
                number = Int32(shared.items[2 * self.listed_at(step) + 1])
        return number

    @cute.jit
    def fetch(self, share: Share, step: Int32) -> cute.Tensor:
        """Keys of a lane's scores of a step, 0 where there is no candidate: what lies behind the
        last one may be nobody's."""
        config, words, vector = self.config, zeros(WORDS), self.vector_of(step)
        behind = share.size - vector * config.vector
        place = share.scores + Int64(vector) * VECTOR_BYTES
        if behind >= config.vector:
            cute.autovec_copy(self.load(share, vector), words)
        elif behind > 0:
            for number in cutlass.range_constexpr(config.vector - 1):
                if number < behind:
                    self.load_one(place, words, number)
        keys = self.keys_of(words)
        for number in cutlass.range_constexpr(config.vector):
            keys[number] = keys[number] if number < behind else Uint32(0)
        return keys

    @cute.jit
    def load(self, share: Share, vector: Int32) -> cute.Tensor:
        """Scores of a whole vector."""
        words, place = zeros(WORDS), share.scores + Int64(vector) * VECTOR_BYTES
        if cutlass.const_expr(self.config.aligned):
            load_bytes(place, words)
        else:
            for number in cutlass.range_constexpr(self.config.vector):
                self.load_one(place, words, number)
        return words

    @cute.jit
    def load_one(self, place: Int64, words: cute.Tensor, number: cutlass.Constexpr[int]) -> None:
        """A score of a vector."""
        if cutlass.const_expr(self.config.key_bits == 32):
            load_bytes(place + number * 4, cute.local_tile(words, (1,), (number,)))
        else:
            half = zeros(1, Uint16)
            load_bytes(place + number * 2, half)
            words[number // 2] = words[number // 2] | Uint32(half[0]) << number % 2 * HALF

    @cute.jit
    def keys_of(self, words: cute.Tensor) -> cute.Tensor:
        """Of the scores of a vector, a word each."""
        config, keys = self.config, zeros(self.config.vector)
        for number in cutlass.range_constexpr(config.vector):
            if cutlass.const_expr(config.key_bits == 32):
                keys[number] = key_of_score(words[number])
            else:
                word = words[number // 2]
                bits = word << HALF if number % 2 == 0 else word & Uint32(LOW << HALF)
                keys[number] = cutlass.max(key_of_score(bits) >> HALF, Uint32(NO_NUMBER))
        return keys

    @cute.jit
    def packed(self, keys: cute.Tensor) -> cute.Tensor:
        """As they are kept."""
        if cutlass.const_expr(self.config.key_bits == 32):
            return keys
        words = zeros(WORDS)
        for word in cutlass.range_constexpr(WORDS):
            words[word] = keys[2 * word] | keys[2 * word + 1] << HALF
        return words

    @cute.jit
    def unpacked(self, words: cute.Tensor) -> cute.Tensor:
        """A word each."""
        if cutlass.const_expr(self.config.key_bits == 32):
            return words
        keys = zeros(self.config.vector)
        for word in cutlass.range_constexpr(WORDS):
            keys[2 * word] = words[word] & Uint32(LOW)
            keys[2 * word + 1] = words[word] >> HALF
        return keys


@cute.jit
def key_of_score(bits: Uint32) -> Uint32:
    """In the order of the numbers that the bits are of; both zeros are one number."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 x; .reg .b32 y, sign; .reg .pred nan; mov.b32 x, {$r0}; "
        "add.rn.f32 x, x, 0f00000000; mov.b32 y, x; shr.s32 sign, y, 31; "
        "or.b32 sign, sign, 0x80000000; xor.b32 y, y, sign; setp.nan.f32 nan, x, x; "
        f"selp.b32 {{$w0}}, {NO_NUMBER}, y, nan; }}",
        write_only_types=[Uint32],
        read_only_args=[bits],
    )
