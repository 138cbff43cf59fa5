"""The mixed product on Hopper, which converts four-bit weights to bf16 in registers."""
