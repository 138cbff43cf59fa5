"""Calls that somebody gets wrong, generated and judged."""
