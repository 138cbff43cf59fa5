"""Attention to latent keys with mma.sync and cp.async, from compute capability 8.0 on."""
