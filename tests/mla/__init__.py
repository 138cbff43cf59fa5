"""Tests of the KV cache."""
