"""Roles of the warps of a CTA, in data-flow order: load, scales, mma, epilogue."""
