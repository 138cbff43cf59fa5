"""Dense products, norms, rotations and appends of few tokens, in fused launches."""
