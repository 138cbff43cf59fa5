"""Roles of the warps of a CTA, in data-flow order: scheduler, load, mma, epilogue."""
