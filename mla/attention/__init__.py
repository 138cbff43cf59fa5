"""Attention to latent keys: one entry of 512 or 576 columns for all heads, its first 512 are V."""
