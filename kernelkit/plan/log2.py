"""Factors between e and 2: kernels compute exp2 and log2, callers think in natural logarithms."""

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# Factors of scores of e4m3 in log2 units beyond these act like them, so that no product with a
# finite score is infinite, and a factor of 0 gives equal weights where -inf * 0 would be NaN.
MIN_FACTOR, MAX_FACTOR = 2.0**-100, 2.0**80
