"""Tests of the mixture-of-experts kernels and of their shared definitions."""
