"""What scripts/plan_kv.py does: the memory of a cache divided."""
