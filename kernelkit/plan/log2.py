"""Factors between e and 2: kernels compute exp2 and log2, callers think in natural logarithms."""

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
MIN_SCALE = 1e-12
# Factors of scores of e4m3 in log2 units beyond these act like them, so that no product with a
# finite score is infinite, and a factor of 0 gives equal weights where -inf * 0 would be NaN.
MIN_FACTOR, MAX_FACTOR = 2.0**-100, 2.0**80
MIN_SOFTCAP, MAX_SOFTCAP = 1e-6, 4096.0  # the logits of a larger cap would be off by 2 ** -11


def exponent_factors(scale: float, softcap: float) -> tuple[float, float]:
    """(scale_log2, softcap_log2): exp2 takes the place of exp, so scales carry log2(e).

    With softcap c the kernel computes c tanh(x) as 2 c (1/2 - 1 / (1 + exp(2 x))), where x is
    scale q.k / c; without it softcap_log2 is 0.
    """
    scale_log2 = scale * LOG2_E
    if softcap <= 0:
        return scale_log2, 0.0
    return 2.0 * softcap * LOG2_E, 2.0 * scale_log2 / softcap


def check_factors(scale: float, softcap: float) -> None:
    """ValueError for what the kernels do not compute, naming the value and the limit."""
    if not MIN_SCALE <= scale <= 1 / MIN_SCALE:
        raise ValueError(
            f"scale {scale}: from {MIN_SCALE} to {1 / MIN_SCALE}; above 0, since the row maximum "
            "is taken before scaling, and well inside fp32"
        )
    if softcap and not MIN_SOFTCAP <= softcap <= MAX_SOFTCAP:
        raise ValueError(
            f"softcap {softcap}: from {MIN_SOFTCAP} to {MAX_SOFTCAP}, or 0 for none; scores are "
            "good to 2 ** -23 of it"
        )
