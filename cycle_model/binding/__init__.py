"""Which SASS instructions a recorded warp executed."""
