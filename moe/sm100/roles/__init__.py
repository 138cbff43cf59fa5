"""What the warps of a CTA do, in data-flow order: scheduler, load, mma, epilogue."""
