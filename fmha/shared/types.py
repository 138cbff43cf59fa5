"""Names of dtypes -> those of the DSL."""

import cutlass

IO_TYPES = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
}
OUT_TYPES = IO_TYPES | {"fp32": cutlass.Float32}
