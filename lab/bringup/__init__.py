"""The day a GPU is there: what is run on it, step by step, and what comes back as a file."""
