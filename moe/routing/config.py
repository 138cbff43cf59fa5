"""Configurations of the routing kernels, and how much work a CTA of each does. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, ClassVar, TypeVar

from kernelkit.plan.dtypes import ITEM_BYTES
from kernelkit.plan.hw import WARP_THREADS

MAX_EXPERTS = 512  # a lane holds 16 of them, up to 30 of odd groups
MAX_TOP_K = 16
MAX_GROUPS = WARP_THREADS  # a lane holds the score of one
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")

ROUTE_WARPS = 4  # warps of a CTA; a warp routes one token

BLOCK_TOKENS = 8  # tokens of a cluster: columns of an mma.sync; a CTA routes one
EXPERT_ROWS = 16  # rows of such a product
STEP_ELEMENTS = 32  # elements of H of a warp's step: two products, 16 bytes a lane
LANE_ELEMENTS = 8  # elements of a row, 16 bytes
LINEAR_WARPS = 8  # warps that multiply; one more routes
# CTAs of a cluster: the largest portable size, and the largest size, for weights that take long to
# read. The limit in bytes is not measured.
CLUSTER, WIDE_CLUSTER, WIDE_FROM_BYTES = 8, 16, 1 << 20
# Most tokens of one launch; with more, torch's linear layer runs first. H200, us, one launch (two
# steps): gpt-oss (8 CTAs) 3.0 (7.4) for 64 tokens, more was not measured; DeepSeek-V3 (16 CTAs) 8.0
# (8.9) for 16 and 15.4 (9.2) for 64.
MOST_TOKENS = {CLUSTER: 64, WIDE_CLUSTER: 16}
# Blocks of EXPERT_ROWS by STEP_ELEMENTS that a warp loads ahead, 8 registers each. With more, ptxas
# spills for 512 experts (nine warps, 168 registers).
MOST_IN_FLIGHT = 10

MAX_ROWS = 1 << 30  # slots are counted in 32 bits, including past the last one
WARPS = 16  # warps of a CTA: a thread for each of MAX_EXPERTS; two CTAs fit an SM
# Up to here one CTA is faster than a second launch; above, CTAs share the slots.
ROWS_OF_ONE_CTA = 2048
MAX_TURNS = 4  # most turns of a round
MAX_CHUNKS = 128  # one CTA each, all at once on an H100 (132 SMs) and on a B200 (148)
WORDS_IN_FLIGHT = 40  # words of the table of counts that a thread loads at once
PACKED_LIMIT = 1 << 16  # two counts are packed in a word if no sum reaches it

KEPT = 1024  # cached plans
VECTOR_BYTES = 16
COMBINE_THREADS = 128
# With at least this many tokens, one CTA per token fills the GPU and loads a token's slots once.
TOKENS_THAT_FILL = 2048


Config = TypeVar("Config", bound="RouteConfig | CombineConfig")


@dataclass(frozen=True)
class RouteConfig:
    """Static fields of the router. The number of tokens, strides and the scale are arguments."""

    label: ClassVar = ("moe_route",)

    experts: int
    top_k: int
    dtype: str
    scoring: str
    bias: bool
    n_group: int
    topk_group: int
    renormalize: bool
    # logits and biases aligned to VECTOR_BYTES, equally many experts per lane
    vectors: bool = False
    logit_bias: bool = False
    shared: int = 0  # experts added to every token, numbered after `experts`
    ordered: bool = False  # a single token, whose slots are also sorted by expert
    partial: bool = False  # with `ordered`: only a range of experts has rows
    clears: bool = False  # words that a later launch counts in become zeros

    @property
    def slots(self) -> int:
        """Experts of a token."""
        return self.top_k + self.shared

    @property
    def groups(self) -> int:
        """Number of groups for the choice: one if all groups are chosen."""
        return self.n_group if self.topk_group < self.n_group else 1

    @property
    def group_size(self) -> int:
        """Experts of a group, which are neighbours."""
        return self.experts // self.groups

    @property
    def lanes(self) -> int:
        """Number of lanes that share a group: a power of two."""
        return 1 << (WARP_THREADS // self.groups).bit_length() - 1

    @property
    def steps(self) -> tuple[int, ...]:
        """Lane distances of a butterfly over a group."""
        return tuple(1 << bit for bit in range(self.lanes.bit_length() - 1))

    @property
    def choice_steps(self) -> tuple[int, ...]:
        """Lane distances of a butterfly over the lanes that have a choice."""
        return tuple(1 << bit for bit in reversed(range((self.top_k - 1).bit_length())))

    @property
    def per_lane(self) -> int:
        """Neighbouring experts of a lane. The last lanes of a group may have fewer."""
        return -(-self.group_size // self.lanes)

    @property
    def is_even(self) -> bool:
        """Whether all lanes that have experts have equally many."""
        return self.group_size == self.lanes * self.per_lane

    def check(self) -> None:
        """Raise ValueError or NotImplementedError for unsupported routing: value and limit."""
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring {self.scoring!r}: one of {SCORINGS}")
        if not 1 <= self.experts <= MAX_EXPERTS:
            raise NotImplementedError(f"{self.experts} experts: from 1 to {MAX_EXPERTS}")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise NotImplementedError(f"top_k {self.top_k}: from 1 to {MAX_TOP_K}")
        self._check_shared()
        if not 1 <= self.n_group <= MAX_GROUPS or self.experts % self.n_group:
            raise ValueError(
                f"n_group {self.n_group}: from 1 to {MAX_GROUPS}, "
                f"a divisor of {self.experts} experts"
            )
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(f"topk_group {self.topk_group}: from 1 to n_group {self.n_group}")
        if self.top_k > self.topk_group * (self.experts // self.n_group):
            size = self.experts // self.n_group
            raise ValueError(
                f"top_k {self.top_k} of {self.topk_group} groups with {size} experts each: at most "
                f"{self.topk_group * size}"
            )

    def _check_shared(self) -> None:
        if self.shared < 0:
            raise ValueError(f"shared {self.shared}: at least 0")
        if self.slots > MAX_TOP_K:
            raise NotImplementedError(
                f"shared {self.shared} with top_k {self.top_k}: at most {MAX_TOP_K} in all"
            )
        if self.experts + self.shared > MAX_EXPERTS:
            raise NotImplementedError(
                f"shared {self.shared} with {self.experts} experts: at most {MAX_EXPERTS} in all"
            )


@dataclass(frozen=True)
class LinearConfig:
    """Static fields of a router with its linear layer.

    A warp has every `expert_ways`-th block of EXPERT_ROWS experts, `blocks` of them. It also has
    one of `shares` parts of H: `steps` times STEP_ELEMENTS.
    """

    label: ClassVar = ("moe_route_tokens", "hidden")

    route: RouteConfig  # config of the logits; its dtype is also that of x and weight
    hidden: int  # H
    weight_bias: bool = False  # whether the linear layer has a bias
    ready: bool = False  # weight and biases are older than the previous kernel

    @property
    def cluster(self) -> int:
        """CTAs that share H."""
        nbytes = self.route.experts * self.hidden * ITEM_BYTES[self.route.dtype]
        return CLUSTER if nbytes < WIDE_FROM_BYTES else WIDE_CLUSTER

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of one launch."""
        return MOST_TOKENS[self.cluster]

    @property
    def expert_ways(self) -> int:
        """Warps of a CTA that share the experts: a power of two."""
        blocks = -(-self.route.experts // EXPERT_ROWS)
        return min(LINEAR_WARPS, 1 << (blocks - 1).bit_length())

    @property
    def blocks(self) -> int:
        """Number of expert blocks of a warp. The last one may be past the last expert."""
        return -(-self.route.experts // (EXPERT_ROWS * self.expert_ways))

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(block, half) of each vector that a lane loads in a step."""
        return tuple((block, half) for block in range(self.blocks) for half in range(2))

    @property
    def shares(self) -> int:
        """Partial sums of every logit."""
        return self.cluster * (LINEAR_WARPS // self.expert_ways)

    @property
    def vectors(self) -> int:
        """Number of vectors of LANE_ELEMENTS in a row."""
        return self.hidden // LANE_ELEMENTS

    @property
    def steps(self) -> int:
        """Number of steps in a share of H. The last ones may be past the end of H."""
        return -(-self.hidden // (STEP_ELEMENTS * self.shares))

    @property
    def in_flight(self) -> int:
        """Steps that a warp loads ahead, at least one."""
        return max(1, min(self.steps, MOST_IN_FLIGHT // self.blocks))

    @property
    def is_whole(self) -> bool:
        """Whether no step is past the end of H."""
        return self.hidden == self.steps * self.shares * STEP_ELEMENTS

    def check(self) -> None:
        """Raise ValueError or NotImplementedError for unsupported routing: value and limit."""
        self.route.check()
        if self.hidden < LANE_ELEMENTS or self.hidden % LANE_ELEMENTS:
            raise NotImplementedError(
                f"hidden size {self.hidden}: a multiple of {LANE_ELEMENTS}, at least "
                f"{LANE_ELEMENTS} (16-byte accesses)"
            )


@dataclass(frozen=True)
class PermutationConfig:
    """Static fields of the permutation kernels."""

    experts: int
    turns: int  # iterations of a warp in a round, 32 slots each
    chunked: bool  # several CTAs share the slots; a first launch counts each CTA's
    packed: bool = False  # two counts in a word
    partial: bool = False  # `experts` is a range of all experts that does not begin at 0
    warps: int = WARPS

    @property
    def threads(self) -> int:
        """Threads of a CTA. Thread e adds up the counts of expert e."""
        return self.warps * WARP_THREADS

    @property
    def slots(self) -> int:
        """Slots of a CTA in a round."""
        return self.threads * self.turns

    @property
    def bits(self) -> int:
        """Bits of an expert's number; one more value marks slots without a row."""
        return self.experts.bit_length()

    @property
    def per_word(self) -> int:
        """Counts in a word of the table."""
        return 2 if self.packed else 1

    @property
    def words(self) -> int:
        """Words of a chunk in the table of counts, rounded up to whole vectors."""
        unit = self.per_word * VECTOR_BYTES // 4
        return -(-self.experts // unit) * VECTOR_BYTES // 4

    @property
    def vector(self) -> int:
        """Words that a thread reads at a time: few, so that there are more parts."""
        return 2 if self.words <= self.threads // 4 else 4

    @property
    def parts(self) -> int:
        """Parts of the chunks whose counts threads add up in parallel, at least four: one thread
        per vector of words and part."""
        return min(self.threads // (self.words // self.vector), self.warps)

    def chunks_of_part(self, chunks: Any) -> Any:
        """Largest number n of chunks in a part. Before a CTA's chunk, part p has chunks from p n
        on; from that chunk on, part p has chunks from (p - 1) n on: one part is split in two."""
        return (chunks + self.parts - 2) // (self.parts - 1)


@dataclass(frozen=True)
class PermutationPlan:
    """Division of the slots. CTA c has the slots from c * slots * rounds on, `slots` of its config
    in each round."""

    config: PermutationConfig
    chunks: int
    rounds: int


@lru_cache(KEPT)
def plan_permutation(rows: int, experts: int, partial: bool = False) -> PermutationPlan:
    """Divide `rows` slots, at least one, among CTAs and warps; see PermutationConfig."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise NotImplementedError(f"{experts} experts: from 1 to {MAX_EXPERTS}")
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} slots, limit {MAX_ROWS}")
    chunked = rows > ROWS_OF_ONE_CTA
    shared = WARPS * WARP_THREADS * (MAX_CHUNKS if chunked else 1)
    turns = 1 << (-(-rows // shared) - 1).bit_length()
    if not chunked:
        return PermutationPlan(PermutationConfig(experts, turns, False, partial=partial), 1, 1)
    config = PermutationConfig(experts, min(turns, MAX_TURNS), True, True, partial)
    rounds = -(-rows // (config.slots * MAX_CHUNKS))
    chunks = -(-rows // (config.slots * rounds))
    most = config.chunks_of_part(chunks) * config.slots * rounds  # of one expert in a part
    return PermutationPlan(replace(config, packed=most < PACKED_LIMIT), chunks, rounds)


@dataclass(frozen=True)
class CombineConfig:
    """Static fields of the combination; tokens, hidden size and strides are arguments. partial:
    slots may have no row."""

    label: ClassVar = ("moe_combine",)

    top_k: int
    dtype: str
    out_dtype: str
    weighted: bool
    partial: bool = False

    @property
    def vector(self) -> int:
        """Elements that a thread processes at a time: one or two loads and stores of 16 bytes."""
        return VECTOR_BYTES // min(ITEM_BYTES[name] for name in (self.dtype, self.out_dtype))

    def check(self) -> None:
        """Raise NotImplementedError, naming value and limit."""
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise NotImplementedError(f"top_k {self.top_k}: from 1 to {MAX_TOP_K}")


def combine_columns(tokens: int, vectors: int) -> int:
    """CTAs that share the vectors of a token."""
    return 1 if tokens >= TOKENS_THAT_FILL else -(-vectors // COMBINE_THREADS)


@cache
def checked(config: Config) -> Config:
    """Return the config. Raise NotImplementedError or ValueError, naming value and limit, if no
    kernel supports it."""
    config.check()
    return config


@cache
def in_vectors(config: RouteConfig) -> RouteConfig:
    """The config for logits and biases that are aligned to VECTOR_BYTES."""
    return replace(config, vectors=True) if config.is_even else config


@lru_cache(KEPT)
def columns_of(config: CombineConfig, tokens: int, hidden: int) -> int:
    """Return the CTAs that share a token. Raise ValueError unless H is whole vectors."""
    if hidden % config.vector:
        raise ValueError(f"hidden size {hidden}: a multiple of {config.vector} (16-byte accesses)")
    return combine_columns(tokens, hidden // config.vector)
