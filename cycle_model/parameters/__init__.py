"""What the engine knows of a GPU: numbers with their units, sources and ranges."""
