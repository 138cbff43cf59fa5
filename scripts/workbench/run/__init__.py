"""What scripts/run_*.py do."""
