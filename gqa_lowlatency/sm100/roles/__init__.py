"""Roles of the warps of the Blackwell decode kernel, each for the whole life of its CTA."""
