"""A layer of DeepSeek-V4 over the cache, and the plain model that judges it."""
