"""Context parallelism: a whole prompt of which each rank computes its tokens, and keeps all keys.

Full layers attend by `ring_attention`. Sliding ones need the keys of the window in front of a
rank's two chunks and no ring. Keys of all ranks go into the cache of each, so that afterwards every
rank decodes by itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from blackwell_engines.parallel import join, own_positions, ring_attention
from examples.gpt_oss.cache import Kept
from examples.gpt_oss.ranks import Ranks
from fmha import attention
from kernelkit.call.tensors import brought
from kvcache import Step, append_rows


class SharedPrefill:
    """`Attend` of a step that appends one prompt, from its beginning to its end.

    places: int64 [T], which tokens of the prompt are this rank's, in its order. Prompts that do not
    come out even have their last token some more times, which nobody sees.
    """

    def __init__(self, kept: Kept, step: Step, ranks: Ranks) -> None:
        if len(step.requests) != 1 or step.starts[0]:
            raise ValueError(f"{len(step.requests)} requests behind {step.starts} tokens: one, new")
        self.kept, self.ranks, self.tokens = kept, ranks, step.longest
        chunks = 2 * ranks.world
        self.chunk = -(-self.tokens // chunks)
        own = own_positions(self.chunk * chunks, ranks.rank, ranks.world)
        self.places = own.clamp(max=self.tokens - 1)
        self.at = step.tensors(kept.device)
        before = kept.window - 1
        self.spans = [(max(0, x - before), x + self.chunk) for x in own[:: self.chunk].tolist()]
        ends = torch.tensor([[0, 0], *[[self.chunk, end - begin] for begin, end in self.spans]])
        starts = brought(ends.cumsum(0).int(), kept.device).unbind(1)
        self.starts = [each.contiguous() for each in starts]  # of queries, and of keys

    @property
    def last(self) -> tuple[int, int]:
        """The rank that has the prompt's last token, and which of its tokens that is."""
        number, place = divmod(self.tokens - 1, self.chunk)
        world = self.ranks.world
        late = number >= world
        return 2 * world - 1 - number if late else number, place + self.chunk * late

    def __call__(
        self, number: int, sinks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `examples.gpt_oss.model.Attend`."""
        place, group = self.kept.places[number], self.ranks.group
        keys, values = self._gathered(k), self._gathered(v)
        mapping = self.at["rows_of.k_window" if place.sliding else "rows_of.k"]
        new = keys[: self.tokens], values[: self.tokens]
        append_rows((place.rows[0], new[0]), (place.rows[1], new[1]), mapping)
        if not place.sliding:
            own = (x[None].contiguous() for x in (q, k, v))
            return ring_attention(*own, causal=True, sinks=sinks, group=group)[0]
        near = [torch.cat([x[slice(*span)] for span in self.spans]) for x in (keys, values)]
        return attention(
            q, *near, window=(self.kept.window - 1, 0), sinks=sinks, cu_seqlens_q=self.starts[0],
            cu_seqlens_k=self.starts[1], max_seqlen_q=self.chunk,
        )  # fmt: skip

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks, [2 world chunk, ..], in the order of the prompt."""
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.ranks.world)]
        dist.all_gather(parts, own, group=self.ranks.group)
        return join(parts, dim=0)
