"""The flags that spell a layer of DeepSeek-V4 over the cache: its sizes, and definitions that are
wrong on purpose. `lab.dsv4` computes it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from kvcache.layouts.models import V4_RECORDS
from lab.tools import groups
from lab.tools.groups import add, count, positive_count, switch

HEAD_DIM, INDEX_DIM, ROPE, WINDOW = 512, 128, 64, 128
RATIOS = {"swa": 0, "csa": 4, "hca": 128}


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; hidden and intermediate must suit the expert formats.

    kind: a key of RATIOS.
    select: entries that a query of a CSA layer attends to.
    choices: experts per token. Without experts the layer ends after attention."""

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
            raise ValueError(
                f"{self.heads} heads in {self.o_groups} groups: the groups must divide the heads"
            )
        if self.experts < 0:
            raise ValueError(f"{self.experts} experts: at least 0, 0 for none")
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
    """Open choices of the model's definition.

    window: tokens that a query sees, itself included.
    phase: offset of the position biases in their window.
    sinks: whether there is a logit without a value.
    rope_shift: distance of an entry's position from the first token of its window."""

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


ARCHS = ("sm_100a", "sm_90a")
ARCHS_OF_EXPERTS = ARCHS[:1]
SIZES = {
    "hidden": "width of the residual stream",
    "q-heads": "query heads, 512 columns each",
    "index-heads": "heads of the indexer, 128 columns each",
    "select": "entries that a query attends to",
    "experts": "number of experts; 0: none, the layer ends after attention",
    "top-k": "experts per token",
    "intermediate": "width of an expert",
}
# grammar -> (field of Shape, older spelling)
FIELDS = {"q-heads": ("heads", ["heads"]), "top-k": ("choices", ["choices"])}
NUMBERS = {
    "requests": (1, "requests, which arrive one after another"),
    "prefix": (200, "tokens of the first prompt"),
    "chunk": (96, "tokens of a prompt per step"),
    "steps": (8, "decoding steps per request"),
    "draft": (0, "tokens per step that are drafts, some of which are rolled back"),
    "every": (1, "steps per line of the table"),
}


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py dsv4`."""
    shape = Shape()
    group = parser.add_argument_group("layer")
    add(
        group,
        "kind",
        "only a window, or a window and compressed entries",
        shape.kind,
        choices=RATIOS,
    )
    for name, words in SIZES.items():
        field, old = FIELDS.get(name, (name.replace("-", "_"), []))
        kind = count if name == "experts" else positive_count
        add(group, name, words, getattr(shape, field), old=old, dest=field, type=kind)
    add(group, "record", "record format of the entries", "fp8", choices=V4_RECORDS)
    switch(group, "online-hca", "store a running softmax in the tails of HCA layers, not 128 rows")
    seed, json = "weights and tokens", "every number of every step"
    group = groups.add_run(parser, seed=seed, json=json)
    for name, (value, words) in NUMBERS.items():
        add(group, name, words, value)
    words = "compare with a model that is wrong on purpose; must exit with code 1"
    add(group, "mutate", words, choices=MUTATIONS)
    groups.add_plot(group, "errors by step")
