"""What adaptors of serving engines share: a step's batch, attention over it, what is refused."""
