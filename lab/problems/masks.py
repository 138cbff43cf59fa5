"""Recipes of masks and scores by functions of positions, as problems.

Each is a few lines that users write as well, see docs/masks.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from fmha.blocks import BlockLists, block_lists
from lab.tools.groups import RECIPES

Function = Callable[..., Any]
DOCUMENT = 1024  # tokens of a document, on average
GLOBAL = 4  # first tokens that see all, and that all see


@dataclass(frozen=True)
class Recipe:
    """Options of `fmha.attention`.

    causal: whether the recipe is causal, too.
    tables: tensors that the function reads.
    numbers: constants of the function.
    """

    mask_mod: Function | None = None
    score_mod: Function | None = None
    causal: bool = False
    tables: tuple[torch.Tensor, ...] = ()
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def whole_mask(self) -> Function | None:
        """The mask with its causal part, as one function; None where all see all."""
        mask = self.mask_mod
        if not self.causal:
            return mask
        if mask is None:
            return causal_mask
        return lambda b, h, q, k: mask(b, h, q, k) & (k <= q)


def lists_of(
    mask: Function | None, shape: tuple[int, int, int, int], size: int, device: torch.device | str
) -> BlockLists:
    """Return the lists of blocks of `size` x `size`.

    mask: a function of queries that count from 0, whose lists all heads share; None for whole
        blocks at random, other ones for each head, that do not end behind the last key.
    shape: entries, heads, queries and keys.
    """
    entries, heads, queries, keys = shape
    if mask is not None:
        sizes = (entries, None, queries, keys)
        return block_lists(create_block_mask(mask, *sizes, device=device, BLOCK_SIZE=size))[0]
    generator, rows = torch.Generator().manual_seed(queries + keys), -(-queries // size)
    whole = max(keys // size, 1)
    order = torch.rand(entries, heads, rows, whole, generator=generator).argsort(-1)
    counts = torch.randint(0, keys // size + 1, order.shape[:3], generator=generator)
    counts, order = counts.int().to(device), order.int().to(device)
    return BlockLists(torch.zeros_like(counts), order, counts, order, size, size)


def shifted(mask: Function | None, offset: int) -> Function | None:
    """Return a mask of queries that count from 0, where the first one has position `offset`."""
    if mask is None:
        return None
    return lambda b, h, q, k: mask(b, h, q + offset, k)


def causal_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Whether k is not after q."""
    return k <= q


def recipe_of(
    name: str, entries: int, heads: int, positions: int, device: torch.device | str = "cpu"
) -> Recipe:
    """Return a recipe of `lab.tools.groups.RECIPES` for problems of such sizes. Tables are on
    `device`; positions: more than any of a query or key."""
    assert name in RECIPES
    makers = {
        "document": _documents,
        "alibi": _alibi,
        "prefix": _prefixes,
        "sliding-global": _sliding,
        "softcap": _softcap,
        "chunks": _chunks,
    }
    return makers[name](entries, heads, max(positions, 1), device)


def documents(entries: int, positions: int) -> torch.Tensor:
    """Return int32 [entries, positions], the number of the document of each position; documents of
    random lengths follow each other."""
    pick, rows = random.Random(positions), []
    for _ in range(entries):
        count = max(2, positions // DOCUMENT)
        starts = sorted(pick.randrange(positions) for _ in range(count - 1))
        row = torch.zeros(positions, dtype=torch.int32)
        for start in starts:
            row[start:] += 1
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, positions, dtype=torch.int32)


def _documents(entries: int, heads: int, positions: int, device: Any) -> Recipe:
    ids = documents(entries, positions).to(device)

    def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[b, q] == ids[b, k]

    return Recipe(mask_mod=same_document, causal=True, tables=(ids,))


def _alibi(entries: int, heads: int, positions: int, device: Any) -> Recipe:
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads).to(device)

    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slopes[h] * (k - q)

    return Recipe(score_mod=alibi, causal=True, tables=(slopes,))


def _prefixes(entries: int, heads: int, positions: int, device: Any) -> Recipe:
    lengths = [positions * (entry + 1) // (4 * entries) for entry in range(entries)]
    prefix = torch.tensor(lengths, dtype=torch.int32, device=device)

    def prefix_lm(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < prefix[b]) | (k <= q)

    return Recipe(mask_mod=prefix_lm, tables=(prefix,))


def _sliding(entries: int, heads: int, positions: int, device: Any) -> Recipe:
    window = max(positions // 8, 1)

    def sliding_and_global(b: Any, h: Any, q: Any, k: Any) -> Any:
        near = (q - k <= window) & (k - q <= window)
        return near | (k < GLOBAL) | (q < GLOBAL)

    return Recipe(mask_mod=sliding_and_global, numbers={"window": window, "first": GLOBAL})


def _softcap(entries: int, heads: int, positions: int, device: Any) -> Recipe:
    def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 20.0 * torch.tanh(score / 20.0)

    return Recipe(score_mod=softcap)


def _chunks(entries: int, heads: int, positions: int, device: Any) -> Recipe:
    size = max(positions // 4, 1)

    def same_chunk(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q // size == k // size

    return Recipe(mask_mod=same_chunk, causal=True, numbers={"chunk": size})
