"""Of which attention problems a soak keeps count."""

from __future__ import annotations

from lab.problems.attention import Case
from lab.soak.campaign.record import Feature

LARGE = 100.0  # amplitude

FEATURES: dict[str, Feature] = {
    **{
        f"head dim {d}": lambda case, d=d: case.dims[0] == d
        for d in (64, 96, 128, 192, 256, 512)
    },
    "bf16": lambda case: case.dtype == "bf16",
    "fp16": lambda case: case.dtype == "fp16",
    "e4m3 keys, bf16 queries": lambda case: case.kv_dtype == "e4m3",
    "e4m3": lambda case: case.dtype == "e4m3",
    "O of another dtype": lambda case: case.out_dtype not in ("", case.dtype),
    "raw O": lambda case: not case.normalize,
    "causal": lambda case: case.causal,
    "left window": lambda case: case.window[0] is not None,
    "right window": lambda case: case.window[1] is not None,
    "sink tokens": lambda case: case.sink_tokens,
    "learned sinks": lambda case: case.sinks,
    "sinks of -inf or 90": lambda case: case.sink_value is not None,
    "softcap": lambda case: case.softcap,
    "rope": lambda case: case.rope_dim,
    "q_offset": lambda case: case.q_offset is not None,
    "kv_lens": lambda case: case.kv_lens is not None,
    "pages": lambda case: case.page_size,
    "packed q": lambda case: case.q_lens is not None,
    "packed k and v": lambda case: case.k_lens is not None,
    "packed heads": lambda case: case.pack_heads,
    "groups of heads": lambda case: case.heads[0] > case.heads[1],
    "tokens first in memory": lambda case: case.tokens_first,
    "entries without queries": lambda case: 0 in case.queries,
    "entries without keys": lambda case: 0 in case.keys,
    "rows of 100k keys": lambda case: max(case.queries) and max(case.keys) >= 100_000,
    "scores of 0": lambda case: case.amplitude == 0.0,
    "huge scores": lambda case: case.amplitude >= LARGE,
    "scores that climb": lambda case: case.climb,
    "scores far below 0": lambda case: case.depth,
    "extremes": lambda case: case.extreme,
    "a tuned tile": lambda case: case.tile_m or case.tile_n,
    "tuned CTAs": lambda case: case.ctas,
    "tuned rings": lambda case: case.k_stages or case.v_stages,
    "a tuned schedule": lambda case: case.schedule,
    "a tuned polynomial": lambda case: case.polynomial >= 0,
    "a tuned lag": lambda case: case.rescale_log2 != Case.rescale_log2,
    "pdl": lambda case: case.pdl,
    "K is V": lambda case: case.k_is_v,
}  # fmt: skip
