"""The mixed product on Blackwell, which converts weights to bf16 in tensor memory."""
