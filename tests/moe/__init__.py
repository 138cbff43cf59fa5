"""Tests of the mixture-of-experts kernels and of what they agree on."""
