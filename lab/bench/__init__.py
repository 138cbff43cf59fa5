"""What scripts/bench.py does: times and static figures, beside peers."""
