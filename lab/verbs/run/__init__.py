"""What scripts/run.py does: kernels by name, and how exact they are."""
