"""Names of dtypes as the DSL has them."""

from cutlass import BFloat16, Float8E4M3FN, Float16

X_TYPES = {"bf16": BFloat16, "e4m3": Float8E4M3FN}
OUT_TYPES = {"bf16": BFloat16, "fp16": Float16, "e4m3": Float8E4M3FN}
