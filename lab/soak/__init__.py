"""Random operations on a cache, beside a model that keeps every token."""
