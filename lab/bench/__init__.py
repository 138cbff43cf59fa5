"""Implementation of scripts/bench.py: times and static figures, next to those of peers."""
