"""What `run`, `explain`, `dump` and `emulate` do."""
