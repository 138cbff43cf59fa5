"""`prepare_attention` in the emulator, under its checker: the bytes of the separate calls."""

from __future__ import annotations

from tests.mla.prepare_cases import Setup, Twins


def test_steps_leave_the_same_bytes():
    """A CSA layer that decodes: both streams, queries and the window."""
    twins = Twins(Setup(padded=3))
    twins.step(a=3, b=1)
    twins.step(a=1, b=1)
    twins.step(b=1, a=1, c=2)
