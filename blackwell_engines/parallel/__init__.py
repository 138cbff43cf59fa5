"""More than one GPU by torch.distributed: attention over a sequence that ranks share."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from blackwell_engines.parallel.ring import join, own_positions, own_tokens, ring_attention

__all__ = ["join", "own_positions", "own_tokens", "ring_attention"]

__version__: str
exports(__name__, {
    "blackwell_engines.parallel.ring": "join own_positions own_tokens ring_attention",
})  # fmt: skip
