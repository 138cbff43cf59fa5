"""The dtypes that configs are spelt with. Plain data, without torch or the DSL."""

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1}
BF16_BYTES, FP32_BYTES = ITEM_BYTES["bf16"], ITEM_BYTES["fp32"]
