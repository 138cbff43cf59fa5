"""Limits of the launch that computes all of a layer after the choice of experts."""

from __future__ import annotations

from moe.mixed.few.config import MOST_EXPERTS, MOST_ROWS

EXPERT_ROWS = 4  # rows of an expert on average, up to which the launch is faster on an H200


def pays(tokens: int, slots: int, experts: int, x: str, total: int) -> bool:
    """Return whether the launch is possible and faster than the steps.

    Args:
        tokens, slots, experts, x: see `require`.
        total: number of experts, here or elsewhere.
    """
    return tokens * slots <= EXPERT_ROWS * total and not _reason(tokens, slots, experts, x)


def require(tokens: int, slots: int, experts: int, x: str) -> None:
    """Raise NotImplementedError, with the value and the limit, if the launch is impossible.

    Args:
        tokens: number of tokens.
        slots: choices of a token.
        experts: number of experts that are here.
        x: dtype that the weights are arranged for.
    """
    if reason := _reason(tokens, slots, experts, x):
        raise NotImplementedError(f"few_rows True: {reason}; pass None or False")


def _reason(tokens: int, slots: int, experts: int, x: str) -> str:
    """Return why the launch is impossible; '' if it is possible."""
    rows = tokens * slots
    if x != "bf16":
        return f"experts arranged for {x!r}, supported is 'bf16'"
    if rows > MOST_ROWS:
        return f"{tokens} tokens of {slots} slots are {rows} rows, at most {MOST_ROWS}"
    if experts > MOST_EXPERTS:
        return f"{experts} experts, at most {MOST_EXPERTS}"
    return ""
