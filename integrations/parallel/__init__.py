"""More than one GPU by torch.distributed: attention over a sequence that ranks share."""

from typing import TYPE_CHECKING

from kernelkit.exports import exports

if TYPE_CHECKING:
    from integrations.parallel.ring import ring_attention
    from integrations.parallel.zigzag import join, own_positions, own_tokens

__all__ = ["join", "own_positions", "own_tokens", "ring_attention"]

__getattr__, __dir__ = exports(__name__, {
    "integrations.parallel.ring": "ring_attention",
    "integrations.parallel.zigzag": "join own_positions own_tokens",
})  # fmt: skip
