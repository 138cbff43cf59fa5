"""The functions of docs/support.md."""

from __future__ import annotations

from lab.support import attention, cache, decode, experts, sparse, weights

SPACES = {
    space.name: space
    for space in (
        attention.SPACE,
        decode.SPACE,
        experts.SPACE,
        *cache.SPACES,
        *weights.SPACES,
        *sparse.SPACES,
    )
}
