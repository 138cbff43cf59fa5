"""Other people's models and engines on these kernels; each is imported when it is asked for."""
