"""Tests of matrices in Q8_0."""
