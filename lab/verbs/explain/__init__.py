"""What scripts/explain.py does: a plan as text."""
