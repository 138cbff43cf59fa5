"""The functions of docs/support.md."""

from __future__ import annotations

from lab.support import attention, between, cache, decode, experts, latent, sparse, weights

SPACES = {
    space.name: space
    for space in (
        attention.SPACE,
        decode.SPACE,
        *latent.SPACES,
        experts.SPACE,
        *cache.SPACES,
        *weights.SPACES,
        *sparse.SPACES,
        *between.SPACES,
    )
}
