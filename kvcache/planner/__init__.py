"""Capacity and traffic of a cache: requests that fit in memory, and stranded bytes."""
