"""The memory that the books are about: pools, views, the host tier, guards."""
