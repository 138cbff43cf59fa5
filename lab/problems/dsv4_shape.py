"""One layer of DeepSeek-V4 in numbers: sizes, and definitions that are wrong on purpose."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM, INDEX_DIM, ROPE, WINDOW = 512, 128, 64, 128
RATIOS = {"swa": 0, "csa": 4, "hca": 128}


@dataclass(frozen=True)
class Shape:
    """kind: of RATIOS. select: entries that a query of a CSA layer attends to. choices: experts of
    a token; without experts the layer ends behind attention. hidden and intermediate as the expert
    formats want them."""

    kind: str = "csa"
    hidden: int = 256
    heads: int = 8
    q_rank: int = 96
    o_groups: int = 2
    o_rank: int = 64
    index_heads: int = 32
    select: int = 32
    experts: int = 6
    intermediate: int = 128
    choices: int = 2

    def __post_init__(self) -> None:
        if self.kind not in RATIOS:
            raise ValueError(f"kind {self.kind!r}: one of {', '.join(RATIOS)}")
        if self.heads < 1 or self.o_groups < 1 or self.heads % self.o_groups:
            raise ValueError(f"{self.heads} heads in {self.o_groups} groups: a divisor, at least 1")
        if self.experts < 0:
            raise ValueError(f"{self.experts} experts: at least 0, which is none")
        if self.experts and not 1 <= self.choices <= self.experts:
            raise ValueError(f"{self.choices} choices of {self.experts} experts: from 1 to all")

    @property
    def ratio(self) -> int:
        """Tokens to a compressed entry, 0 without any."""
        return RATIOS[self.kind]

    @property
    def overlap(self) -> int:
        """Windows that make an entry."""
        return 2 if self.kind == "csa" else 1


@dataclass(frozen=True)
class Definition:
    """window: tokens that a query sees, itself included. phase: of the position biases in their
    window. sinks: whether a logit without a value is there. rope_shift: of the position of an
    entry from the first token of its window."""

    window: int = WINDOW
    phase: int = 0
    sinks: bool = True
    rope_shift: int = 0


MUTATIONS = {
    "window": Definition(window=WINDOW - 1),
    "phase": Definition(phase=1),
    "sink": Definition(sinks=False),
    "rope": Definition(rope_shift=1),
}
