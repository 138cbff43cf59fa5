"""The same product on Blackwell, whose weights become bf16 in tensor memory."""
