"""Of which decode problems a soak keeps count."""

from __future__ import annotations

from gqa_lowlatency.config import HEAD_DIMS
from lab.problems.decode import Case
from lab.soak.campaign.record import Feature

FEATURES: dict[str, Feature] = {
    **{f"head dim {d}": lambda case, d=d: case.head_dim == d for d in HEAD_DIMS},
    "bf16": lambda case: case.dtype == "bf16",
    "fp16": lambda case: case.dtype == "fp16",
    "e4m3 keys": lambda case: case.kv_dtype == "e4m3",
    "O of another dtype": lambda case: case.out_dtype not in ("", case.dtype),
    "several tokens": lambda case: case.tokens > 1,
    "groups of heads": lambda case: case.heads[0] > case.heads[1],
    "more rows than a CTA has": lambda case: case.heads[0] // case.heads[1] * case.tokens > 64,
    "not causal": lambda case: not case.causal,
    "window": lambda case: case.window is not None,
    "sink tokens": lambda case: case.sink_tokens,
    "first keys": lambda case: case.firsts,
    "learned sinks": lambda case: case.sinks,
    "sinks of -inf or 90": lambda case: case.sink_value is not None,
    "softcap": lambda case: case.softcap,
    "lengths": lambda case: case.keys == "lens",
    "pages": lambda case: isinstance(case.keys, int),
    "entries without keys": lambda case: 0 in case.lengths,
    "rows of 100k keys": lambda case: max(case.lengths) >= 100_000,
    "scores of 0": lambda case: case.amplitude == 0.0,
    "large scores": lambda case: case.amplitude > Case.amplitude,
    "scores that climb": lambda case: case.climb,
    "scores far below 0": lambda case: case.depth,
    "extremes": lambda case: case.extreme,
    "several clusters a head": lambda case: case.parts > 1,
    "the same bits in any batch": lambda case: case.batch_invariant,
    "a tuned cluster": lambda case: case.cluster,
    "other tuned fields": lambda case: case.tuning,
    "pdl": lambda case: case.pdl == "pdl",
    "pdl, keys ready": lambda case: case.pdl == "ready",
}
