"""What the warps of a CTA do, in data-flow order: load, scales, mma, epilogue."""
