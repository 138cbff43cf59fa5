"""What scripts/emulate.py does: a launch as a timeline with the plan's names."""
