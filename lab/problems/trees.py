"""Trees of draft tokens, as problems."""

from __future__ import annotations

import random

import torch

from kernelkit.plan.limits import MAX_TREE_TOKENS
from kernelkit.trees import tree_of_mask, tree_of_parents


def words_of_tree(kind: str, tokens: int, pick: random.Random) -> torch.Tensor:
    """Return int64 [tokens].

    kind: one of `lab.tools.groups.TREES`. 'branches': every token has an earlier parent or none;
        'mask': random bits, some tokens see nothing; 'block': every token sees all; 'chain': a
        causal block.
    """
    if tokens == 0:
        return torch.zeros(0, dtype=torch.int64)
    if tokens > MAX_TREE_TOKENS:
        raise ValueError(f"tree with {tokens} query tokens of an entry: at most {MAX_TREE_TOKENS}")
    if kind == "branches":
        near = pick.choice((1, 4, tokens))  # deep trees, or wide ones
        parents = [max(token - pick.randint(1, near), -1) for token in range(tokens)]
        return tree_of_parents(torch.tensor(parents))
    share = {"mask": pick.choice((0.05, 0.5, 0.9)), "block": 1.0, "chain": 0.0}[kind]
    bits = [[pick.random() < share for _ in range(tokens)] for _ in range(tokens)]
    mask = torch.tensor(bits)
    return tree_of_mask(mask if kind != "chain" else torch.ones_like(mask).tril())
