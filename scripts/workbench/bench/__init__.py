"""What scripts/bench*.py do: times and static figures, beside peers."""
