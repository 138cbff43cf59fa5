"""Parameters of GPUs for the engine: numbers with units, sources and ranges."""
