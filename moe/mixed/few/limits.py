"""Limits of the launch that computes all of a layer after the choice of experts."""

from __future__ import annotations

from moe.mixed.few.config import MOST_EXPERTS, MOST_ROWS


def require(tokens: int, slots: int, experts: int, x: str) -> None:
    """Raise NotImplementedError, with the value and the limit, if the launch is impossible.

    Args:
        tokens: number of tokens.
        slots: choices of a token.
        experts: number of experts that are here.
        x: dtype that the weights are arranged for.
    """
    rows, reason = tokens * slots, ""
    if x != "bf16":
        reason = f"experts arranged for {x!r}, supported is 'bf16'"
    elif rows > MOST_ROWS:
        reason = f"{tokens} tokens of {slots} slots are {rows} rows, at most {MOST_ROWS}"
    elif experts > MOST_EXPERTS:
        reason = f"{experts} experts, at most {MOST_EXPERTS}"
    if reason:
        raise NotImplementedError(f"few_rows True: {reason}; pass None or False")
