"""Attention to latent keys by mma.sync and cp.async, for every GPU from compute capability 8.0."""
