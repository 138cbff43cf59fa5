"""Device code of the mixed product that architectures share."""
