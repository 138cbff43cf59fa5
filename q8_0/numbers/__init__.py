"""Many tokens in fp16 or bf16 times weights in Q8_0, on Hopper's wgmma: `q8_0.numbers.launch`."""

WRITTEN_FOR = "sm_90a"
