"""Shared parts of adaptors for serving engines: a step's batch, its attention, limits."""
