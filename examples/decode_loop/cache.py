"""Keys and values in pages: prompts attend with `fmha`, new tokens with `gqa_lowlatency`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch.nn.functional import pad

from examples.decode_loop.model import Model
from fmha import attention
from gqa_lowlatency import decode
from kvcache import Cache, Sizes, Step, append_rows, gqa

PAGE = 16  # tokens


class Paged:
    """`Attend` of one step over the pages of a cache.

    width: pages of the longest request at its end. With a page table of constant width the kernel
        stays the same and, on a GPU, calls of later steps skip their checks.
    parts: clusters that share a KV head in `decode`; 0 chooses.
    """

    def __init__(self, cache: Cache, step: Step, width: int, parts: int) -> None:
        self.cache, self.longest, self.parts = cache, step.longest, parts
        self.at = at = step.tensors(cache.device)
        self.table = pad(at["block_tables"], (0, width - at["block_tables"].shape[1]))

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k and v, then attend to everything that is there."""
        rows = [self.cache.rows(name, layer).alone for name in ("k", "v")]
        append_rows((rows[0], k), (rows[1], v), self.at["rows_of.k"])
        keys, values = (self.cache.pages(name, layer, k.dtype, k.shape[1:]) for name in ("k", "v"))
        if self.longest == 1:
            return decode(
                q, keys, values, kv_lens=self.at["lengths"], page_table=self.table, parts=self.parts
            )
        return attention(
            q, keys, values, causal=True, kv_lens=self.at["lengths"], page_table=self.table,
            cu_seqlens_q=self.at["cu_tokens"], max_seqlen_q=self.longest,
        )  # fmt: skip


def generate(
    model: Model, prompts: Sequence[Sequence[int]], new_tokens: int, parts: int = 0
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield for each step the most likely next token of every prompt, and its logits [B, V].

    The first step is the prefill of all prompts, each later one decodes one token of each.
    """
    config, device = model.config, str(model.speed.device)
    pages = [-(-(len(prompt) + new_tokens) // PAGE) for prompt in prompts]
    layout = gqa(config.layers, config.kv_heads, config.head_dim, block_tokens=PAGE)
    cache = Cache(layout, Sizes(blocks=1 + sum(pages)), device=device)  # the first is a null block
    given = {cache.admit(f"prompt {n}", each).request: each for n, each in enumerate(prompts)}
    for _ in range(new_tokens):
        with cache.step(given) as step:
            attend = Paged(cache, step, max(pages), parts)
            tokens = torch.tensor([*chain(*given.values())], device=device)
            last = attend.at["cu_tokens"][1:].long() - 1
            logits = model(tokens, attend.at["positions"], attend, last)
        chosen = logits.argmax(-1).tolist()
        yield chosen, logits
        given = {request: [token] for request, token in zip(given, chosen, strict=True)}
