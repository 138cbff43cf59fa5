"""Factors between e and 2: kernels compute exp2 and log2, callers think in natural logarithms."""

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
