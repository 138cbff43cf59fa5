"""Bookkeeping of slots: the manager and its parts. No memory, no GPU."""
