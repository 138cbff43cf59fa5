"""Quantising on the GPU: 16-bit numbers to a block-scaled format, bit for bit `moe.reference`."""
