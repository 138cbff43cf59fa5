"""Steps as bare tensors, from the lengths of their requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from mla.window import ChunkWindow, TokenWindow, see_window

BLOCK = 8  # tokens


@dataclass(frozen=True)
class Batch:
    """Requests as (earlier tokens, tokens of the step). padding: number of tokens and requests
    appended."""

    requests: tuple[tuple[int, int], ...]
    window: int = 12
    draft: int = 0
    padding: int = 0
    seed: int = 0
    blocks: int = 0

    def __str__(self) -> str:
        requests = "+".join(f"{start}:{tokens}" for start, tokens in self.requests)
        return f"{requests}-w{self.window}-d{self.draft}-p{self.padding}"

    @property
    def rows(self) -> int:
        return self.window + max(self.draft, 1) - 1

    @property
    def longest(self) -> int:
        return max((tokens for _, tokens in self.requests), default=0)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the arrays of a step by name."""
        pick = random.Random(self.seed)
        padding = [0] * self.padding
        starts = [start for start, _ in self.requests] + padding
        ends = [start + tokens for start, tokens in self.requests] + padding
        states = pick.sample(range(1, 40), len(self.requests)) + [-1] * self.padding
        owners = [b for b, (_, tokens) in enumerate(self.requests) for _ in range(tokens)]
        positions = [s + i for s, tokens in self.requests for i in range(tokens)]
        slots = [
            states[b] * self.rows + p % self.rows if p >= ends[b] - self.rows else -1
            for b, p in zip(owners, positions, strict=True)
        ]
        width = self.blocks or -(-max(ends, default=0) // BLOCK) + 1
        tables = torch.zeros(len(starts), width, dtype=torch.int32)
        for row, end in zip(tables, ends, strict=True):
            count = -(-end // BLOCK)
            row[:count] = torch.tensor(pick.sample(range(1, 10_000), count), dtype=torch.int32)
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        return {
            "positions": torch.tensor(positions + padding, dtype=torch.int64),
            "owners": torch.tensor(owners + padding, dtype=torch.int32),
            "slots": torch.tensor(slots + [-1] * self.padding, dtype=torch.int64),
            "starts": torch.tensor(starts, dtype=torch.int32),
            "lengths": torch.tensor(ends, dtype=torch.int32),
            "cu_tokens": torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)),
            "state_slots": torch.tensor(states, dtype=torch.int32),
            "block_tables": tables,
        }

    def view(self) -> tuple[dict[str, torch.Tensor], TokenWindow | ChunkWindow]:
        arrays = self.arrays()
        view = see_window(
            arrays, arrays["slots"], window=self.window, rows=self.rows, longest=self.longest,
            context=arrays["block_tables"].shape[1] * BLOCK,
        )  # fmt: skip
        return arrays, view
