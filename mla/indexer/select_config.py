"""Configuration of the kernel that selects the k best keys of a row, and the division of the rows.

A cluster of CTAs processes a row of scores. Each CTA has neighbouring candidates, and each warp of
it a stretch of those. A score becomes a key, an unsigned integer with the order of the scores and
as many bits as a score: 0 is no candidate, NO_NUMBER a NaN. The k-th largest key is found digit by
digit, the highest digit first. All CTAs count the digits of the keys that agree with the digits
known so far. The counts of the cluster give the next digit of the k-th largest key, and how many of
the k have a larger one.

A CTA keeps its keys in shared memory, so that scores are read once, or it reads the scores again
for each digit. Keys whose first digit is smaller than that of the k-th largest cannot be chosen.
Each warp lists the other keys, nearly always few, and from then on processes only these. A CTA that
has a long row alone keeps no keys. It first takes a sample, which excludes most keys, and its warps
list the rest while they count: scores are read once, except for the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw

CLUSTERS = (1, 2, 4, 8)
MAX_K = 2048
DIGIT_BITS = 11  # at most
WARP_THREADS = hw.WARP_THREADS
GROUP = WARP_THREADS  # bins that are also counted together
NO_NUMBER = 1
VECTOR_BYTES = 16
KEY_BITS = {"fp32": 32, "bf16": 16}
KEY_BYTES_ALONE = 192 << 10  # at most, of a CTA that has its SM alone
KEY_BYTES = 64 << 10  # at most, of a CTA that shares its SM
FEW_KEYS = 4096  # keys of a CTA that another CTA would not help
MANY_KEYS = 16384  # keys of a CTA from which on it has more threads
LISTED_OF_WARP = 128
# Sizes for a CTA that lists while it counts. A sample of 1 / s of its candidates lets about k s of
# them through, and also some that have the smallest digit: half as many, rarely more.
LISTED, SAMPLED_FOR = 8192, 4096  # SAMPLED_FOR is the limit of k s
SAMPLES = (8, 4, 2)  # values of s; few, since each needs its own kernel


@dataclass(frozen=True)
class Digit:
    """Bits shift .. shift + bits - 1 of a key.

    first: number of bins of all higher digits, which come before its own.
    """

    shift: int
    bits: int
    first: int

    @property
    def bins(self) -> int:
        """Number of values of the digit."""
        return 1 << self.bits

    @property
    def groups(self) -> int:
        """Number of groups of bins."""
        return self.bins // GROUP


@dataclass(frozen=True)
class SelectConfig:
    """Config of a selection kernel.

    dtype: of scores, 'fp32' or 'bf16'.
    cluster: CTAs of a row.
    capacity: keys that a CTA can keep, a multiple of a step; 0 if it keeps none.
    paged: whether a block table maps candidates to entries.
    listed: keys that a warp can list.
    aligned: whether rows of scores begin at multiples of an access.
    sampled: if > 0, a CTA that keeps no keys first reads one candidate in `sampled` to bound those
    that can be chosen; while it counts, warps list the keys that reach the bound.
    """

    dtype: str
    cluster: int
    capacity: int
    paged: bool
    threads: int = 512
    listed: int = 128
    aligned: bool = True
    sampled: int = 0

    @property
    def key_bits(self) -> int:
        """Number of bits of a score and of its key."""
        return KEY_BITS[self.dtype]

    @property
    def vector(self) -> int:
        """Number of scores in one memory access."""
        return VECTOR_BYTES * 8 // self.key_bits

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        return self.threads // hw.WARP_THREADS

    @property
    def step(self) -> int:
        """Number of candidates that a warp processes at a time."""
        return self.vector * hw.WARP_THREADS

    @property
    def digits(self) -> tuple[Digit, ...]:
        """Digits of a key, the highest first."""
        found: list[Digit] = []
        shift, first = self.key_bits, 0
        while shift:
            bits = min(DIGIT_BITS, shift)
            shift -= bits
            found.append(Digit(shift, bits, first))
            first += 1 << bits
        return tuple(found)

    @property
    def bins(self) -> int:
        """Number of bins of all digits."""
        return sum(digit.bins for digit in self.digits)

    @property
    def key_words(self) -> int:
        """Number of 32-bit words of the keys that a CTA keeps."""
        return self.capacity * self.key_bits // 32


def choose_select(
    dtype: str, sizes: tuple[int, int, int], arch: str, *, paged: bool, aligned: bool = True
) -> SelectConfig:
    """Choose the config for a problem.

    The thresholds were measured on an H100.

    sizes: (rows, candidates at most, k).
    """
    rows, candidates, k = sizes
    sms, room = hw.SMS_OF[arch], KEY_BYTES * 8 // KEY_BITS[dtype]
    cluster = choose_cluster(rows, candidates, sms, room)
    if cluster == 1 and dtype == "bf16" and room < candidates <= 2 * room:
        cluster = 2
    keys, ctas = -(-candidates // cluster), rows * cluster
    room = room if ctas > sms else KEY_BYTES_ALONE * 8 // KEY_BITS[dtype]
    capacity = capacity_of(keys, room) if keys <= room else 0
    threads, sampled = 512, 0
    if capacity:
        threads = 256 if ctas > sms and keys <= FEW_KEYS else threads
        threads = 1024 if ctas <= sms and keys > MANY_KEYS else threads
    elif cluster == 1:
        threads = 1024 if dtype == "bf16" else threads
        sampled = next(s for s in SAMPLES if s == SAMPLES[-1] or k * s <= SAMPLED_FOR)
    listed = LISTED if sampled else LISTED_OF_WARP * threads // WARP_THREADS
    return SelectConfig(
        dtype, cluster, capacity, paged, threads, listed * WARP_THREADS // threads, aligned, sampled
    )


def capacity_of(keys: int, room: int) -> int:
    """Round `keys` up to one of few capacities, since each needs its own kernel; at most `room`."""
    return min(max(1 << (keys - 1).bit_length(), FEW_KEYS), room)


def choose_cluster(rows: int, candidates: int, sms: int, keys_of_two: int) -> int:
    """Return the largest cluster with which all rows run at once.

    Two CTAs share an SM if the keys of both fit.
    """
    if candidates <= 2 * FEW_KEYS:
        return 1
    for cluster in reversed(CLUSTERS[1:]):
        keys = candidates // cluster
        at_once = 2 * sms if keys <= keys_of_two else sms
        if keys >= FEW_KEYS and rows * cluster <= at_once:
            return cluster
    return 1
