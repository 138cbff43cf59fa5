"""Many tokens times weights in Q8_0, on int8 tensor cores with mma.sync: `q8_0.product.launch`."""
