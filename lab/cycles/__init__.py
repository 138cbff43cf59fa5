"""Kernel times predicted by the cycle model."""
