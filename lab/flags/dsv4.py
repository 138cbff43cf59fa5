"""The flags that spell a layer of DeepSeek-V4 over the cache; `lab.dsv4` computes it."""

from __future__ import annotations

import argparse

from kvcache.layouts.models import V4_RECORDS
from lab.problems.dsv4_shape import MUTATIONS, RATIOS, Shape
from lab.tools import groups
from lab.tools.groups import add, count, positive_count, switch

ARCHS = ("sm_100a", "sm_90a")
ARCHS_OF_EXPERTS = ARCHS[:1]
SIZES = {
    "hidden": "width of the residual stream",
    "q-heads": "query heads, 512 columns each",
    "index-heads": "heads of the indexer, 128 columns each",
    "select": "entries that a query attends to",
    "experts": "experts, all of them; 0: none, the layer ends behind attention",
    "top-k": "experts of a token",
    "intermediate": "width of an expert",
}
# grammar -> (field of Shape, older spelling)
FIELDS = {"q-heads": ("heads", ["heads"]), "top-k": ("choices", ["choices"])}
NUMBERS = {
    "requests": (1, "that arrive one after another"),
    "prefix": (200, "tokens of the first prompt"),
    "chunk": (96, "tokens of a prompt in a step"),
    "steps": (8, "of decoding, for each request"),
    "draft": (0, "tokens of a step, some of which are taken back"),
    "every": (1, "steps to a line of the table"),
}


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py dsv4`."""
    shape = Shape()
    group = parser.add_argument_group("layer")
    add(group, "kind", "window alone, or beside compressed entries", shape.kind, choices=RATIOS)
    for name, words in SIZES.items():
        field, old = FIELDS.get(name, (name.replace("-", "_"), []))
        kind = count if name == "experts" else positive_count
        add(group, name, words, getattr(shape, field), old=old, dest=field, type=kind)
    add(group, "record", "of the entries", "fp8", choices=V4_RECORDS)
    switch(group, "online-hca", "tails of HCA layers hold a running softmax, not 128 rows")
    seed, json = "weights and tokens", "every number of every step"
    group = groups.add_run(parser, ARCHS, seed=seed, json=json)
    for name, (value, words) in NUMBERS.items():
        add(group, name, words, value)
    words = "a wrong model beside it, which has to be noticed (exit code 1)"
    add(group, "mutate", words, choices=MUTATIONS)
    groups.add_plot(group, "errors over steps")
