"""Tests of the shared vocabulary, by hand-derived arithmetic."""
