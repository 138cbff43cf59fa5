"""What scripts/plan.py does: the memory of a cache divided."""
