"""Tests of other people's models and engines on our kernels."""
