"""Attention to latent keys on Blackwell: tcgen05, a pair of CTAs for 128 query rows."""
