"""Recipes of `lab.problems.masks` as mask_mod and score_mod of FlashAttention-4, and its lists of
blocks.

FlashAttention-4 takes functions of its DSL's vectors: of (b, h, q, k, lengths, tables) for a mask,
and with the score before them for scores. Queries are numbered from 0.
"""

from collections.abc import Callable
from typing import Any

import torch

BLOCK = 128  # keys of a block, and queries of a query tile


def functions(name: str, sizes: dict[str, int]) -> dict[str, Callable]:
    """Return mask_mod or score_mod of a recipe (imports FlashAttention-4).

    sizes: numbers of the recipe: offset of the first query, `window`, `first`, `chunk`, and
        whether it is causal.
    """
    scores = _scores(sizes["offset"])
    if name in scores:
        return {"score_mod": scores[name]}
    return {"mask_mod": _masks(sizes)[name]}


def _masks(sizes: dict[str, int]) -> dict[str, Callable]:
    """Map each recipe of a mask to its function."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32
    from flash_attn.cute.utils import scalar_to_ssa

    offset, causal = sizes["offset"], bool(sizes["causal"])

    def number(value: Any) -> Any:
        return scalar_to_ssa(value, Int32)

    def visible(seen: Any, q: Any, k: Any) -> Any:
        return seen & (k <= q + number(offset)) if causal else seen

    @cute.jit
    def document(b: Any, h: Any, q: Any, k: Any, lengths: Any, tables: Any) -> Any:
        own = number(tables[0][b[0], q[0] + offset])
        return visible(own == number(tables[0][b[0], k[0]]), q, k)

    @cute.jit
    def prefix(b: Any, h: Any, q: Any, k: Any, lengths: Any, tables: Any) -> Any:
        return (k < number(tables[0][b[0]])) | (k <= q + number(offset))

    @cute.jit
    def sliding(b: Any, h: Any, q: Any, k: Any, lengths: Any, tables: Any) -> Any:
        at, window, first = q + number(offset), number(sizes["window"]), number(sizes["first"])
        near = (at - k <= window) & (k - at <= window)
        return near | (k < first) | (at < first)

    @cute.jit
    def chunks(b: Any, h: Any, q: Any, k: Any, lengths: Any, tables: Any) -> Any:
        size = number(sizes["chunk"])
        return visible((q + number(offset)) // size == k // size, q, k)

    @cute.jit
    def tree(b: Any, h: Any, q: Any, k: Any, lengths: Any, tables: Any) -> Any:
        own = cutlass.max(k[0] - offset, 0)
        seen = number(Int32(tables[0][q[0], own])) != number(0)
        return (k < number(offset)) | seen

    found = {"document": document, "prefix": prefix, "sliding-global": sliding}
    return found | {"chunks": chunks, "tree": tree}


def _scores(offset: int) -> dict[str, Callable]:
    """Map each recipe of scores to its function."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any, lengths: Any, tables: Any) -> Any:
        slope = scalar_to_ssa(tables[0][h[0]], Float32)
        return score + slope * (k - q - scalar_to_ssa(offset, Int32)).to(Float32)

    @cute.jit
    def softcap(score: Any, b: Any, h: Any, q: Any, k: Any, lengths: Any, tables: Any) -> Any:
        cap = scalar_to_ssa(20.0, Float32)
        return cap * cute.math.tanh(score / cap, fastmath=True)

    return {"alibi": alibi, "softcap": softcap}


def block_lists(mask: Any, rows: int) -> Any:
    """Return FlashAttention-4's lists of a BlockMask whose blocks are of `rows` x BLOCK."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    lists = {
        "mask_block_cnt": mask.kv_num_blocks,
        "mask_block_idx": mask.kv_indices,
        "full_block_cnt": mask.full_kv_num_blocks,
        "full_block_idx": mask.full_kv_indices,
    }
    if "block_size" in getattr(BlockSparseTensorsTorch, "_fields", ()):
        lists["block_size"] = (rows, BLOCK)
    return BlockSparseTensorsTorch(**lists)


def forward(inputs: Any, given: dict[str, Any]) -> torch.Tensor:
    """Call its forward function, which alone takes tables."""
    from flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd(inputs.q, inputs.k, inputs.v, **given)[0]
