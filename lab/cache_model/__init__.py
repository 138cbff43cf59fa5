"""Implementation of scripts/plan.py: divides the memory of a cache."""
