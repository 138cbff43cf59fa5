"""Binding: find the SASS instructions that a recorded warp executed."""
