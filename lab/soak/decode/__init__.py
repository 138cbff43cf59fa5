"""Random decode steps."""
