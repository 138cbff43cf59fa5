"""Damaged files of every kind that is read: named errors only, in bounded time and memory."""
